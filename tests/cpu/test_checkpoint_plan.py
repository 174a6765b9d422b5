"""The plan of a checkpoint: slices computed by arithmetic equal the slices of a real array and of DTensors."""

import random
from math import prod

import compare
import pytest
import torch
from layouts import LAYOUTS
from marks import choose_fast

from torchtitan_lite.build import build_parts
from torchtitan_lite.checkpoint.format import (
    Split,
    TensorRecord,
    find_coordinates,
    list_degrees,
    name_file,
)
from torchtitan_lite.checkpoint.read import list_slices
from torchtitan_lite.checkpoint.save import OFFSETS, plan_save
from torchtitan_lite.config.checks import plan_layout, resolve_config
from torchtitan_lite.config.layout import MESH_DIMS
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.plan.fake_world import fake_group


def make_degrees(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1) -> dict[str, int]:
    efsdp = dp_shard * cp * tp // ep
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    return degrees | {"efsdp": efsdp, "ep": ep}


FSDP = Split(0, ("dp_shard", "cp"))
# degrees | shape | splits: dim of the tensor, mesh dims
CASES = """
dp_shard=3 | 7 4 | 0 dp_shard cp               # 3, 3 and 1 rows
dp_shard=4 | 5 | 0 dp_shard cp                 # 2, 2, 1 and no rows
pp=2 dp_shard=2 tp=2 | 8 4 | 0 tp, 0 dp_shard cp
pp=2 dp_shard=2 cp=2 tp=2 | 8 6 | 1 tp, 0 dp_shard cp
dp_replicate=2 dp_shard=2 tp=2 | 6 | 0 dp_shard cp     # 4 ranks have each slice
dp_replicate=2 dp_shard=2 | |
dp_shard=2 tp=4 ep=4 | 8 6 4 | 0 ep, 0 efsdp
dp_shard=2 tp=4 ep=4 | 8 6 4 | 0 ep, 2 efsdp
dp_replicate=2 dp_shard=4 ep=2 | 4 6 4 | 0 ep
"""


def cut_by_torch(record: TensorRecord, degrees: dict[str, int], rank: int) -> torch.Tensor:
    """Return the slice of a rank, which torch.chunk cuts from a tensor of element numbers."""
    whole = torch.arange(prod(record.shape)).view(tuple(record.shape))
    own = find_coordinates(rank, record.mesh_dims, degrees)
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


@pytest.mark.parametrize("line", CASES.strip().splitlines())
def test_slices_are_torchs_chunks_and_each_is_written_once(line):
    named, sizes, listed = line.partition("#")[0].split("|")
    pairs = [word.split("=") for word in named.split()]
    degrees = make_degrees(**{mesh_dim: int(n) for mesh_dim, n in pairs})
    shape = tuple(map(int, sizes.split()))
    splits = []
    for dim, *mesh_dims in map(str.split, filter(str.strip, listed.split(","))):
        splits.append(Split(int(dim), tuple(mesh_dims)))
    stage = degrees["pp"] - 1
    first = TensorRecord("float32", shape, stage, splits, 0)
    n_copies = prod(degrees[dim] for dim in first.copy_dims)
    numbers = torch.arange(prod(shape)).view(shape)
    writers = set()
    chance = random.Random(0)
    for copy in range(n_copies):
        record = first._replace(copy=copy)
        stored = list(list_slices(record, degrees, [0] * len(shape), shape))
        written = torch.zeros(shape, dtype=torch.int64)
        for file, *box in stored:
            assert file not in writers, "copies are written by different ranks"
            writers.add(file)
            rank = int(file[5:10])
            place = make_box(*box)
            cut = cut_by_torch(record, degrees, rank)
            assert torch.equal(numbers[place], cut)
            written[place] += 1
        assert (written == 1).all()
        for _ in range(10):
            offsets = [chance.randrange(n) for n in shape]
            sizes = [chance.randint(1, n - at) for n, at in zip(shape, offsets, strict=True)]
            wanted = torch.zeros(shape, dtype=torch.bool)
            wanted[make_box(offsets, sizes)] = True
            overlapping = [one for one in stored if wanted[make_box(*one[1:])].any()]
            assert list(list_slices(record, degrees, offsets, sizes)) == overlapping
    n_ranks = prod(degrees[dim] for dim in MESH_DIMS[1:])
    assert writers <= {name_file(stage * n_ranks + rank) for rank in range(n_ranks)}


def test_on_a_host_the_first_rank_with_a_slice_writes_it():
    degrees = make_degrees(dp_replicate=2, dp_shard=2, tp=2)
    norm = TensorRecord("float32", (6,), 0, [FSDP], 3)
    everywhere = list(list_slices(norm, degrees, [0], [6], among=range(4, 8)))
    assert [one.file for one in everywhere] == [name_file(4), name_file(6)]
    weight = TensorRecord("float32", (8, 4), 0, [Split(0, ("tp",)), FSDP], 0)
    half = list(list_slices(weight, degrees, [0, 0], [8, 4], among=range(2)))  # dp_shard rank 0
    assert [one.offsets for one in half] == [[0, 0], [4, 0]]


WRITTEN_ON = {}  # one row for each mesh
for row in LAYOUTS.values():
    config = compare.complete(row.overrides, row.world_size)
    layout = plan_layout(config, resolve_model(config.model), row.world_size)
    config = resolve_config(config, layout, "cpu")
    WRITTEN_ON.setdefault(str(list_degrees(layout)), (config, layout))


@pytest.mark.parametrize("mesh", choose_fast(WRITTEN_ON, list(WRITTEN_ON)[-4:]))
def test_a_reader_computes_the_slices_that_ranks_write_of_their_dtensors(mesh):
    config, layout = WRITTEN_ON[mesh]
    degrees = list_degrees(layout)
    model_args = resolve_model(config.model)
    written = {}
    records = {}
    for rank in range(layout.world_size):
        with fake_group(layout.world_size, rank=rank):
            parts = build_parts(config, model_args, layout, build_mesh(layout, "cpu"))
            tensors = {}
            for part in parts:
                for fqn, tensor in part.named_parameters():
                    tensors[f"model.{fqn}"] = tensor
            plan = plan_save(tensors, degrees, rank)
        records |= plan.records
        for name, shard in plan.slices.items():
            written[name, plan.file] = plan.sharding[name][OFFSETS], [*shard.shape]
    computed = {}
    for name, record in records.items():
        for file, *box in list_slices(record, degrees, [0] * len(record.shape), record.shape):
            computed[name, file] = tuple(box)
    assert written == computed
