"""Compares large tensors without gathering them: each rank its slice, and the parent adds the squared errors up.

    oracle's tensor, a file mapped to memory    rank 0 reads rows [:H/2]     rank 1 reads rows [H/2:]
    of its slice each rank computes             |g - ref|^2, |ref|^2, <g, ref>
    of all slices the parent computes           ||g - ref|| / ||ref||, as if some rank had gathered the tensor

A tensor that is copied along some mesh dims is held as several wholes. The error of a rank is that of the whole that
its slice belongs to, as it would be after `full_tensor()`; so ranks of different wholes can be seen to disagree.

No weight is updated here, which would take DTensor a second to plan: the wide trial sees updates and whole tensors.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.config.schema import Config
from torchtitan_lite.verify.comparison import (
    Coordinates,
    Prepare,
    Share,
    build_small_run,
    describe_placement,
    list_tensors,
    measure_scalars,
    own_rows,
)
from torchtitan_lite.verify.reference import ReferenceRun, clip_factor, make_batch_of

PIECE = 2**20  # numbers that are widened to float64 at a time
SPLIT_ALONG = {"shard": ("dp_shard", "cp")}  # mesh dims that FSDP's dim stands for; any other stands for itself


@dataclass(frozen=True)
class Slice:
    """How far one rank's slice of a tensor is from the oracle's: sums over its numbers, in float64."""

    whole: tuple[tuple[str, int], ...]  # coordinates that ranks share whose slices make one whole
    wrong: float  # of squared differences
    squared: float  # of the oracle's numbers, squared
    product: float  # of the oracle's numbers times the rank's


@dataclass
class SlicedShare(Share):
    """What one rank sees of its own slices. `join_shares` makes `gradient` and `gradient_scale` of those of all ranks.

    Without updates, `weight` and `update` are empty.
    """

    slices: dict[str, Slice]  # FQN -> of the gradient


def measure_slices(
    rank: int, world_size: int, config: Config, oracle_path: str, prepare: Prepare | None = None
) -> SlicedShare:
    """Worker: builds the layout, makes one step up to clipping, and compares what this rank holds. Collective.

    `prepare(run, oracle)` may change the run before its step: a probe.
    """
    oracle: ReferenceRun = torch.load(oracle_path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size, oracle.method)
    initial_equal = {
        fqn: torch.equal(slice_local_shard(parameter), cut_slice(oracle.initial[fqn], parameter))
        for fqn, parameter in run.parameters.items()
    }
    if prepare is not None:
        prepare(run, oracle)
    batch = own_rows(run, make_batch_of(run.config, 0, oracle.method))
    n_tokens = int(stepping.count_global_tokens(run, stepping.shard_for_cp(run, batch)))
    loss = stepping.sum_losses(run, stepping.compute_gradients(run, batch)).item()
    coordinates = run.mesh.coordinates()
    gradients = list_tensors(run, lambda parameter: parameter.grad)
    slices = {fqn: measure_slice(tensor, oracle.gradients[fqn], coordinates) for fqn, tensor in gradients.items()}
    before = [sum_squares(tensor) for tensor in gradients.values()]
    grad_norm = stepping.clip_grad_norm(run.parameters.values(), run.config.training.max_norm).item()
    after = [sum_squares(tensor) for tensor in gradients.values()]
    factor = clip_factor(oracle.grad_norms[0], run.config, 0)
    clipping = [math.sqrt(now / then) / factor - 1 for now, then in zip(after, before, strict=True) if then]
    return SlicedShare(
        coordinates=coordinates,
        initial_equal=initial_equal,
        gradient={},
        gradient_scale={},
        weight={},
        update={},
        placements={fqn: describe_placement(parameter) for fqn, parameter in run.parameters.items()},
        unequal_replicas=set(),
        n_tokens=n_tokens,
        losses=[loss],
        grad_norms=[grad_norm],
        errors={
            **measure_scalars(oracle, n_tokens, [loss], [grad_norm]),
            "clipping": max(map(abs, clipping), default=0.0),
        },
        slices=slices,
    )


def slice_local_shard(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def cut_slice(full: Tensor, like: Tensor) -> Tensor:
    """What this rank has to hold of `full`, if it holds `like`. Nothing travels."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


@torch.no_grad()
def measure_slice(tensor: Tensor, full: Tensor, coordinates: Coordinates) -> Slice:
    """`tensor` is this rank's, `full` the oracle's; `coordinates` are those of the rank on the whole mesh."""
    split = set()
    if isinstance(tensor, DTensor):
        for name, placement in zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True):
            split |= set() if placement.is_replicate() else set(SPLIT_ALONG.get(name, (name,)))
    wrong = squared = product = 0.0
    own, reference = slice_local_shard(tensor), cut_slice(full, tensor)
    for numbers, expected in zip(own.flatten().split(PIECE), reference.flatten().split(PIECE), strict=True):
        numbers, expected = numbers.double(), expected.double()
        wrong += (numbers - expected).square().sum().item()
        squared += expected.square().sum().item()
        product += torch.dot(numbers, expected).item()
    whole = tuple((dim, at) for dim, at in coordinates.items() if dim not in split)
    return Slice(whole, wrong, squared, product)


def sum_squares(tensor: Tensor) -> float:
    """Of this rank's slice, in float64."""
    return sum(piece.double().square().sum().item() for piece in slice_local_shard(tensor).flatten().split(PIECE))


def join_shares(shares: list[SlicedShare]) -> list[SlicedShare]:
    """The shares with their gradients' errors, as each rank would see them if it gathered what its slices belong to."""
    pairs = zip(shares, join_slices([share.slices for share in shares]), strict=True)
    return [
        replace(
            share,
            gradient={fqn: error for fqn, (error, _) in joined.items()},
            gradient_scale={fqn: scale for fqn, (_, scale) in joined.items()},
        )
        for share, joined in pairs
    ]


def join_slices(of_ranks: list[dict[str, Slice]]) -> list[dict[str, tuple[float, float]]]:
    """By rank and FQN: relative error of the whole, and the factor of the oracle's tensor that is nearest to it."""
    wholes: dict[tuple, list[Slice]] = defaultdict(list)
    for slices in of_ranks:
        for fqn, piece in slices.items():
            wholes[fqn, piece.whole].append(piece)
    joined = {whole: join_whole(pieces) for whole, pieces in wholes.items()}
    return [{fqn: joined[fqn, piece.whole] for fqn, piece in slices.items()} for slices in of_ranks]


def join_whole(pieces: list[Slice]) -> tuple[float, float]:
    """Relative error and factor; a zero reference demands zero, and what is not finite is infinitely wrong."""
    wrong, squared, product = (
        sum(getattr(piece, name) for piece in pieces) for name in ("wrong", "squared", "product")
    )
    if not squared:
        return (0.0 if wrong == 0 else math.inf), 1.0
    return math.sqrt(wrong / squared) if math.isfinite(wrong) else math.inf, product / squared
