"""Build the meshes of a layout: one DeviceMesh of five dims, and the sub-meshes that other code needs.

    dim            split                          communication
    pp             layers                         send/recv of hidden states, per microbatch
    dp_replicate   sequences                      all-reduce of gradients, per block and step
    dp_shard       sequences and parameters       all-gather of parameters, reduce-scatter of gradients, per block
    cp             each sequence                  all-gather or send/recv of keys and values, per block
    tp             heads, ffn, vocabulary         all-gather and reduce-scatter of activations, four per block and pass

    experts        (expert_parallel.py)           on a second mesh over the same ranks
    efsdp          expert parameters              like dp_shard
    ep             experts                        all-to-all of tokens, two per block and pass

A pass is a forward or a backward pass. Every rank has one coordinate on each dim. A group consists of the ranks that
differ only in one coordinate. A dim of size 1 has a group of one rank, which sends nothing. In traces and NCCL logs a
group is named after its dims: mesh_tp, mesh_dp_shard_cp. The group of all ranks is torch's default group, default_pg.

Effect: creates process groups; nothing is sharded yet. Sources: DeviceMesh; arXiv:2410.06511.
"""

from dataclasses import dataclass

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend "fake"
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lite.config.layout import EXPERT_DIMS, MESH_DIMS, Layout


@dataclass(frozen=True)
class Mesh:
    """The world mesh and its sub-meshes. Each mesh has the process groups of this rank."""

    # Stored, because indexing a mesh creates a new object each time.
    world: DeviceMesh  # (pp, dp_replicate, dp_shard, cp, tp)
    pp: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
    # For fully_shard: 1-D (shard) or 2-D (replicate, shard); shard = dp_shard x cp
    fsdp_mesh: DeviceMesh
    # For fully_shard of the experts: 1-D (efsdp) or 2-D (dp_replicate, efsdp). None if the model has no experts
    expert_fsdp_mesh: DeviceMesh | None
    # 1-D: the ranks that share the experts of a layer. None if the model has no experts
    ep: DeviceMesh | None

    def coordinates(self) -> dict[str, int]:
        """Return the coordinate of this rank on each mesh dim."""
        return dict(zip(MESH_DIMS, self.world.get_coordinate(), strict=True))

    @property
    def data_rank(self) -> int:
        """Index of this rank among the data-parallel ranks, 0 .. layout.dp - 1."""
        own = self.coordinates()
        return own["dp_replicate"] * self.world["dp_shard"].size() + own["dp_shard"]


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Create the process groups of a layout. Collective over all ranks."""
    world = make_mesh(device_type, layout.degrees)
    shard = world["dp_shard"]
    if layout.cp > 1:
        shard = world["cp"]
        if layout.dp_shard > 1:
            shard = world["dp_shard", "cp"]._flatten()
    # On a 1-D mesh, FSDP only shards. On a 2-D mesh, FSDP also replicates over the first dim, which adds an all-reduce.
    fsdp_mesh = shard
    if layout.dp_replicate > 1:
        fsdp_mesh = DeviceMesh._concatenate([world["dp_replicate"], shard])
    ep = None
    expert_fsdp_mesh = None
    if layout.ep:
        degrees = {dim: layout.all_degrees[dim] for dim in EXPERT_DIMS}
        experts = make_mesh(device_type, degrees, new=("efsdp", "ep"))
        ep = experts["ep"]
        expert_fsdp_mesh = experts["efsdp"]
        if layout.dp_replicate > 1:
            expert_fsdp_mesh = experts["dp_replicate", "efsdp"]
    return Mesh(
        world=world,
        pp=world["pp"],
        cp=world["cp"],
        tp=world["tp"],
        fsdp_mesh=fsdp_mesh,
        expert_fsdp_mesh=expert_fsdp_mesh,
        ep=ep,
    )


def make_mesh(
    device_type: str,
    degrees: dict[str, int],
    new: tuple[str, ...] = (),
) -> DeviceMesh:
    """Create a mesh of all ranks, with a new group for each dim.

    `new`: dims that get a new group even if they span all ranks. If the dims of the experts shared the default group,
    the all-to-alls of one layer would queue behind the all-gathers of the next layer.
    """
    # A dim of size 1 needs no communication, so the backend "fake" is enough. If a backend is named, torch creates a
    # group for every rank in turn: for 16,384 ranks and two dims of size 1, this takes 1.3 CPU seconds.
    backends = {dim: "fake" for dim, degree in degrees.items() if degree == 1}
    backends = dict.fromkeys(new, dist.get_backend()) | backends
    return init_device_mesh(
        device_type,
        tuple(degrees.values()),
        mesh_dim_names=tuple(degrees),
        backend_override=backends,
    )
