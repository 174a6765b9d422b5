"""Compute causal attention over the ranks of `cp`: fetch keys and values, attend part by part, merge the parts.

Each rank has an early and a late piece of the sequence (context_parallel.py). How the queries of this rank attend to
the keys of a rank depends on the order of the two ranks:

    an earlier rank    all queries attend to the early piece, and no query to the late piece
    the same rank      causal attention, because positions increase from the early to the late piece
    a later rank       late queries attend to both pieces, and early queries to none

In all three cases, the query-key pairs form a full rectangle or a triangle, so no masks are needed. All ranks compute
the same number of query-key pairs. The parts are merged with their log-sum-exp (lse, explained below).

    method      bytes in forward                             bytes in backward
    allgather   P(n-1)/n, overlaps with the local part       the same, then a reduce-scatter of fp32 gradients
    ring        P per round, n-1 rounds, overlaps compute    the same, and n rounds of fp32 gradients, which follow
                                                             their keys one step behind

For `allgather`, P = 2*B*K*S*E*2 bytes in bf16, the keys and values of all ranks. For `ring`, P is the keys and values
of one rank, so in forward both methods move the same number of bytes. With both methods, a rank attends to its own keys
while keys of other ranks arrive. After that, it attends to the keys of the other ranks, one rank after another. For
backward, a rank saves only local tensors: query, key, value, out and lse. While a layer computes, `allgather` stores
the keys, values and gradients of all ranks; `ring` stores the keys, values and gradients of only two ranks.

Legend: B batch, S full sequence over n ranks, H query heads, K key/value heads, E head dim, C = S/(2n) one piece.
Sources: arXiv:2310.01889; online softmax arXiv:1805.02867; FlashAttention arXiv:2205.14135, 2307.08691.
Effect: defines a torch operator and its backward. context_parallel.py calls the operator.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from torchtitan_lite.model.attention import avoids_cudnn, stack_heads
from torchtitan_lite.parallel.exchange import Ranks, collectives

aten = torch.ops.aten

# The collectives are asynchronous: they overlap with compute until wait_tensor.

# ---------------------------------------------------------------- keys and values of all ranks


class KeysOfRanks:
    """The keys and values of all ranks, and their gradients. A subclass defines how ranks exchange keys, values and
    gradients."""

    def __init__(self, key: Tensor, value: Tensor, ranks: Ranks):
        """`key` and `value` are tensors of this rank, (B, K, 2C, E)."""
        self.key_value = stack_heads(key, value)  # (2, B, K, 2C, E)
        self.ranks = ranks
        self.grads: Tensor | None = None  # sums so far, fp32

    def list_visible(self) -> Iterator[tuple[int, slice, slice, Tensor]]:
        """Yield the keys that this rank's queries attend to, rank by rank, starting with this rank's own keys.

        Each item has a source rank, the slice of this rank's queries that attend to keys of the source rank, the slice
        of these keys, and the keys with their values.
        """
        half = self.key_value.shape[3] // 2
        for source, key_value in self.fetch():
            queries, keys = find_visible(self.ranks.own, source, half)
            yield source, queries, keys, key_value[:, :, :, keys]


class GatheredKeys(KeysOfRanks):
    """Implements `allgather`, which fetches the keys and values of all ranks at once. `grads` is
    (n, 2, B, K, 2C, E)."""

    def fetch(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank with its keys and values, starting with this rank."""
        n = self.ranks.n
        gathered = collectives.all_gather_into_tensor(self.key_value, n, self.ranks.group_name)
        yield self.ranks.own, self.key_value
        gathered = collectives.wait_tensor(gathered).view(n, *self.key_value.shape)
        for source in range(n):
            if source != self.ranks.own:
                yield source, gathered[source]

    def add_gradient(self, source: int, keys: slice, grad: Tensor) -> None:
        """Add `grad` to the gradient of a slice of keys of rank `source`, the rank that `fetch` yielded last."""
        if self.grads is None:
            self.grads = grad.new_zeros(self.ranks.n, *self.key_value.shape)
        self.grads[source, :, :, :, keys] += grad

    def sum_gradients(self) -> Tensor:
        """Return the gradient of this rank's keys and values, summed over all ranks."""
        summed = collectives.reduce_scatter_tensor(
            self.grads.flatten(0, 1), "sum", self.ranks.n, self.ranks.group_name
        )
        return collectives.wait_tensor(summed)


class PassedKeys(KeysOfRanks):
    """Implements `ring`, which fetches the keys and values of one rank at a time. The gradients of these keys and
    values are flat tensors, and arrive one round later than the keys and values."""

    def fetch(self) -> Iterator[tuple[int, Tensor]]:
        key_value = self.key_value
        for step in range(self.ranks.n):
            is_last = step == self.ranks.n - 1
            if not is_last:
                arriving = pass_on(key_value, self.ranks)
            yield (self.ranks.own - step) % self.ranks.n, key_value
            if not is_last:
                key_value = collectives.wait_tensor(arriving).view_as(key_value)

    def add_gradient(self, source: int, keys: slice, grad: Tensor) -> None:
        if self.grads is not None:
            arrived = self.sum_gradients()
            arrived[:, :, :, keys] += grad
            grad = arrived
        self.grads = pass_on(grad, self.ranks)

    def sum_gradients(self) -> Tensor:
        return collectives.wait_tensor(self.grads).view(self.key_value.shape)


METHODS = {"allgather": GatheredKeys, "ring": PassedKeys}  # context_parallel_rotate_method


def pass_on(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Send P bytes to the next rank, and receive P bytes from the previous rank. The caller must wait for the result.

    The result is flat.
    """
    sent = [0] * ranks.n
    received = [0] * ranks.n
    sent[(ranks.own + 1) % ranks.n] = tensor.numel()
    received[ranks.own - 1] = tensor.numel()
    return collectives.all_to_all_single(tensor.flatten(), received, sent, ranks.group_name)


def find_visible(rank: int, source: int, half: int) -> tuple[slice, slice]:
    """Return the slice of this rank's queries that attend to keys of `source`, and the slice of these keys."""
    queries = slice(None)
    keys = slice(None)
    if source < rank:
        keys = slice(0, half)
    if source > rank:
        queries = slice(half, None)
    return queries, keys


# ---------------------------------------------------------------- kernels
#
# softmax over all keys      = merge of (out, lse) over any partition of the keys
# lse (B, H, S)              = log-sum-exp of the scores over the keys of a part: its weight in the merge
# gradients of a part        = backward of the same kernel, called with the *merged* out and lse
#
# A part is either causal (its queries and keys have the same positions) or not masked at all. So no S x S mask is ever
# stored. The kernels do not store attention scores. All inputs and outputs of the kernels are at most as large as
# query. On a CPU, the kernel is torch's flash attention. On a GPU, the kernel is cuDNN's if torch's SDPA prefers cuDNN
# (Hopper, Blackwell), otherwise FlashAttention 2. The CUDA kernels support bf16 and fp16, and a head_dim that is a
# multiple of 8 up to 256; config/settings.py reports anything else as an error. The CUDA kernels have never run. Tests
# check the arguments of these kernels on meta tensors, and GPU tests check the results.

OutAndLse = tuple[Tensor, Tensor]  # out (B, H, S, E); lse (B, H, S) fp32, contiguous


def prefers_cudnn(query: Tensor, key: Tensor) -> bool:
    """Return whether the cuDNN kernel is the fastest on CUDA. Its backward is not deterministic."""
    if torch.are_deterministic_algorithms_enabled() or avoids_cudnn(key):
        return False
    preferred = torch._fused_sdp_choice(query, query, query)
    return SDPBackend(preferred) == SDPBackend.CUDNN_ATTENTION


def attend_to_part(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> OutAndLse:
    """Attend with one kernel call. query, out: (B, H, Q, E). key, value: (B, K, S, E). lse: (B, H, Q) fp32."""
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    if prefers_cudnn(query, key):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal
        )
        return out, lse.flatten(2)  # (B, H, Q, 1)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse


def attend_to_part_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. `out` and `lse` must be the merged results of all parts."""
    tensors = (grad_out, query, key, value, out)
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, lse, 0.0, causal)
    # Sequences of equal length need no cumulative lengths. Without dropout, seed and offset are empty.
    lengths = (None, None, query.shape[2], key.shape[2])
    empty = torch.empty((), dtype=torch.int64, device=query.device)
    if prefers_cudnn(query, key):
        bias = None
        return aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, lse[..., None], empty, empty, bias, *lengths, 0.0, causal
        )
    return aten._scaled_dot_product_flash_attention_backward(
        *tensors, lse, *lengths, 0.0, causal, empty, empty
    )


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the result for a part of the keys into (out, lse), both fp32, in-place."""
    # the weight of the new keys in the softmax over all keys; the formula cannot overflow
    weight = torch.sigmoid(part_lse - lse)
    out.lerp_(part_out.float(), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


# ---------------------------------------------------------------- attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: str,
    rank: int,
    n_ranks: int,
    group_name: str,
) -> OutAndLse:
    """Attend to the keys of all ranks. Collective.

    Takes query (B, H, 2C, E), key and value (B, K, 2C, E) of this rank. Returns out (B, H, 2C, E), and lse (B, H, 2C)
    fp32. The memory order of out is (B, 2C, H, E), as the output projection reads it.
    """
    keys_of_ranks = METHODS[method](key, value, Ranks(rank, n_ranks, group_name))
    for source, queries, _, visible in keys_of_ranks.list_visible():
        is_own = source == rank
        part_out, part_lse = attend_to_part(query[:, :, queries], *visible, causal=is_own)
        if is_own:
            out = part_out.float()
            lse = part_lse.float()
        else:
            out_so_far = out[:, :, queries]
            lse_so_far = lse[:, :, queries]
            merge_into(out_so_far, lse_so_far, part_out, part_lse.float())
    tokens_first = out.to(query.dtype).transpose(1, 2).contiguous()
    return tokens_first.transpose(1, 2), lse.contiguous()


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    method: str,
    rank: int,
    n_ranks: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's query, and of its key and value, stacked (2, B, K, 2C, E). Collective."""
    keys_of_ranks = METHODS[method](key, value, Ranks(rank, n_ranks, group_name))
    for source, queries, keys, visible in keys_of_ranks.list_visible():
        is_own = source == rank
        part_grad_query, *part_grads = attend_to_part_backward(
            grad_out[:, :, queries],
            query[:, :, queries],
            *visible,
            out[:, :, queries],
            lse[:, :, queries].contiguous(),
            causal=is_own,
        )
        if is_own:
            grad_query = part_grad_query.float()
        else:
            grad_query[:, :, queries] += part_grad_query
        keys_of_ranks.add_gradient(source, keys, torch.stack(part_grads).float())
    grads = keys_of_ranks.sum_gradients()
    # Kernels choose the strides of their results. Copy the results to the strides that register_fake declares for
    # torch.compile.
    return torch.empty_like(query).copy_(grad_query), grads.to(key.dtype).contiguous()


# ---------------------------------------------------------------- the torch operator

# torch.compile does not trace into the operator. Per-op recompute saves the operator's output, so keys are not fetched
# again. A dispatch mode (such as a counter of bytes or FLOPs) can see the calls inside the operator by calling
# IMPLEMENTATIONS[op].

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
