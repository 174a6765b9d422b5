"""Collective operations of ranks, computed by one process that has the numbers of all: sums, losses, attention.

    sum_partials     partial products of tp ranks, each rounded, added around a ring, rounding each time
    fan_out          one tensor that tp ranks read: their gradients of it are added in the same way
    RoundedLoss      the head's matmul and loss, a chunk of tokens at a time, each tp rank with a part of the vocabulary
    RoundedContext   attention of context-parallel ranks, part by part of the keys, rounded and merged in fp32

Legend: B batch, S sequence, H query heads, K key/value heads, E head dim, D model dim, V vocabulary, n cp ranks.
"""

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.tools.verify.reference import find_visible
from torchtitan_lite.tools.verify.slices import cut_zigzag

aten = torch.ops.aten


def sum_partials(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    """Return the sum of n parts in their dtype, added in the order of gloo's ring.

    `dim`: a reduce-scatter, in n equal pieces along it. None: an all-reduce of vectors, in pieces of two segments, of
    which there are 2 n. The r-th piece starts on rank r - 1 and goes down the ranks, so that rank r adds its own last.
    For two ranks there is one order only.
    """
    n = len(parts)
    if n == 1:
        return parts[0]
    size = -(-len(parts[0]) // (2 * n)) * 2 if dim is None else parts[0].shape[dim] // n
    pieces = [part.split(size, dim or 0) for part in parts]
    sums = [reduce(torch.add, [pieces[(r - 1 - i) % n][r] for i in range(n)]) for r in range(len(pieces[0]))]
    return torch.cat(sums, dim or 0)


class FanOut(torch.autograd.Function):
    """Return n views of x, whose gradients are added by `sum_partials`. autograd itself promises no order."""

    @staticmethod
    def forward(ctx, x: Tensor, n: int, dim: int | None) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(x.view_as(x) for _ in range(n))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_partials(grads, ctx.dim), None, None


def fan_out(x: Tensor, n: int, dim: int | None) -> tuple[Tensor, ...]:
    return FanOut.apply(x, n, dim) if n > 1 else (x,)


class RoundedLoss(torch.autograd.Function):
    """Compute the summed cross entropy of counted tokens, () fp32, by chunks and by parts of the vocabulary.

    Arguments: targets (N,), tokens of a chunk, whether each tp rank normalizes its own part first, and for each rank
    hidden (N, D), then for each weight (V/tp, D). The gradients of a sum of losses are rounded to the compute dtype
    before the incoming gradient scales them.
    """

    @staticmethod
    def forward(ctx, targets: Tensor, chunk_tokens: int, by_part: bool, *inputs: Tensor) -> Tensor:
        hidden, weights = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
        total = torch.zeros(())
        grads_hidden: list[list[Tensor]] = [[] for _ in hidden]
        grads_weight = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for start in range(0, len(targets), chunk_tokens):
            some = slice(start, start + chunk_tokens)
            logits = [h[some] @ w.t() for h, w in zip(hidden, weights, strict=True)]
            loss, grad = differentiate(logits if by_part else [torch.cat(logits, 1)], targets[some])
            total += loss
            for part, (h, w, of_part) in enumerate(zip(hidden, weights, grad.chunk(len(weights), 1), strict=True)):
                of_part = of_part.contiguous()
                grads_hidden[part].append(of_part @ w)
                if w.dtype == torch.float32:
                    grads_weight[part].addmm_(of_part.t(), h[some])
                else:
                    grads_weight[part] += of_part.t() @ h[some]
        grads = [torch.cat(pieces) for pieces in grads_hidden]
        grads += [grad.to(weight.dtype) for grad, weight in zip(grads_weight, weights, strict=True)]
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(grad * grad_total for grad in ctx.saved_tensors)


def differentiate(logits: list[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of losses, () fp32, of logits in parts (n, V/tp), and its gradient (n, V) in their dtype."""
    largest = [part.float().amax(1, keepdim=True) for part in logits]
    exponentials = [(part.float() - most).exp() for part, most in zip(logits, largest, strict=True)]
    log_totals = [most + e.sum(1, keepdim=True).log() for most, e in zip(largest, exponentials, strict=True)]
    log_total = torch.stack(log_totals).logsumexp(0) if len(logits) > 1 else log_totals[0]
    probabilities = torch.cat([e * (most - log_total).exp() for e, most in zip(exponentials, largest, strict=True)], 1)
    counted = targets != IGNORE_INDEX
    column = targets[counted, None]
    loss = (log_total[counted] - torch.cat(logits, 1).float()[counted].gather(1, column)).sum()
    grad = torch.zeros_like(probabilities)
    grad[counted] = probabilities[counted].scatter_add(1, column, -torch.ones_like(column, dtype=torch.float32))
    return loss, grad.to(logits[0].dtype)


class RoundedContext(nn.Module):
    """Causal attention of n context-parallel ranks, whose tokens are rows: rank 0's B rows, rank 1's, and so on."""

    def __init__(self, n_ranks: int, method: str):
        super().__init__()
        self.n_ranks, self.method = n_ranks, method

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (n * B, H, S/n, E), key and value (n * B, K, S/n, E) -> (n * B, H, S/n, E)."""
        return ContextByParts.apply(query, key, value, self.n_ranks, self.method)


class ContextByParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, n_ranks: int, method: str) -> Tensor:
        queries, keys, values = (x.chunk(n_ranks) for x in (query, key, value))
        outs, lses = [], []
        for rank in range(n_ranks):
            out, lse = (x.float() for x in flash(queries[rank], keys[rank], values[rank], causal=True))
            for some, sources in list_visible(rank, n_ranks, method, query.shape[2] // 2):
                new_out, new_lse = flash(queries[rank][:, :, some], join(keys, sources), join(values, sources))
                weight = torch.sigmoid(new_lse - lse[:, :, some])
                out[:, :, some] = torch.lerp(out[:, :, some], new_out.float(), weight[..., None])
                lse[:, :, some] = torch.logaddexp(lse[:, :, some], new_lse)
            # laid out by tokens, as the output projection reads it
            outs.append(out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2))
            lses.append(lse)
        ctx.where = n_ranks, method
        ctx.save_for_backward(query, key, value, *outs, *lses)
        return torch.cat(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        n_ranks, method = ctx.where
        query, key, value, *saved = ctx.saved_tensors
        outs, lses = saved[:n_ranks], saved[n_ranks:]
        queries, keys, values, grads_out = (x.chunk(n_ranks) for x in (query, key, value, grad_out))
        grads = [[torch.zeros_like(x, dtype=torch.float32) for x in xs] for xs in (queries, keys, values)]
        for rank in range(n_ranks):
            half = query.shape[2] // 2
            own = [(slice(None), [(rank, slice(None))])]
            for index, (some, sources) in enumerate(own + list_visible(rank, n_ranks, method, half)):
                of_part = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grads_out[rank][:, :, some],
                    queries[rank][:, :, some],
                    join(keys, sources),
                    join(values, sources),
                    outs[rank][:, :, some],
                    lses[rank][:, :, some].contiguous(),
                    0.0,
                    index == 0,  # the own part is causal
                )
                grads[0][rank][:, :, some] += of_part[0]
                sizes = [keys[source][:, :, which].shape[2] for source, which in sources]
                for of_all, of_sources in zip(grads[1:], of_part[1:], strict=True):
                    for (source, which), grad in zip(sources, of_sources.split(sizes, dim=2), strict=True):
                        of_all[source][:, :, which] += grad
        return *(torch.cat(of_ranks).to(query.dtype) for of_ranks in grads), None, None


def flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)


def join(of_ranks: tuple[Tensor, ...], sources: list[tuple[int, slice]]) -> Tensor:
    return torch.cat([of_ranks[source][:, :, which] for source, which in sources], dim=2)


def list_visible(rank: int, n_ranks: int, method: str, half: int) -> list[tuple[slice, list[tuple[int, slice]]]]:
    """Return what a rank's queries see of other ranks: queries, ranks and keys of each call of the kernel.

    A rank holds an early and a late piece. All its queries see the early piece of each rank before it; its late
    queries see both pieces of each rank after it.
    """
    everything, early, late = slice(None), slice(0, half), slice(half, None)
    if method == "ring":
        others = [(rank - step) % n_ranks for step in range(1, n_ranks)]
        return [(everything, [(r, early)]) if r < rank else (late, [(r, everything)]) for r in others]
    before, after = [(r, early) for r in range(rank)], [(r, everything) for r in range(rank + 1, n_ranks)]
    return [(queries, sources) for queries, sources in ((everything, before), (late, after)) if sources]


class RoundedDocumentContext(nn.Module):
    """Attention within documents of n context-parallel ranks: each sees all keys, in the order of the ranks."""

    def __init__(self, n_ranks: int, method: str):
        super().__init__()
        self.n_ranks = n_ranks  # `method` makes no difference

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor) -> Tensor:
        """As RoundedContext, with doc_ids (B, S)."""
        n = self.n_ranks
        places = cut_zigzag(torch.arange(doc_ids.shape[1]), n, 0)
        visible = find_visible(doc_ids)[..., torch.cat(places)]
        copies = [fan_out(torch.cat(x.chunk(n), dim=2), n, 2) for x in (key, value)]
        outs = []
        for rank, (some, keys, values) in enumerate(zip(query.chunk(n), *copies, strict=True)):
            mask = visible[:, :, places[rank]]
            outs.append(F.scaled_dot_product_attention(some, keys, values, attn_mask=mask, enable_gqa=True))
        return torch.cat(outs)
