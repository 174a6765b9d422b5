"""What one rank holds of a tensor, how far it is off, and what several ranks hold together.

Squared errors of slices can be added, so no tensor is gathered. A tensor that is copied along some mesh dims is held
as several wholes; ranks of different wholes can be seen to disagree.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.tools.verify.degrees import OF_EXPERTS
from torchtitan_lite.tools.verify.step_formulas import ROUNDING

Coordinates = dict[str, int]  # mesh dim -> coordinate of a rank
Whole = tuple[tuple[str, int], ...]  # coordinates that ranks share whose slices make one whole tensor
PIECE = 2**20  # numbers that are widened to float64 at a time
SPLIT_ALONG = {"dp_shard_cp": ("dp_shard", "cp")}  # mesh dims that were joined to one; any other stands for itself


def cut_zigzag(whole: Tensor, n_ranks: int, dim: int) -> list[Tensor]:
    """Return what each cp rank holds of a sequence: of 2 n pieces, rank r has the r-th and the r-th from the end."""
    pieces = whole.chunk(2 * n_ranks, dim)
    return [torch.cat((pieces[rank], pieces[-1 - rank]), dim) for rank in range(n_ranks)]


class Gap(NamedTuple):
    """Difference between a slice of a tensor, or several slices, and the reference's: sums over numbers, in float64."""

    error: float  # of squared differences
    reference: float  # of the reference's numbers, squared
    rounding: float = 0.0  # of what fp32 alone may do, squared
    product: float = 0.0  # of the numbers times the reference's

    @property
    def relative_error(self) -> float:
        """||x - ref|| / ||ref||; a zero reference demands zero. What is not finite is infinitely wrong."""
        if self.error == 0:
            return 0.0
        return math.sqrt(self.error / self.reference) if self.reference and math.isfinite(self.error) else math.inf

    @property
    def scale(self) -> float:
        """<x, ref> / <ref, ref>: 1, or the factor by which all of it is too large."""
        return self.product / self.reference if self.reference else 1.0

    def relative(self, tolerance: float) -> tuple[float, float]:
        """Return error and bound, in units of the reference's norm, or absolute where that is zero."""
        scale = math.sqrt(self.reference) or 1.0
        allowed = tolerance * math.sqrt(self.reference) + math.sqrt(self.rounding)
        return math.sqrt(self.error) / scale, allowed / scale

    def is_within(self, tolerance: float) -> bool:
        error, bound = self.relative(tolerance)
        return error <= bound


def own_slice(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return local_tensor(tensor).detach()


def cut_slice(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of `full` that this rank holds if it holds `like`. No communication."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


@torch.no_grad()
def measure_slice(tensor: Tensor | None, full: Tensor, *, roundings: int = 0) -> Gap:
    """Compare what this rank holds of a tensor with the same slice of the reference's `full` one. No communication.

    `roundings`: how often every number of it may have been rounded to fp32 otherwise; that is left out.
    """
    if tensor is None:  # a moment that was not made
        return Gap(math.inf, 0.0)
    error = reference = product = 0.0
    own, expected = own_slice(tensor), cut_slice(full, tensor)
    for numbers, right in zip(own.flatten().split(PIECE), expected.flatten().split(PIECE), strict=True):
        numbers, right = numbers.double(), right.double()
        beyond = ((numbers - right).abs() - roundings * ROUNDING * right.abs()).clamp(min=0)
        error += beyond.square().sum().item()
        reference += right.square().sum().item()
        product += torch.dot(numbers, right).item()
    return Gap(error, reference, product=product)


def find_whole(tensor: Tensor, at: Coordinates) -> Whole:
    split: set[str] = set()
    copies = dict(at)  # coordinates on the dims along which there may be copies
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for name, placement, own in zip(mesh.mesh_dim_names, tensor.placements, mesh.get_coordinate(), strict=True):
            if name in ("efsdp", "ep"):  # these two stand for three dims of the world's mesh
                copies = {dim: place for dim, place in copies.items() if dim not in OF_EXPERTS} | {name: own}
            split |= set() if placement.is_replicate() else set(SPLIT_ALONG.get(name, (name,)))
    return tuple((dim, coordinate) for dim, coordinate in copies.items() if dim not in split)


def measure_gap(error: Tensor, reference: Tensor, rounding: Tensor | None = None) -> Gap:
    return Gap(*(0.0 if tensor is None else tensor.square().sum().item() for tensor in (error, reference, rounding)))


def join_slices(of_ranks: list[dict[str, tuple[Whole, Gap]]]) -> list[dict[str, Gap]]:
    """Return by rank and FQN the error of the whole tensor that the rank's slice belongs to.

    A tensor that is copied along some mesh dims is held as several wholes, and ranks of different ones may disagree.
    """
    wholes: dict[tuple, list[Gap]] = defaultdict(list)
    for slices in of_ranks:
        for fqn, (whole, gap) in slices.items():
            wholes[fqn, whole].append(gap)
    joined = {whole: add_gaps(gaps) for whole, gaps in wholes.items()}
    return [{fqn: joined[fqn, whole] for fqn, (whole, _) in slices.items()} for slices in of_ranks]


def add_gaps(gaps: Iterable[Gap]) -> Gap:
    """Return the squared norms of slices together: infinitely wrong where no rank holds one."""
    columns = list(zip(*gaps, strict=True))
    return Gap(*map(sum, columns)) if columns else Gap(math.inf, 0.0)


@torch.no_grad()
def find_unequal_replicas(tensors: dict[str, Tensor]) -> set[tuple[str, str]]:
    """Return names of tensors whose copies are not bit-equal, with the mesh dim. One broadcast per dim with copies.

    All tensors have one dtype. Collective over the ranks that hold the same names.
    """
    copies: dict[str, dict[str, DTensor]] = {}
    sharded = {fqn: tensor for fqn, tensor in tensors.items() if isinstance(tensor, DTensor)}
    for fqn, tensor in sharded.items():
        for name, placement in zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True):
            if placement.is_replicate() and tensor.device_mesh[name].size() > 1:
                copies.setdefault(name, {})[fqn] = tensor
    unequal = set()
    for name, replicated in copies.items():
        own = [tensor.to_local() for tensor in replicated.values()]
        of_first = torch.cat([tensor.flatten() for tensor in own])
        dist.broadcast(of_first, group=next(iter(replicated.values())).device_mesh[name].get_group(), group_src=0)
        pieces = of_first.split([tensor.numel() for tensor in own])
        of_tensors = zip(replicated, own, pieces, strict=True)
        unequal |= {(fqn, name) for fqn, tensor, piece in of_tensors if not torch.equal(tensor.flatten(), piece)}
    return unequal


def describe_placement(parameter: Tensor) -> str:
    """Return `Shard(0) over dp_shard, Replicate() over tp`."""
    if not isinstance(parameter, DTensor):
        return "whole on every rank"
    names = parameter.device_mesh.mesh_dim_names
    return ", ".join(f"{placement} over {name}" for name, placement in zip(names, parameter.placements, strict=True))
