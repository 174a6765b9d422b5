"""The updates trial certifies healthy layouts, and its reference computes what torch computes."""

import math
from dataclasses import replace
from unittest.mock import patch

import compare
import pytest
import torch
from layouts import ADAMW, COMPILED, LAYOUTS, OFFLOAD, REPLICATE, TP, TWO_LAYERS, Row
from mutants_of_updates import RATES

from torchtitan_lite import build as building
from torchtitan_lite.components.optim import learning_rate_factor
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config, LRScheduler, Optimizer
from torchtitan_lite.model.llama3 import Llama3
from torchtitan_lite.tools.verify.command import TRIALS
from torchtitan_lite.tools.verify.one_rank import build_small_run
from torchtitan_lite.tools.verify.reduction import reduce_config
from torchtitan_lite.tools.verify.slices import Gap
from torchtitan_lite.tools.verify.step_formulas import FORMULAS, LEFT, compute_clip_scale, compute_rate_factor
from torchtitan_lite.tools.verify.trial import Check, Culprit
from torchtitan_lite.tools.verify.update_trial import (
    NORMS,
    TOLERANCE,
    choose_positions,
    draw_gradients,
    keep_own_optimizer,
    measure_updates,
)

MOMENTS_IN_BFLOAT16 = {**ADAMW, "optimizer.moments_dtype": "bfloat16"}
FOREACH, FOR_LOOP = {"optimizer.implementation": "foreach"}, {"optimizer.implementation": "for-loop"}
COSINE, SQRT = {"lr_scheduler.decay_type": "cosine"}, {"lr_scheduler.decay_type": "sqrt"}


def row(name: str, overrides: dict[str, object]) -> Row:
    """A row of the table, with other keys too."""
    return replace(LAYOUTS[name], overrides={**LAYOUTS[name].overrides, **overrides})


HEALTHY = {
    "SGD on one rank": row("one rank", {**RATES, "optimizer.weight_decay": 0.1}),
    "AdamW on tied embeddings": row("tp2 tied", {**RATES, **ADAMW, **COSINE}),
    "AdamW in one operation": row("ddp2", {**ADAMW, **FOREACH, **TWO_LAYERS}),
    "bfloat16, copies": Row(4, {TP: 2, REPLICATE: 2, **MOMENTS_IN_BFLOAT16, **OFFLOAD, **TWO_LAYERS}),
    "a run of one step": Row(2, {"training.steps": 1, **ADAMW}),
}
SLOW = {  # many ranks, or compiled
    "hsdp, one by one": row("hsdp2x2", {**RATES, **ADAMW, **SQRT, **FOR_LOOP}),
    "beside cp": row("pp2 x cp2 ring", {**RATES, **ADAMW}),
    "SGD in one operation": row("dp2 x tp2, all parameters in one operation", RATES),
    "stages without layers": row("pp2 x dp2 x tp2 ZBVZeroBubble, embedding and head alone", {**RATES, **ADAMW}),
    "bfloat16 offloaded": row("pp2 x dp2 x tp2 offloaded", {**RATES, **MOMENTS_IN_BFLOAT16}),
    "bfloat16 compiled": Row(2, {**RATES, **MOMENTS_IN_BFLOAT16, **COMPILED, **TWO_LAYERS}),
}


@pytest.mark.parametrize("name", [*HEALTHY, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_healthy_updates_are_certified(pool, tmp_path, name):
    row = {**HEALTHY, **SLOW}[name]
    trial = TRIALS["updates"](compare.reduce_row(row), pool.run, tmp_path)
    assert trial.faults == {} and trial.culprit is None
    errors = {measure.what: measure.error for measure in trial.measures}
    moments = ["moments"] * ("optimizer.name" in row.overrides)
    assert list(errors) == [
        *("learning rate", "gradient norm", "clipping", "non-finite step", *moments, "update", "copies")
    ]
    assert errors["clipping"] > 0 and errors["update"] > 0  # something was compared
    bounds = {measure.what: measure.bound for measure in trial.measures}
    assert errors["update"] > bounds["update"] / 10  # what fp32 may round is not taken for much more than it rounds
    assert errors["clipping"] < 3e-7 and errors.get("moments", 0) < 3e-7  # far from the bound


def measure_with_another_beta(rank: int, world_size: int, *args, shift: float):
    """Worker: the first beta of the run is off by `shift`."""
    original = building.build_optimizer

    def build(section, parameters):
        return original(replace(section, beta1=section.beta1 + shift), parameters)

    with patch.object(building, "build_optimizer", build):
        return measure_updates(rank, world_size, *args)


@pytest.mark.parametrize(("overrides", "shift"), [(ADAMW, 1e-6), (MOMENTS_IN_BFLOAT16, 1e-5)])
def test_a_beta_that_is_off_by_almost_nothing_is_seen_even_where_moments_are_rounded(pool, tmp_path, overrides, shift):
    def run_ranks(worker, *args):
        return pool.run(measure_with_another_beta, *args, shift=shift)

    trial = TRIALS["updates"](reduce_config(compare.complete({**overrides, TP: 2}, 2), 2), run_ranks, tmp_path)
    assert trial.culprit.kind == "moments" and trial.culprit.mesh_dims == []


def fail(rank: int, world_size: int, *args) -> None:
    """Worker: raises."""
    raise RuntimeError("no kernel for this")


def forget_the_head(rank: int, world_size: int, *args):
    """Worker: no rank holds the head."""
    found = measure_updates(rank, world_size, *args)
    found.gaps = {key: gap for key, gap in found.gaps.items() if key[1] != "output.weight"}
    return found


def lose_the_head_in_the_last_step(rank: int, world_size: int, *args):
    """Worker: the head is NaN after the last step."""
    found = measure_updates(rank, world_size, *args)
    key = "update", "output.weight", len(NORMS) - 1
    found.gaps[key] = found.gaps[key]._replace(error=math.nan)
    return found


@pytest.mark.parametrize(
    ("worker", "kind"),
    [(fail, "crash"), (forget_the_head, "parameters"), (lose_the_head_in_the_last_step, "update")],
)
def test_ranks_that_fail_parameters_that_nobody_holds_and_a_wrong_last_step_are_faults(pool, tmp_path, worker, kind):
    reduction = reduce_config(compare.complete({}, 1), 1)
    trial = TRIALS["updates"](reduction, lambda _, *args: pool.run(worker, *args), tmp_path)
    assert trial.culprit.kind == kind and list(trial.faults) == [kind]


# ---------------------------------------------------------------- its inputs


def test_optimizer_schedule_and_threshold_are_the_users_own():
    args = ["--optimizer.weight_decay=0.3", "--lr_scheduler.decay_type=cosine", "--training.max_norm=0.7"]
    real = read_config(["--config", "debug_3d", "--training.steps=77", *args]).config
    config = keep_own_optimizer(reduce_config(real, 8))
    assert config.optimizer == real.optimizer and config.optimizer.weight_decay == 0.3
    assert config.lr_scheduler == replace(real.lr_scheduler, total_steps=77)
    assert config.training.max_norm == 0.7
    without_clipping = compare.override(real, {"training.max_norm": 1e30})
    assert keep_own_optimizer(reduce_config(without_clipping, 8)).training.max_norm == 1000


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"optimizer.name": "Lion"}, "optimizer.name = Lion have no reference"),
        ({"lr_scheduler.decay_type": "steps"}, "lr_scheduler.decay_type = steps have no reference"),
        ({"optimizer.moments_dtype": "bfloat16"}, "keeps no moments"),
    ],
)
def test_a_run_without_a_reference_is_skipped_and_missing(tmp_path, overrides, said):
    trial = TRIALS["updates"](reduce_config(compare.complete(overrides, 1), 1), None, tmp_path)
    assert said in trial.skipped
    assert trial.is_missing and trial.faults == {} and trial.measures == []


def test_steps_are_made_in_warmup_at_the_peak_and_in_the_decay_and_never_beyond_the_schedule():
    section = LRScheduler(warmup_steps=200, total_steps=10_000, decay_ratio=0.3)
    assert choose_positions(section) == [0, 199, 8000, 9000]
    for warmup, total, ratio in ((0, 1, None), (9, 3, None), (0, 100, 0.0), (50, 50, 1.0)):
        positions = choose_positions(LRScheduler(warmup_steps=warmup, total_steps=total, decay_ratio=ratio))
        assert len(positions) == len(NORMS) and all(0 <= position < total for position in positions)


def draw_all(rank: int, world_size: int, config: Config, sizes: dict[str, int]) -> list[torch.Tensor]:
    """Worker: the gradients of each step, all numbers together."""
    run = build_small_run(config, world_size)
    steps = [draw_gradients(run, index, sizes).values() for index in range(len(NORMS))]
    return [torch.cat([gradient.flatten() for gradient in step]).double() for step in steps]


def test_given_gradients_have_the_norm_of_their_step_and_some_are_near_eps(pool):
    config = compare.complete({}, 1)
    sizes = {fqn: parameter.numel() for fqn, parameter in Llama3(resolve_model(config.model)).named_parameters()}
    (steps,) = pool.run(draw_all, 1, config, sizes)
    for numbers, norm in zip(steps, NORMS, strict=True):
        assert numbers.norm().item() == pytest.approx(norm * config.training.max_norm, rel=1e-8)
        assert 0.1 < (numbers == 0).double().mean() < 0.15
        near_eps = (numbers != 0) & (numbers.abs() < 1e-7)
        assert 0.05 < near_eps.double().mean() < 0.95


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize(
    "section",
    [
        Optimizer(lr=0.01, weight_decay=0.1),
        Optimizer(lr=0.3, beta1=0.0, beta2=0.5, eps=1e-3, weight_decay=2.0),
        Optimizer(name="SGD", lr=0.5, weight_decay=0.1),
    ],
)
def test_the_reference_moves_weights_as_torch_does_in_float64(section):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(500, generator=generator, dtype=torch.float64)
    parameter = weight.clone().requires_grad_()
    if section.name == "AdamW":
        betas = (section.beta1, section.beta2)
        optimizer = torch.optim.AdamW([parameter], section.lr, betas, section.eps, section.weight_decay)
    else:
        optimizer = torch.optim.SGD([parameter], section.lr, weight_decay=section.weight_decay)
    moments = {name: torch.zeros_like(weight) for name in FORMULAS[section.name].moments}
    for step in range(1, 6):
        rate = optimizer.param_groups[0]["lr"] = section.lr / step
        exponents = torch.randint(-9, 2, (500,), generator=generator)
        parameter.grad = 10.0**exponents * torch.randn(500, dtype=torch.float64)
        move = FORMULAS[section.name].move(section, weight, parameter.grad, moments, rate=rate, step=step)
        weight, moments = weight + move.update, move.moments
        optimizer.step()
        assert compare.relative_error(parameter.detach(), weight) < 1e-14
        for name, moment in moments.items():
            assert compare.relative_error(optimizer.state[parameter][name], moment) < 1e-14


@pytest.mark.parametrize(("norm", "max_norm"), [(3.0, 1.0), (0.5, 1.0), (1.0, 1.0)])
def test_the_reference_clips_as_torch_does(norm, max_norm):
    parameter = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.full((4,), norm / 2, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    assert parameter.grad.norm().item() == pytest.approx(norm * compute_clip_scale(norm, max_norm), rel=1e-14)


def test_the_reference_follows_torchs_schedules_and_ends_at_the_lowest_rate():
    section = LRScheduler(warmup_steps=4, total_steps=50, decay_type="cosine", min_lr_factor=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 4, 1.0, total_iters=3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=46, eta_min=0.1)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[4])
    for step in range(50):
        assert both.get_last_lr()[0] == pytest.approx(compute_rate_factor(section, step), rel=1e-6)
        optimizer.step()
        both.step()
    section = LRScheduler(warmup_steps=2, total_steps=10, decay_ratio=0.4, min_lr_factor=0.2)
    rates = [compute_rate_factor(section, step) for step in range(12)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    halfway = {name: left(0.25) for name, left in LEFT.items()}
    assert halfway == pytest.approx({"linear": 0.75, "sqrt": 0.5, "cosine": 0.5 + math.sqrt(0.125)})


@pytest.mark.parametrize(
    ("decay_type", "warmup", "total", "ratio"),
    [
        ("linear", 0, 1, None),
        ("sqrt", 9, 3, None),
        ("cosine", 0, 100, 0.0),
        ("sqrt", 3, 40, 0.3),
        ("cosine", 3, 20, 1.0),
    ],
)
def test_schedule_and_reference_agree_to_the_end_and_beyond(decay_type, warmup, total, ratio):
    keys = {"decay_ratio": ratio, "decay_type": decay_type, "min_lr_factor": 0.05}
    section = LRScheduler(warmup_steps=warmup, total_steps=total, **keys)
    for step in range(total + 20):
        assert learning_rate_factor(section, step) == pytest.approx(compute_rate_factor(section, step), abs=1e-14)


@pytest.mark.parametrize(
    ("gap", "is_right"),
    [
        (Gap(1e-14, 1.0, 0.0), True),
        (Gap(4e-12, 1.0, 0.0), False),
        (Gap(4e-12, 1.0, 4e-12), True),
        (Gap(0.0, 0.0, 0.0), True),
        (Gap(1e-30, 0.0, 0.0), False),
        (Gap(math.nan, 1.0, 1.0), False),
        (Gap(math.inf, 1.0, 1.0), False),
    ],
)
def test_an_update_is_right_to_a_millionth_and_what_fp32_rounds_off(gap, is_right):
    check = Check("update", *gap.relative(TOLERANCE), Culprit("update", "w", ""))
    assert (check.excess <= 1) == is_right
