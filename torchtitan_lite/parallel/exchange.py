"""Exchange plain tensors between tensor- and expert-parallel ranks, by functions with their own backward.

    over tp             tp rank 0    tp rank 1         forward             backward             where
    gather_sequence     S[:S/2]      S[S/2:]    -> S   all-gather          reduce-scatter       before attention,
                                                                                                feed-forward and head
    scatter_sequence    part of sum  the other  -> S/2 reduce-scatter      all-gather           after wo, w2, embedding
    gather_vocabulary   V[:V/2]      V[V/2:]    -> V   all-gather          none: the own part   logits without a loss
    over ep
    exchange_rows       rows for 0 and 1        -> those for this rank     all-to-all, back     around the experts

Drawn for two ranks. Each collective moves P(n-1)/n bytes per rank, where P is the size of the whole tensor, and is
waited for at once: on a GPU the stream waits, not the host. torch.compile takes these operators as they are, so
inductor may split them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

collectives = torch.ops._c10d_functional


class Ranks(NamedTuple):
    """The ranks of a mesh dim, as collectives name them."""

    own: int
    n: int
    group_name: str


def list_ranks(mesh: DeviceMesh) -> Ranks:
    return Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name)


def all_gather(own: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Join the ranks' tensors along `dim`. Collective; not differentiable."""
    with below_autograd():
        gathered = collectives.all_gather_into_tensor.default(own.contiguous(), ranks.n, ranks.group_name)
        return torch.cat(collectives.wait_tensor.default(gathered).chunk(ranks.n), dim)


def reduce_scatter(whole: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Add the ranks' tensors up and keep this rank's part along `dim`. Collective; not differentiable."""
    with below_autograd():
        stacked = torch.cat(whole.chunk(ranks.n, dim))
        summed = collectives.reduce_scatter_tensor.default(stacked, "sum", ranks.n, ranks.group_name)
        return collectives.wait_tensor.default(summed)


def all_to_all(rows: Tensor, ranks: Ranks, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
    """Send each rank its rows, and return those that came, by rank. Collective; not differentiable.

    `received`, `sent`: rows from and for each rank; None: equally many.
    """
    with below_autograd():
        if sent is None:
            received = sent = [len(rows) // ranks.n] * ranks.n
        arrived = collectives.all_to_all_single.default(rows.contiguous(), received, sent, ranks.group_name)
        return collectives.wait_tensor.default(arrived)


def below_autograd() -> AbstractContextManager:
    """Context manager: operators skip autograd, which for collectives is Python code that takes longer than they do."""
    return nullcontext() if torch.compiler.is_compiling() else torch._C._AutoDispatchBelowAutograd()


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_gather(own, ranks, dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.ranks, dim=1), None


class ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial_sum: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return reduce_scatter(partial_sum, ranks, dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.ranks, dim=1), None


class GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_gather(own, ranks, dim=2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.ranks.n, dim=2)[ctx.ranks.own], None  # every rank has the same gradient of all logits


class ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, received: list[int], sent: list[int], ranks: Ranks) -> Tensor:
        ctx.back = sent, received
        ctx.ranks = ranks
        return all_to_all(rows, ranks, received, sent)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.ranks, *ctx.back), None, None, None


def gather_sequence(own: Tensor, ranks: Ranks) -> Tensor:
    """(B, S/tp, D) -> (B, S, D): all-gathers over tp. In backward each rank has a part of the gradient's sum."""
    return GatherSequence.apply(own, ranks)


def scatter_sequence(partial_sum: Tensor, ranks: Ranks) -> Tensor:
    """Partial sums (B, S, D) -> (B, S/tp, D): reduce-scatters over tp."""
    return ScatterSequence.apply(partial_sum, ranks)


def gather_vocabulary(own: Tensor, ranks: Ranks) -> Tensor:
    """(B, S, V/tp) -> (B, S, V): all-gathers over tp."""
    return GatherVocabulary.apply(own, ranks)


def exchange_rows(rows: Tensor, received: list[int], sent: list[int], ranks: Ranks) -> Tensor:
    """(sum of sent, D) -> (sum of received, D), sorted by rank: all-to-all over ep."""
    return ExchangeRows.apply(rows, received, sent, ranks)
