"""Tied embeddings in a pipeline: the first stage owns the matrix, and the last stage computes with a copy of it.

    before the forward of a step      the last stage receives the weights             one broadcast
    after the backward of a step      the first stage adds the gradient of the copy   one all-reduce

Each moves V*D*4 bytes, divided by the ranks that share the matrix (tp, dp_shard x cp), between the two ranks. In a V
schedule, both stages are on one rank, which copies and adds.

The copy cannot differ from the matrix, because it is overwritten before every forward. It is not a parameter of the
run: it has no optimizer state, and counts neither in the gradient norm nor in a checkpoint.

Effect: `output.weight` of the last stage follows `tok_embeddings.weight` of the first.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class TiedMatrix:
    """The matrix on the ranks of the first and the last stage. Both hold the same shard of it."""

    owner: Tensor | None  # tok_embeddings.weight; None: another rank has the first stage
    copy: Tensor | None  # output.weight; None: another rank has the last stage
    group: (
        dist.ProcessGroup | None
    )  # the ranks of both stages, first the owner; None: the same rank

    @torch.no_grad()
    def send_weights(self) -> None:
        """Overwrite the copy, and forget its gradient. Collective over the group."""
        if self.copy is not None:
            self.copy.grad = None
        if self.group is None:
            get_local(self.copy).copy_(get_local(self.owner))
        else:
            dist.broadcast(get_local(self.pick()).detach(), group=self.group, group_src=0)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradient of the copy to the gradient of the owner. Collective over the group."""
        if self.group is None:
            get_local(self.owner.grad).add_(get_local(self.copy.grad))
        else:
            dist.all_reduce(get_local(self.pick().grad), group=self.group)

    def pick(self) -> Tensor:
        return self.owner if self.copy is None else self.copy


def get_local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
