"""One rank's part of the trial "updates": the run's own steps from given gradients, each beside the reference.

    given         gradients of each slice, by the seed of (step, FQN, place of the slice): copies get the same
    the run's     clip_grad_norm, step_if_finite, optimizer, lr_scheduler: `train_step` itself, without its backward
    reference     step_formulas.py, from what the slice and its moments were just before: errors do not add up
    at the end    two steps that are not finite on one rank only

Nothing is gathered: the parent adds up the squares that ranks find in their slices.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.checkpoint.state import name_tensors, set_step
from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.schema import Config, LRScheduler
from torchtitan_lite.verify.one_rank import Coordinates, build_small_run, find_unequal_replicas
from torchtitan_lite.verify.step_formulas import FORMULAS, compute_clip_scale, compute_rate_factor, find_decay_start

NORMS = (2.0, 0.5, 1.0, 3.0)  # of the gradients of each step, in units of max_norm: cut, left, at the border, cut
SPREAD = 6  # gradients of one tensor are up to that many powers of ten apart: near eps, and far above
NOT_FINITE = {"NaN": math.nan, "infinity": math.inf}


class Gap(NamedTuple):
    """Squared norms; those of slices may be added up."""

    error: float  # of value - reference
    reference: float
    rounding: float  # of what fp32 alone may do

    def plus(self, other: "Gap") -> "Gap":
        return Gap(*(one + two for one, two in zip(self, other, strict=True)))

    def relative(self, tolerance: float) -> tuple[float, float]:
        """Return error and bound, in units of the reference's norm, or absolute where that is zero."""
        scale = math.sqrt(self.reference) or 1.0
        allowed = tolerance * math.sqrt(self.reference) + math.sqrt(self.rounding)
        return math.sqrt(self.error) / scale, allowed / scale


@dataclass
class UpdateShare:
    """Numbers and errors of one rank."""

    coordinates: Coordinates
    rates: list[tuple[int, list[float]]] = field(default_factory=list)  # at a step of the schedule, of each group
    grad_norms: list[float] = field(default_factory=list)  # of each step
    finite: list[bool] = field(default_factory=list)  # what each of these steps said
    gaps: dict[tuple[str, str, int], Gap] = field(default_factory=dict)  # (what is compared, FQN, step) -> this slice's
    unequal_replicas: set[tuple[str, str, str]] = field(default_factory=set)  # what, FQN, mesh dim
    said_finite: list[str] = field(default_factory=list)  # of NOT_FINITE, those that a step took for finite
    changed: dict[str, list[str]] = field(default_factory=dict)  # of NOT_FINITE -> tensors that such a step changed


def choose_positions(section: LRScheduler) -> list[int]:
    """Return four steps of the user's schedule: its start, its peak, and two in its decay."""
    start, end = find_decay_start(section), section.total_steps
    if start >= end:  # no decay
        start = 0
    positions = [0, section.warmup_steps - 1, start + (end - start) // 3, start + 2 * (end - start) // 3]
    return [min(max(0, position), end - 1) for position in positions]


def measure_updates(rank: int, world_size: int, config: Config, sizes: dict[str, int]) -> UpdateShare:
    """Worker: make the steps and compare them. `sizes`: numbers of each parameter of the model. Collective."""
    run = build_small_run(config, world_size)
    share = UpdateShare(run.mesh.coordinates())
    positions = choose_positions(run.config.lr_scheduler)
    for index, position in enumerate(positions):
        if run.lr_scheduler.last_epoch != position:
            set_step(run.lr_scheduler, position)  # as a run does that resumes
        step_beside_reference(run, share, index, position, sizes)
    named = {"weights": run.parameters}
    for name in FORMULAS[config.optimizer.name].moments:
        named[name] = {fqn: run.optimizer.state[parameter][name] for fqn, parameter in run.parameters.items()}
    for what, tensors in named.items():
        share.unequal_replicas |= {(what, *pair) for pair in find_unequal_replicas(tensors)}
    set_step(run.lr_scheduler, positions[1])  # at the peak: a rate of zero would hide a step
    for name, value in NOT_FINITE.items():
        step_without_effect(run, share, name, value, sizes)
    return share


def step_beside_reference(
    run: stepping.Run, share: UpdateShare, index: int, position: int, sizes: dict[str, int]
) -> None:
    """Make one step of the run at `position` of its schedule, and compare every slice. Collective."""
    section, max_norm = run.config.optimizer, run.config.training.max_norm
    gradients = draw_gradients(run, index, sizes)
    weights = {fqn: local_tensor(parameter).detach().double() for fqn, parameter in run.parameters.items()}
    moments = {fqn: copy_moments(run, fqn) for fqn in run.parameters}
    share.rates.append((position, read_rates(run)))
    with gradients_given(run, gradients), clipped_noted(run) as clipped:
        result = stepping.train_step(run, None)
    share.rates.append((position + 1, read_rates(run)))
    share.grad_norms.append(result.grad_norm.item())
    share.finite.append(bool(result.finite))

    rate = section.lr * compute_rate_factor(run.config.lr_scheduler, position)
    scale = compute_clip_scale(NORMS[index] * max_norm, max_norm)
    for fqn, parameter in run.parameters.items():
        gradient = gradients[fqn].double() * scale
        before = {name: tensor.double() for name, tensor in moments[fqn].items()}
        move = FORMULAS[section.name].move(section, weights[fqn], gradient, before, rate=rate, step=index + 1)
        update = local_tensor(parameter).detach().double() - weights[fqn]
        share.gaps["clipped gradient", fqn, index] = measure_gap(clipped[fqn].double() - gradient, gradient)
        for name, after in copy_moments(run, fqn).items():
            share.gaps[name, fqn, index] = measure_gap(beyond_rounding(after, move.moments[name]), move.moments[name])
        share.gaps["update", fqn, index] = measure_gap(update - move.update, move.update, move.rounding)


def step_without_effect(run: stepping.Run, share: UpdateShare, name: str, value: float, sizes: dict[str, int]) -> None:
    """Make one step with a single gradient of the last rank not finite; note any effect. Collective."""
    gradients = draw_gradients(run, 0, sizes)
    if dist.get_rank() == dist.get_world_size() - 1:
        next(slice_ for slice_ in gradients.values() if slice_.numel()).view(-1)[0] = value
    tensors = name_tensors(run.parameters, run.optimizer)
    before = {tensor_name: local_tensor(tensor).clone() for tensor_name, tensor in tensors.items()}
    with gradients_given(run, gradients):
        result = stepping.train_step(run, None)
    if result.finite:
        share.said_finite.append(name)
    share.changed[name] = [key for key, old in before.items() if not torch.equal(local_tensor(tensors[key]), old)]


# ---------------------------------------------------------------- what a step is given, and what it leaves


def draw_gradients(run: stepping.Run, index: int, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return gradients of this rank's slices, fp32; the norm of all slices is NORMS[index] * max_norm.

    Each slice gets the share of the squares that it has of all numbers, so no rank needs to know the others' slices.
    One number in eight is zero; the others differ by SPREAD powers of ten, for only some are near eps.
    """
    norm = NORMS[index] * run.config.training.max_norm
    n_numbers = sum(sizes.values())
    gradients = {}
    for fqn, parameter in run.parameters.items():
        own = local_tensor(parameter)
        generator = torch.Generator().manual_seed(hash_of(f"{index} {fqn} {describe_slice(parameter)}"))
        drawn = torch.randn(own.shape, generator=generator, dtype=torch.float64)
        exponent = torch.rand(own.shape, generator=generator) * 8 / 7
        drawn = (drawn * 10 ** (-SPREAD * exponent)).masked_fill(exponent > 1, 0.0)
        if own.numel() and not drawn.any():  # a slice of one number
            drawn += 1.0
        gradients[fqn] = (drawn * (norm * math.sqrt(own.numel() / n_numbers) / drawn.norm())).float()
    return gradients


def describe_slice(tensor: Tensor) -> str:
    """Return the coordinates on the dims that split a tensor: equal on all ranks with the same slice."""
    if not isinstance(tensor, DTensor):
        return "whole"
    mesh = tensor.device_mesh
    places = zip(mesh.mesh_dim_names, mesh.get_coordinate(), tensor.placements, strict=True)
    return " ".join(f"{name}{place}" for name, place, placement in places if not placement.is_replicate())


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@contextmanager
def gradients_given(run: stepping.Run, gradients: dict[str, Tensor]) -> Iterator[None]:
    """Context manager: steps inside get these gradients, this rank's slices, instead of those of a batch."""

    @torch.no_grad()
    def give(run: stepping.Run, batch: None) -> Tensor:
        for fqn, parameter in run.parameters.items():
            parameter.grad = torch.zeros_like(parameter)
            local_tensor(parameter.grad).copy_(gradients[fqn])
        return torch.zeros((), device=run.device)

    with patch.object(stepping, "compute_gradients", give):
        yield


@contextmanager
def clipped_noted(run: stepping.Run) -> Iterator[dict[str, Tensor]]:
    """Context manager: yields copies of this rank's gradients, as the optimizer of a step inside gets them."""
    clipped: dict[str, Tensor] = {}
    step_if_finite = stepping.step_if_finite

    def note_and_step(*args) -> Tensor:
        clipped.update({fqn: local_tensor(parameter.grad).clone() for fqn, parameter in run.parameters.items()})
        return step_if_finite(*args)

    with patch.object(stepping, "step_if_finite", note_and_step):
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
    squares = [0.0 if tensor is None else tensor.square().sum().item() for tensor in (error, reference, rounding)]
    return Gap(*squares)
