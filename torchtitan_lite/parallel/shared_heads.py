"""Tensor parallel with fewer key/value heads than ranks. Loaded only for such a layout.

If K heads are split over tp ranks and K < tp, tp/K ranks use the same head. Each of these ranks stores and updates its
own slice of the head, as in any colwise module, so every parameter is stored once. The ranks of a head exchange the
outputs of their slices (drawn for tp=4, K=2):

                      tp rank 0     tp rank 1     tp rank 2     tp rank 3
    wk.weight         head 0: top   head 0: rest  head 1: top   head 1: rest       (K*E/tp, D)  Shard(0)
    key (B, S, E)     head 0        head 0        head 1        head 1             after the exchange
    its gradient      from the queries of this rank: partial sums, added by the exchange in backward

Traffic: in forward and in backward, the tp/K ranks of a head exchange keys in one all-to-all and values in another.
Each all-to-all moves P(n-1)/n per rank, where P = B*S*E*2 bytes and n = tp/K. With E = 128 and D = 4096, P is 1/32 of
the P of the other exchanges in a block (tensor_parallel.py).

Replicated weights would need no exchange in forward. However, either each rank would store all K heads, or FSDP, the
gradient norm and checkpoints would need a second mesh for the ranks of a head.
"""

import torch
from torch import Tensor, nn

from torchtitan_lite.parallel.exchange import ExchangeRows, Ranks
from torchtitan_lite.parallel.tensor_parallel import ColwiseParallel


class SharedHeads(ColwiseParallel):
    """Computes this rank's slice of one key/value head, and fetches the other slices: x (B, S, D) -> (B, S, E)."""

    def __init__(self, n_heads: int):
        super().__init__()
        self.n_heads = n_heads

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        own = super().compute(module, ranks, x)
        return share_heads(own, ranks, ranks.n // self.n_heads)


def share_heads(own: Tensor, ranks: Ranks, n_sharing: int) -> Tensor:
    """Concatenate the features of the `n_sharing` ranks that use one head, (B, S, E/n_sharing) -> (B, S, E).

    This is an all-gather among the ranks of a head, written as an all-to-all that sends nothing to the ranks of other
    heads. In backward, each rank receives the gradients of its features from all ranks of the head, and adds them.
    """
    first = ranks.own // n_sharing * n_sharing
    sent = [0] * ranks.n
    sent[first : first + n_sharing] = [len(own)] * n_sharing
    copies = own.expand(n_sharing, *own.shape).flatten(0, 1)
    slices = ExchangeRows.apply(copies, sent, sent, ranks)
    return torch.cat(slices.chunk(n_sharing), -1)
