"""The chunked loss (model/chunked_loss.py) of a head whose vocabulary is split over mesh dim `tp` (drawn for tp=2).

    hidden (N, D)     all tokens on both ranks        weight (V, D)    top half       bottom half
    of one chunk      tp rank 0                       tp rank 1
    logits (n, V/2)   of the ids below V/2            of the ids from V/2 on
    exchanged         log of its sum of exponentials, and the target's logit or 0: 2 numbers a token
    loss ()           the same on both
    grad_hidden       what its ids contribute         what its ids contribute      partial sums, added in backward
    grad_weight       top half                        bottom half

Traffic: one all-gather of tp*n*8 bytes per chunk, waited for at once; in backward the reduce-scatter of grad_hidden,
which the plain head has too. With parallelism.disable_loss_parallel the logits themselves are gathered, N*V*2 bytes in
bf16 for all chunks together, and every rank computes the whole loss.

Source: Megatron-LM arXiv:1909.08053, section 3 (cross entropy of logits that stay split).
Effect: none on parameters; the head's loss takes local tensors and returns one.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from torchtitan_lite.model.chunked_loss import ChunkedLoss

collectives = torch.ops._c10d_functional  # compile takes them as they are


def build_chunked_loss(chunk_tokens: int, mesh: DeviceMesh, *, shard_loss: bool) -> ChunkedLoss:
    """Build the chunked loss of one rank of `mesh` (tp, of any size)."""
    if mesh.size() == 1:
        return ChunkedLoss(chunk_tokens)
    return (ShardedLoss if shard_loss else GatheredLoss)(chunk_tokens, mesh)


class LossOfShard(ChunkedLoss):
    """Base of both losses: this rank's rows of the weight, and partial sums as the gradient of `hidden`."""

    def __init__(self, chunk_tokens: int, mesh: DeviceMesh):
        super().__init__(chunk_tokens)
        self.rank, self.n_ranks, self.group_name = mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name

    def forward(self, hidden: DTensor, weight: DTensor, targets: Tensor) -> Tensor:
        """hidden (B, S, D) replicated, weight (V, D) sharded by rows, targets (B, S) -> () fp32. Collective."""
        return super().forward(hidden.to_local(grad_placements=[Partial()]), weight.to_local(), targets)

    def gather(self, own: Tensor) -> Tensor:
        """All-gathers along a new first dim, (...) -> (tp, ...)."""
        gathered = collectives.all_gather_into_tensor(own.contiguous(), self.n_ranks, self.group_name)
        return collectives.wait_tensor(gathered).view(self.n_ranks, *own.shape)


class ShardedLoss(LossOfShard):
    """Loss parallel: logits stay on the rank that computes them."""

    def __init__(self, chunk_tokens: int, mesh: DeviceMesh):
        super().__init__(chunk_tokens, mesh)
        self.share = self.rank

    def combine(self, log_total: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
        log_totals, of_targets = self.gather(torch.stack((log_total, of_target))).unbind(1)  # (tp, n, 1) each
        return log_totals.logsumexp(0), of_targets.sum(0)


class GatheredLoss(LossOfShard):
    """Without loss parallel: gathers all logits of a chunk, and keeps the gradient of its own."""

    def differentiate(self, logits: Tensor, targets: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        whole = self.gather(logits).transpose(0, 1).flatten(1)  # (n, V): ranks hold neighbouring ids
        loss, gradient = super().differentiate(whole, targets, with_gradient=with_gradient)
        return loss, gradient.chunk(self.n_ranks, dim=1)[self.rank] if with_gradient else None
