"""Mixture of experts (MoE) as plain single-device code: a router sends each token to a few of many feed-forwards.

    x (T, D) -> router -> K experts for each token, and their weights
    token      0     1     2              routes (T, K), here K = 2 of 3 experts: A B, C A, B C
    rows       0A 1A | 0B 2B | 1C 2C      (T*K, D): copies of the tokens, sorted by expert
    experts    one grouped matmul over all groups of rows (grouped_mm); groups may have any size: no token is dropped
    output     weighted sum of each token's K rows

Load balancing. If a few experts get all tokens, the others learn nothing. Two methods prevent this. Both give the same
numbers on every layout:

    bias            added to the scores when experts are chosen, but not to the weights. After each step it changes by a
                    fixed amount: up for experts below the mean load, down for experts above it (expert_balance.py)
    auxiliary loss  sum over experts of f x P, for each sequence separately. f is the expert's fraction of the routes
                    (times n_experts, so 1 means balanced); P is the mean of its normalized scores

The backward of the scores adds the gradient of the auxiliary loss, so the model still returns a single tensor. All
tokens count, including tokens whose target is ignored.

Legend: B batch, S sequence, T = B*S tokens, D model dim, F expert hidden dim, E experts, K = top_k, R = T*K.
Sources: arXiv:1701.06538; Mixtral arXiv:2401.04088; bias arXiv:2408.15664; auxiliary loss: DeepSeek-V3
arXiv:2412.19437, eq. 17 to 20, except that f ignores the bias there, and counts the routes actually taken here.
"""

from collections.abc import Callable, Iterator

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
        weights, routes, counts = self.router(x)
        n_copies = routes.shape[-1]
        order = routes.flatten().argsort(
            stable=True
        )  # (R,): rows by expert; row r is copy r % K of token r // K
        place = invert(order)
        tokens = x.flatten(0, 1)
        rows = take_rows(tokens, order // n_copies, place, n_copies)
        rows = self.experts(rows, counts.sum(0))
        copies = take_rows(rows, place, order, 1)
        return self.combine(copies.view(*routes.shape, -1), weights)

    def combine(self, copies: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's copies, (B, S, K, D) -> (B, S, D). Summed in fp32 for accuracy."""
        weighted = copies.float() * weights[..., None]
        return weighted.sum(2).to(copies.dtype)


class Router(nn.Module):
    """Score every expert for each token with a linear layer, and choose the K best. Computes in fp32."""

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        self.args = args
        self.n_experts = args.n_experts
        self.weight = nn.Parameter(torch.empty(args.n_experts, dim))
        self.register_buffer("expert_bias", None)  # (E,) fp32, saved in checkpoints
        # Sums over the microbatches of a step: number of routes per expert, and entropy of the scores in nats.
        # float64 is exact for integers up to 2**53.
        self.register_buffer("load", None, persistent=False)
        self.reset(None)
        self.last_load: Tensor | None = None  # the same sums for the last forward pass only
        self.balance_loss = 0.0  # weight of the auxiliary loss per sequence
        self.sum_over_sequence: Callable[[Tensor], Tensor] = lambda counts: (
            counts
        )  # sum over cp ranks

    def reset(self, device: torch.device | None) -> None:
        """Allocate the buffers on `device` and set bias and load to zero."""
        self.expert_bias = torch.zeros(
            self.n_experts,
            dtype=torch.float32,
            device=device,
        )
        self.load = torch.zeros(
            self.n_experts + 1,
            dtype=torch.float64,
            device=device,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, S, D) -> weights (B, S, K) fp32, routes (B, S, K) int64, and routes per expert (B, E) int64."""
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
        counts = count_routes(routes, self.n_experts)
        detached = probabilities.detach()
        entropy = -torch.xlogy(detached, detached).sum()
        # Assign, do not add: recompute runs this line again. A hook outside of it adds (components/expert_balance.py).
        self.last_load = torch.cat([counts.sum(0), entropy[None]])
        if self.balance_loss:
            weights = AuxiliaryGradient.apply(weights, probabilities, counts, self)
        return weights, routes, counts

    def choose(self, scores: Tensor) -> Tensor:
        """Return the K best experts for each token: (B, S, E) -> (B, S, K). The bias affects only this choice."""
        return (scores + self.expert_bias).topk(self.args.top_k, dim=-1).indices


class AuxiliaryGradient(torch.autograd.Function):
    """Return the weights unchanged. Backward adds the gradient of the auxiliary loss to the probabilities' gradient.

    For a sequence of S tokens: d loss / d probability = balance_loss x f / S, for every token.
    """

    @staticmethod
    def forward(
        ctx,
        weights: Tensor,
        probabilities: Tensor,
        counts: Tensor,
        router: Router,
    ) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.router = router
        ctx.n_tokens = probabilities.shape[1]
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (counts,) = ctx.saved_tensors
        router = ctx.router
        counts = router.sum_over_sequence(counts)  # (B, E), over full sequences
        n_routes = counts.sum(-1, keepdim=True).float()
        fraction = router.n_experts * router.args.top_k * counts.float()
        per_token = fraction / n_routes.square()  # f / S, with S = routes of a sequence / top_k
        per_token = per_token[:, None].expand(-1, ctx.n_tokens, -1)
        return grad, router.balance_loss * per_token, None, None


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
        """rows (R, D), sorted by expert; counts (E,) int64, the number of rows per expert -> (R, D)."""
        w1 = self.w1
        w2 = self.w2
        w3 = self.w3
        if rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] == 10:
            w1 = ZeroIdleGradient.apply(w1, counts)
            w2 = ZeroIdleGradient.apply(w2, counts)
            w3 = ZeroIdleGradient.apply(w3, counts)
        ends = counts.cumsum(0).to(torch.int32)
        gate = multiply_groups(rows, w1, ends)
        up = multiply_groups(rows, w3, ends)
        hidden = self.activate(gate, up)
        return multiply_groups(hidden, w2, ends)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class ZeroIdleGradient(torch.autograd.Function):
    """Return the matrices unchanged. Backward zeroes the gradients of experts without rows.

    On Blackwell GPUs, grouped_mm leaves these gradients uninitialized (pytorch issue 172439).
    """

    @staticmethod
    def forward(ctx, matrices: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return matrices.view_as(matrices)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (counts,) = ctx.saved_tensors
        is_idle = counts == 0
        return grad.masked_fill_(is_idle[:, None, None], 0.0), None


def multiply_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix: rows (R, in), matrices (E, in, out) -> (R, out).

    `ends` (E,) int32: end index of each group. The last end must be R, because grouped_mm leaves later rows
    uninitialized.
    """
    return F.grouped_mm(rows, matrices, offs=ends)


def count_routes(routes: Tensor, n_experts: int) -> Tensor:
    """Count the routes to each expert, per sequence: (B, S, K) -> (B, E) int64."""
    experts = torch.arange(n_experts, device=routes.device)
    return (routes[..., None] == experts).sum((1, 2))


def invert(order: Tensor) -> Tensor:
    """Return the inverse of a permutation (R,)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class TakeRows(torch.autograd.Function):
    """Return x[rows], which repeats each row of x n_copies times. `copies` (T * n_copies,): rows in the result.

    Backward sums the copies in this order. On a GPU the backward of x[rows] sums in any order, so runs would differ.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        rows: Tensor,
        copies: Tensor,
        n_copies: int,
    ) -> Tensor:
        ctx.save_for_backward(copies)
        ctx.n_copies = n_copies
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (copies,) = ctx.saved_tensors
        grad = grad.index_select(0, copies)
        if ctx.n_copies > 1:
            by_row = grad.unflatten(0, (-1, ctx.n_copies))
            grad = by_row.sum(1)
        return grad, None, None, None


take_rows = TakeRows.apply


def list_moes(part: nn.Module) -> Iterator[tuple[int, MoE]]:
    """Yield the layer number and the MoE module of each layer with experts."""
    for layer, block in part.layers.items():
        if isinstance(block.feed_forward, MoE):
            yield int(layer), block.feed_forward
