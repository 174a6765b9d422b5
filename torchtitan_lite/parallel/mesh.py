"""From a layout to process groups: one device, one DeviceMesh of five dims, and the sub-meshes that serve a purpose.

    dim            split                          communication
    pp             layers                         send/recv of hidden states, per microbatch
    dp_replicate   sequences                      all-reduce of gradients, per backward
    dp_shard       sequences and parameters       all-gather and reduce-scatter of parameters, per block
    cp             each sequence                  all-gather or send/recv of keys and values, per block
    tp             heads, ffn, vocabulary         all-gather and reduce-scatter of activations, four per block

    of experts     (expert_parallel.py)           on a second mesh over the same ranks
    efsdp          expert parameters              all-gather and reduce-scatter, per block
    ep             experts                        all-to-all of tokens, four per block

Every rank has one coordinate on each dim; a group is the ranks that differ in one coordinate only. Groups of one rank
are created too: they cost nothing, and the code needs no special case.

How long a rank waits in a collective, a send or a receive before it raises ([comm]):

    groups of the mesh, pipeline   init_timeout_seconds until the first step is done, train_timeout_seconds after it
    groups of the host             init_timeout_seconds throughout: in them a rank waits for the slowest disk of all

In the first step ranks compile, connect and read at different speeds. After it, a peer that is late by many steps is
hung. A save takes as long as its disk. torch gives 30 minutes to a group created without a time-out.

Effect: process groups exist; nothing is sharded yet. Sources: DeviceMesh; arXiv:2410.06511.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import _redistribute, debug

from torchtitan_lite.config.layout import MESH_DIMS, Layout
from torchtitan_lite.parallel.pipeline import list_stages


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
    world = init_device_mesh(device_type, tuple(layout.degrees.values()), mesh_dim_names=MESH_DIMS)
    shard = world["dp_shard", "cp"]._flatten("shard")
    replicate = world["dp_replicate"]
    of_experts = {}
    if layout.ep:
        sizes = (layout.pp, layout.dp_replicate, layout.efsdp, layout.ep)
        # With a backend of its own to name, a group of all ranks is a new one: the tokens of one layer do not queue
        # behind the parameters of the next, and the group has the name of its dim.
        own_groups = dict.fromkeys(("efsdp", "ep"), dist.get_backend())
        experts = init_device_mesh(
            device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"), backend_override=own_groups
        )
        shared = experts["dp_replicate", "efsdp"] if layout.dp_replicate > 1 else experts["efsdp"]
        of_experts = {"expert_fsdp_mesh": shared, "ep": experts["ep"]}
    return Mesh(
        world=world,
        # A 1-D mesh shards; a second dim in front of it replicates, which costs FSDP an all-reduce: only where needed.
        fsdp_mesh=DeviceMesh._concatenate([replicate, shard]) if layout.dp_replicate > 1 else shard,
        dp_cp_mesh=world["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp"),
        loss_mesh=world["pp", "dp_replicate", "dp_shard", "cp"]._flatten("loss"),
        **of_experts,
    )


def choose_device(local_rank: int, device_type: str) -> torch.device:
    """Return this process's GPU, or the CPU. `device_type` comes from config/machine.py.

    Raises RuntimeError if the driver and this build of torch disagree: one rank on the CPU would stop all others.
    """
    if device_type == "cpu":
        if torch.cuda.is_available():
            raise RuntimeError(
                "torch sees GPUs, and nvidia-smi on this host lists none: repair nvidia-smi, "
                "or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "nvidia-smi lists GPUs that this torch cannot use: install a CUDA build of torch, "
            "or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def start_process_group(
    device: torch.device, timeout_s: int, restarts: int, *, offload: bool, is_pipelined: bool
) -> None:
    """Join the job's process group (its address is in torchrun's environment): NCCL on CUDA, gloo on CPU.

    `offload`: gradients are on the host, and their norm is a CPU tensor, which NCCL cannot reduce: gloo too.
    `is_pipelined`: NCCL connects when ranks first talk. A group that connects at once (`device_id`) runs all sends and
    receives of a pipeline on one stream, and each waits for the one before it.
    `timeout_s` is for the first steps, in which ranks compile and read at different speeds.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        choose_backend(device, offload),
        # torchrun keeps one store over all restarts, and in it the addresses of ranks that are dead: without a prefix
        # of its own, a restarted rank may read those, and fail to connect or wait for ever (torch 2.13).
        store=dist.PrefixStore(f"restart-{restarts}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and not is_pipelined else None,
    )


def choose_backend(device: torch.device, offload: bool) -> str:
    """Return the backend in torch's spelling. Sub-groups inherit it."""
    if device.type == "cpu":
        return "gloo"
    return "cuda:nccl,cpu:gloo" if offload else "nccl"


def make_host_group(name: str, timeout_s: int) -> dist.ProcessGroup:
    """Make a group of all ranks for objects and CPU tensors, to be used by one thread. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=name)


def forget_groups() -> None:
    """Clear torch's caches by mesh: an equal mesh of a later job must not get the groups of an earlier one."""
    torch._dynamo.reset()
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # not in every torch
        _redistribute.clear_redistribute_planner_cache()


# ---------------------------------------------------------------- time-outs


def list_groups() -> list[dist.ProcessGroup]:
    """List every process group of this rank: DeviceMesh, FSDP, torch's pipeline and this code make them.

    torch has no public list of them; its private map holds those of this rank only.
    """
    return list(dist.distributed_c10d._world.pg_map)


def set_timeouts(
    timeout_s: int,
    schedule: _PipelineSchedule | None,
    *,
    host_group: dist.ProcessGroup,
    besides: Collection[dist.ProcessGroup] = (),
) -> None:
    """Set the time-out of every group of this process, except the groups in `besides`.

    Collective: no rank may wait with a short time-out for one that is still in its first step.
    """
    dist.barrier(host_group)
    timeout = timedelta(seconds=timeout_s)
    for group in list_groups():
        if group not in besides:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    renew_pipeline_group(timeout, schedule)


def renew_pipeline_group(timeout: timedelta, schedule: _PipelineSchedule | None) -> None:
    """Give the stages of this rank a new group with this time-out, if they use gloo.

    Gloo's send and receive keep the time-out with which their group was made; one that is set later applies to
    collectives only (torch 2.13). The old group stays, idle: its name in the store must not be used again.
    """
    stages = list_stages(schedule)
    if stages and dist.get_backend(stages[0].group) == "gloo":
        ranks = dist.get_process_group_ranks(stages[0].group)
        group = dist.new_group(
            ranks, timeout=timeout, backend="gloo", use_local_synchronization=True, group_desc="pipeline"
        )
        for stage in stages:
            stage.group = group
            if hasattr(stage, "_downstream_group"):  # torch 2.14 has two more names for it
                stage._downstream_group = stage._upstream_group = group
