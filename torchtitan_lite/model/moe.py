"""Compute a mixture of experts (MoE) on one device: a router sends each token to a few of many feed-forwards.

    x (T, D) -> router -> K experts for each token, and their routing weights
    token      0     1     2              routes (T, K), here K = 2 of 3 experts: A B, C A, B C
    rows       0A 1A | 0B 2B | 1C 2C      (T*K, D): copies of the tokens, sorted by expert
    experts    one grouped matmul over all groups of rows (grouped_mm); groups may have any size: no token is dropped
    output     weighted sum of each token's K rows

To choose experts, a bias is added to the scores; the routing weights are computed without the bias.
components/expert_balance.py counts the routes, and updates the bias after each step to balance the load.

Legend: B batch, S sequence, T = B*S tokens, D model dim, F expert hidden dim, E experts, K = top_k, R = T*K.
Sources: arXiv:1701.06538; Mixtral arXiv:2401.04088; bias arXiv:2408.15664.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.model_rows import MoEArgs


class MoE(nn.Module):
    """A feed-forward with a router and experts."""

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        self.router = Router(dim, args)
        self.experts = Experts(dim, args)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, D) -> (B, S, D)."""
        weights, routes, counts, _, _ = self.router(x)
        # (R,) each. Row r is copy r % K of token r // K, and `order` sorts the rows by expert
        order, place = sort_rows(routes.flatten(), self.router.n_experts)
        top_k = routes.shape[-1]
        rows = PermuteRows.apply(x.flatten(0, 1), order // top_k, place, top_k)
        rows = self.experts(rows, counts.sum(0))
        copies = PermuteRows.apply(rows, place, order, 1)
        return self.combine(copies.view(*routes.shape, -1), weights)

    def combine(self, copies: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's copies, (B, S, K, D) -> (B, S, D). Summed in fp32 for accuracy."""
        weighted = copies.float() * weights[..., None]
        return weighted.sum(2).to(copies.dtype)


class Routing(NamedTuple):
    """The experts of each token."""

    weights: Tensor  # (B, S, K) fp32, routing weight of each chosen expert
    routes: Tensor  # (B, S, K) int64, indices of the chosen experts
    counts: Tensor  # (B, E) int64, routes per expert and sequence
    probabilities: Tensor  # (B, S, E) fp32, scores of all experts, normalized to a sum of 1
    logits: Tensor  # (B, S, E) fp32


class Router(nn.Module):
    """Score every expert for each token with a linear layer, and choose the K best. Computes in fp32."""

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        self.args = args
        self.n_experts = args.n_experts
        self.weight = nn.Parameter(torch.empty(args.n_experts, dim))
        # (E,) fp32, saved in checkpoints
        self.register_buffer("expert_bias", torch.zeros(args.n_experts))

    def forward(self, x: Tensor) -> Routing:
        """Choose the experts of each token, x (B, S, D)."""
        logits = F.linear(x.float(), self.weight.float())  # (B, S, E)
        if self.args.router_scores == "softmax":
            scores = probabilities = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
        routes = self.choose(scores.detach())
        weights = scores.gather(-1, routes)
        if self.args.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, routes, True)
        return Routing(weights, routes, is_chosen.sum(1), probabilities, logits)

    def choose(self, scores: Tensor) -> Tensor:
        """Return the K best experts for each token: (B, S, E) -> (B, S, K). The bias affects only this choice, not the
        routing weights."""
        return (scores + self.expert_bias).topk(self.args.top_k, dim=-1).indices


class Experts(nn.Module):
    """SwiGLU experts: w2(silu(w1 x) * w3 x). Each parameter stacks the matrices of all experts."""

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        ffn_dim = args.expert_ffn_dim
        up_shape = (args.n_experts, dim, ffn_dim)  # (E, in, out)
        down_shape = (args.n_experts, ffn_dim, dim)
        self.w1 = nn.Parameter(torch.empty(up_shape))
        self.w2 = nn.Parameter(torch.empty(down_shape))
        self.w3 = nn.Parameter(torch.empty(up_shape))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts to rows (R, D), sorted by expert. `counts` (E,) int64: number of rows per expert."""
        matrices = [self.w1, self.w2, self.w3]
        if rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] == 10:
            matrices = [zero_idle_gradient(each, counts) for each in matrices]
        w1, w2, w3 = matrices
        ends = counts.cumsum(0).to(torch.int32)
        gate = multiply_groups(rows, w1, ends)
        up = multiply_groups(rows, w3, ends)
        hidden = self.activate(gate, up)
        return multiply_groups(hidden, w2, ends)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


def zero_idle_gradient(matrices: Tensor, counts: Tensor) -> Tensor:
    """Return the matrices unchanged. Backward zeroes the gradients of experts without rows.

    On Blackwell GPUs, grouped_mm leaves these gradients uninitialized (pytorch issue 172439).
    """
    is_idle = (counts == 0)[:, None, None]
    matrices = matrices.view_as(matrices)
    if matrices.requires_grad:
        matrices.register_hook(lambda grad: grad.masked_fill_(is_idle, 0.0))
    return matrices


def multiply_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix: rows (R, in), matrices (E, in, out) -> (R, out).

    `ends` (E,) int32: end index of each group. The last end must be R, because grouped_mm leaves later rows
    uninitialized.
    """
    return F.grouped_mm(rows, matrices, offs=ends)


def sort_rows(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Sort rows by expert. Return the order and its inverse permutation, (R,) each.

    The keys have the narrowest possible dtype, because a radix sort on a GPU makes one pass per 8 bits of a key. The
    sort is stable.
    """
    keys = experts.to(torch.uint8 if n_experts <= 256 else torch.int16)
    order = keys.argsort(stable=True)
    rows = torch.arange(len(order), device=order.device)
    return order, torch.empty_like(order).scatter_(0, order, rows)


class PermuteRows(torch.autograd.Function):
    """Copy each row of x (R / n_copies, D) `n_copies` times, in any order. Returns x[sources], (R, D).

    `inverse` lists the copies in the order of the rows of x, and gives the index of each copy in the result. The
    backward of `x[sources]` would add the gradients of the copies of a row one by one.
    """

    @staticmethod
    def forward(ctx, x: Tensor, sources: Tensor, inverse: Tensor, n_copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.n_copies = n_copies
        return x.index_select(0, sources)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        copies = grad.index_select(0, inverse)
        if ctx.n_copies > 1:
            copies = copies.unflatten(0, (-1, ctx.n_copies)).sum(1)
        return copies, None, None, None


def list_moes(part: nn.Module) -> Iterator[tuple[int, MoE]]:
    """Yield (layer number, MoE) for each layer of a model part that has experts."""
    for layer, block in part.layers.items():
        if part.model_args.is_moe(int(layer)):
            yield int(layer), block.feed_forward
