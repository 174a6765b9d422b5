"""Causal attention over the ranks of `cp`: fetch keys and values, attend part by part, merge the parts.

Each rank has an early and a late piece of the sequence (context_parallel.py). Its queries attend to the keys of

    an earlier rank    all queries attend to the early piece, no query to the late piece
    the same rank      all queries, causal: the positions increase from the early to the late piece
    a later rank       late queries attend to both pieces, early queries to none

Each case is a plain rectangle or triangle, so no masks are needed, and each rank computes the same number of query-key
pairs. The parts are merged by their log-sum-exp, lse (attention_kernels.py).

    method      forward                                     backward
    allgather   P(n-1)/n, overlaps with the local part      the same, then a reduce-scatter of fp32 gradients
    ring        P per round, n-1 rounds, overlaps compute   the same, and n rounds of fp32 gradients, which follow
                                                            their keys one step behind

For `allgather`, P = 2*B*K*S*E*2 bytes in bf16, the keys and values of all ranks. For `ring` P is 1/n of this, so the
totals are equal. For backward a rank saves its local query, key, value, out and lse, and nothing from other ranks.
While a layer computes, `allgather` stores the keys, values and gradients of all ranks; `ring` stores two ranks'.

Legend: B batch, S full sequence over n ranks, H query heads, K key/value heads, E head dim, C = S/(2n) one piece.
Sources: arXiv:2310.01889.
Effect: defines a torch operator with its backward, which context_parallel.py calls.
"""

import torch
from torch import Tensor

from torchtitan_lite.parallel.attention_kernels import choose_kernel, merge_into

collectives = torch.ops._c10d_functional  # asynchronous: overlap with compute until wait_tensor

ALL = slice(None)

# ---------------------------------------------------------------- forward


def attend(
    query: Tensor, key: Tensor, value: Tensor, method: str, group: str, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor]:
    """query (B, H, 2C, E), key and value (B, K, 2C, E) of this rank -> out (B, H, 2C, E), lse (B, H, 2C) fp32.

    The memory order of out is (B, 2C, H, E), as the output projection reads it. Collective.
    """
    out, lse = METHODS[method][0](query, torch.stack((key, value)), group, rank, n_ranks)
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


def attend_gathered(query: Tensor, key_value: Tensor, group: str, rank: int, n_ranks: int) -> tuple[Tensor, Tensor]:
    # (n * 2, B, K, 2C, E); overlaps with the local part
    gathered = collectives.all_gather_into_tensor(key_value, n_ranks, group)
    out, lse = attend_part(query, key_value, causal=True)
    for queries, others in visible_of_others(collectives.wait_tensor(gathered), rank, n_ranks):
        merge_part(out, lse, query, join(others), queries)
    return out, lse


def attend_around_ring(query: Tensor, key_value: Tensor, group: str, rank: int, n_ranks: int) -> tuple[Tensor, Tensor]:
    arriving = pass_on(key_value, group, rank, n_ranks)
    out, lse = attend_part(query, key_value, causal=True)
    for step in range(1, n_ranks):
        key_value = collectives.wait_tensor(arriving).view_as(key_value)
        if step < n_ranks - 1:
            arriving = pass_on(key_value, group, rank, n_ranks)  # overlaps with this part
        queries, keys = visible_of_one(rank, (rank - step) % n_ranks, query.shape[2] // 2)
        merge_part(out, lse, query, key_value[:, :, :, keys], queries)
    return out, lse


def attend_part(query: Tensor, key_value: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attend to some of the keys. Return out (B, H, queries, E) and lse (B, H, queries), both fp32."""
    out, lse = choose_kernel(query).attend(query, *key_value, causal)
    return out.float(), lse.float()


def merge_part(out: Tensor, lse: Tensor, query: Tensor, key_value: Tensor, queries: slice) -> None:
    new_out, new_lse = attend_part(query[:, :, queries], key_value)
    merge_into(out[:, :, queries], lse[:, :, queries], new_out, new_lse)


def visible_of_others(gathered: Tensor, rank: int, n_ranks: int) -> list[tuple[slice, Tensor]]:
    """List pairs (queries, visible keys), as views (ranks, 2, B, K, C or 2C, E) of gathered (n * 2, B, K, 2C, E)."""
    half = gathered.shape[3] // 2
    gathered = gathered.unflatten(0, (n_ranks, 2))
    parts = [(ALL, gathered[:rank, :, :, :, :half]), (slice(half, None), gathered[rank + 1 :])]
    return [(queries, others) for queries, others in parts if len(others)]


def visible_of_one(rank: int, source: int, half: int) -> tuple[slice, slice]:
    """Return the slice of this rank's queries that attend to keys of `source`, and the slice of these keys."""
    return (ALL, slice(0, half)) if source < rank else (slice(half, None), ALL)


def join(others: Tensor) -> Tensor:
    """(ranks, 2, B, K, L, E) -> (2, B, K, ranks * L, E). Without a mask, the order of the keys does not matter."""
    return others.movedim(0, 3).flatten(3, 4)


def pass_on(tensor: Tensor, group: str, rank: int, n_ranks: int) -> Tensor:
    """Send to the next rank and receive from the previous rank, P bytes each. Wait for the flat result before use."""
    to_next, from_last = [0] * n_ranks, [0] * n_ranks
    to_next[(rank + 1) % n_ranks] = from_last[rank - 1] = tensor.numel()
    return collectives.all_to_all_single(tensor.flatten(), from_last, to_next, group)


# ---------------------------------------------------------------- backward


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    method: str,
    group: str,
    rank: int,
    n_ranks: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's query, and of its key and value, stacked (2, B, K, 2C, E). Collective."""
    saved = grad_out, query, out, lse
    grad_query, grad_key_value = METHODS[method][1](saved, torch.stack((key, value)), group, rank, n_ranks)
    # Kernels choose the strides of their results. Copy to the strides that register_fake promised torch.compile.
    return torch.empty_like(query).copy_(grad_query), grad_key_value.to(key.dtype).contiguous()


def attend_gathered_backward(
    saved: tuple[Tensor, ...], key_value: Tensor, group: str, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor]:
    gathered = collectives.all_gather_into_tensor(key_value, n_ranks, group)
    grad_query, own_grad = attend_part_backward(saved, key_value, causal=True)
    grads = grad_query.new_zeros((n_ranks * 2, *key_value.shape[1:]))
    grads.unflatten(0, (n_ranks, 2))[rank] = own_grad
    visible = visible_of_others(collectives.wait_tensor(gathered), rank, n_ranks)
    for (queries, others), (_, grads_of_others) in zip(visible, visible_of_others(grads, rank, n_ranks), strict=True):
        more, grad = attend_part_backward(saved, join(others), queries=queries)
        grad_query[:, :, queries] += more
        grads_of_others += grad.unflatten(3, (len(others), -1)).movedim(3, 0)
    own_grad = collectives.reduce_scatter_tensor(grads, "sum", n_ranks, group)
    return grad_query, collectives.wait_tensor(own_grad)


def attend_around_ring_backward(
    saved: tuple[Tensor, ...], key_value: Tensor, group: str, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor]:
    arriving = pass_on(key_value, group, rank, n_ranks)
    grad_query, grads = attend_part_backward(saved, key_value, causal=True)
    for step in range(1, n_ranks):
        grads_arriving = pass_on(grads, group, rank, n_ranks)
        key_value = collectives.wait_tensor(arriving).view_as(key_value)
        if step < n_ranks - 1:
            arriving = pass_on(key_value, group, rank, n_ranks)
        queries, keys = visible_of_one(rank, (rank - step) % n_ranks, saved[1].shape[2] // 2)
        more, grad = attend_part_backward(saved, key_value[:, :, :, keys], queries=queries)
        grad_query[:, :, queries] += more
        grads = collectives.wait_tensor(grads_arriving).view_as(grads)  # gradients of the current keys and values
        grads[:, :, :, keys] += grad
    home = pass_on(grads, group, rank, n_ranks)
    return grad_query, collectives.wait_tensor(home).view_as(grads)


def attend_part_backward(
    saved: tuple[Tensor, ...], key_value: Tensor, *, queries: slice = ALL, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return a part's contribution to the gradients, fp32: for its queries, and for its keys and values (stacked)."""
    grad_out, query, out, lse = (tensor[:, :, queries] for tensor in saved)
    grad_query, *grads = choose_kernel(query).attend_backward(
        grad_out, query, *key_value, out, lse.contiguous(), causal
    )
    return grad_query.float(), torch.stack(grads).float()


# ---------------------------------------------------------------- the torch operator

METHODS = {  # context_parallel_rotate_method -> forward, backward
    "allgather": (attend_gathered, attend_gathered_backward),
    "ring": (attend_around_ring, attend_around_ring_backward),
}

# torch.compile does not trace into the operator. Per-op recompute saves the operator's output, so it does not fetch
# keys again. A dispatch mode (such as a counter of bytes or FLOPs) can look inside by calling IMPLEMENTATIONS[op].

context_attention = torch.library.custom_op("torchtitan_lite::context_attention", attend, mutates_args=())
context_attention_backward = torch.library.custom_op(
    "torchtitan_lite::context_attention_backward", attend_backward, mutates_args=()
)
IMPLEMENTATIONS = {
    torch.ops.torchtitan_lite.context_attention.default: attend,
    torch.ops.torchtitan_lite.context_attention_backward.default: attend_backward,
}


@context_attention.register_fake
def _(query, key, value, method, group, rank, n_ranks):
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@context_attention_backward.register_fake
def _(grad_out, query, key, value, out, lse, method, group, rank, n_ranks):
    return torch.empty_like(query), key.new_empty((2, *key.shape))


def keep_for_backward(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output)


def differentiate(ctx, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of query, key and value. grad_lse is ignored, because no caller uses lse."""
    grad_query, grad_key_value = context_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return grad_query, *grad_key_value.unbind(), *(None for _ in ctx.options)


context_attention.register_autograd(differentiate, setup_context=keep_for_backward)
