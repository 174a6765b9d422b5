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
totals are equal. A rank saves only local tensors for backward: query, key, value, out and lse.
While a layer computes, `allgather` stores the keys, values and gradients of all ranks; `ring` stores two ranks'.

Legend: B batch, S full sequence over n ranks, H query heads, K key/value heads, E head dim, C = S/(2n) one piece.
Sources: arXiv:2310.01889.
Effect: defines a torch operator with its backward, which context_parallel.py calls.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan_lite.parallel.attention_kernels import (
    Attention,
    choose_kernel,
    merge_into,
)
from torchtitan_lite.parallel.exchange import Ranks

collectives = torch.ops._c10d_functional  # asynchronous: overlap with compute until wait_tensor

ALL = slice(None)

Gradients = tuple[Tensor, Tensor]  # of query; of key and value, stacked
Saved = tuple[Tensor, ...]  # grad_out, query, out, lse of this rank

# ---------------------------------------------------------------- forward


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: str,
    group: str,
    rank: int,
    n_ranks: int,
) -> Attention:
    """query (B, H, 2C, E), key and value (B, K, 2C, E) of this rank -> out (B, H, 2C, E), lse (B, H, 2C) fp32.

    The memory order of out is (B, 2C, H, E), as the output projection reads it. Collective.
    """
    key_value = torch.stack((key, value))
    ranks = Ranks(rank, n_ranks, group)
    forward, _ = METHODS[method]
    out, lse = forward(query, key_value, ranks)
    tokens_first = out.to(query.dtype).transpose(1, 2).contiguous()
    return tokens_first.transpose(1, 2), lse.contiguous()


def attend_gathered(query: Tensor, key_value: Tensor, ranks: Ranks) -> Attention:
    half = query.shape[2] // 2
    gathered = collectives.all_gather_into_tensor(
        key_value,
        ranks.n,
        ranks.group_name,
    )
    out, lse = attend_part(query, key_value, causal=True)  # overlaps with the all-gather
    gathered = collectives.wait_tensor(gathered).view(
        ranks.n, *key_value.shape
    )  # (n, 2, B, K, 2C, E)
    for queries, sources, keys in visible_of_others(ranks, half):
        visible = gathered[sources, :, :, :, keys]
        merge_part(out, lse, query, queries, join(visible))
    return out, lse


def attend_around_ring(query: Tensor, key_value: Tensor, ranks: Ranks) -> Attention:
    half = query.shape[2] // 2
    arriving = pass_on(key_value, ranks)
    out, lse = attend_part(query, key_value, causal=True)
    for step in range(1, ranks.n):
        key_value = collectives.wait_tensor(arriving).view_as(key_value)
        if step < ranks.n - 1:
            arriving = pass_on(key_value, ranks)  # overlaps with this part
        source = (ranks.own - step) % ranks.n
        queries, keys = visible_of_one(ranks.own, source, half)
        merge_part(
            out,
            lse,
            query,
            queries,
            key_value[:, :, :, keys],
        )
    return out, lse


def attend_part(query: Tensor, key_value: Tensor, *, causal: bool = False) -> Attention:
    """Attend to some of the keys. Return out (B, H, queries, E) and lse (B, H, queries), both fp32."""
    out, lse = choose_kernel(query).attend(query, *key_value, causal)
    return out.float(), lse.float()


def merge_part(
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    queries: slice,
    key_value: Tensor,
) -> None:
    """Attend from some queries to more keys, and merge the result into (out, lse) in place."""
    part_out, part_lse = attend_part(query[:, :, queries], key_value)
    merge_into(
        out[:, :, queries],
        lse[:, :, queries],
        part_out,
        part_lse,
    )


def visible_of_others(ranks: Ranks, half: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield (queries, ranks, keys): these queries of this rank attend to these keys of each of these ranks."""
    if ranks.own > 0:
        yield ALL, slice(0, ranks.own), slice(0, half)
    if ranks.own < ranks.n - 1:
        yield slice(half, None), slice(ranks.own + 1, ranks.n), ALL


def visible_of_one(rank: int, source: int, half: int) -> tuple[slice, slice]:
    """Return the slice of this rank's queries that attend to keys of `source`, and the slice of these keys."""
    if source < rank:
        return ALL, slice(0, half)
    return slice(half, None), ALL


def join(visible: Tensor) -> Tensor:
    """(ranks, 2, B, K, L, E) -> (2, B, K, ranks * L, E). Without a mask, the order of the keys does not matter."""
    return visible.movedim(0, 3).flatten(3, 4)


def pass_on(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Send to the next rank and receive from the previous rank, P bytes each. Wait for the flat result before use."""
    sent = [0] * ranks.n
    received = [0] * ranks.n
    sent[(ranks.own + 1) % ranks.n] = tensor.numel()
    received[ranks.own - 1] = tensor.numel()
    return collectives.all_to_all_single(
        tensor.flatten(),
        received,
        sent,
        ranks.group_name,
    )


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
) -> Gradients:
    """Return the gradients of this rank's query, and of its key and value, stacked (2, B, K, 2C, E). Collective."""
    saved = grad_out, query, out, lse
    key_value = torch.stack((key, value))
    ranks = Ranks(rank, n_ranks, group)
    _, backward = METHODS[method]
    grad_query, grads = backward(saved, key_value, ranks)
    # Kernels choose the strides of their results. Copy to the strides that register_fake promised torch.compile.
    return torch.empty_like(query).copy_(grad_query), grads.to(key.dtype).contiguous()


def attend_gathered_backward(saved: Saved, key_value: Tensor, ranks: Ranks) -> Gradients:
    half = key_value.shape[3] // 2
    gathered = collectives.all_gather_into_tensor(
        key_value,
        ranks.n,
        ranks.group_name,
    )
    grad_query, local_grads = attend_part_backward(saved, key_value, ALL, causal=True)
    grads = grad_query.new_zeros((ranks.n, *key_value.shape))
    grads[ranks.own] = local_grads
    gathered = collectives.wait_tensor(gathered).view_as(grads)
    for queries, sources, keys in visible_of_others(ranks, half):
        visible = gathered[sources, :, :, :, keys]
        grad_queries, grad_keys = attend_part_backward(saved, join(visible), queries)
        grad_query[:, :, queries] += grad_queries
        by_rank = grad_keys.unflatten(3, (len(visible), -1))
        grads[sources, :, :, :, keys] += by_rank.movedim(3, 0)
    local_grads = collectives.reduce_scatter_tensor(
        grads.flatten(0, 1),
        "sum",
        ranks.n,
        ranks.group_name,
    )
    return grad_query, collectives.wait_tensor(local_grads)


def attend_around_ring_backward(saved: Saved, key_value: Tensor, ranks: Ranks) -> Gradients:
    half = key_value.shape[3] // 2
    arriving = pass_on(key_value, ranks)
    grad_query, grads = attend_part_backward(saved, key_value, ALL, causal=True)
    for step in range(1, ranks.n):
        grads_arriving = pass_on(grads, ranks)
        key_value = collectives.wait_tensor(arriving).view_as(key_value)
        if step < ranks.n - 1:
            arriving = pass_on(key_value, ranks)
        source = (ranks.own - step) % ranks.n
        queries, keys = visible_of_one(ranks.own, source, half)
        grad_queries, grad_keys = attend_part_backward(
            saved,
            key_value[:, :, :, keys],
            queries,
        )
        grad_query[:, :, queries] += grad_queries
        grads = collectives.wait_tensor(grads_arriving).view_as(
            grads
        )  # gradients of the current keys and values
        grads[:, :, :, keys] += grad_keys
    home = pass_on(grads, ranks)
    return grad_query, collectives.wait_tensor(home).view_as(grads)


def attend_part_backward(
    saved: Saved,
    key_value: Tensor,
    queries: slice,
    causal: bool = False,
) -> Gradients:
    """Return a part's contribution to the gradients, fp32: for its queries, and for its keys and values (stacked)."""
    grad_out, query, out, lse = [tensor[:, :, queries] for tensor in saved]
    kernel = choose_kernel(query)
    grad_query, *grads = kernel.attend_backward(
        grad_out,
        query,
        *key_value,
        out,
        lse.contiguous(),
        causal,
    )
    return grad_query.float(), torch.stack(grads).float()


# ---------------------------------------------------------------- the torch operator

METHODS = {  # context_parallel_rotate_method -> forward, backward
    "allgather": (attend_gathered, attend_gathered_backward),
    "ring": (attend_around_ring, attend_around_ring_backward),
}

# torch.compile does not trace into the operator. Per-op recompute saves the operator's output, so it does not fetch
# keys again. A dispatch mode (such as a counter of bytes or FLOPs) can look inside by calling IMPLEMENTATIONS[op].

context_attention = torch.library.custom_op(
    "torchtitan_lite::context_attention",
    attend,
    mutates_args=(),
)
context_attention_backward = torch.library.custom_op(
    "torchtitan_lite::context_attention_backward",
    attend_backward,
    mutates_args=(),
)
IMPLEMENTATIONS = {
    torch.ops.torchtitan_lite.context_attention.default: attend,
    torch.ops.torchtitan_lite.context_attention_backward.default: attend_backward,
}


@context_attention.register_fake
def _(query, *inputs):
    tokens_first = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    return tokens_first.transpose(1, 2), lse


@context_attention_backward.register_fake
def _(grad_out, query, key, *inputs):
    return torch.empty_like(query), key.new_empty((2, *key.shape))


def save_for_backward(ctx, inputs, output):
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output)


def differentiate(ctx, grad_out, grad_lse):
    """Compute the gradients of query, key and value. grad_lse is ignored, because no caller uses lse."""
    grad_query, grads = context_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return grad_query, *grads, None, None, None, None


context_attention.register_autograd(differentiate, setup_context=save_for_backward)
