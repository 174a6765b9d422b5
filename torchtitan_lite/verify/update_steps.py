"""One rank's part of the updates trial: the run's own steps from given gradients, each beside the reference.

    given         gradients, drawn by a seed of (step, FQN)
    the run's     clip_grad_norm, step_if_finite, optimizer, lr_scheduler: `train_step` itself, without its backward
    reference     step_formulas.py, from the slice and its moments as they were just before: errors do not add up
    at the end    two steps whose gradients are not finite on one rank only

Nothing is gathered: the parent adds the squared errors that ranks find in their slices.
"""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.checkpoint.load import set_step
from torchtitan_lite.checkpoint.save import name_tensors
from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.schema import Config, LRScheduler
from torchtitan_lite.verify.one_rank import Coordinates, build_small_run, cut_slice, find_unequal_replicas
from torchtitan_lite.verify.step_formulas import FORMULAS, compute_clip_scale, compute_rate_factor, find_decay_start
from torchtitan_lite.verify.trial_checks import Gap

NORMS = (2.0, 0.5, 1.0, 3.0)  # of the gradients of each step, in units of max_norm: cut, left, at the border, cut
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
        if run.lr_scheduler.last_epoch != position:
            set_step(run.lr_scheduler, position)  # as a run does that resumes
        step_beside_reference(run, found, index, position, sizes)
    named = {"weights": run.parameters}
    for name in FORMULAS[config.optimizer.name].moments:
        named[name] = {fqn: run.optimizer.state[parameter][name] for fqn, parameter in run.parameters.items()}
    for what, tensors in named.items():
        found.unequal_replicas |= {(what, *pair) for pair in find_unequal_replicas(tensors)}
    set_step(run.lr_scheduler, positions[1])  # at the peak: a rate of zero would hide a step
    for name, value in NOT_FINITE.items():
        found.finite_faults += step_without_effect(run, name, value, sizes)
    return found


def step_beside_reference(
    run: stepping.Run, found: RankUpdates, index: int, position: int, sizes: dict[str, int]
) -> None:
    """Make one step of the run at `position` of its schedule, and compare every slice. Collective."""
    section, max_norm = run.config.optimizer, run.config.training.max_norm
    formula = FORMULAS[section.name]
    gradients = draw_gradients(run, index, sizes)
    weights = {fqn: local_tensor(parameter).detach().double() for fqn, parameter in run.parameters.items()}
    moments = {fqn: copy_moments(run, fqn) for fqn in run.parameters}
    found.rates.append((position, read_rates(run)))
    with gradients_given(run, gradients) as clipped:
        result = stepping.train_step(run, None)
    found.rates.append((position + 1, read_rates(run)))
    found.grad_norms.append(result.grad_norm.item())
    if not result.finite:
        found.finite_faults.append(f"step {index + 1}, whose gradients are finite, is taken for one that is not")

    rate = section.lr * compute_rate_factor(run.config.lr_scheduler, position)
    scale = compute_clip_scale(NORMS[index] * max_norm, max_norm)
    for fqn, parameter in run.parameters.items():
        gradient = gradients[fqn].double() * scale
        before = {name: tensor.double() for name, tensor in moments[fqn].items()}
        move = formula.move(section, weights[fqn], gradient, before, rate=rate, step=index + 1)
        update = local_tensor(parameter).detach().double() - weights[fqn]
        found.gaps["clipped gradient", fqn, index] = measure_gap(clipped[fqn].double() - gradient, gradient)
        for name, after in copy_moments(run, fqn).items():
            found.gaps[name, fqn, index] = measure_gap(beyond_rounding(after, move.moments[name]), move.moments[name])
        found.gaps["update", fqn, index] = measure_gap(update - move.update, move.update, move.rounding)


def step_without_effect(run: stepping.Run, name: str, value: float, sizes: dict[str, int]) -> list[str]:
    """Make one step with a single gradient of the last rank not finite; return what is wrong. Collective."""
    gradients = draw_gradients(run, 0, sizes)
    if dist.get_rank() == dist.get_world_size() - 1:
        next(slice_ for slice_ in gradients.values() if slice_.numel()).view(-1)[0] = value
    tensors = name_tensors(run.saved, run.optimizer)
    before = {tensor_name: local_tensor(tensor).clone() for tensor_name, tensor in tensors.items()}
    with gradients_given(run, gradients):
        result = stepping.train_step(run, None)
    n_changed = sum(not torch.equal(local_tensor(tensors[key]), old) for key, old in before.items())
    if not result.finite and not n_changed:
        return []
    taken = "is taken for finite" if result.finite else "is seen"
    return [f"a gradient of {name} on the last rank {taken}, and changes {n_changed} tensors"]


# ---------------------------------------------------------------- what a step is given, and what it leaves


def draw_gradients(run: stepping.Run, index: int, sizes: dict[str, int]) -> dict[str, Tensor]:
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
def gradients_given(run: stepping.Run, gradients: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Context manager: a step inside gets these gradients, this rank's slices, instead of those of a batch.

    Yields copies of them as the optimizer gets them: clipped.
    """
    clipped: dict[str, Tensor] = {}
    step_if_finite = stepping.step_if_finite

    @torch.no_grad()
    def give(run: stepping.Run, batch: None) -> Tensor:
        for fqn, parameter in run.parameters.items():
            parameter.grad = torch.zeros_like(parameter)
            local_tensor(parameter.grad).copy_(gradients[fqn])
        for router in run.balance.routers.values() if run.balance else ():
            router.load.zero_()[0] = 1  # a load of its own, so that the step would move the biases
        return torch.zeros((), device=run.device)

    def note_and_step(*args) -> Tensor:
        clipped.update({fqn: local_tensor(parameter.grad).clone() for fqn, parameter in run.parameters.items()})
        return step_if_finite(*args)

    with patch.multiple(stepping, compute_gradients=give, step_if_finite=note_and_step):
        yield clipped


def copy_moments(run: stepping.Run, fqn: str) -> dict[str, Tensor]:
    """Return this rank's slices of a parameter's moments, in their dtype; zeros before the first step."""
    parameter = run.parameters[fqn]
    state = run.optimizer.state.get(parameter, {})
    names = FORMULAS[run.config.optimizer.name].moments
    return {
        name: local_tensor(state[name] if state else torch.zeros_like(parameter)).detach().clone() for name in names
    }


def read_rates(run: stepping.Run) -> list[float]:
    return [float(group["lr"]) for group in run.optimizer.param_groups]


def beyond_rounding(value: Tensor, reference: Tensor) -> Tensor:
    """Return the error of each number beyond that of the nearest number in the dtype of `value`.

    So moments in bf16, whose steps are 0.4 to 0.8 %, are measured as finely as those in fp32: a value that rounds to
    the other neighbour is right if both are equally near.
    """
    nearest = reference.to(value.dtype).double()
    return ((value.double() - reference).abs() - (nearest - reference).abs()).clamp(min=0)


def measure_gap(error: Tensor, reference: Tensor, rounding: Tensor | None = None) -> Gap:
    return Gap(*(0.0 if tensor is None else tensor.square().sum().item() for tensor in (error, reference, rounding)))
