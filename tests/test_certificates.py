"""A run finds the certificate of its own config, mesh dims and code, and of no other, and says what it covers."""

import compare
import pytest
from layouts import CP, MODE, PP, TP

from torchtitan_lite.config import certificates
from torchtitan_lite.config.certificates import describe_coverage, find_certificate, write_certificate
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.preflight import preflight

CSV = "parallelism.pipeline_parallel_schedule_csv"
FLOAT8 = "quantize.linear.float8"
RECORD = {
    "layout": "tp2",
    "largest_error": 2e-7,
    "date": "2026-11-22",
    "trials": ["wide", "deep"],
    "not_covered": ["data"],
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def find(config: Config, n_ranks: int):
    return find_certificate(config, plan_layout(config, resolve_model(config.model), n_ranks))


def keep(config: Config, n_ranks: int) -> None:
    write_certificate(config, plan_layout(config, resolve_model(config.model), n_ranks), RECORD)


@pytest.mark.parametrize(
    ("key", "value", "is_found"),
    [
        # a key that decides a number asks for a certificate of its own
        ("training.local_batch_size", 4, False),
        ("training.seq_len", 64, False),
        ("training.max_norm", 2.0, False),
        ("model.converters", ["float8"], False),
        (f"{FLOAT8}.recipe_name", "rowwise", False),
        ("optimizer.lr", 1.0, False),
        ("lr_scheduler.decay_type", "cosine", False),
        ("compile.enable", True, False),
        ("parallelism.zero_stage", 1, False),
        (MODE, "none", False),
        # what decides no number of the layout does not
        ("training.steps", 3, True),
        ("training.dataset", ["elsewhere"], True),
        ("debug.seed", 7, True),
        ("metrics.log_freq", 1, True),
        ("job.dump_folder", "elsewhere", True),
        ("checkpoint.enable", True, True),
    ],
)
def test_a_certificate_is_found_by_the_keys_that_decide_a_number(key, value, is_found):
    config = compare.complete({TP: 2}, 2)
    assert find(config, 2) is None
    keep(config, 2)
    assert find(config, 2)["layout"] == "tp2"
    assert bool(find(compare.override(config, {key: value}), 2)) == is_found


def test_a_proof_on_fewer_mesh_dims_is_no_proof():
    """dp_shard is automatic: the same config is tp2 on two ranks, and dp_shard2 x tp2 on four."""
    config = compare.override(compare.TABLE_CONFIG, {TP: 2, "training.local_batch_size": 2})
    keep(config, 2)
    assert find(config, 2) and not find(config, 4)
    keep(config, 4)
    assert find(config, 4) and find(config, 8)  # dp_shard 4 instead of 2: the same dims


def test_other_code_and_another_torch_ask_for_a_certificate_of_their_own(tmp_path, monkeypatch):
    package = tmp_path / "torchtitan_lite"
    package.mkdir()
    (package / "step.py").write_text("")
    (tmp_path / "train.py").write_text("first")
    monkeypatch.setattr(certificates, "PACKAGE", package)
    config = compare.complete({CP: 2}, 2)
    for change in (
        lambda: (tmp_path / "train.py").write_text("other"),
        lambda: (package / "step.py").write_text("other"),
        lambda: monkeypatch.setattr(certificates, "find_torch_version", lambda: "another"),
    ):
        keep(config, 2)
        assert find(config, 2)
        change()
        assert find(config, 2) is None


def test_the_content_of_a_schedule_file_counts_and_its_name_does_not(tmp_path):
    rows = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    for name in ("one.csv", "other.csv"):
        (tmp_path / name).write_text(rows)
    config = compare.complete({PP: 2, CSV: "one.csv", MODE: "none", "training.local_batch_size": 2}, 2)
    config = compare.override(config, {"training.global_batch_size": 2})
    keep(config, 2)
    assert find(compare.override(config, {CSV: "other.csv"}), 2)
    (tmp_path / "one.csv").write_text(rows.replace("1F0,1F1,1B0,1B1", "1F0,1B0,1F1,1B1"))
    assert find(config, 2) is None


def test_a_run_says_what_its_certificate_covers_and_what_not():
    args = ["--config", "debug", f"--{TP}=2"]
    config = read_config(args).config
    machine = Machine("cpu", 1, 2**34, "a laptop")
    assert not any("certif" in notice for notice in preflight(args, machine=machine, n_ranks=2).notices)
    keep(config, 2)
    prepared = preflight(args, machine=machine, n_ranks=2)
    said = describe_coverage(prepared.certificate, prepared.layout)
    assert said == prepared.notices[-2:]
    assert "certified 2026-11-22 for tp2; this run is tp2" in said[0] and "trials: wide, deep" in said[0]
    assert said[1] == "the certificate does not cover: data"
