"""Mistakes that one process and every layout would share, or that only large sizes show: `verify` cannot see them."""

import json

import pytest
import torch
import torch.nn.functional as F
import warm_start

from torchtitan_lite.components.optim import learning_rate_factor
from torchtitan_lite.config.flavors import FLAVORS
from torchtitan_lite.config.schema import LRScheduler
from torchtitan_lite.model.head import ChunkedLoss
from torchtitan_lite.model.moe import Router
from torchtitan_lite.parallel.initial_weights import copy_local_shard


def test_each_shard_of_a_large_vocabulary_finds_its_own_targets():
    logits, targets = torch.randn(3, 2**17), torch.tensor([5, 2**16 + 5, 2**17 - 1])
    expected = F.cross_entropy(logits, targets, reduction="none")
    for first_id in (0, 2**16):
        shard = logits[:, first_id : first_id + 2**16]
        loss = ChunkedLoss(0)
        loss.combine = lambda log_total, of_target: (torch.zeros_like(log_total), of_target)
        found, _ = loss.differentiate(shard.clone(), targets, with_gradient=False, first_id=first_id)
        is_here = (targets >= first_id) & (targets < first_id + 2**16)
        right = -(logits.gather(1, targets[:, None])[:, 0] * is_here).sum()
        assert found.item() == pytest.approx(right.item(), rel=1e-5)
    whole, _ = ChunkedLoss(0).differentiate(logits.clone(), targets, with_gradient=False)
    assert whole.item() == pytest.approx(expected.sum().item(), rel=1e-5)


def test_a_large_initial_weight_is_copied_to_its_end():
    full = torch.randn(2**21 + 5)
    parameter = torch.zeros_like(full)
    copy_local_shard(parameter, full)
    assert torch.equal(parameter, full)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_the_decay_reaches_its_lowest_rate_one_step_after_the_last_and_stays_there(decay_type):
    section = LRScheduler(warmup_steps=2, total_steps=10, decay_type=decay_type, min_lr_factor=0.1)
    rates = [learning_rate_factor(section, step) for step in range(14)]
    assert rates[1] == 1 and all(one > next_one for one, next_one in zip(rates[2:9], rates[3:10], strict=True))
    assert rates[9] > 0.1 and rates[10:] == pytest.approx([0.1] * 4)


def test_a_router_computes_in_float32_whatever_its_tokens_and_weights_are(monkeypatch):
    seen = []
    monkeypatch.setattr(Router, "choose", lambda router, scores: seen.append(scores) or scores.topk(2).indices)
    router = Router(16, FLAVORS["debug_moe"].moe)
    router.weight = torch.nn.Parameter(torch.randn(8, 16).bfloat16())
    router.reset(torch.device("cpu"))
    x = torch.randn(2, 3, 16).bfloat16()
    weights, _ = router(x)
    assert weights.dtype == seen[0].dtype == torch.float32
    assert torch.equal(seen[0], F.linear(x.float(), router.weight.float()).softmax(-1))


def test_a_run_logs_the_rate_that_each_step_used(pool, tmp_path):
    keys = [*warm_start.write_letters(tmp_path / "letters"), f"--job.dump_folder={tmp_path / 'run'}"]
    schedule = ["--training.steps=3", "--lr_scheduler.warmup_steps=2", "--lr_scheduler.total_steps=4"]
    assert pool.run(warm_start.start, 1, [*keys, *schedule, "--optimizer.lr=0.01", "--checkpoint.no_enable"]) == [0]
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [record["lr"] for record in records if record["kind"] == "step"] == pytest.approx([0.005, 0.01, 0.01])
