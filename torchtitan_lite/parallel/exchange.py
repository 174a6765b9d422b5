"""Exchange plain tensors between the ranks of tp, cp or ep. Each function defines its own backward.

    over tp            tp rank 0    tp rank 1         forward           backward                where
    Gather             S[:S/2]      S[S/2:]    -> S   all-gather        reduce-scatter          before attention,
                                                                                                feed-forward and head
    GatherEqually      its logits   its logits -> 2   all-gather        nothing                 in the loss
    Scatter            partial sum  partial sum-> S/2 reduce-scatter    all-gather              after wo, w2, embedding
    add_tokens         its tokens   its tokens -> sum nothing           all-reduce              weights of norms
    over cp
    Gather             its pieces   its pieces -> S   all-gather        reduce-scatter          keys and values of
                                                                                                attention with masks
    over ep, or over tp (shared_heads.py)
    ExchangeRows       rows for 0 and 1        -> rows for this rank    all-to-all back         around the experts;
                                                                                                after wk, wv

The table is drawn for two ranks. P is the size of the full tensor in bytes. An all-reduce moves 2P(n-1)/n bytes per
rank, and each other collective moves P(n-1)/n. Each function waits for its collective immediately. On a GPU, the stream
waits, not the host. torch.compile sees the collectives as operators, so inductor may split them.

gloo takes 0.45 ms of CPU time to reduce-scatter 128 kB over two ranks (torch 2.13, two cores). Therefore, with gloo, an
all-to-all exchanges the chunks, and each rank adds the chunks that it receives. The all-to-all and the sum take 0.24 ms
for the same bytes.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.distributed.device_mesh import DeviceMesh

collectives = torch.ops._c10d_functional


class Ranks(NamedTuple):
    """Index of this rank on a mesh dim, number of ranks on this dim, and name of their process group."""

    own: int
    n: int
    group_name: str
    uses_gloo: bool = False


def list_ranks(mesh: DeviceMesh) -> Ranks:
    group = mesh.get_group()
    uses_gloo = dist.get_backend(group) == "gloo"
    return Ranks(mesh.get_local_rank(), mesh.size(), group.group_name, uses_gloo)


def all_gather(own: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Concatenate the tensors of all ranks along `dim`. Collective; not differentiable."""
    stacked = run_collective(
        collectives.all_gather_into_tensor, own.contiguous(), ranks.n, ranks.group_name
    )
    if is_stacked(own, dim):
        return stacked.view(1, -1, *own.shape[2:])
    return torch.cat(stacked.chunk(ranks.n), dim)


def reduce_scatter(whole: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Sum the tensors of all ranks, and return this rank's chunk along `dim`. Collective; not differentiable."""
    if is_stacked(whole, dim):
        stacked = whole.reshape(ranks.n, -1, *whole.shape[2:])
    else:
        stacked = torch.cat(whole.chunk(ranks.n, dim))
    if not ranks.uses_gloo or torch.compiler.is_compiling():
        return run_collective(
            collectives.reduce_scatter_tensor, stacked, "sum", ranks.n, ranks.group_name
        )
    n_rows = [len(stacked) // ranks.n] * ranks.n
    terms = all_to_all(stacked, ranks, n_rows, n_rows)
    return terms.unflatten(0, (ranks.n, -1)).sum(0)


def add_tokens(ranks: Ranks, gradient: Tensor) -> Tensor:
    """Sum the gradients of a replicated parameter over the ranks, which have different tokens. An all-reduce."""
    return run_collective(collectives.all_reduce, gradient, "sum", ranks.group_name)


def is_stacked(tensor: Tensor, dim: int) -> bool:
    """Return whether chunks along `dim` are contiguous, as in a batch of one sequence. Such chunks need no copy.

    Returns False in compiled code, which needs the copies: inductor recognizes a collective by its copies, and rewrites
    the collective (parallelism.enable_async_tensor_parallel).
    """
    return dim == 1 and len(tensor) == 1 and not torch.compiler.is_compiling()


def all_to_all(rows: Tensor, ranks: Ranks, received: list[int], sent: list[int]) -> Tensor:
    """Send rows to each rank, and return the received rows in rank order. Collective; not differentiable.

    `received` and `sent` are the numbers of rows from and to each rank.
    """
    return run_collective(
        collectives.all_to_all_single, rows.contiguous(), received, sent, ranks.group_name
    )


def run_collective(collective: OpOverloadPacket, *arguments) -> Tensor:
    """Run a collective and wait. Bypasses autograd, whose Python code takes longer than the collective."""
    if torch.compiler.is_compiling():
        return collectives.wait_tensor.default(collective.default(*arguments))
    with torch._C._AutoDispatchBelowAutograd():
        return collectives.wait_tensor.default(collective.default(*arguments))


class Gather(torch.autograd.Function):
    """All-gathers along `dim`, (B, S/tp, D) -> (B, S, D). The gradient on each rank is a partial sum."""

    @staticmethod
    def forward(ctx, own: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks = ranks
        ctx.dim = dim
        return all_gather(own, ranks, dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.ranks, ctx.dim), None, None


class GatherEqually(torch.autograd.Function):
    """All-gathers (...) -> (tp, ...). Backward does not communicate, so all ranks must apply the same computation to
    the result."""

    @staticmethod
    def forward(ctx, own: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_gather(own[None], ranks, 0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.ranks.own], None


class Scatter(torch.autograd.Function):
    """Reduce-scatters partial sums, (B, S, D) -> (B, S/tp, D)."""

    @staticmethod
    def forward(ctx, partial_sum: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return reduce_scatter(partial_sum, ranks, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.ranks, 1), None


class ExchangeRows(torch.autograd.Function):
    """Exchanges rows with all ranks, (sum of sent, D) -> (sum of received, D), in rank order."""

    @staticmethod
    def forward(ctx, rows: Tensor, received: list[int], sent: list[int], ranks: Ranks) -> Tensor:
        ctx.received = received
        ctx.sent = sent
        ctx.ranks = ranks
        return all_to_all(rows, ranks, received, sent)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.ranks, ctx.sent, ctx.received), None, None, None
