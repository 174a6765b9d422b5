"""The trial of train.py accuses no healthy layout and leaves nothing behind; its reference cuts rows by itself.

test_verify.py runs its mutants with all others.
"""

import gc
import logging
import math
import os

import compare
import pytest
import torch
from layouts import (
    ADAMW,
    BUDGET,
    COMPILED,
    CP,
    DOCUMENTS,
    EP,
    LAYOUTS,
    MODE,
    OFFLOAD,
    PP,
    REPLICATE,
    RING,
    SCHEDULE,
    SHARED,
    TP,
    Row,
)

from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.dataset import SampleReader
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.tools.verify import train_trial
from torchtitan_lite.tools.verify.command import TRIALS
from torchtitan_lite.tools.verify.ranks import RankPool, RankTimeout
from torchtitan_lite.tools.verify.slices import measure_slice
from torchtitan_lite.tools.verify.train_checks import StartPlan, find_unlike_peers
from torchtitan_lite.tools.verify.train_reference import cut_samples, make_batch, make_text, write_corpus
from torchtitan_lite.tools.verify.train_trial import choose_other_layout, make_config, try_train

ASYNC = {"checkpoint.async_mode": "async"}
ACCUMULATION = {"training.local_batch_size": 1}
TWO_CORPORA = {"training.dataset": ["a", "b", "c"], "training.dataset_weights": [1.0, 2.0, 3.0]}
DECAY = {"lr_scheduler.decay_ratio": 0.2, "lr_scheduler.decay_type": "cosine", "lr_scheduler.min_lr_factor": 0.1}

HEALTHY = {
    "one rank": Row(1, {**ADAMW, **DECAY}),
    "dp2 tied, documents, two corpora": Row(2, {"flavor.tie_embeddings": True, **DOCUMENTS, **TWO_CORPORA, **ADAMW}),
    "pp2 x cp2 documents": Row(4, {PP: 2, CP: 2, **DOCUMENTS, **ASYNC}),
    "pp2 DualPipeV": Row(2, {PP: 2, SCHEDULE: "DualPipeV", MODE: "none", **ADAMW, **ASYNC}),
    "experts on tp2, ep2": Row(2, {TP: 2, EP: 2, **SHARED, **ADAMW, **ASYNC}),
}
SLOW = {  # many ranks, or compiled
    "one rank offloaded": Row(1, OFFLOAD),
    "hsdp2x2 accumulation": Row(4, {REPLICATE: 2, **ACCUMULATION, **ADAMW, **ASYNC}),
    "cp2 x tp2 ring compile": Row(4, {CP: 2, TP: 2, **RING, MODE: "full", **COMPILED, **ADAMW}),
    "dp2 compile, memory budget": Row(2, {**BUDGET, "model.n_layers": 2, **ADAMW}),
    "pp2 x dp2 x tp2 Interleaved1F1B": Row(8, {PP: 2, TP: 2, SCHEDULE: "Interleaved1F1B", **ADAMW, **ASYNC, **DECAY}),
}


@pytest.mark.parametrize("name", [*HEALTHY, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_healthy_layout_is_not_accused(pool, tmp_path, name):
    row = {**HEALTHY, **SLOW}[name]
    trial = try_train(compare.reduce_row(row), pool.run, tmp_path)
    assert trial.faults == {} and trial.culprit is None
    assert {measure.what: measure.error for measure in trial.measures if not measure.error <= measure.bound / 3} == {}
    assert len(trial.measures) == (10 if "optimizer.name" in row.overrides else 9)


def look_around(rank: int, world_size: int) -> tuple:
    """Worker: what train.py changes in its process."""
    logger = logging.getLogger("torchtitan_lite")
    state = (gc.isenabled(), gc.get_freeze_count(), logger.handlers, logger.level, logger.propagate, os.getcwd())
    return *state, dict(os.environ), torch.are_deterministic_algorithms_enabled()


def test_a_worker_is_left_as_it_was_and_no_file_is_written_elsewhere(tmp_path, monkeypatch, capfd):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "trial").mkdir()
    reduction = compare.reduce_row(Row(2, {"debug.deterministic": True}))
    with RankPool(2) as pool:  # its own: a worker of the shared one may be replaced meanwhile, and begins elsewhere
        before = pool.run(look_around, 2)
        assert try_train(reduction, pool.run, tmp_path / "trial").faults == {}
        assert list((tmp_path / "elsewhere").iterdir()) == []
        assert pool.run(look_around, 2) == before
    assert capfd.readouterr().out == ""


def test_a_missing_train_py_a_rank_that_fails_and_one_that_hangs_end_differently(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(train_trial, "TRAIN_PY", tmp_path / "nowhere" / "train.py")
    trial = try_train(compare.reduce_row(Row(1)), None, tmp_path)
    assert trial.faults == {} and trial.is_missing and "train.py" in trial.skipped
    (tmp_path / "train.py").write_text(
        "def restore_or_load(): pass\ntrain_step = validate = restore_or_load\n"
        "def main(args, stop):\n    print('the disk is full')\n    return 1\n"
    )
    monkeypatch.setattr(train_trial, "TRAIN_PY", tmp_path / "train.py")
    trial = TRIALS["train.py"](compare.reduce_row(Row(1)), pool.run, tmp_path)
    assert trial.culprit.kind == "crash" and "the disk is full" in trial.culprit.detail

    def hang(*args):
        raise RankTimeout("ranks [0] did not answer")

    assert not TRIALS["train.py"](compare.reduce_row(Row(1)), hang, tmp_path).finished


# ---------------------------------------------------------------- the second layout


@pytest.mark.parametrize(
    ("row", "other"),
    [
        (Row(1), "one rank"),
        (Row(2), "tp2"),
        (Row(2, {TP: 2}), "dp_shard2"),
        (Row(2, {REPLICATE: 2}), "tp2"),
        (Row(4, {CP: 4}), "dp_shard2 x cp2"),
        (Row(8, {PP: 2, TP: 2}), "pp2 x dp_shard4"),
        (LAYOUTS["pp2 ZBVZeroBubble"], "dp_shard2"),
        (Row(2, {"model.n_heads": 3, "model.n_kv_heads": 1, "model.head_dim": 8}), "pp2"),
    ],
)
def test_a_resume_is_tried_on_another_layout_of_the_same_ranks(tmp_path, row, other):
    config = make_config(compare.reduce_row(row), tmp_path)
    first = plan_layout(config, resolve_model(config.model), row.world_size)
    moved, layout = choose_other_layout(config, first)
    assert str(layout) == other
    assert moved.training.global_batch_size == config.training.global_batch_size
    assert plan_layout(moved, resolve_model(moved.model), row.world_size) == layout


def test_rows_of_a_rank_are_those_of_its_place_on_the_data_parallel_dims():
    config = compare.complete({PP: 2, REPLICATE: 2, TP: 2}, 16)
    plan = StartPlan(config, plan_layout(config, resolve_model(config.model), 16), 0)
    assert plan.coordinates(13) == {"pp": 1, "dp_replicate": 1, "dp_shard": 0, "cp": 0, "tp": 1}
    assert [plan.own_rows(rank)[0] for rank in range(16)] == [0, 0, 2, 2, 4, 4, 6, 6] * 2
    rows = [[(1, row) for row in plan.own_rows(rank)] for rank in range(16)]
    assert find_unlike_peers(plan, rows) == []
    assert find_unlike_peers(plan, [*rows[:8], *rows[:8][::-1]]) == ["pp"]


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("restart_positions", [False, True])
def test_samples_are_cut_as_the_reader_of_runs_cuts_them(tmp_path, restart_positions):
    train, validation = make_text(0, 500), make_text(1, 90)
    write_corpus(tmp_path / "corpus", train, validation)
    for split, text in (("train", train), ("validation", validation)):
        corpus = open_corpus(str(tmp_path / "corpus"), load_tokenizer("bytes"), tmp_path, split=split)
        reader = SampleReader([corpus], seq_len=24, vocab_size=258, restart_positions=restart_positions)
        cut = cut_samples(text, 24, restart_positions=restart_positions)
        assert reader.n_samples == [len(cut)]
        read = reader.read(torch.zeros(len(cut), dtype=torch.int64), torch.arange(len(cut)))
        right = make_batch(cut)
        fields = ("tokens", "targets", "positions", "doc_ids")
        assert all(torch.equal(getattr(read, name), getattr(right, name)) for name in fields)


def test_only_the_part_of_a_difference_counts_that_rounding_does_not_explain():
    expected = torch.tensor([1.0, -2.0])
    one_bit = expected * (1 + 2**-23)
    assert measure_slice(one_bit, expected, roundings=4)[:2] == (0.0, 5.0)
    assert measure_slice(one_bit, expected).error == pytest.approx(5 * 2**-46)
    assert measure_slice(expected + 0.1, expected, roundings=4).error == pytest.approx(0.02, rel=1e-5)
    assert math.isnan(measure_slice(expected * math.nan, expected, roundings=4).error)
