"""Time-outs of [comm]: how long a rank waits in a collective, a send or a receive before it raises.

    groups of the mesh, pipeline   init_timeout_seconds until the first step is done, train_timeout_seconds after it
    groups of the host             init_timeout_seconds throughout: in them a rank waits for the slowest disk of all

In their first step ranks compile, connect and read at different speeds; after it, a peer that is late by many steps is
hung. A save or an export takes as long as its disk. torch gives 30 minutes to a group that is made without a time-out.

Effect: on how long ranks wait; and the stages of a pipeline on gloo get another group of the same ranks.
"""

from collections.abc import Collection
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _PipelineSchedule

from torchtitan_lite.parallel.pipeline import list_stages


def list_groups() -> list[dist.ProcessGroup]:
    """List every process group of this rank: DeviceMesh, FSDP, torch's pipeline and this code make them.

    torch has no public list of them; its private map holds those of this rank only.
    """
    return list(dist.distributed_c10d._world.pg_map)


def set_timeouts(
    timeout_s: int, schedule: _PipelineSchedule | None, *, besides: Collection[dist.ProcessGroup] = ()
) -> None:
    """Give this time-out to every group of this process, but for those in `besides`, which keep theirs.

    Collective: no rank may wait with a short time-out for one that is still in its first step.
    """
    dist.barrier()
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
