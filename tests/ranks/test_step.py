"""Test what a step does if a loss or a gradient is not finite, or if a gradient norm is unusually high."""

import math
import os
import random
import re
from functools import partial
from unittest.mock import patch

import compare
import torch
import warm_start
from checkpoints import copy_state, list_differing
from layouts import TP, read_rows
from marks import each_row

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.components.diagnosis import find_non_finite
from torchtitan_lite.extensions.spike_filter import SpikeFilter
from torchtitan_lite.model.batch import Batch


def meet_bad_steps(rank: int, world_size: int, overrides: dict[str, object]) -> list[tuple]:
    """Worker: make steps, the last one with a NaN on rank 1. For each step, return whether it was applied, whether it
    changed no weight and no state, and the number of skipped steps.
    """
    run = compare.build_table_run(world_size, overrides)
    # the usual norm is unknown, far too low, far too high
    usual_norms = [math.inf, 1e-6, 1e6, math.inf] if run.spikes else [None, None]
    seen = []
    for step, usual_norm in enumerate(usual_norms):
        if run.spikes:
            run.spikes.history.fill_(usual_norm)
        if rank == 1 and step == len(usual_norms) - 1:
            run.parts[-1].register_forward_hook(lambda module, args, output: output * math.nan)
        before = snapshot(run)
        applied, *_ = stepping.train_step(run, compare.read_rows(run, step)).read()
        is_unchanged = list_differing(snapshot(run), before) == []
        seen.append((applied, is_unchanged, run.spikes and int(run.spikes.skipped)))
    return seen


def snapshot(run: build.Run) -> dict[str, torch.Tensor]:
    """Return this rank's slices of all weights, biases of experts, and optimizer states, without gradient norms."""
    return {name: copy for name, copy in copy_state(run).items() if "spike" not in name}


BAD_STEPS = read_rows(
    """
fused AdamW | 2 | ADAMW
foreach AdamW | 2 | ADAMW optimizer.implementation=foreach
moments in bfloat16 | 2 | ADAMW optimizer.moments_dtype=bfloat16
SGD | 2
experts | 2 | MOE
spikes, pp2 | 2 | ADAMW PP=2 SPIKES
spikes, tp2 | 2 | ADAMW TP=2 SPIKES
spikes, Muon | 2 | optimizer.name=Muon SPIKES
spikes, SGD | 2 | SPIKES
spikes, experts | 2 | MOE SPIKES
""",
    {"SPIKES": {"training.skip_spikes": 2.0}},
)


@each_row("name", BAD_STEPS)
def test_a_loss_that_is_not_finite_or_a_spike_changes_nothing_on_any_rank(pool, name):
    expected = [(True, False, None), (False, True, None)]
    if name.startswith("spikes"):
        expected = [(True, False, 0), (False, True, 1), (True, False, 1), (False, True, 1)]
    assert pool.run(meet_bad_steps, *BAD_STEPS[name]) == [expected] * 2


# norms of successive steps, some repeated | skipped steps, first-last. The limit is 3 times the median of the last 32
# norms.
NORMS_AND_SKIPPED = """
1*15 9 1 3.1 nan 2.9 2*20 5     | 17           # no limit yet for the 16th norm; at the end, most norms are 2
1*40 3 3.001                    | 41           # three times the median exactly
1*40 4*1960                     | 40-55        # higher for good
1*40 4*4 1 4*4 1 4*4 1 4*4 1 4*4 1 4*4 1 4*4 1 4*4 1 4*4 1 4*4 1 4*4 1 | 40-43 45-48 50-53 55-58  # in 4 of 5
1*40 4*40 16*40                 | 40-55 80-95  # higher twice
1*40 9*15 1*20 9                | 40-54 75     # a burst, then as before
1*40 inf*40 4                   | 40-80        # infinite norms are not kept, because they would raise the median
1*40 0.1*40 1*40                | 80-95        # lower for good, then as before
"""


@each_row("row", NORMS_AND_SKIPPED)
def test_a_gradient_norm_is_compared_with_the_median_of_the_last_norms(row):
    norms, skipped = map(str.split, row)
    spikes = SpikeFilter(3.0, 32, torch.device("cpu"))
    judged = []
    for word in norms:
        norm, _, times = word.partition("*")
        for _ in range(int(times or 1)):
            judged.append(spikes.judge(torch.tensor(float(norm))).item())
    expected = []
    for word in skipped:
        first, _, last = word.partition("-")
        expected += range(int(first), int(last or first) + 1)
    assert [at for at, is_spike in enumerate(judged) if is_spike] == expected
    assert spikes.skipped == len(expected)


SPIKES = """
--training.steps=22 --training.skip_spikes=3 --training.spike_window=4 --metrics.log_freq=100
--checkpoint.no_enable
"""


# step, steps skipped so far, accepted level. After step 10, there is a record for each skipped step, for the applied
# step after it, and for the last step.
SKIPPED = [
    (15, 1, 1),
    (16, 1, None),
    (17, 2, 1),
    (18, 2, None),
    (22, 2, None),
]


def test_the_log_names_skipped_steps_and_the_level_that_is_accepted(
    run_training, letters, tmp_path
):
    norms = [1.0] * 14 + [5.0, 1.0] + [4.0] * 6
    squares = [torch.tensor(norm).double().square() for norm in norms]
    inside = partial(patch, "torchtitan_lite.step.sum_gradient_squares", side_effect=squares)
    run = tmp_path / "run"
    run_training(run, [*letters, *SPIKES.split()], inside=inside)
    seen = []
    for record in warm_start.read_records(run):
        if "loss" in record and record["step"] > 10:
            skipped = record["skipped_steps"]
            seen.append((record["step"], skipped, record.get("skipped_above")))
    assert seen == SKIPPED
    log = (run / "log.txt").read_text()
    assert re.findall("step (.*): .* no longer skipped", log) == ["18"]
    assert "spike_window" in log


# --- which rank and module produced the first number that is not finite ---

N_TRIALS = int(os.environ.get("TRIALS", "3"))  # for each layout


def break_output(forward, factor: float, *args, **kwargs) -> torch.Tensor:
    return forward(*args, **kwargs) * factor


def break_gradient(forward, factor: float, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    x = x.clone()
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * factor)
    return forward(x, *args, **kwargs)


# what becomes NaN or infinite in a module of one rank
BREAKS = {"output": break_output, "gradient": break_gradient}


def break_many_steps(
    rank: int, world_size: int, overrides: dict[str, object], n_trials: int
) -> list[tuple]:
    """Worker: after a good step, each trial breaks a module of one rank. Return what was broken, and the diagnosis."""
    run = compare.build_table_run(world_size, overrides)
    batch = compare.read_rows(run)
    trials = [(None, "a sound step", find_origin(run, batch))]
    modules = {}
    for part in run.parts:
        modules.update(part.named_modules())
    for seed in range(n_trials):
        chosen = random.Random(seed)
        broken_rank = chosen.randrange(world_size)
        kind = chosen.choice(list(BREAKS))
        factor = chosen.choice([math.nan, math.inf])
        # Some modules are never broken. The whole model and the list of layers have no computation of their own. If
        # modules share an input, the diagnosis of a gradient names the first module. Token ids have no gradient.
        left_out = ("", "layers")
        if kind == "gradient":
            left_out += ("tok_embeddings", "wk", "wv", "w3")
        fqn = chosen.choice([fqn for fqn in modules if fqn.rpartition(".")[2] not in left_out])
        if rank != broken_rank:
            trials.append((broken_rank, "", find_origin(run, batch)))
            continue
        broken = partial(BREAKS[kind], modules[fqn].forward, factor)
        with patch.object(modules[fqn], "forward", broken):
            trials.append((broken_rank, f"{kind} of {fqn}", find_origin(run, batch)))
    return trials


def find_origin(run: build.Run, batch: Batch) -> str:
    stepping.train_step(run, batch)
    repeat = partial(stepping.compute_gradients, run, batch)
    return find_non_finite(run.parts, run.mesh.coordinates(), repeat)


DIAGNOSED = read_rows("""
dp2 | 2
tp2 | 2 | TP=2
pp2 | 2 | PP=2 TWO_LAYERS
pp2 x dp2 x tp2 | 8 | PP=2 TP=2 TWO_LAYERS
cp2 ring, every second layer recomputed | 2 | CP=2 RING EVERY_SECOND
cp2 documents, compiled | 2 | CP=2 DOCUMENTS COMPILED
dp2 float8 | 2 | GATHER EMULATED BFLOAT16 TWO_LAYERS
""")
SLOW = ("pp2 x dp2 x tp2", "cp2 documents, compiled", "dp2 float8")


@each_row("name", DIAGNOSED, slow=SLOW)
def test_the_rank_and_the_module_that_made_the_first_nan_are_named(pool, name):
    n_ranks, overrides = DIAGNOSED[name]
    by_rank = pool.run(break_many_steps, n_ranks, overrides, N_TRIALS)
    for trial, (broken_rank, _, found) in enumerate(by_rank[0]):
        assert all(answers[trial][2] == found for answers in by_rank)
        if broken_rank is None:
            assert found.startswith("every gradient is finite")
            continue
        broken = by_rank[broken_rank][trial][1]  # ranks hold different modules
        assert broken.rpartition(" of ")[2] in found, (broken, found)
        assert found.startswith(f"rank {broken_rank} ("), (broken, found)


def break_a_weight(rank: int, world_size: int, kind: str) -> str:
    """Worker: put a NaN into a weight of rank 1 (as a bad checkpoint or broken memory would), or into the weight's
    gradient."""
    run = compare.build_table_run(world_size, {TP: 2})
    batch = compare.read_rows(run)
    stepping.compute_gradients(run, batch)
    weight = run.parameters["layers.2.feed_forward.w1.weight"]
    if rank == 1:
        (weight.data if kind == "value" else weight.grad).to_local()[3, 5] = math.nan
    return find_non_finite(
        run.parts, run.mesh.coordinates(), partial(stepping.compute_gradients, run, batch)
    )


@each_row("kind, said", [("value", "the"), ("gradient", "the gradient of the")])
def test_the_diagnosis_names_a_weight_that_is_not_finite_or_whose_gradient_is_not(pool, kind, said):
    for found in pool.run(break_a_weight, 2, kind):
        assert f": {said} weight layers.2.feed_forward.w1.weight" in found
        assert found.startswith("rank 1 (")
