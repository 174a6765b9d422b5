"""Context parallel: split each sequence over mesh dim `cp` (drawn for cp=2, a sequence of 2*cp = 4 pieces).

    of a sequence of S tokens            cp rank 0      cp rank 1
    tokens, targets, positions (B, S)    piece 0 and 3  piece 1 and 2    "zig-zag": an early and a late one
    hidden states (B, S/cp, D)           of those       of those         with tp below, split again over tp
    query, key, value                    of those       of those
    keys that the queries see            0..3 of 4      0..2 of 4        fetched in attention, layer by layer
    doc_ids (B, S)                       all            all              visibility is decided across pieces
    parameters                           as dp_shard: FSDP shards them over dp_shard x cp

A token sees all tokens before it, so late pieces cost more than early ones; one of each gives all ranks equal work.
Everything but attention works on tokens alone and needs no change: the loss is a sum over tokens, and FSDP sums the
gradients.

Causal attention: what a rank's queries, an early piece and a late one, see of another rank's pieces:

    of an earlier rank    all queries see its early piece, none its late one
    own                   all queries, causal: positions rise from the early piece to the late one
    of a later rank       the late queries see both pieces, the early ones none

Each of the three is a plain rectangle or triangle, so no masks are needed, and each rank computes the same number of
query-key pairs. The parts are merged by their log-sum-exp (attention_kernels.py).

    method      forward                                         backward
    allgather   P(n-1)/n, behind the own part                   the same again, then a reduce-scatter of fp32 gradients
    ring        P per round, n-1 rounds, behind the compute     the same again, and n rounds of fp32 gradients, which
                                                                follow their keys one step behind

P is the bytes of one rank's keys and values, 2*B*K*(S/n)*E*2 in bf16, for `ring`; of all of them for `allgather`: in
sum the same. For backward a rank keeps its own query, key, value, out and lse, nothing of other ranks, so the memory
per rank falls with n. While a layer computes, `allgather` holds all keys and values and their gradients, `ring` those
of two ranks.

Document attention all-gathers keys and values and masks them: P(n-1)/n, P = 2*B*K*S*E*2 bytes in bf16, and a
reduce-scatter of as many in backward. The gathered keys and values are kept for backward, unless recompute (any mode
but "none") fetches them again.

Legend: B batch, S sequence of all n ranks, H query heads, K key/value heads, E head dim, C = S/(2n) one piece.
Sources: ring arXiv:2310.01889; zig-zag: Llama 3 arXiv:2407.21783, and arXiv:2311.09431 for another balanced order.
Effect: `attention.inner` of each block is another module, without parameters; FQNs do not change.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.model.attention import attend_within_documents
from torchtitan_lite.parallel.attention_kernels import choose_kernel, merge_into

collectives = torch.ops._c10d_functional  # asynchronous: they overlap with compute until wait_tensor

ALL = slice(None)


def plan_query_positions(rank: int | Tensor, n_ranks: int, seq_len: int, device: torch.device | None = None) -> Tensor:
    """Return the positions in the sequence of the tokens of a cp rank, (S/cp,), ascending.

    For a column of ranks (R, 1), return (R, S/cp). Positions are computed, because inductor cannot compile a mask of
    flex attention that reads the result of `cat`.
    """
    piece = seq_len // (2 * n_ranks)
    place = torch.arange(2 * piece, device=device)
    return place + torch.where(place < piece, rank, 2 * n_ranks - 2 - rank) * piece


def shard_sequence(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Keep this rank's pieces: (B, S) -> (B, S/cp). No communication: every rank has read the whole sequence."""
    return whole[:, plan_query_positions(mesh.get_local_rank(), mesh.size(), whole.shape[1], whole.device)]


def apply_context_parallel(part: nn.Module, mesh: DeviceMesh, *, attention: str, method: str) -> None:
    """Replace the attention of each block by one that fetches keys and values over cp.

    `attention` is model.attention, `method` context_parallel_rotate_method. Raises KeyError for a pair without a row of
    CONTEXT_ATTENTIONS; config/checks.py refuses it before launch, by `under_cp` of the row in config/choices.py.
    """
    build = CONTEXT_ATTENTIONS[attention, method]
    for block in part.layers.values():
        block.attention.inner = build(mesh)


class CausalContext(nn.Module):
    """Every token sees all tokens before it, on every rank."""

    def __init__(self, mesh: DeviceMesh, method: str):
        super().__init__()
        self.options = method, mesh.get_group().group_name, mesh.get_local_rank(), mesh.size()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, H, S/cp, E), key and value (B, K, S/cp, E) -> (B, H, S/cp, E). Collective."""
        return context_attention(query, key, value, *self.options)[0]


class DocumentContext(nn.Module):
    """Every token sees its document up to itself, on every rank."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.group_name, self.rank, self.n_ranks = mesh.get_group().group_name, mesh.get_local_rank(), mesh.size()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, H, S/cp, E), key and value (B, K, S/cp, E), doc_ids (B, S) -> (B, H, S/cp, E). Collective."""
        gathered = Gather.apply(torch.stack((key, value)), self.n_ranks, self.group_name)
        # Keys stay in the order of the ranks: the mask compares positions.
        keys, values = gathered.unflatten(0, (self.n_ranks, 2)).movedim(0, 3).flatten(3, 4)
        seq_len = keys.shape[2]
        ranks = torch.arange(self.n_ranks, device=query.device)[:, None]
        own = plan_query_positions(self.rank, self.n_ranks, seq_len, query.device)
        of_all = plan_query_positions(ranks, self.n_ranks, seq_len, query.device).flatten()
        return attend_within_documents(query, keys, values, doc_ids, query_positions=own, key_positions=of_all)


class Gather(torch.autograd.Function):
    """All-gathers along dim 0, (2, ...) -> (cp * 2, ...); in backward, reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx, own: Tensor, n_ranks: int, group_name: str) -> Tensor:
        ctx.group = n_ranks, group_name
        return collectives.wait_tensor(collectives.all_gather_into_tensor(own, *ctx.group))

    @staticmethod
    def backward(ctx, grads: Tensor) -> tuple[Tensor, None, None]:
        own_grads = collectives.reduce_scatter_tensor(grads.contiguous(), "sum", *ctx.group)
        return collectives.wait_tensor(own_grads), None, None


# (model.attention, context_parallel_rotate_method) -> the module that computes it, built from the cp mesh
CONTEXT_ATTENTIONS: dict[tuple[str, str], Callable[[DeviceMesh], nn.Module]] = {
    ("causal", "allgather"): partial(CausalContext, method="allgather"),
    ("causal", "ring"): partial(CausalContext, method="ring"),
    ("document", "allgather"): DocumentContext,
}


# ---------------------------------------------------------------- causal attention over ranks


def attend(
    query: Tensor, key: Tensor, value: Tensor, method: str, group_name: str, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor]:
    """query (B, H, 2C, E), key and value (B, K, 2C, E) of this rank -> out (B, H, 2C, E), lse (B, H, 2C) fp32.

    out is stored as (B, 2C, H, E), the order that the output projection reads. Collective.
    """
    out, lse = METHODS[method][0](query, torch.stack((key, value)), group_name, rank, n_ranks)
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    method: str,
    group_name: str,
    rank: int,
    n_ranks: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's query, and of its key and value, stacked (2, B, K, 2C, E). Collective."""
    saved = grad_out, query, out, lse
    grad_query, grad_key_value = METHODS[method][1](saved, torch.stack((key, value)), group_name, rank, n_ranks)
    # Restride the gradients to the layout that register_fake promised torch.compile: kernels choose their own.
    return torch.empty_like(query).copy_(grad_query), grad_key_value.to(key.dtype).contiguous()


def attend_gathered(
    query: Tensor, key_value: Tensor, group_name: str, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor]:
    # (n * 2, B, K, 2C, E); runs while the own part computes
    gathered = collectives.all_gather_into_tensor(key_value, n_ranks, group_name)
    out, lse = attend_part(query, key_value, causal=True)
    for queries, others in visible_of_others(collectives.wait_tensor(gathered), rank, n_ranks):
        merge_part(out, lse, query, join(others), queries)
    return out, lse


def attend_gathered_backward(
    saved: tuple[Tensor, ...], key_value: Tensor, group_name: str, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor]:
    gathered = collectives.all_gather_into_tensor(key_value, n_ranks, group_name)
    grad_query, own_grad = attend_part_backward(saved, key_value, causal=True)
    grads = grad_query.new_zeros((n_ranks * 2, *key_value.shape[1:]))
    grads.unflatten(0, (n_ranks, 2))[rank] = own_grad
    parts = zip(
        visible_of_others(collectives.wait_tensor(gathered), rank, n_ranks),
        visible_of_others(grads, rank, n_ranks),
        strict=True,
    )
    for (queries, others), (_, grads_of_others) in parts:
        more, grad = attend_part_backward(saved, join(others), queries=queries)
        grad_query[:, :, queries] += more
        grads_of_others += grad.unflatten(3, (len(others), -1)).movedim(3, 0)
    own_grad = collectives.reduce_scatter_tensor(grads, "sum", n_ranks, group_name)
    return grad_query, collectives.wait_tensor(own_grad)


def attend_around_ring(
    query: Tensor, key_value: Tensor, group_name: str, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor]:
    arriving = pass_on(key_value, group_name, rank, n_ranks)
    out, lse = attend_part(query, key_value, causal=True)
    for step in range(1, n_ranks):
        key_value = collectives.wait_tensor(arriving).view_as(key_value)
        if step < n_ranks - 1:
            arriving = pass_on(key_value, group_name, rank, n_ranks)  # runs while this part computes
        queries, keys = visible_of_one(rank, (rank - step) % n_ranks, query.shape[2] // 2)
        merge_part(out, lse, query, key_value[:, :, :, keys], queries)
    return out, lse


def attend_around_ring_backward(
    saved: tuple[Tensor, ...], key_value: Tensor, group_name: str, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor]:
    arriving = pass_on(key_value, group_name, rank, n_ranks)
    grad_query, grads = attend_part_backward(saved, key_value, causal=True)
    for step in range(1, n_ranks):
        grads_arriving = pass_on(grads, group_name, rank, n_ranks)
        key_value = collectives.wait_tensor(arriving).view_as(key_value)
        if step < n_ranks - 1:
            arriving = pass_on(key_value, group_name, rank, n_ranks)
        queries, keys = visible_of_one(rank, (rank - step) % n_ranks, saved[1].shape[2] // 2)
        more, grad = attend_part_backward(saved, key_value[:, :, :, keys], queries=queries)
        grad_query[:, :, queries] += more
        grads = collectives.wait_tensor(grads_arriving).view_as(grads)  # of the keys and values that are here now
        grads[:, :, :, keys] += grad
    home = pass_on(grads, group_name, rank, n_ranks)
    return grad_query, collectives.wait_tensor(home).view_as(grads)


def visible_of_others(gathered: Tensor, rank: int, n_ranks: int) -> list[tuple[slice, Tensor]]:
    """List (queries, visible keys) of gathered (n * 2, B, K, 2C, E): slices and views (ranks, 2, B, K, C or 2C, E)."""
    half = gathered.shape[3] // 2
    gathered = gathered.unflatten(0, (n_ranks, 2))
    parts = [(ALL, gathered[:rank, :, :, :, :half]), (slice(half, None), gathered[rank + 1 :])]
    return [(queries, others) for queries, others in parts if len(others)]


def visible_of_one(rank: int, source: int, half: int) -> tuple[slice, slice]:
    """Return which of this rank's queries see which of another rank's keys."""
    return (ALL, slice(0, half)) if source < rank else (slice(half, None), ALL)


def join(others: Tensor) -> Tensor:
    """(ranks, 2, B, K, L, E) -> (2, B, K, ranks * L, E). Without a mask the order of keys does not matter."""
    return others.movedim(0, 3).flatten(3, 4)


def attend_part(query: Tensor, key_value: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attend to some keys: out (B, H, queries, E) and lse (B, H, queries), both fp32."""
    out, lse = choose_kernel(query).attend(query, *key_value, causal)
    return out.float(), lse.float()


def merge_part(out: Tensor, lse: Tensor, query: Tensor, key_value: Tensor, queries: slice) -> None:
    new_out, new_lse = attend_part(query[:, :, queries], key_value)
    merge_into(out[:, :, queries], lse[:, :, queries], new_out, new_lse)


def attend_part_backward(
    saved: tuple[Tensor, ...], key_value: Tensor, *, queries: slice = ALL, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return what a part adds to the gradients, fp32: of the queries, and of its keys and values (stacked)."""
    grad_out, query, out, lse = (tensor[:, :, queries] for tensor in saved)
    grad_query, *grads = choose_kernel(query).attend_backward(
        grad_out, query, *key_value, out, lse.contiguous(), causal
    )
    return grad_query.float(), torch.stack(grads).float()


def pass_on(tensor: Tensor, group_name: str, rank: int, n_ranks: int) -> Tensor:
    """Send to the next rank, receive from the previous one: P bytes each way, flat. Wait for it before use."""
    to_next, from_last = [0] * n_ranks, [0] * n_ranks
    to_next[(rank + 1) % n_ranks] = from_last[rank - 1] = tensor.numel()
    return collectives.all_to_all_single(tensor.flatten(), from_last, to_next, group_name)


METHODS = {  # context_parallel_rotate_method -> forward, backward
    "allgather": (attend_gathered, attend_gathered_backward),
    "ring": (attend_around_ring, attend_around_ring_backward),
}

# ---------------------------------------------------------------- one operator for torch

# Compile takes the operator as it is. Per-op recompute keeps the operator's output instead of those of its parts, and
# does not fetch keys again. A dispatch mode (a counter of bytes or FLOPs) sees inside by calling IMPLEMENTATIONS[op].

context_attention = torch.library.custom_op("torchtitan_lite::context_attention", attend, mutates_args=())
context_attention_backward = torch.library.custom_op(
    "torchtitan_lite::context_attention_backward", attend_backward, mutates_args=()
)
IMPLEMENTATIONS = {
    torch.ops.torchtitan_lite.context_attention.default: attend,
    torch.ops.torchtitan_lite.context_attention_backward.default: attend_backward,
}


@context_attention.register_fake
def _(query, key, value, method, group_name, rank, n_ranks):
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@context_attention_backward.register_fake
def _(grad_out, query, key, value, out, lse, method, group_name, rank, n_ranks):
    return torch.empty_like(query), key.new_empty((2, *key.shape))


def keep_for_backward(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output)


def differentiate(ctx, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    """Ignore grad_lse: no caller uses lse."""
    grad_query, grad_key_value = context_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return grad_query, *grad_key_value.unbind(), *(None for _ in ctx.options)


context_attention.register_autograd(differentiate, setup_context=keep_for_backward)
