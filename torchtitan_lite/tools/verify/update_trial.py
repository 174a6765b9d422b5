"""Does the run's own optimizer make of given gradients what its formulas make of them, on every rank?

given         gradients, drawn by a seed of (step, FQN)
the user's    optimizer, moments_dtype, weight decay, schedule and max_norm; `train_step` itself makes the steps,
              without its backward
reference     step_formulas.py, from the slice and its moments as they were just before: errors do not add up
compared      learning rates, gradient norm, clipped gradients, moments, updates, copies; and between two steps, what
              two others change whose gradients are not finite on one rank only: the schedule alone
"""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite import build
from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.checkpoint.load import set_step
from torchtitan_lite.checkpoint.save import name_tensors
from torchtitan_lite.config.checks import check_run
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Config, LRScheduler
from torchtitan_lite.tools.verify.one_rank import build_small_run, list_rates
from torchtitan_lite.tools.verify.reduction import Reduction
from torchtitan_lite.tools.verify.slices import (
    Coordinates,
    Gap,
    add_gaps,
    cut_slice,
    find_unequal_replicas,
    measure_gap,
    own_slice,
)
from torchtitan_lite.tools.verify.step_formulas import (
    FORMULAS,
    LEFT,
    ROUNDING,
    compute_clip_scale,
    compute_rate_factor,
    find_decay_start,
)
from torchtitan_lite.tools.verify.trial import Check, Culprit, RunRanks, Trial, blame, check_values, judge

REMEDY = "add it to verify/step_formulas.py"
# Of gradient norms, clipped gradients, moments and updates. Right code stays below 1e-7; fp32 alone makes 6e-8.
TOLERANCE = 1e-6
RATE_TOLERANCE = 1e-12  # of the peak: rates are Python's floats
LEAST_MAX_NORM, LARGEST_MAX_NORM = 1e-3, 1e3  # fp32 holds the squares of gradients of such norms
NORMS = (2.0, 0.5, 1.0, 3.0)  # of the gradients of each step, in units of max_norm: cut, left, at the border, cut
SECOND_HALF = 2  # index of the step before which there are two whose gradients are not finite
SPREAD = 6  # gradients of one tensor are up to that many powers of ten apart: near eps, and far above
NOT_FINITE = {"NaN": math.nan, "infinity": math.inf}


@dataclass
class RankUpdates:
    """Numbers and errors of one rank."""

    coordinates: Coordinates
    rates: list[tuple[int, list[float]]] = field(default_factory=list)  # step of the schedule, rate of each group
    grad_norms: list[float] = field(default_factory=list)  # of each step
    gaps: dict[tuple[str, str, int], Gap] = field(default_factory=dict)  # (what is compared, FQN, step) -> this slice's
    unequal_replicas: set[tuple[str, str, str]] = field(default_factory=set)  # weights or moment, FQN, mesh dim
    finite_faults: list[str] = field(default_factory=list)  # steps taken for finite, or for not finite, wrongly


def try_updates(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Make four steps of the run from given gradients, and two whose gradients are not finite."""
    config = keep_own_optimizer(reduction)
    if why := find_obstacle(config):
        return Trial(skipped=why, is_missing=True)
    model = build.build_on_meta(config, resolve_model(config.model))
    sizes = {fqn: parameter.numel() for fqn, parameter in model.named_parameters()}
    ranks = run_ranks(measure_updates, reduction.layout.world_size, config, sizes)
    held = {fqn for rank in ranks for _, fqn, _ in rank.gaps}
    if lost := [fqn for fqn in sizes if fqn not in held]:
        culprit = Culprit("parameters", lost[0], "no rank holds it")
        measures = {"parameters": f"of {len(sizes)} that no rank holds"}
        return judge([Check("parameters", len(lost), 0, culprit)], measures)
    section, max_norm, worst = config.optimizer, config.training.max_norm, f"worst of {len(sizes)} parameters"
    steps = ", ".join(str(step) for step in sorted({step for step, _ in ranks[0].rates}))
    measures = {
        "learning rate": f"of the peak, at steps {steps} of the schedule",
        "gradient norm": f"of {', '.join(f'{norm:g}' for norm in NORMS)} times max_norm {max_norm:g}",
        "clipping": f"gradients that the optimizer leaves; {worst}",
        "non-finite step": f"of {len(ranks)} ranks step on a gradient of {' or '.join(NOT_FINITE)}, or say so",
        "moments": f"in {section.moments_dtype}; {worst}",
        "update": f"bound: 1e-6, and what fp32 rounds off weights; {worst}",
        "copies": f"of {len(sizes)} parameters: weights or moments not bit-equal on all ranks that hold one",
    }
    subject = f"{section.name} ({section.implementation}), {len(NORMS)} steps from given gradients and moments"
    return judge(list(list_checks(ranks, config, list(sizes))), measures, subject)


def keep_own_optimizer(reduction: Reduction) -> Config:
    """Return the small config with the real optimizer, schedule and clipping; total_steps is resolved."""
    small, real = reduction.config, reduction.real
    max_norm = min(max(real.training.max_norm, LEAST_MAX_NORM), LARGEST_MAX_NORM)
    total_steps = real.lr_scheduler.total_steps or real.training.steps
    return replace(
        small,
        optimizer=real.optimizer,
        lr_scheduler=replace(real.lr_scheduler, total_steps=total_steps),
        training=replace(small.training, max_norm=max_norm),
    )


def find_obstacle(config: Config) -> str:
    """Return why the trial cannot be made; empty where it can."""
    name, decay_type = config.optimizer.name, config.lr_scheduler.decay_type
    if name not in FORMULAS:
        return f"the updates of optimizer.name = {name} have no reference: {REMEDY}"
    if decay_type not in LEFT:
        return f"the rates of lr_scheduler.decay_type = {decay_type} have no reference: {REMEDY}"
    return "; ".join(str(problem) for problem in check_run(config))


def list_checks(ranks: list[RankUpdates], config: Config, fqns: list[str]) -> Iterator[Check]:
    """Yield all checks, in the order of what a step does."""
    peak, max_norm = config.optimizer.lr, config.training.max_norm
    for index, (step, _) in enumerate(ranks[0].rates):
        right = peak * compute_rate_factor(config.lr_scheduler, step)
        values = [(rank.coordinates, rank.rates[index][1]) for rank in ranks]
        culprit = Culprit("learning rate", "lr_scheduler", f"the learning rate at step {step} of the schedule")
        yield check_values("learning rate", culprit, values, right, RATE_TOLERANCE, unit=peak or 1.0)
    for index, norm in enumerate(NORMS):
        values = [(rank.coordinates, [rank.grad_norms[index]]) for rank in ranks]
        culprit = Culprit("gradient norm", "measure_grad_norm", f"the gradient norm in step {index + 1}")
        yield check_values("gradient norm", culprit, values, norm * max_norm, TOLERANCE)
    wrong = [rank.finite_faults[0] for rank in ranks if rank.finite_faults]
    is_right = [(rank.coordinates, not rank.finite_faults) for rank in ranks]
    culprit = blame("non-finite step", "update_weights", wrong[0] if wrong else "", is_right)
    yield Check("non-finite step", len(wrong), 0, culprit)
    moments = FORMULAS[config.optimizer.name].moments
    for measure, kinds in {"clipping": ["clipped gradient"], "moments": moments, "update": ["update"]}.items():
        for fqn in fqns:
            for kind in kinds:
                for index in range(len(NORMS)):
                    yield check_tensor(measure, kind, fqn, index, ranks, config)
    unequal = set().union(*(rank.unequal_replicas for rank in ranks))
    wrong = {fqn for _, fqn, _ in unequal}
    first = next((fqn for fqn in fqns if fqn in wrong), "")
    kinds, dims = (sorted({found[index] for found in unequal if found[1] == first}) for index in (0, 2))
    detail = f"copies of its {' and '.join(kinds)} are not bit-equal; {len(wrong)} of {len(fqns)} parameters are wrong"
    yield Check("copies", len(wrong), 0, Culprit("replicas", first, detail, dims))


def check_tensor(measure: str, kind: str, fqn: str, index: int, ranks: list[RankUpdates], config: Config) -> Check:
    """Check all slices of a tensor together, and name the ranks whose slice is wrong by itself."""
    tolerance = TOLERANCE + (find_coarseness(config, index + 1) if kind == "update" else 0.0)
    held = [(rank.coordinates, rank.gaps[kind, fqn, index]) for rank in ranks if (kind, fqn, index) in rank.gaps]
    error, bound = add_gaps(gap for _, gap in held).relative(tolerance)
    is_right = [(coordinates, gap.is_within(tolerance)) for coordinates, gap in held]
    name = "update_weights" if measure == "clipping" else fqn
    following = ", after two that are not finite," if index == SECOND_HALF else ""
    detail = f"in step {index + 1}{following} the {kind} of {fqn} is off"
    return Check(measure, error, bound, blame(measure, name, f"{detail} by {error:.1e}", is_right))


def find_coarseness(config: Config, step: int) -> float:
    """Return the extra tolerance of updates from bf16 moments that one compiled kernel moves.

    It computes 1 - beta^step in fp32 on the device, so that this difference is rounded as 1 is.
    """
    section = config.optimizer
    if section.moments_dtype != "bfloat16" or not config.compile.enable:
        return 0.0
    return 2 * ROUNDING * (1 / (1 - section.beta1**step) + 0.5 / (1 - section.beta2**step))


# ---------------------------------------------------------------- one rank


def choose_positions(section: LRScheduler) -> list[int]:
    """Return four steps of the user's schedule: its start, its peak, and two in its decay."""
    start, end = find_decay_start(section), section.total_steps
    if start >= end:  # no decay
        start = 0
    positions = [0, section.warmup_steps - 1, start + (end - start) // 3, start + 2 * (end - start) // 3]
    return [min(max(0, position), end - 1) for position in positions]


def measure_updates(rank: int, world_size: int, config: Config, sizes: dict[str, int]) -> RankUpdates:
    """Worker: make the steps and compare them. `sizes`: numbers of each parameter of the model. Collective."""
    run = build_small_run(config, world_size)
    found = RankUpdates(run.mesh.coordinates())
    positions = choose_positions(run.config.lr_scheduler)
    for index, position in enumerate(positions):
        if index == SECOND_HALF:
            for name, value in NOT_FINITE.items():
                set_step(run.lr_scheduler, position)  # in the decay: neither is the rate zero, nor the next one equal
                found.finite_faults += step_without_effect(run, name, value, sizes)
                found.rates.append((position + 1, list_rates(run.optimizer)))  # which a resume sets by the step alone
        if run.lr_scheduler.last_epoch != position:
            set_step(run.lr_scheduler, position)  # as a run does that resumes
        step_beside_reference(run, found, index, position, sizes)
    named = {"weights": run.parameters}
    for name in FORMULAS[config.optimizer.name].moments:
        named[name] = {fqn: run.optimizer.state[parameter][name] for fqn, parameter in run.parameters.items()}
    for what, tensors in named.items():
        found.unequal_replicas |= {(what, *pair) for pair in find_unequal_replicas(tensors)}
    return found


def step_beside_reference(run: build.Run, found: RankUpdates, index: int, position: int, sizes: dict[str, int]) -> None:
    """Make one step of the run at `position` of its schedule, and compare every slice. Collective."""
    section, max_norm = run.config.optimizer, run.config.training.max_norm
    formula = FORMULAS[section.name]
    gradients = draw_gradients(run, index, sizes)
    weights = {fqn: own_slice(parameter).double() for fqn, parameter in run.parameters.items()}
    moments = {fqn: copy_moments(run, fqn) for fqn in run.parameters}
    found.rates.append((position, list_rates(run.optimizer)))
    with gradients_given(run, gradients) as clipped:
        result = stepping.train_step(run, None)
    found.rates.append((position + 1, list_rates(run.optimizer)))
    found.grad_norms.append(result.grad_norm.item())
    if not result.finite:
        found.finite_faults.append(f"step {index + 1}, whose gradients are finite, is taken for one that is not")

    rate = section.lr * compute_rate_factor(run.config.lr_scheduler, position)
    scale = compute_clip_scale(NORMS[index] * max_norm, max_norm)
    for fqn, parameter in run.parameters.items():
        gradient = gradients[fqn].double() * scale
        before = {name: tensor.double() for name, tensor in moments[fqn].items()}
        move = formula.move(section, weights[fqn], gradient, before, rate=rate, step=index + 1)
        update = own_slice(parameter).double() - weights[fqn]
        found.gaps["clipped gradient", fqn, index] = measure_gap(clipped[fqn].double() - gradient, gradient)
        for name, after in copy_moments(run, fqn).items():
            found.gaps[name, fqn, index] = measure_gap(beyond_rounding(after, move.moments[name]), move.moments[name])
        found.gaps["update", fqn, index] = measure_gap(update - move.update, move.update, move.rounding)


def step_without_effect(run: build.Run, name: str, value: float, sizes: dict[str, int]) -> list[str]:
    """Make one step with a single gradient of the last rank not finite; return what is wrong. Collective."""
    gradients = draw_gradients(run, 0, sizes)
    if dist.get_rank() == dist.get_world_size() - 1:
        next(slice_ for slice_ in gradients.values() if slice_.numel()).view(-1)[0] = value
    tensors = name_tensors(run.saved, run.optimizer)
    before = {tensor_name: own_slice(tensor).clone() for tensor_name, tensor in tensors.items()}
    with gradients_given(run, gradients):
        result = stepping.train_step(run, None)
    n_changed = sum(not torch.equal(own_slice(tensors[key]), old) for key, old in before.items())
    if not result.finite and not n_changed:
        return []
    taken = "is taken for finite" if result.finite else "is seen"
    return [f"a gradient of {name} on the last rank {taken}, and changes {n_changed} tensors"]


def draw_gradients(run: build.Run, index: int, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return gradients of this rank's slices, fp32; the norm of the whole model's is NORMS[index] * max_norm.

    Each rank draws whole tensors and keeps its slices, so copies are equal. One number in eight is zero; the others
    differ by SPREAD powers of ten, because only some should be near eps.
    """
    norm = NORMS[index] * run.config.training.max_norm
    gradients = {}
    for fqn, parameter in run.parameters.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{index} {fqn}".encode()))
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        exponent = torch.rand(parameter.shape, generator=generator) * 8 / 7
        drawn = (drawn * 10 ** (-SPREAD * exponent)).masked_fill(exponent > 1, 0.0)
        # Each tensor has the part of the squares that it has of all numbers.
        scale = norm * math.sqrt(sizes[fqn] / sum(sizes.values())) / drawn.norm()
        gradients[fqn] = cut_slice((drawn * scale).float(), parameter)
    return gradients


@contextmanager
def gradients_given(run: build.Run, gradients: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Context manager: a step inside gets these gradients, this rank's slices, instead of those of a batch.

    Yields copies of them as the optimizer leaves them: clipped.
    """
    clipped: dict[str, Tensor] = {}
    update_weights = stepping.update_weights

    @torch.no_grad()
    def give(run: build.Run, batch: None) -> Tensor:
        for fqn, parameter in run.parameters.items():
            parameter.grad = torch.zeros_like(parameter)
            own_slice(parameter.grad).copy_(gradients[fqn])
        for router in run.balance.routers.values() if run.balance else ():
            router.load.zero_()[0] = 1  # a load of its own, so that the step would move the biases
        return torch.zeros((), device=run.device)

    def update_and_note(*args) -> Tensor:
        finite = update_weights(*args)
        clipped.update({fqn: own_slice(parameter.grad).clone() for fqn, parameter in run.parameters.items()})
        return finite

    with patch.multiple(stepping, compute_gradients=give, update_weights=update_and_note):
        yield clipped


def copy_moments(run: build.Run, fqn: str) -> dict[str, Tensor]:
    """Return this rank's slices of a parameter's moments, in their dtype; zeros before the first step."""
    parameter = run.parameters[fqn]
    state = run.optimizer.state.get(parameter, {})
    names = FORMULAS[run.config.optimizer.name].moments
    return {name: own_slice(state[name] if state else torch.zeros_like(parameter)).clone() for name in names}


def beyond_rounding(value: Tensor, reference: Tensor) -> Tensor:
    """Return the error of each number beyond that of the nearest number in the dtype of `value`.

    So moments in bf16, whose steps are 0.4 to 0.8 %, are measured as finely as those in fp32: a value that rounds to
    the other neighbor is right if both are equally near.
    """
    nearest = reference.to(value.dtype).double()
    return ((value.double() - reference).abs() - (nearest - reference).abs()).clamp(min=0)
