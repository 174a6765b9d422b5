"""`verify`: it catches and names every mutant, accuses no healthy layout, and says what it did not look at."""

import json
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import compare
import pytest
import torch.nn.functional as F
from layouts import CP, LAYOUTS, PP, SCHEDULE, TP
from mutant_table import SHARD
from mutants import MUTANTS

from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config, ConfigError
from torchtitan_lite.model.llama3 import FeedForward, Llama3, init_parameter
from torchtitan_lite.verify import command as tool
from torchtitan_lite.verify.certificate import (
    EXIT_STATUS,
    Certificate,
    Trial,
    describe,
    describe_verdict,
    record_for_runs,
    report_for_programs,
)
from torchtitan_lite.verify.command import TRIALS
from torchtitan_lite.verify.culprit import name_first_output
from torchtitan_lite.verify.gradient_trial import FP32_TOLERANCE, save_reference, try_layout
from torchtitan_lite.verify.module_outputs import observe_outputs
from torchtitan_lite.verify.other_layouts import (
    COLUMNS,
    FEATURES,
    ROWS,
    Cell,
    describe_grid,
    find_smallest,
    judge_matrix,
    list_features,
    plan_cell,
    turn_off,
)
from torchtitan_lite.verify.reduction import reduce_config
from torchtitan_lite.verify.reference import load_reference

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where references are kept from test to test."""
    return tmp_path_factory.mktemp("references")


def read(*args: str) -> Config:
    reading = read_config(list(args))
    assert reading.problems == []
    return reading.config


# ---------------------------------------------------------------- mutants and healthy layouts


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_and_rightly_named(pool, folder, name):
    mutant = MUTANTS[name]

    def run_ranks(worker, world_size, *args, **options):
        return pool.run(compare.run_mutant, world_size, name, worker, *args, **options)

    config = compare.complete(mutant.row.overrides, mutant.row.world_size)
    with mutant.patch():  # one of them lets a refused config through
        reduction = reduce_config(config, mutant.row.world_size)
    trial = TRIALS[mutant.trial](reduction, run_ranks, folder)
    assert mutant.noticed_by in trial.faults
    assert (trial.culprit.kind, trial.culprit.name) == mutant.culprit
    assert tuple(trial.culprit.mesh_dims) == mutant.mesh_dims
    assert trial.culprit.cause.startswith(mutant.cause)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, LAYOUTS["accumulation 2"].overrides),
        (2, LAYOUTS["pp2 Interleaved1F1B, embedding and head alone"].overrides),
        (4, {CP: 2, TP: 2}),
        slow(2, LAYOUTS["ddp2 accumulation 2"].overrides),
        slow(2, LAYOUTS["tp2 whole logits"].overrides),
        slow(2, LAYOUTS["pp2 DualPipeV"].overrides),
        slow(8, LAYOUTS["pp2 x dp2 x tp2 Interleaved1F1B"].overrides),
        slow(4, LAYOUTS["dp2 x tp2 full recompute"].overrides),
        slow(4, {PP: 2, CP: 2}),
    ],
    ids=str,
)
def test_no_module_of_a_healthy_layout_is_accused_and_every_one_is_looked_at(pool, folder, world_size, overrides):
    config = compare.complete(overrides, world_size)
    path = save_reference(config, folder)
    shares = pool.run(observe_outputs, world_size, config, path)
    reference = load_reference(path)
    assert name_first_output(shares, reference, FP32_TOLERANCE / 5) is None
    assert {module for share in shares for module in share.error} == set(reference.outputs)


class CubedFeedForward(FeedForward):
    def forward(self, x):
        return self.w2(F.relu(self.w1(x)) ** 2 * self.w3(x))


class Fork(Llama3):
    """A changed model: another activation, and norms that are not the usual ones."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        for block in self.layers.values():
            block.feed_forward = CubedFeedForward(shape)


def init_fork(fqn, full, shape, generator):
    if full.dim() == 1:
        full.uniform_(0.5, 1.5, generator=generator)
    else:
        init_parameter(fqn, full, shape, generator)


def run_fork(rank: int, world_size: int, mutant: str | None, worker, *args, **options):
    """Worker: another one, with the fork's model known, and perhaps broken."""
    with fork_known(), MUTANTS[mutant].patch() if mutant else nullcontext():
        return worker(rank, world_size, *args, **options)


def fork_known():
    return compare.fork_known(Fork, init_fork)


@pytest.mark.parametrize(
    ("mutant", "culprit"),
    [(None, None), ("causal_mask_lost_on_one_rank", "layers.0.attention.inner")],
)
def test_a_forks_model_is_verified_unchanged(pool, folder, mutant, culprit):
    config = compare.complete({"model.name": "fork", TP: 2}, 2)

    def run_ranks(worker, world_size, *args, **options):
        return pool.run(run_fork, world_size, mutant, worker, *args, **options)

    with fork_known():
        trial = try_layout(config, 2, run_ranks, folder)
        forked = load_reference(save_reference(config, folder))
    assert (trial.culprit and trial.culprit.name) == culprit
    usual = load_reference(save_reference(compare.complete({TP: 2}, 2), folder))
    assert abs(forked.losses[0] - usual.losses[0]) > 1e-3  # the reference runs the fork's code


# ---------------------------------------------------------------- bisection and matrix

THREE_D = {PP: 2, TP: 2, SHARD: 2, "model.tie_embeddings": False, SCHEDULE: "Interleaved1F1B"}


@pytest.mark.parametrize(
    ("guilty", "smallest"),
    [
        (lambda config, layout: layout.tp > 1 and layout.pp > 1, ["pp", "tp"]),
        (
            lambda config, layout: config.activation_checkpoint.mode != "none" and layout.dp > 1,
            ["dp_shard", "recompute"],
        ),
        (lambda config, layout: len(layout.stages) > 2, ["pp", "schedule"]),
        (lambda config, layout: True, []),
    ],
)
def test_bisection_finds_the_smallest_combination(guilty, smallest):
    config = compare.complete(THREE_D, 8)
    layout = plan_layout(config, resolve_model(config.model), 8)
    assert {"pp", "dp_shard", "tp", "recompute", "schedule", "loss parallel"} == set(list_features(config, layout))
    assert find_smallest(config, layout, guilty, lambda off, outcome: None) == smallest


def test_bisection_keeps_what_cannot_be_turned_off():
    config = compare.complete(THREE_D, 8)
    layout = plan_layout(config, resolve_model(config.model), 8)
    outcomes = {}
    with patch.dict(FEATURES, {"tp": replace(FEATURES["tp"], off={TP: 3})}):  # 3 divides no number of heads here
        assert find_smallest(config, layout, lambda *run: True, outcomes.__setitem__) == ["tp"]
    assert {outcome for off, outcome in outcomes.items() if "tp" in off} == {None}


def test_fewer_data_parallel_ranks_leave_each_rank_its_rows():
    config = compare.complete({SHARD: 4, "training.local_batch_size": 1, "training.global_batch_size": 8}, 4)
    layout = plan_layout(config, resolve_model(config.model), 4)
    small, small_layout = turn_off(config, layout, frozenset({"dp_shard"}))
    assert (small_layout.world_size, small_layout.global_batch_size, small_layout.n_microbatches) == (1, 2, 2)
    _, without = turn_off(config, layout, frozenset({"accumulation"}))
    assert (without.world_size, without.global_batch_size, without.n_microbatches) == (4, 4, 1)


def test_the_matrix_has_thirty_layouts_that_can_run_and_refuses_tied_embeddings_under_a_pipeline_only():
    config = read("--config", "debug")
    layouts = {(row, column): plan_cell(config, row, column, 8).layout for row in ROWS for column in COLUMNS}
    assert len({str(layout) + str(cell[1]) for cell, layout in layouts.items()}) == 30
    assert str(layouts["dp2 x tp2", "DualPipeV"]) == "pp2 x dp_shard2 x tp2"
    assert len(layouts["tp2", "ZBVZeroBubble"].stages) == 4
    tied = read("--config", "llama3_1b")
    plan_cell(tied, "tp2", COLUMNS[0], 8)
    with pytest.raises(ConfigError, match="tied"):
        plan_cell(tied, "tp2", "1F1B", 8)


def make_cells(*outcomes: str) -> list[Cell]:
    """All cells of the grid: the first ones with these outcomes, the others right."""
    faults = {"wrong": {"loss": "off"}, "not finished": {"no answer": "1 of 2 ranks did not answer"}}
    places = [(row, column) for row in ROWS for column in COLUMNS]
    cells = []
    for (row, column), outcome in zip(places, [*outcomes, *["right"] * (30 - len(outcomes))], strict=True):
        trial = Trial("wide", [], faults.get(outcome, {}), None, 1.0, difference=Namespace(gradient={"w": 1e-7}))
        trial = None if outcome in ("refused", "not run") else replace(trial, finished=outcome != "not finished")
        cells.append(Cell(row, column, trial, why_not="it cannot be split" if outcome == "refused" else ""))
    return cells


@pytest.mark.parametrize(
    ("outcomes", "verdict", "status"),
    [
        (["refused"], "certified", 0),
        (["not run"], "certified in part", 3),
        (["refused", *["not run"] * 29], "in part", 3),
        (["not finished", "not run"], "not finished", 4),
        (["wrong", "not finished", "not run"], "wrong", 1),
    ],
)
def test_the_verdict_on_a_matrix_counts_what_was_not_run(outcomes, verdict, status):
    cells = make_cells(*outcomes)
    assert judge_matrix(cells) == verdict and EXIT_STATUS[verdict] == status
    grid = describe_grid(cells)
    assert (grid.count("FAILS"), grid.count("TIMEOUT")) == (outcomes.count("wrong"), outcomes.count("not finished"))
    assert ("it cannot be split" in grid) == ("refused" in outcomes)


def test_the_matrix_on_one_rank_is_in_part_and_says_how_many_layouts_were_run(pool, folder, capsys):
    config = compare.complete({}, 1)
    assert tool.verify_matrix(config, Namespace(ranks=1, json=True), pool.run, folder) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["certified"] is False and report["verdict"] == "certified in part"
    assert report["counts"] == {"right": 1, "wrong": 0, "not finished": 0, "refused": 0, "not run": 29}
    assert [each["outcome"] for each in report["cells"]].count("not run") == 29


# ---------------------------------------------------------------- the door


def test_the_command_verifies_a_config_from_a_cold_start():
    command = [sys.executable, "-m", "torchtitan_lite", "verify", "--config", "debug", "--ranks", "2", f"--{TP}=2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for said in (
        "certified for tp2: this layout computes the one-process model",
        "dp_shard is automatic, and no rank was left for it",
        "AdamW -> SGD",
        "layers.*.attention.wq.weight",
        "the model file, which both sides share",
        *(f"{name}, " for name in TRIALS if name != "float8"),
    ):
        assert said in done.stdout
    assert "kept for runs of this config" in done.stderr


def test_a_report_for_programs_holds_every_parameter_and_all_that_was_replaced(pool, folder):
    reduction = reduce_config(read("--config", "debug", f"--{TP}=2"), 2)
    with patch.dict(TRIALS, {"wide": TRIALS["wide"]}, clear=True):
        certificate = tool.verify("debug", reduction, Namespace(bisect=False), pool.run, folder)
    report = json.loads(json.dumps(report_for_programs(certificate)))
    assert report["certified"] is True and report["culprit"] is None and report["faults"] == {}
    assert report["degrees"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    assert report["asked"]["dp_shard"] == "automatic" and report["asked"]["tp"] == 2
    assert {change["key"] for change in report["reduced"]} >= {"optimizer.name", "model.dim"}
    wq = report["parameters"]["layers.1.attention.wq.weight"]
    assert wq["initial_equal"] is True and 0 < wq["gradient"] < 1e-6 and wq["copies_unequal_over"] == []
    assert "S(0) over tp" in wq["placement"]
    record = record_for_runs(certificate)
    assert record["layout"] == "tp2" and record["largest_error"] < 1e-5 and "optimizer.name" in record["reduced"]


def test_a_wrong_layout_ends_with_its_first_fault_and_the_smallest_combination(pool, folder):
    mutant, reduction = "loss_counted_by_every_tp_rank", reduce_config(read("--config", "debug", f"--{TP}=2"), 2)

    def run_ranks(worker, world_size, *args, **options):
        return pool.run(compare.run_mutant, world_size, mutant, worker, *args, **options)

    certificate = tool.verify("debug", reduction, Namespace(bisect=True), run_ranks, folder)
    assert certificate.verdict == "wrong" and [trial.name for trial in certificate.trials] == ["wide"]
    said = describe(certificate, verbose=False)
    assert "certified" not in said
    assert "first to differ: module output: output" in said and "cause: unknown" in said
    assert "smallest combination that fails: tp" in said


WIDE = Trial("wide", [], {}, None, 1.0)
MISSING = Trial("train.py", [], {}, None, 0.0, skipped="train.py is not beside the package", is_missing=True)
NOT_ASKED = Trial("float8", [], {}, None, 0.0, skipped="the run has no float8")
WRONG = Trial("deep", [], {"loss": "loss is off by 1.0e-02"}, None, 1.0)
SILENT = Trial("deep", [], {"no answer": "ranks [1] did not answer within 300 s"}, None, 300.0, finished=False)


@pytest.mark.parametrize(
    ("max_ranks", "trials", "verdict", "status", "said"),
    [
        (4, [WIDE, NOT_ASKED], "certified", 0, "certified for pp2 x tp2: "),
        (4, [WIDE, MISSING], "certified in part", 3, "train.py is missing: train.py is not beside the package"),
        (2, [WIDE], "in part", 3, "but tp 2 could not be tried"),
        (2, [WIDE, MISSING], "in part", 3, "--ranks 4 would try every dim"),
        (4, [WIDE, WRONG], "wrong", 1, "loss is off by 1.0e-02"),
        (2, [WIDE, WRONG], "wrong", 1, "(trial deep)"),
        (4, [WIDE, SILENT], "not finished", 4, "not finished: in trial deep, ranks [1] did not answer"),
    ],
)
def test_the_verdict_is_for_what_was_tried(max_ranks, trials, verdict, status, said):
    config = read("--config", "debug", f"--{PP}=2", f"--{TP}=2", f"--{SHARD}=1")
    certificate = Certificate("debug", reduce_config(config, max_ranks), trials)
    assert (certificate.verdict, EXIT_STATUS[certificate.verdict]) == (verdict, status)
    assert report_for_programs(certificate)["verdict"] == verdict
    lines = "\n".join(describe_verdict(certificate))
    assert said in lines
    assert ("certified" in lines) == (verdict in ("certified", "certified in part"))


def test_a_reduced_degree_is_named_in_the_verdict():
    degrees = (f"--{PP}=16", f"--{CP}=8", f"--{SHARD}=1", f"--{TP}=2")
    config = read("--config", "llama3_70b", "--training.local_batch_size=16", *degrees)
    verdict, *_ = describe_verdict(Certificate("llama3_70b", reduce_config(config, 8), [WIDE]))
    assert verdict.startswith("certified for pp2 x cp2 x tp2; pp 16 and cp 8 were reduced: ")


@pytest.mark.parametrize(
    "args",
    [
        ["--config", "debug", "--parallelism.tensor_paralel_degree=2"],
        ["--config", "debug", f"--{TP}=4"],
        ["--config", "no such file"],
    ],
)
def test_wrong_input_ends_with_2_and_says_why(args, capsys):
    assert tool.main(args) == 2
    assert "could not start" in capsys.readouterr().err
    assert tool.main([*args, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"]


def test_too_many_ranks_are_refused():
    with pytest.raises(SystemExit) as exit_:
        tool.main(["--config", "debug", "--ranks", "17"])
    assert exit_.value.code == 2
