"""Test the plan of a checkpoint: the slices that format.py computes are the shards of DTensors. See also
test_checkpoint.py."""

from layouts import LAYOUTS
from marks import each_row
from measure_memory import plan

from torchtitan_lite.build import build_parts
from torchtitan_lite.checkpoint.read import list_slices
from torchtitan_lite.checkpoint.save import OFFSETS, plan_save
from torchtitan_lite.config.block import list_parameters
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.plan.fake_world import fake_group

# layouts whose meshes are tested by default
MESHES = [f"experts, {name}, ep2" for name in ("cp2 ring", "hsdp2x2")]
MESHES += [f"experts, {name}, ep4" for name in ("dp2 x tp2", "dp2 x cp2")]
WRITTEN_ON = {}  # one row for each mesh
FAST = []
for name, row in LAYOUTS.items():
    planned = plan(*row)
    mesh = str(planned[2].all_degrees)
    WRITTEN_ON.setdefault(mesh, planned)
    if name in MESHES:
        FAST.append(mesh)


@each_row("mesh", WRITTEN_ON, fast=FAST)
def test_a_reader_computes_the_same_slices_that_ranks_write_from_their_dtensors(mesh):
    config, model_args, layout = WRITTEN_ON[mesh]
    degrees = layout.all_degrees
    written = {}
    records = {}
    for rank in range(layout.world_size):
        with fake_group(layout.world_size, rank=rank):
            tensors = {}
            for part in build_parts(config, model_args, layout, build_mesh(layout, "cpu")):
                tensors |= dict(part.named_parameters(prefix="ema"))  # tensors of a fork
            saved = plan_save(tensors, degrees, rank)
        records |= saved.records
        for name, shard in saved.slices.items():
            written[name, saved.file] = saved.sharding[name][OFFSETS], [*shard.shape]
    computed = {}
    for name, record in records.items():
        for file, *box in list_slices(record, degrees, [0] * len(record.shape), record.shape):
            computed[name, file] = tuple(box)
    assert written == computed
    assert records.keys() >= {f"ema.{fqn}" for fqn in list_parameters(model_args)}
