"""Test for bugs that `verify` cannot find, because one process has the same bug, or because the bug only appears at
large sizes."""

from functools import partial
from unittest.mock import patch

import compare
import pytest
import torch
import warm_start
from layouts import TP
from made_corpora import write_corpus
from marks import each_row

from torchtitan_lite.parallel.initial_weights import copy_local_shard
from torchtitan_lite.step import train_step
from torchtitan_lite.tools.verify.ranks import RankFailure


def test_all_elements_of_a_large_initial_weight_are_copied():
    full = torch.randn(2**21 + 5)
    parameter = torch.zeros_like(full)
    copy_local_shard(parameter, full)
    assert torch.equal(parameter, full)


def count_wrong_norms(rank: int, world_size: int) -> list[float]:
    """Worker: run a step in bfloat16. For each norm, return the fraction of outputs that differ from a norm in
    float32."""
    run = compare.build_table_run(world_size, {TP: 2, "training.mixed_precision_param": "bfloat16"})
    shares = []

    def compare_norm(norm, args, output):
        x = args[0].float()
        mean = x.square().mean(-1, keepdim=True)
        scale = torch.rsqrt(mean + norm.eps)
        right = x * scale * compare.local(norm.weight).float()
        shares.append((output != right.to(output.dtype)).float().mean().item())

    for module in run.parts[0].modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.register_forward_hook(compare_norm)
    train_step(run, compare.read_rows(run))
    return shares


def test_each_tp_rank_computes_norms_in_float32_in_a_run_in_bfloat16(pool):
    for shares in pool.run(count_wrong_norms, 2):
        assert len(shares) >= 9 and max(shares) < 0.01


FOUR_STEPS = """
--training.steps=4 --lr_scheduler.warmup_steps=2 --lr_scheduler.total_steps=5 --optimizer.lr=0.01
--training.max_norm=0.1 --checkpoint.no_enable --validation.freq=1
"""
RATES = {1: 0.005, 2: 0.01, 3: 0.01, 4: 0.01 * 2 / 3}


def test_each_step_logs_learning_rate_and_gradient_norm_and_validation_does_not_change_the_losses(
    run_training, letters, tmp_path
):
    corpus = tmp_path / "abc"
    write_corpus(corpus, [[b"abc" * 50] * 20], validation=[[b"xyz" * 50]])
    keys = [*letters, f"--training.dataset={corpus}", *FOUR_STEPS.split()]
    for option in ("enable", "no_enable"):
        run_training(tmp_path / option, [*keys, f"--validation.{option}"])
    read = partial(warm_start.read_losses, tmp_path / "enable")
    losses = read()
    assert read("lr") == pytest.approx(RATES)
    assert min(read("grad_norm").values()) > 0.2, "before clipping"
    assert losses == warm_start.read_losses(tmp_path / "no_enable")
    assert losses[4] < losses[1] - 0.5
    assert read("val_loss")[4] > losses[1], "other documents"


# ---------------------------------------------------------------- when a run saves, compares and validates


def note_compared_steps(rank: int, world_size: int, keys: list[str]) -> list[int]:
    """Worker: train. Return the steps after which copies were compared."""
    steps = []
    with patch(
        "torchtitan_lite.extensions.copies.compare_copies",
        lambda run, group: steps.append(run.lr_scheduler.last_epoch),
    ):
        assert warm_start.start(rank, world_size, keys)[0] == 0
    return steps


def test_a_run_compares_validates_and_records_after_every_nth_step(pool, letters, tmp_path):
    keys = [*letters, f"--job.dump_folder={tmp_path}/run"]
    keys += ["--training.steps=16", "--debug.compare_copies_every=3", "--checkpoint.no_enable"]
    keys += ["--validation.enable", "--validation.freq=3", "--metrics.log_freq=5"]
    assert pool.run(note_compared_steps, 1, keys) == [[3, 6, 9, 12, 15]]
    validated = [1, 3, 6, 9, 12, 15, 16]
    assert [*warm_start.read_losses(tmp_path / "run", "val_loss")] == validated
    assert [*warm_start.read_losses(tmp_path / "run")] == [*range(1, 11), 12, 15, 16]
    assert not (tmp_path / "run" / "checkpoint").exists()


@each_row("mode", ["disabled", "async"])
def test_snapshots_are_kept_until_the_last_checkpoint_is_saved(
    run_training, letters, tmp_path, mode
):
    (tmp_path / "run/checkpoint/step-6").mkdir(parents=True)  # this save fails
    keys = [*letters, "--training.steps=6", f"--checkpoint.async_mode={mode}"]
    keys += [f"--checkpoint.local_folder={tmp_path}/snapshots", "--checkpoint.local_interval=2"]
    with pytest.raises(RankFailure, match="step-6 already exists"):
        run_training(tmp_path / "run", keys)
    kept = {path.name for path in tmp_path.glob("snapshots/*/*/*")}
    assert kept == {"step-2", "step-4"}


def test_an_error_of_an_asynchronous_save_ends_the_run_at_the_next_step(
    run_training, letters, tmp_path
):
    (tmp_path / "run/checkpoint/step-1").mkdir(parents=True)
    keys = [*letters, "--checkpoint.interval=1", "--checkpoint.async_mode=async"]
    with pytest.raises(RankFailure, match="step-1 already exists"):
        run_training(tmp_path / "run", keys, 2)
    assert [*warm_start.read_losses(tmp_path / "run")] == [1, 2]
