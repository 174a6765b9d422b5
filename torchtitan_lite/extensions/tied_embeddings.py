"""Tie embeddings in a pipeline: the first stage owns the matrix, and the last stage computes with a copy of it.

    before the forward of a step      the last stage receives the weights             one broadcast
    after the backward of a step      the first stage adds the gradient of the copy   one all-reduce

Each collective moves V*D*4 bytes between the two ranks, divided by the number of ranks that shard the matrix (tp,
dp_shard x cp). In a V schedule, both stages are on one rank, which copies and adds locally.

The copy cannot differ from the matrix, because the copy is overwritten before every forward. The copy is not a
parameter of the run: it has no optimizer state, and is not part of the gradient norm or of a checkpoint.

Effect: `output.weight` of the last stage always equals `tok_embeddings.weight` of the first stage. In a run with tied
weights under pp, a TiedSchedule wraps the schedule.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _PipelineSchedule

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.dtensor import local_shard


@dataclass(frozen=True)
class TiedSchedule:
    """The pipeline schedule of a rank that has the matrix or its copy. The first and the last stage shard the matrix in
    the same way."""

    schedule: _PipelineSchedule
    owner: Tensor | None  # tok_embeddings.weight; None if another rank has the first stage
    copy: Tensor | None  # output.weight; None if another rank has the last stage
    # The first rank of the group has the owner, and the second has the copy. None if both stages are on one rank
    group: dist.ProcessGroup | None

    def step(self, *tokens: Tensor, **options) -> None:
        self.send_weights()  # broadcasts this rank's shard of the matrix from the first to the last stage
        self.schedule.step(*tokens, **options)
        self.sum_gradients()  # all-reduces the gradient of this rank's shard over the two stages

    def eval(self, *tokens: Tensor, **options) -> None:
        self.send_weights()  # broadcasts this rank's shard of the matrix
        self.schedule.eval(*tokens, **options)

    @torch.no_grad()
    def send_weights(self) -> None:
        """Overwrite the copy, and clear its gradient. Collective over the group."""
        if self.copy is not None:
            self.copy.grad = None
        if self.group is None:
            local_shard(self.copy).copy_(local_shard(self.owner))
        else:
            dist.broadcast(local_shard(self.pick()).detach(), group=self.group, group_src=0)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradient of the copy to the gradient of the owner. Collective over the group."""
        if not self.pick().requires_grad:  # a fork has frozen the matrix
            return
        if self.group is None:
            local_shard(self.owner.grad).add_(local_shard(self.copy.grad))
        else:
            dist.all_reduce(local_shard(self.pick().grad), group=self.group)

    def pick(self) -> Tensor:
        """Return the copy if this rank has it, otherwise the owner's matrix."""
        return self.owner if self.copy is None else self.copy


def tie_schedule(
    schedule: _PipelineSchedule,
    owner: Tensor | None,
    copy: Tensor | None,
    layout: Layout,
    pp: DeviceMesh,
) -> _PipelineSchedule | TiedSchedule:
    """Wrap the schedule if this rank has `owner`, `copy` or both. Collective over the ranks of both stages."""
    if copy is None and owner is None:
        return schedule
    pipeline = dist.get_process_group_ranks(pp.get_group())
    first = pipeline[layout.stage_ranks[0]]
    last = pipeline[layout.stage_ranks[-1]]
    group = None
    if first != last:
        ends = [first, last]
        group = dist.new_group(ends, use_local_synchronization=True, group_desc="mesh_pp_ends")
    return TiedSchedule(schedule, owner, copy, group)
