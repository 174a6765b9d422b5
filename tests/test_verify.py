"""`verify`: it catches and names every mutant, and states what its verdict covers."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import compare
import pytest
from layouts import CP, PP, TP
from mutant_table import SHARD
from mutants import MUTANTS, apply_mutant, try_mutant

from torchtitan_lite.__main__ import main
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify import command as tool
from torchtitan_lite.tools.verify.certificate import (
    EXIT_STATUS,
    Certificate,
    describe,
    describe_verdict,
    report_for_programs,
)
from torchtitan_lite.tools.verify.command import TRIALS
from torchtitan_lite.tools.verify.reduction import reduce_config
from torchtitan_lite.tools.verify.trial import Trial

REPOSITORY = Path(__file__).resolve().parent.parent


def read(*args: str) -> Config:
    reading = read_config(["--config", *args])
    assert reading.problems == []
    return reading.config


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_and_rightly_named(pool, references, name):
    mutant = MUTANTS[name]
    _, trial = try_mutant(name, mutant.trial, pool, references)
    assert mutant.noticed_by in trial.faults
    assert (trial.culprit.kind, trial.culprit.name) == mutant.culprit
    assert tuple(trial.culprit.mesh_dims) == mutant.mesh_dims
    assert trial.culprit.cause.startswith(mutant.cause)


# ---------------------------------------------------------------- the door


def test_the_command_verifies_a_config_from_a_cold_start():
    command = [sys.executable, "-m", "torchtitan_lite", "verify", "--config", "debug", "--ranks", "2", f"--{TP}=2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for text in (
        "certified for tp2: this layout computes the one-process model",
        "dp_shard is automatic, and no rank was left for it",
        "AdamW -> SGD",
        "layers.*.attention.wq.weight",
        "the model file, which both sides share",
        *(f"{name}, " for name in TRIALS if name != "float8"),
    ):
        assert text in done.stdout


def test_a_report_for_programs_holds_every_parameter_and_all_that_was_replaced(pool, references):
    reduction = reduce_config(read("debug", f"--{TP}=2"), 2)
    with patch.dict(TRIALS, {"wide": TRIALS["wide"]}, clear=True):
        certificate = tool.verify("debug", reduction, pool.run, references)
    report = json.loads(json.dumps(report_for_programs(certificate)))
    assert report["certified"] is True and report["culprit"] is None and report["faults"] == {}
    assert report["degrees"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    assert report["asked"]["dp_shard"] == "automatic" and report["asked"]["tp"] == 2
    assert {change["key"] for change in report["reduced"]} >= {"optimizer.name", "model.dim"}
    wq = report["parameters"]["layers.1.attention.wq.weight"]
    assert wq["initial_equal"] is True and 0 < wq["gradient"] < 1e-6 and wq["copies_unequal_over"] == []
    assert "S(0) over tp" in wq["placement"]


def test_a_wrong_layout_ends_with_its_first_fault(pool, references):
    run_ranks = compare.ranks_inside(pool, partial(apply_mutant, "loss_counted_by_every_tp_rank"))
    reduction = reduce_config(read("debug", f"--{TP}=2"), 2)
    certificate = tool.verify("debug", reduction, run_ranks, references)
    assert certificate.verdict == "wrong" and [trial.name for trial in certificate.trials] == ["wide"]
    text = describe(certificate, verbose=False)
    assert "certified" not in text
    assert "first to differ: module output: output" in text and "cause: unknown" in text


WIDE = Trial("wide")
MISSING = Trial("train.py", skipped="train.py is not beside the package", is_missing=True)
NOT_ASKED = Trial("float8", skipped="the run has no float8")
WRONG = Trial("deep", faults={"loss": "loss is off by 1.0e-02"})
SILENT = Trial("deep", faults={"no answer": "ranks [1] did not answer within 300 s"}, finished=False)


@pytest.mark.parametrize(
    ("max_ranks", "trials", "verdict", "status", "text"),
    [
        (4, [WIDE, NOT_ASKED], "certified", 0, "certified for pp2 x tp2: "),
        (4, [WIDE, MISSING], "certified in part", 3, "train.py is missing: train.py is not beside the package"),
        (2, [WIDE], "in part", 3, "but tp 2 could not be tried"),
        (2, [WIDE, MISSING], "in part", 3, "--ranks 4 would try every dim"),
        (2, [WIDE, WRONG], "wrong", 1, "loss is off by 1.0e-02"),
        (4, [WIDE, SILENT], "not finished", 4, "not finished: in trial deep, ranks [1] did not answer"),
    ],
)
def test_the_verdict_is_for_what_was_tried(max_ranks, trials, verdict, status, text):
    config = read("debug", f"--{PP}=2", f"--{TP}=2", f"--{SHARD}=1")
    certificate = Certificate("debug", reduce_config(config, max_ranks), trials)
    assert (certificate.verdict, EXIT_STATUS[certificate.verdict]) == (verdict, status)
    assert report_for_programs(certificate)["verdict"] == verdict
    lines = "\n".join(describe_verdict(certificate))
    assert text in lines
    assert ("certified" in lines) == (verdict in ("certified", "certified in part"))


def test_a_reduced_degree_is_named_in_the_verdict():
    degrees = (f"--{PP}=16", f"--{CP}=8", f"--{SHARD}=1", f"--{TP}=2")
    config = read("llama3_70b", "--training.local_batch_size=16", *degrees)
    verdict, *_ = describe_verdict(Certificate("llama3_70b", reduce_config(config, 8), [WIDE]))
    assert verdict.startswith("certified for pp2 x cp2 x tp2; pp 16 and cp 8 were reduced: ")


@pytest.mark.parametrize(
    "args", [["debug", "--parallelism.tensor_paralel_degree=2"], ["debug", f"--{TP}=4"], ["no such file"]]
)
def test_wrong_input_ends_with_2_and_says_why(args, capsys):
    assert main(["verify", "--config", *args, "--json"]) == 2
    out, err = capsys.readouterr()
    assert "could not start" in err and json.loads(out)["problems"]


def test_too_many_ranks_are_refused():
    with pytest.raises(SystemExit) as exit_:
        main(["verify", "--config", "debug", "--ranks", "17"])
    assert exit_.value.code == 2
