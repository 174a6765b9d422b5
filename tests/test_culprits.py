"""Culprits and endings of `verify`: the first difference is named, and what is not known is not called wrong."""

import os
import signal
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import CP, DOCUMENTS, EP, LAYOUTS, PP, SHARED, TP
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lite import build, step
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.parallel import parallelize, tensor_parallel
from torchtitan_lite.parallel.tensor_parallel import MissingFromPlan
from torchtitan_lite.tools.verify import command as tool
from torchtitan_lite.tools.verify.culprit import name_first_output
from torchtitan_lite.tools.verify.gradient_trial import FP32_TOLERANCE, save_reference, try_layout
from torchtitan_lite.tools.verify.module_outputs import (
    ModuleErrors,
    RankRoutes,
    find_flips,
    judge_routes,
    observe_outputs,
)
from torchtitan_lite.tools.verify.ranks import RankKilled, RankPool, RankTimeout, describe_stack
from torchtitan_lite.tools.verify.reference import load_reference
from torchtitan_lite.tools.verify.slices import Gap, find_unequal_replicas, join_slices
from torchtitan_lite.tools.verify.trial import describe_failure, find_disagreement, name_crash

# ---------------------------------------------------------------- what ranks see is put together


def test_ranks_disagree_along_the_dims_on_which_neighbours_differ():
    ranks = [{"pp": p, "tp": t} for p in (0, 1) for t in (0, 1)]
    assert find_disagreement([(rank, 1.0 + rank["pp"]) for rank in ranks], 1e-5) == ["pp"]
    assert find_disagreement([(rank, 3.0) for rank in ranks], 1e-5) == []
    assert find_disagreement([(rank, float(n)) for n, rank in enumerate(ranks)], 1e-5) == ["pp", "tp"]


def compare_copies(rank: int, world_size: int) -> set[tuple[str, str]]:
    """Worker: a tensor that two mesh dims copy, and that is another one on the second rank of tp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    copies = DTensor.from_local(torch.tensor([rank % 2.0]), mesh, [Replicate(), Replicate()], run_check=False)
    return find_unequal_replicas({"w": copies})


def test_copies_are_compared_along_each_dim_that_has_some(pool):
    assert set.union(*pool.run(compare_copies, 4)) == {("w", "tp")}


def test_slices_are_joined_to_the_wholes_that_they_belong_to():
    here, there = (("tp", 0),), (("tp", 1),)  # a tensor that is copied over tp, and split over dp_shard
    numbers = [(here, 1.0, 50.0), (here, 3.0, 50.0), (there, 0.0, 50.0), (there, 100.0, 0.0)]
    ranks = [{"w": (whole, Gap(error, 50.0, product=product))} for whole, error, product in numbers]
    joined = [(of_rank["w"].relative_error, of_rank["w"].scale) for of_rank in join_slices(ranks)]
    assert joined == [(0.2, 1.0), (0.2, 1.0), (1.0, 0.5), (1.0, 0.5)]
    assert Gap(1e-30, 0.0).relative_error == Gap(float("nan"), 1.0).relative_error == float("inf")


# ---------------------------------------------------------------- a module is blamed only if its inputs are right


def observe(pool, references, world_size: int, overrides: dict) -> tuple:
    config = compare.complete(overrides, world_size)
    path = save_reference(config, references)
    return pool.run(observe_outputs, world_size, config, path), load_reference(path)


slow = partial(pytest.param, marks=pytest.mark.slow)  # other combinations of what the other rows have


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, LAYOUTS["accumulation 2"].overrides),
        (2, LAYOUTS["pp2 Interleaved1F1B, embedding and head alone"].overrides),
        (2, {PP: 2, **DOCUMENTS}),
        (4, {CP: 2, TP: 2}),
        (4, {**SHARED, CP: 2, TP: 2, EP: 4}),
        slow(2, LAYOUTS["pp2 DualPipeV"].overrides),
        slow(8, LAYOUTS["pp2 x dp2 x tp2 Interleaved1F1B"].overrides),
        slow(4, {PP: 2, CP: 2, **DOCUMENTS}),
    ],
    ids=str,
)
def test_every_module_of_a_healthy_layout_is_compared_and_none_is_accused(pool, references, world_size, overrides):
    ranks, reference = observe(pool, references, world_size, overrides)
    assert name_first_output(ranks, reference, FP32_TOLERANCE / 5) is None
    for rank in ranks:
        assert {error for errors in rank.pieces.values() for error in errors.values()} == {0.0}
        assert all(errors.keys() == reference.inputs[name].keys() for name, errors in rank.inputs.items())
        assert max(error for errors in rank.inputs.values() for error in errors.values()) < FP32_TOLERANCE / 10
    assert {name for rank in ranks for name in rank.inputs} == set(reference.inputs) == set(reference.outputs)
    assert {name for rank in ranks for name in rank.error} == set(reference.outputs)
    config = compare.complete(overrides, world_size)
    fields = {"targets", "positions", "doc_ids"} | ({"routes"} if reference.experts else set())
    stages = {fqns[0]: fields for fqns in plan_layout(config, resolve_model(config.model), world_size).stages}
    given = {name: set(errors) for rank in ranks for name, errors in rank.pieces.items()}
    assert given == {**stages, "tok_embeddings": {"x", *fields}, "shard_for_cp": {"tokens", *fields}}


def with_error(share: ModuleErrors, output: dict[str, float], inputs: dict[str, dict[str, float]]) -> ModuleErrors:
    return replace(share, error={**share.error, **output}, inputs={**share.inputs, **inputs})


def test_a_module_with_wrong_inputs_is_not_blamed_for_its_output(pool, references):
    (share,), reference = observe(pool, references, 1, {})
    name = partial(name_first_output, reference=reference, tolerance=FP32_TOLERANCE / 5)
    wq, w2 = "layers.1.attention.wq", "layers.1.feed_forward.w2"
    assert name([share]) is None
    assert name([with_error(share, {w2: 1e-3}, {})]).name == w2
    both = with_error(share, {w2: 1e-3}, {w2: {"input": 8e-4}})
    assert (name([both]).kind, name([both]).name) == ("growing error", w2)
    earlier = with_error(both, {wq: 1e-5}, {})
    assert (name([earlier]).kind, name([earlier]).name) == ("module output", wq)
    at_zero, at_one = (
        replace(one, coordinates={**share.coordinates, "tp": tp}) for tp, one in enumerate((share, both))
    )
    wrong_elsewhere = with_error(at_zero, {w2: 1e-3}, {})  # a wrong input on another rank may be the reason
    assert name([wrong_elsewhere, at_one]).kind == "growing error"
    lost = name([with_error(share, {"layers.2": 1e-3}, {"layers.2": {"x": 1e-3}})])
    assert (lost.kind, lost.name) == ("module input", "layers.2") and "layers.1" in lost.detail


# ---------------------------------------------------------------- routes that routers choose themselves


def test_the_margin_of_a_flip_is_that_of_the_expert_that_was_lost():
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).expand(3, -1)
    right, own = torch.tensor([[0, 1]] * 3), torch.tensor([[1, 0], [0, 2], [3, 2]])
    n_flips, margins = find_flips(own, right, scores)
    assert n_flips.tolist() == [0, 1, 2]
    assert torch.allclose(margins[1:], torch.tensor([0.1, 0.3]))


def test_a_tie_is_no_fault_and_what_follows_from_it_is_not_judged():
    ties = [RankRoutes({"tp": 0}, 500, {(0, 1): (1, 1e-7), (2, 1): (3, 0.1)}), RankRoutes({"tp": 1}, 500, {})]
    flips = judge_routes(ties)
    (measure,) = flips.measures
    assert flips.faults == {} and measure.error == 1e-7 and measure.is_right
    assert "of 1,000 routes that routers choose themselves, 4 are others" in measure.of
    wide = judge_routes([ties[0], RankRoutes({"tp": 1}, 500, {(1, 3): (1, 1e-3)})])
    assert "5 of 1,000 routes" in wide.faults["routes"] and not wide.measures[0].is_right
    assert (wide.culprit.name, wide.culprit.mesh_dims) == ("layers.1.feed_forward.router", ["tp"])


# ---------------------------------------------------------------- a module that the tensor-parallel plan does not name


def row_missing():
    """Inside, the plan lacks a row."""
    plan = tensor_parallel.plan_tensor_parallel

    def without_a_row(part, **options) -> dict:
        return {name: style for name, style in plan(part, **options).items() if not name.endswith("0.ffn_norm")}

    return patch.object(parallelize, "plan_tensor_parallel", without_a_row)


def test_a_parameter_that_the_tensor_parallel_plan_does_not_name_is_named(pool, references):
    trial = try_layout(compare.complete({TP: 2}, 4), 4, compare.ranks_inside(pool, row_missing), references)
    assert (trial.culprit.kind, trial.culprit.name) == ("placement", "layers.0.ffn_norm.weight")
    assert trial.finished and set(trial.faults) == {"crash"}
    assert len(trial.faults["crash"]) < 500 and "plan does not name its module" in trial.culprit.detail


class OtherNorm(nn.RMSNorm):
    """A fork's norm, with arithmetic of its own."""


def test_a_module_of_another_class_is_refused_instead_of_computed_as_what_it_is_not():
    part = build.build_on_meta(compare.TABLE_CONFIG, resolve_model(compare.TABLE_CONFIG.model))
    part.layers["1"].ffn_norm = OtherNorm(part.model_args.dim)
    with pytest.raises(MissingFromPlan, match="layers.1.ffn_norm is a OtherNorm, and CopiedNorm computes RMSNorm"):
        tensor_parallel.apply_tensor_parallel(part, None, tensor_parallel.plan_tensor_parallel(part))


def test_a_crash_is_named_by_the_last_line_of_its_traceback():
    culprit = name_crash("rank 1 of 2: Traceback ...\n  File ...\nRuntimeError: got that\n")
    assert (culprit.kind, culprit.name, culprit.detail) == ("crash", "rank 1 of 2", "RuntimeError: got that")
    assert name_crash(f"rank 0 of 2: ...\n{MissingFromPlan.__module__}.MissingFromPlan: a.b lies here").name == "a.b"


# ---------------------------------------------------------------- ranks that do not answer


def wait_for_each_other(rank: int, world_size: int) -> None:
    """Worker: one rank sums what another one gathers."""
    mesh = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=mesh)
    else:
        dist.recv(torch.ones(3), src=0)


def kill_last(rank: int, world_size: int) -> None:
    """Worker: a signal ends the last rank; its peer notices and raises."""
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def report_timeouts(rank: int, world_size: int) -> list[timedelta]:
    """Worker: how long the first group and a later one wait."""
    groups = (dist.group.WORLD, dist.new_group([0, 1]))
    dist.barrier()  # no rank leaves while another still joins
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


@pytest.fixture(scope="module")
def own_pool():
    """Of ranks that may be killed: the others' go on."""
    with RankPool(2) as ranks:
        yield ranks


def test_ranks_that_wait_for_each_other_are_named_with_their_places_and_nothing_is_called_wrong(own_pool):
    own_pool.run(compare.all_ranks_agree, 2, "started")  # the time is for the work alone
    with pytest.raises(RankTimeout) as timeout:
        own_pool.run(wait_for_each_other, 2, timeout_s=2)
    trial = describe_failure(timeout.value)
    assert not trial.finished and trial.culprit is None
    for text in ("--timeout", "2 of 2 ranks", "rank 0 in all_reduce (distributed_c10d.py:", "rank 1 in recv ("):
        assert text in trial.faults["no answer"]
    assert own_pool.run(compare.all_ranks_agree, 2, "alive") == [True, True]


def test_a_rank_that_a_signal_ends_says_nothing_of_the_layout(own_pool):
    with pytest.raises(RankKilled) as killed:
        own_pool.run(kill_last, 2)
    trial = describe_failure(killed.value)
    assert not trial.finished and trial.faults["no answer"] == "rank 1 of 2: was killed by SIGABRT"


def test_the_parent_gives_up_before_any_group_does(own_pool):
    for waits in own_pool.run(report_timeouts, 2, timeout_s=7200):
        assert all(seconds > timedelta(seconds=7200) for seconds in waits)


def test_a_place_is_the_innermost_call_and_the_line_of_this_package_that_made_it():
    text = f"""Thread 0x1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 5 in wait
  File "/usr/lib/python3/threading.py", line 6 in run

Current thread 0x2 (most recent call first):
  File "/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "{build.build_optimizer.__code__.co_filename}", line 108 in measure_grad_norm
  File "{step.__file__}", line 120 in train_step
  File "{tool.__file__}/../ranks.py", line 150 in serve
"""
    place = (
        "in all_reduce (distributed_c10d.py:3000), called by measure_grad_norm "
        "(torchtitan_lite/components/optim.py:108)"
    )
    assert describe_stack(text) == place
    assert describe_stack("") == "cannot say where they are"
