"""Compute the error of a rank: compare the rank's slice of a tensor with the plain loop's tensor, without
communication."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite.dtensor import local_shard

ROUNDING = 2.0**-24  # largest relative error of one fp32 operation
LARGEST_ERROR = 1e30  # JSON has no infinity
Coordinates = dict[str, int]  # mesh dim -> coordinate of a rank
Key = tuple[
    int, str, str
]  # step, measure (such as the gradient), and the name of a parameter, module or function


@dataclass
class Seen:
    """The findings of one rank."""

    coordinates: Coordinates
    step: int = 0  # number of the step in which new errors are recorded
    errors: dict[Key, float] = field(default_factory=dict)
    results: list[dict] = field(default_factory=list)  # loss and gradients of each step
    acted: dict[str, bool | None] = field(default_factory=dict)  # witnesses.Acted

    def note(self, measure: str, name: str, error: float) -> None:
        """Record an error, capped at LARGEST_ERROR. If a key has several errors, keep the largest."""
        key = (self.step, measure, name)
        error = error if error < LARGEST_ERROR else LARGEST_ERROR  # also NaN
        self.errors[key] = max(error, self.errors.get(key, 0.0))

    def compare(self, measure: str, name: str, own: float, right: float) -> None:
        """Record the relative error of a number."""
        self.note(measure, name, abs(own - right) / (abs(right) or 1.0))


def local(tensor: Tensor) -> Tensor:
    return local_shard(tensor).detach()


def cut_local(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's slice of `whole`, with the placement of `like`. No communication."""
    if not isinstance(like, DTensor):
        return whole
    placed = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to_local()


@torch.no_grad()
def relative_error(
    tensor: Tensor,
    whole: Tensor,
    unit: Tensor | None = None,
    *,
    roundings: int = 0,
    forgives: bool = False,
) -> float:
    """Return ||own - right|| divided by this slice's share of ||unit||. `own` is the local slice of `tensor`, and
    `right` is the same slice of `whole`.

    `unit` is `whole` by default. If the share is 0, the result is 0 for own = right, and otherwise infinity. An error
    of up to `roundings` fp32 roundings per element is treated as 0. If `forgives` is true, the elements with the
    largest errors are ignored (two elements, plus 0.1 % of all elements). In bfloat16, about one element in ten
    thousand is rounded to the neighboring value.
    """
    own = local(tensor).double()
    right = cut_local(whole, tensor).double()
    ignored = roundings * ROUNDING * right.abs()
    errors = ((own - right).abs() - ignored).clamp(min=0)
    if forgives and own.isfinite().all():
        n_ignored = 2 + errors.numel() // 1000
        errors = errors.flatten().sort().values[:-n_ignored]
    wrong = errors.norm().item()
    if wrong == 0:
        return 0.0
    unit = whole if unit is None else unit
    fraction = own.numel() / unit.numel()
    share = unit.double().norm().item() * math.sqrt(fraction)
    own_norm = cut_local(unit, tensor).double().norm().item()
    scale = max(share, own_norm)
    return wrong / scale if scale else math.inf
