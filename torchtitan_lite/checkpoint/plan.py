"""Plan which rank writes which slice of a tensor, from the mesh degrees and one line per tensor. Pure; no torch.

    layers.3.attention.wq.weight (256, 256)      stage 1   split dim 0 over tp, then over dp_shard x cp
    norm.weight (256,)                           stage 1   split dim 0 over dp_shard x cp; tp ranks have copies

    mesh pp2 x dp_shard2 x tp2      rank 4          rank 5          rank 6          rank 7
    wq.weight                       rows 0..63      rows 128..191   rows 64..127    rows 192..255
    norm.weight, copy 0             rows 0..127     (equal)         rows 128..255   (equal)

A save therefore gathers no list of slices, and the manifest has one line per tensor, on any number of ranks. A reader
computes by arithmetic which ranks wrote the slices that it needs: `list_slices`. If several ranks have equal slices,
the rank with the number `copy` writes; save.py lets them take turns.

A dim of n elements over k ranks has slices of ceil(n/k) elements, and the last ones may be smaller or empty, as in
torch.chunk. If a dim is split twice, the second split cuts each slice of the first.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from torchtitan_lite.config.layout import Layout

WORLD_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# second mesh of the same ranks, for experts and routers
EXPERT_DIMS = ("pp", "dp_replicate", "efsdp", "ep")

Degrees = dict[str, int]  # ranks of each of these mesh dims


def list_degrees(layout: Layout) -> Degrees:
    """Return the degrees of both meshes of a layout."""
    ep = max(1, layout.ep)
    return {**layout.degrees, "efsdp": layout.fsdp * layout.tp // ep, "ep": ep}


class Split(NamedTuple):
    """One cut of a tensor dim: its slices belong to the ranks of mesh dims, the first of them outermost."""

    dim: int
    mesh_dims: tuple[str, ...]


class TensorRecord(NamedTuple):
    """The line of a tensor in the manifest."""

    dtype: str  # torch's name: "float32"
    shape: Sequence[int]
    stage: int  # coordinate on pp of the ranks that have it
    splits: Sequence[Split]  # in the order of cutting
    copy: int  # which of the ranks with equal slices writes


class Slice(NamedTuple):
    """One stored slice of a tensor."""

    file: str
    offsets: Sequence[int]  # index of the first element in the full tensor
    sizes: Sequence[int]


def name_file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def find_coordinates(rank: int, sizes: Sequence[int]) -> list[int]:
    """Return the index on each dim of a mesh with these sizes, the first of them outermost."""
    coordinates = []
    for size in reversed(sizes):
        coordinates.insert(0, rank % size)
        rank //= size
    return coordinates


def find_rank(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the rank at these coordinates: the inverse of find_coordinates."""
    rank = 0
    for coordinate, size in zip(coordinates, sizes, strict=True):
        rank = rank * size + coordinate
    return rank


def choose_mesh(record: TensorRecord) -> tuple[str, ...]:
    """Return the dims of the mesh that a tensor is split over."""
    used = {mesh_dim for split in record.splits for mesh_dim in split.mesh_dims}
    return EXPERT_DIMS if used & {"efsdp", "ep"} else WORLD_DIMS


def count_copies(record: TensorRecord, degrees: Degrees) -> int:
    """Return the number of ranks that have each slice of a tensor."""
    mesh_dims = choose_mesh(record)
    n_ranks = prod(degrees[mesh_dim] for mesh_dim in mesh_dims[1:])
    return n_ranks // prod(count_slices(split, degrees) for split in record.splits)


def count_slices(split: Split, degrees: Degrees) -> int:
    return prod(degrees[mesh_dim] for mesh_dim in split.mesh_dims)


def find_indices(record: TensorRecord, degrees: Degrees, rank: int) -> list[int]:
    """Return the index of this rank's slice in each split."""
    mesh_dims = choose_mesh(record)
    coordinates = find_coordinates(rank, [degrees[mesh_dim] for mesh_dim in mesh_dims])
    own = dict(zip(mesh_dims, coordinates, strict=True))
    indices = []
    for split in record.splits:
        sizes = [degrees[mesh_dim] for mesh_dim in split.mesh_dims]
        indices.append(find_rank([own[mesh_dim] for mesh_dim in split.mesh_dims], sizes))
    return indices


def find_writer(
    record: TensorRecord, degrees: Degrees, indices: Sequence[int], among: range | None = None
) -> int | None:
    """Return the rank that writes a slice, or None if no rank of `among` has it.

    `indices` is the result of find_indices. For a snapshot, `among` has the ranks of one host, and the first of them
    that has the slice writes it. If `among` is None, `record.copy` says which of all ranks with the slice writes it.
    """
    mesh_dims = choose_mesh(record)
    sizes = [degrees[mesh_dim] for mesh_dim in mesh_dims]
    if among is not None:
        for rank in among:
            is_on_stage = find_coordinates(rank, sizes)[0] == record.stage
            if is_on_stage and find_indices(record, degrees, rank) == list(indices):
                return rank
        return None
    fixed = {"pp": record.stage}
    for split, index in zip(record.splits, indices, strict=True):
        of_split = [degrees[mesh_dim] for mesh_dim in split.mesh_dims]
        fixed.update(zip(split.mesh_dims, find_coordinates(index, of_split), strict=True))
    free = [mesh_dim for mesh_dim in mesh_dims if mesh_dim not in fixed]
    of_free = [degrees[mesh_dim] for mesh_dim in free]
    fixed.update(zip(free, find_coordinates(record.copy, of_free), strict=True))
    return find_rank([fixed[mesh_dim] for mesh_dim in mesh_dims], sizes)


def list_slices(
    record: TensorRecord,
    degrees: Degrees,
    offsets: Sequence[int],
    sizes: Sequence[int],
    among: range | None = None,
) -> Iterator[Slice]:
    """Yield the stored slices that overlap a box of the tensor.

    If `among` is given (see find_writer), slices that none of its ranks has are left out.
    """
    by_dim = []
    for dim, length in enumerate(record.shape):
        splits = [at for at, split in enumerate(record.splits) if split.dim == dim]
        stop = offsets[dim] + sizes[dim]
        n_slices = [count_slices(record.splits[at], degrees) for at in splits]
        cuts = list_cuts(0, length, n_slices, offsets[dim], stop)
        by_dim.append([(splits, *cut) for cut in cuts])
    for chosen in product(*by_dim):
        indices = [0] * len(record.splits)
        begin = []
        extent = []
        for splits, of_splits, first, length in chosen:
            for at, index in zip(splits, of_splits, strict=True):
                indices[at] = index
            begin.append(first)
            extent.append(length)
        writer = find_writer(record, degrees, indices, among)
        if writer is not None:
            yield Slice(name_file(writer), begin, extent)


def list_cuts(
    begin: int, length: int, n_slices: Sequence[int], first: int, stop: int
) -> Iterator[tuple[list[int], int, int]]:
    """Yield the slices of one dim that overlap first .. stop - 1: index in each split, first element, length.

    The elements from `begin` on are cut into n_slices[0] slices, each of them into n_slices[1], and so on.
    """
    if not n_slices:
        if max(begin, first) < min(begin + length, stop):
            yield [], begin, length
        return
    n, *rest = n_slices
    size = max(1, ceil(length / n))
    least = max(0, (first - begin) // size)
    most = min(n, ceil((stop - begin) / size))
    for index in range(least, most):
        start = index * size
        own_length = min(size, length - start)
        for indices, at, extent in list_cuts(begin + start, own_length, rest, first, stop):
            yield [index, *indices], at, extent


def find_slice(record: TensorRecord, degrees: Degrees, rank: int) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes of the slice that a rank has."""
    offsets = [0] * len(record.shape)
    sizes = list(record.shape)
    for split, index in zip(record.splits, find_indices(record, degrees, rank), strict=True):
        size = ceil(sizes[split.dim] / count_slices(split, degrees))
        start = min(index * size, sizes[split.dim])
        offsets[split.dim] += start
        sizes[split.dim] = min(size, sizes[split.dim] - start)
    return offsets, sizes
