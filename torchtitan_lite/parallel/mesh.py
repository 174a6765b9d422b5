"""From a layout to meshes: one DeviceMesh of five dims, and the sub-meshes that serve a purpose.

    dim            split                          communication
    pp             layers                         send/recv of hidden states, per microbatch
    dp_replicate   sequences                      all-reduce of gradients, per block and step
    dp_shard       sequences and parameters       all-gather and reduce-scatter of parameters, per block
    cp             each sequence                  all-gather or send/recv of keys and values, per block
    tp             heads, ffn, vocabulary         all-gather and reduce-scatter of activations, four per block

    experts        (expert_parallel.py)           on a second mesh over the same ranks
    efsdp          expert parameters              all-gather and reduce-scatter, per block
    ep             experts                        all-to-all of tokens, four per block

Every rank has one coordinate on each dim; a group is the ranks that differ in one coordinate only. Dims of one rank
share one group without communication, so the code needs no special case for them. In traces and NCCL's logs a group is
named after its dims: mesh_tp, mesh_dp_shard_cp. The group of all ranks is torch's own, default_pg.

Effect: process groups exist; nothing is sharded yet. Sources: DeviceMesh; arXiv:2410.06511.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lite.config.layout import MESH_DIMS, Layout


@dataclass(frozen=True)
class Mesh:
    """The world mesh and its sub-meshes. Each holds the process groups of this rank."""

    world: DeviceMesh  # (pp, dp_replicate, dp_shard, cp, tp)
    fsdp_mesh: DeviceMesh  # what fully_shard gets: 1-D (shard) or 2-D (replicate, shard); shard = dp_shard x cp
    dp_cp_mesh: DeviceMesh  # 1-D: ranks whose tokens differ, dp_replicate x dp_shard x cp
    loss_mesh: DeviceMesh  # 1-D: ranks whose losses are added up, pp x dp x cp: all but tp
    expert_fsdp_mesh: DeviceMesh | None = None  # what fully_shard gets for experts: (efsdp) or (dp_replicate, efsdp)
    ep: DeviceMesh | None = None  # 1-D: ranks that share the experts of a layer; both None: the model has none

    # Cached, because torch makes a new slice of a mesh, in 0.15 ms, whenever it is indexed.

    @cached_property
    def pp(self) -> DeviceMesh:
        return self.world["pp"]

    @cached_property
    def cp(self) -> DeviceMesh:
        return self.world["cp"]

    @cached_property
    def tp(self) -> DeviceMesh:
        return self.world["tp"]

    def coordinates(self) -> dict[str, int]:
        """Return the coordinate of this rank on each mesh dim."""
        return dict(zip(MESH_DIMS, self.world.get_coordinate(), strict=True))

    @property
    def data_rank(self) -> int:
        """Index of this rank's rows among those of the global batch, 0 .. layout.dp - 1."""
        own = self.coordinates()
        return own["dp_replicate"] * self.world["dp_shard"].size() + own["dp_shard"]


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Make the process groups of a layout. Collective: every rank of the world calls it."""
    # "fake" does nothing, which is right for one rank. No other rank takes part in making this group.
    alone = dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True, group_desc="one rank")
    world = make_mesh(device_type, layout.degrees, alone)
    shard = join_dims(world, "dp_shard", "cp")
    experts = {}
    if layout.ep:
        degrees = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "efsdp": layout.efsdp, "ep": layout.ep}
        mesh = make_mesh(device_type, degrees, alone, own=("efsdp", "ep"))
        shared = mesh["dp_replicate", "efsdp"] if layout.dp_replicate > 1 else mesh["efsdp"]
        experts = {"expert_fsdp_mesh": shared, "ep": mesh["ep"]}
    return Mesh(
        world=world,
        # A 1-D mesh shards. A second dim in front of it replicates, which adds an all-reduce to FSDP.
        fsdp_mesh=DeviceMesh._concatenate([world["dp_replicate"], shard]) if layout.dp_replicate > 1 else shard,
        dp_cp_mesh=join_dims(world, "dp_replicate", "dp_shard", "cp"),
        loss_mesh=join_dims(world, "pp", "dp_replicate", "dp_shard", "cp"),
        **experts,
    )


def make_mesh(
    device_type: str, degrees: dict[str, int], alone: dist.ProcessGroup, own: tuple[str, ...] = ()
) -> DeviceMesh:
    """Make a mesh of all ranks. Dims of one rank get the group `alone`, the others a group of their own.

    `own`: dims that do not use the default group even if they span all ranks. The tokens of one layer then do not queue
    behind the parameters of the next.
    """
    used = {dim: degree for dim, degree in degrees.items() if degree > 1}
    groups = dict.fromkeys(degrees, alone)
    if used:
        named = {dim: dist.get_backend() for dim in own if dim in used}  # with a backend named, torch makes a new group
        mesh = init_device_mesh(
            device_type, tuple(used.values()), mesh_dim_names=tuple(used), backend_override=named or None
        )
        groups |= {dim: mesh.get_group(dim) for dim in used}
    ranks = torch.arange(dist.get_world_size()).view(*degrees.values())
    return DeviceMesh.from_group(list(groups.values()), device_type, ranks, mesh_dim_names=tuple(degrees))


def join_dims(world: DeviceMesh, *dims: str) -> DeviceMesh:
    """Return the 1-D mesh over several dims. It reuses the group of a single dim, or of the same dims joined before."""
    used = [dim for dim in dims if world[dim].size() > 1]
    if len(used) > 1:
        return world[tuple(used)]._flatten()
    return world[used[0] if used else dims[0]]
