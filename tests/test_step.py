"""What a step does when something goes wrong: losses and gradients that are not finite, ranks that do not answer."""

import math

import compare
import pytest
import torch
from layouts import ADAMW

from torchtitan_lite import step as stepping
from torchtitan_lite.components.diagnosis import Finding, find_non_finite, name_culprit, natural_order
from torchtitan_lite.sizes import resolve_shape


def break_a_step(rank: int, world_size: int, overrides: dict[str, object], broken: str) -> tuple[bool, bool, str]:
    """Worker: one good step, then one with a NaN. Was it finite; did weights and moments stay; what is said of it?"""
    run = compare.build_table_run(world_size, overrides)
    vocab_size = resolve_shape(run.config.model).vocab_size
    stepping.train_step(run, compare.own_rows(run, compare.make_batch(0, vocab_size)))
    before = snapshot(run)

    if broken == "loss of rank 1" and rank == 1:
        run.parts[-1].register_forward_hook(lambda module, args, output: output * math.nan)
    if broken == "gradient of layer 2":
        for fqn, parameter in run.parameters.items():
            if fqn == "layers.2.feed_forward.w1.weight":
                parameter.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().fill_(math.inf))
    result = stepping.train_step(run, compare.own_rows(run, compare.make_batch(1, vocab_size)))
    after = snapshot(run)
    unchanged = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    said = find_non_finite(result.local_loss, run.parameters, run.mesh.coordinates())
    return bool(result.finite), unchanged, said


def snapshot(run: stepping.Run) -> dict[str, torch.Tensor]:
    """This rank's slices of all weights and optimizer states."""
    tensors = {fqn: parameter.to_local().clone() for fqn, parameter in run.parameters.items()}
    for fqn, parameter in run.parameters.items():
        for name, value in run.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                tensors[f"{fqn} {name}"] = compare.local(value).clone()
    return tensors


OPTIMIZERS = {
    "fused AdamW": ADAMW,
    "foreach AdamW": {**ADAMW, "optimizer.implementation": "foreach"},
    "SGD": {},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_that_is_not_finite_changes_nothing_and_its_rank_is_named(pool, optimizer):
    answers = pool.run(break_a_step, 2, OPTIMIZERS[optimizer], "loss of rank 1")
    for finite, unchanged, said in answers:
        assert not finite
        assert unchanged
        assert said == ("the loss of rank 1 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 0) is not finite")


def test_a_gradient_that_is_not_finite_is_named_by_fqn_and_place_on_a_3d_mesh(pool):
    overrides = {"parallelism.pipeline_parallel_degree": 2, "parallelism.tensor_parallel_degree": 2}
    answers = pool.run(break_a_step, 8, {**overrides, **OPTIMIZERS["fused AdamW"]}, "gradient of layer 2")
    for finite, unchanged, said in answers:
        assert not finite
        assert unchanged
        assert "every loss is finite" in said
        assert "gradient of layers.2.feed_forward.w1.weight on rank 4 (pp 1, dp_replicate 0, dp_shard 0" in said


def test_the_first_bad_gradient_is_the_first_in_the_order_of_layers():
    findings = [
        Finding(0, {"pp": 0}, True, "layers.10.attention.wq.weight"),
        Finding(1, {"pp": 1}, True, "layers.2.attention.wq.weight"),
    ]
    assert "layers.2.attention.wq.weight on rank 1" in name_culprit(findings)
    assert natural_order("layers.2.x") < natural_order("layers.10.x")


def test_an_overflow_of_the_norm_alone_is_told_apart():
    assert "more than fp32 holds" in name_culprit([Finding(0, {"pp": 0}, True, None)])
