"""What a step does when something goes wrong: losses and gradients that are not finite."""

import math
import os
import random
from functools import partial

import compare
import pytest
import torch
from layouts import ADAMW, BFLOAT16, COMPILED, CP, DOCUMENTS, GATHER, PP, RECOMPUTE, RING, TP, TWO_LAYERS

from torchtitan_lite import step as stepping
from torchtitan_lite.components.diagnosis import find_non_finite
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel.context_parallel import IMPLEMENTATIONS as CONTEXT_ATTENTION


def break_a_step(rank: int, world_size: int, overrides: dict[str, object]) -> tuple[bool, bool]:
    """Worker: one good step, then one with a NaN on rank 1. Was it finite; did weights and moments stay?"""
    run = compare.build_table_run(world_size, overrides)
    vocab_size = resolve_model(run.config.model).vocab_size
    stepping.train_step(run, compare.own_rows(run, compare.make_batch(0, vocab_size)))
    before = snapshot(run)
    if rank == 1:
        run.parts[-1].register_forward_hook(lambda module, args, output: output * math.nan)
    result = stepping.train_step(run, compare.own_rows(run, compare.make_batch(1, vocab_size)))
    after = snapshot(run)
    unchanged = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return bool(result.finite), unchanged


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
def test_a_loss_that_is_not_finite_changes_nothing(pool, optimizer):
    for finite, unchanged in pool.run(break_a_step, 2, OPTIMIZERS[optimizer]):
        assert not finite
        assert unchanged


# --- who made the first number that is not finite ---

N_TRIALS = int(os.environ.get("TRIALS", "4"))  # of each layout

BREAKS = {  # what is multiplied by NaN or infinity on one rank
    "output": lambda module, output, factor: output * factor,
    "gradient of the output": lambda module, output, factor: output.register_hook(lambda grad: grad * factor),
    "gradient of the weight": lambda module, output, factor: module.weight.register_hook(lambda grad: grad * factor),
}


def break_many_steps(rank: int, world_size: int, overrides: dict[str, object], n_trials: int) -> list[tuple]:
    """Worker: each trial breaks one module of one rank. What was broken, and the diagnosis; a sound step first."""
    run = compare.build_table_run(world_size, overrides)
    batch = compare.own_rows(run, compare.make_batch(0, resolve_model(run.config.model).vocab_size))
    trials = [(None, "a sound step", find_origin(run, batch))]
    for seed in range(n_trials):
        chosen = random.Random(seed)
        broken_rank, kind = chosen.randrange(world_size), chosen.choice(list(BREAKS))
        factor = chosen.choice([math.nan, math.inf])
        modules = {fqn: module for part in run.parts for fqn, module in part.named_modules() if fqn}
        if kind == "gradient of the weight":
            modules = {fqn: module for fqn, module in modules.items() if hasattr(module, "weight")}
        # A ModuleDict computes nothing, and the chunked loss forms the gradient of its logits in forward.
        fqn = chosen.choice([fqn for fqn in modules if fqn not in ("layers", "output.token_loss")])

        handles = []

        def break_it(module, args, output, *, kind=kind, factor=factor, handles=handles):
            changed = BREAKS[kind](module, output, factor)
            if kind == "output":
                return changed
            handles.append(changed)

        if rank == broken_rank:
            handles.append(modules[fqn].register_forward_hook(break_it))
        found = find_origin(run, batch)
        for handle in handles:
            handle.remove()
        trials.append((broken_rank, f"{kind} of {fqn}", found))
    return trials


def find_origin(run: stepping.Run, batch: Batch) -> str:
    result = stepping.train_step(run, batch)
    repeat = partial(stepping.compute_gradients, run, batch)
    return find_non_finite(result.local_loss, run.parts, run.mesh.coordinates(), repeat, composed=CONTEXT_ATTENTION)


DIAGNOSED = {  # ranks, layout
    "dp2": (2, {}),
    "tp2": (2, {TP: 2}),
    "pp2": (2, {PP: 2, **TWO_LAYERS}),
    "pp2 x dp2 x tp2": (8, {PP: 2, TP: 2, **TWO_LAYERS}),
    "cp2 ring, every second layer recomputed": (2, {CP: 2, **RING, **RECOMPUTE["every-second-layer"]}),
    "cp2 documents, compiled": (2, {CP: 2, **DOCUMENTS, **COMPILED}),
    "dp2 float8": (2, {**GATHER, **BFLOAT16, **TWO_LAYERS}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if n_ranks == 8 or keys.items() >= COMPILED.items() else ())
        for name, (n_ranks, keys) in DIAGNOSED.items()
    ],
)
def test_the_rank_and_the_module_that_made_the_first_nan_are_named(pool, name):
    n_ranks, overrides = DIAGNOSED[name]
    by_rank = pool.run(break_many_steps, n_ranks, overrides, N_TRIALS if len(name) < 20 else 3)
    for trial, (broken_rank, what, found) in enumerate(by_rank[0]):
        assert all(answers[trial][2] == found for answers in by_rank)
        if broken_rank is None:
            assert found.startswith("every loss and every gradient is finite")
        else:
            what = by_rank[broken_rank][trial][1]  # ranks hold different modules
            assert found.startswith(f"rank {broken_rank} ("), f"{what} on rank {broken_rank}: {found}"
            assert "others" not in found, f"{what} on rank {broken_rank}: {found}"
            assert what.rpartition(" of ")[2] in found, f"{what} on rank {broken_rank}: {found}"


def break_a_weight(rank: int, world_size: int) -> str:
    """Worker: a NaN in a weight of rank 1, as a checkpoint or a defect of memory may leave one."""
    run = compare.build_table_run(world_size, {TP: 2})
    if rank == 1:
        run.parameters["layers.2.feed_forward.w1.weight"].data.to_local()[3, 5] = math.nan
    return find_origin(run, compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size)))


def test_a_weight_that_was_not_finite_before_the_step_is_named(pool):
    for found in pool.run(break_a_weight, 2):
        assert found.startswith("the weight layers.2.feed_forward.w1.weight on rank 1 (")


def break_one_pass(rank: int, world_size: int) -> str:
    """Worker: a NaN on rank 1 that does not come again."""
    run = compare.build_table_run(world_size, {})
    factors = iter([math.nan] if rank == 1 else [])
    run.parts[-1].register_forward_hook(lambda module, args, output: output * next(factors, 1.0))
    return find_origin(run, compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size)))


def test_a_nan_that_does_not_come_again_has_no_culprit(pool):
    for found in pool.run(break_one_pass, 2):
        assert found.startswith("unknown")
        assert "the losses of ranks 1 were not finite" in found
