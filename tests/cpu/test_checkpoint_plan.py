"""The plan of a checkpoint: slices computed by arithmetic, beside slices that are cut from a real array."""

import random
from math import prod

import pytest
import torch

from torchtitan_lite.checkpoint.plan import (
    WORLD_DIMS,
    Split,
    TensorRecord,
    choose_mesh,
    count_copies,
    find_coordinates,
    find_indices,
    find_slice,
    find_writer,
    list_slices,
    name_file,
)


def make_degrees(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1) -> dict[str, int]:
    efsdp = dp_shard * cp * tp // ep
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    return degrees | {"efsdp": efsdp, "ep": ep}


FSDP = Split(0, ("dp_shard", "cp"))
CASES = [  # degrees, shape, splits
    (make_degrees(dp_shard=3), (7, 4), [FSDP]),  # 3, 3 and 1 rows
    (make_degrees(dp_shard=4), (5,), [FSDP]),  # 2, 2, 1 and no rows
    (make_degrees(pp=2, dp_shard=2, tp=2), (8, 4), [Split(0, ("tp",)), FSDP]),
    (make_degrees(pp=2, dp_shard=2, cp=2, tp=2), (8, 6), [Split(1, ("tp",)), FSDP]),
    (make_degrees(dp_replicate=2, dp_shard=2, tp=2), (6,), [FSDP]),  # 4 ranks have each slice
    (make_degrees(dp_replicate=2, dp_shard=2), (), []),
    (make_degrees(dp_shard=2, tp=4, ep=4), (8, 6, 4), [Split(0, ("ep",)), Split(0, ("efsdp",))]),
    (make_degrees(dp_shard=2, tp=4, ep=4), (8, 6, 4), [Split(0, ("ep",)), Split(2, ("efsdp",))]),
    (make_degrees(dp_replicate=2, dp_shard=4, ep=2), (4, 6, 4), [Split(0, ("ep",))]),
]


def cut_by_torch(record: TensorRecord, degrees: dict[str, int], rank: int) -> torch.Tensor:
    """Return the slice of a rank, by torch.chunk from a tensor of element numbers."""
    whole = torch.arange(prod(record.shape)).view(tuple(record.shape))
    mesh_dims = choose_mesh(record)
    coordinates = find_coordinates(rank, [degrees[dim] for dim in mesh_dims])
    own = dict(zip(mesh_dims, coordinates, strict=True))
    for split in record.splits:
        n = 1
        index = 0
        for dim in split.mesh_dims:
            n *= degrees[dim]
            index = index * degrees[dim] + own[dim]
        chunks = whole.chunk(n, split.dim)
        empty = whole.narrow(split.dim, 0, 0)
        whole = chunks[index] if index < len(chunks) else empty
    return whole


def make_box(offsets, sizes) -> tuple[slice, ...]:
    box = []
    for start, n in zip(offsets, sizes, strict=True):
        box.append(slice(start, start + n))
    return tuple(box)


def cut_by_plan(record: TensorRecord, offsets, sizes) -> torch.Tensor:
    whole = torch.arange(prod(record.shape)).view(tuple(record.shape))
    return whole[make_box(offsets, sizes)]


def list_ranks(degrees: dict[str, int], stage: int) -> range:
    n = prod(degrees[dim] for dim in WORLD_DIMS[1:])
    return range(stage * n, (stage + 1) * n)


@pytest.mark.parametrize("degrees, shape, splits", CASES)
def test_slices_are_torchs_chunks_and_each_is_written_once(degrees, shape, splits):
    stage = degrees["pp"] - 1
    ranks = list_ranks(degrees, stage)
    first = TensorRecord("float32", shape, stage, splits, 0)
    for copy in range(count_copies(first, degrees)):
        record = first._replace(copy=copy)
        written = torch.zeros(shape, dtype=torch.int64)
        for rank in ranks:
            own = find_slice(record, degrees, rank)
            assert torch.equal(cut_by_plan(record, *own), cut_by_torch(record, degrees, rank))
            indices = find_indices(record, degrees, rank)
            if find_writer(record, degrees, indices) == rank:
                written[make_box(*own)] += 1
        assert (written == 1).all()


@pytest.mark.parametrize("degrees, shape, splits", CASES)
def test_a_box_is_covered_once_by_the_slices_of_their_writers(degrees, shape, splits):
    stage = degrees["pp"] - 1
    record = TensorRecord("float32", shape, stage, splits, 0)
    slices_of_files = {}
    for rank in list_ranks(degrees, stage):
        slices_of_files.setdefault(name_file(rank), find_slice(record, degrees, rank))
    chance = random.Random(0)
    for _ in range(20):
        offsets = [chance.randrange(n) for n in shape]
        sizes = [chance.randint(1, n - at) for n, at in zip(shape, offsets, strict=True)]
        wanted = make_box(offsets, sizes)
        covered = torch.zeros(shape, dtype=torch.int64)
        for file, begin, extent in list_slices(record, degrees, offsets, sizes):
            assert slices_of_files[file] == (list(begin), list(extent))
            before = covered[wanted].sum()
            covered[make_box(begin, extent)] += 1
            assert covered[wanted].sum() > before  # no file is opened for nothing
        assert (covered[wanted] == 1).all()


def test_on_a_host_the_first_rank_with_a_slice_writes_it():
    degrees = make_degrees(dp_replicate=2, dp_shard=2, tp=2)
    norm = TensorRecord("float32", (6,), 0, [FSDP], 3)
    everywhere = list(list_slices(norm, degrees, [0], [6], among=range(4, 8)))
    assert [one.file for one in everywhere] == [name_file(4), name_file(6)]
    weight = TensorRecord("float32", (8, 4), 0, [Split(0, ("tp",)), FSDP], 0)
    half = list(list_slices(weight, degrees, [0, 0], [8, 4], among=range(2)))  # dp_shard rank 0
    assert [one.offsets for one in half] == [[0, 0], [4, 0]]
