"""Plan which rank writes which slice of a tensor, from the mesh degrees and one line per tensor. Pure; no torch.

    layers.3.attention.wq.weight (256, 256)      stage 1   split dim 0 over tp, then over dp_shard x cp
    norm.weight (256,)                           stage 1   split dim 0 over dp_shard x cp; tp ranks have copies

    mesh pp2 x dp_shard2 x tp2      rank 4          rank 5          rank 6          rank 7
    wq.weight                       rows 0..63      rows 128..191   rows 64..127    rows 192..255
    norm.weight, copy 0             rows 0..127     (equal)         rows 128..255   (equal)

A save therefore gathers no list of slices, and the manifest has one line per tensor, on any number of ranks. A reader
computes by arithmetic which ranks wrote the slices that it needs (read.py). If several ranks have equal slices, the
rank with the number `copy` writes; save.py lets them take turns.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from torchtitan_lite.config.layout import MESH_DIMS, Layout

# second mesh of the same ranks, for experts and routers
EXPERT_DIMS = ("pp", "dp_replicate", "efsdp", "ep")

Degrees = dict[str, int]  # ranks of each of these mesh dims
Coordinates = Mapping[str, int]  # index of a rank on mesh dims


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

    @property
    def mesh_dims(self) -> tuple[str, ...]:
        """The dims of the mesh that the tensor is split over."""
        return EXPERT_DIMS if self.split_dims & {"efsdp", "ep"} else MESH_DIMS

    @property
    def split_dims(self) -> set[str]:
        return {mesh_dim for split in self.splits for mesh_dim in split.mesh_dims}

    @property
    def copy_dims(self) -> list[str]:
        """The mesh dims whose ranks have equal slices."""
        return [dim for dim in self.mesh_dims if dim not in {"pp", *self.split_dims}]


def name_file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def find_coordinates(rank: int, mesh_dims: Sequence[str], degrees: Degrees) -> dict[str, int]:
    """Return the index of a rank on each of these mesh dims, the first of them outermost."""
    n_ranks = prod(degrees[mesh_dim] for mesh_dim in mesh_dims)
    coordinates = {}
    for mesh_dim in mesh_dims:
        n_ranks //= degrees[mesh_dim]
        coordinates[mesh_dim], rank = divmod(rank, n_ranks)
    return coordinates


def find_writer(
    record: TensorRecord, degrees: Degrees, at: Coordinates, among: range | None = None
) -> int | None:
    """Return the rank that writes the slice of the rank at these coordinates; those on copy_dims may be missing.

    For a snapshot, `among` has the ranks of one host. The first of them that has the slice writes it; the result is
    None if none of them has it. Otherwise `record.copy` says which of all ranks with the slice writes it.
    """
    if among is not None:
        for rank in among:
            other = find_coordinates(rank, record.mesh_dims, degrees)
            if all(other[mesh_dim] == at[mesh_dim] for mesh_dim in {"pp", *record.split_dims}):
                return rank
        return None
    writer = {**at, **find_coordinates(record.copy, record.copy_dims, degrees)}
    rank = 0
    for mesh_dim in record.mesh_dims:
        rank = rank * degrees[mesh_dim] + writer[mesh_dim]
    return rank
