"""Schedule, clipping, optimizers and experts by their formulas: how every reference makes its steps.

    schedule   linear warm-up, a stable stretch, decay            arXiv:2404.06395
    clipping   g <- g min(1, max_norm / (||g|| + 1e-6))           documentation of torch.nn.utils.clip_grad_norm_
    AdamW      w <- (1 - lr wd) w - lr m' / (sqrt(v') + eps)      arXiv:1711.05101; m', v': corrected for their start
    SGD        w <- w - lr (g + wd w)                             documentation of torch.optim.SGD; no momentum
    experts    every expert computes every token, and a weight of zero drops it again

Nothing here calls components/optim.py or torch.optim, and of model/moe.py only the parameters are used: a mistake that
both sides share would not be seen. The first four are float64 and treat each number by itself, so that a rank can apply
them to the slices that it holds. A fork adds a row to FORMULAS for its optimizer; without one `verify` says that its
updates have no reference.

Of experts, routes are the best by score and bias, and recorded, so that a layout can be given the same ones
(Batch.routes). Biases start so that loads are uneven: in each layer one expert gets no token, and one every token.

Legend: B batch, S sequence, D model dim, E experts, K = top_k.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.schema import LRScheduler, Optimizer, Training
from torchtitan_lite.model.moe import MoE, Router, list_moes

ROUNDING = 2.0**-24  # one fp32 operation changes its result by at most this share

# TOML's lr_scheduler.decay_type -> share of the peak that is left at `done` (0 -> 1) of the decay
LEFT = {
    "linear": lambda done: 1.0 - done,
    "sqrt": lambda done: 1.0 - done**0.5,
    "cosine": lambda done: math.cos(math.pi * done / 2) ** 2,
}


def find_decay_start(section: LRScheduler) -> int:
    """Return the first step of the decay, whose rate is still the peak. `total_steps` is resolved."""
    ratio = 1.0 if section.decay_ratio is None else section.decay_ratio
    return max(section.warmup_steps, section.total_steps - round(ratio * section.total_steps))


def compute_rate_factor(section: LRScheduler, step: int) -> float:
    """Return the share of the peak learning rate at `step` (0 = first)."""
    start, end = find_decay_start(section), section.total_steps
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if step < start:
        return 1.0
    done = min(1.0, (step - start) / (end - start)) if end > start else float(step > start)
    return section.min_lr_factor + (1.0 - section.min_lr_factor) * LEFT[section.decay_type](done)


def compute_clip_scale(norm: float, max_norm: float) -> float:
    """Return the factor of all gradients: 1 where their norm is below `max_norm`."""
    return min(1.0, max_norm / (norm + 1e-6))


@dataclass(frozen=True)
class Move:
    """One optimizer step of one slice; every tensor is float64 and has the shape of the slice."""

    update: Tensor  # new weight - old weight
    moments: dict[str, Tensor]  # by torch's names
    rounding: Tensor  # largest error of the new weight that is due to fp32 alone


def move_adamw(
    section: Optimizer, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], *, rate: float, step: int
) -> Move:
    """Make a step of AdamW. `moments` are those before the step; `step` counts from 1."""
    first = section.beta1 * moments["exp_avg"] + (1 - section.beta1) * gradient
    second = section.beta2 * moments["exp_avg_sq"] + (1 - section.beta2) * gradient.square()
    corrected = first / (1 - section.beta1**step), second / (1 - section.beta2**step)
    decay = -rate * section.weight_decay * weight
    update = decay - rate * corrected[0] / (corrected[1].sqrt() + section.eps)
    # fp32 rounds the factor of the decay, its product with the weight, and the sum with the rest.
    rounding = ROUNDING * (2 * (weight + decay).abs() + (weight + update).abs())
    return Move(update, {"exp_avg": first, "exp_avg_sq": second}, rounding)


def move_sgd(
    section: Optimizer, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], *, rate: float, step: int
) -> Move:
    """Make a step of SGD without momentum; weight decay is added to the gradient, as in torch."""
    decay = section.weight_decay * weight
    update = -rate * (gradient + decay)
    # fp32 rounds the product with the decay, its sum with the gradient, and the sum with the weight.
    rounding = ROUNDING * (rate * (decay.abs() + (gradient + decay).abs()) + (weight + update).abs())
    return Move(update, {}, rounding)


@dataclass(frozen=True)
class Formula:
    """One optimizer."""

    moments: tuple[str, ...]  # torch's names
    move: Callable[..., Move]


FORMULAS = {  # optimizer.name -> its formula
    "AdamW": Formula(("exp_avg", "exp_avg_sq"), move_adamw),
    "SGD": Formula((), move_sgd),
}


# ---------------------------------------------------------------- experts

NEVER = -10.0  # a bias below any difference of two scores, which are between 0 and 1
APART = 0.005  # standard deviation of the other biases: a third of that of the scores at the start


@dataclass
class ExpertRecord:
    """What the routers of one process did. Lists are by step; a dense layer has zeros."""

    initial_biases: dict[str, Tensor]  # FQN -> (E,) fp32
    scores: Tensor | None = None  # (B, S, layers, E) of the first step, with the bias: the choice is by these
    routes: list[Tensor] = field(default_factory=list)  # (B, S, layers, K) int64
    loads: list[Tensor] = field(default_factory=list)  # (layers, E) int64
    entropies: list[Tensor] = field(default_factory=list)  # (layers,) float64: sums over tokens, in nats
    biases: dict[str, Tensor] = field(default_factory=dict)  # after the last step; none without updates


@dataclass(frozen=True)
class RouterCall:
    routes: Tensor  # (B, S, K)
    scores: Tensor  # (B, S, E), with the bias
    probabilities: Tensor  # (B, S, E): the scores, normalized

    @property
    def chosen(self) -> Tensor:
        """1 where a token is sent to an expert, (B, S, E) int64."""
        return F.one_hot(self.routes, self.scores.shape[-1]).sum(2)


class PlainMoEs:
    """The MoE layers of a model, which compute plainly from now on."""

    def __init__(self, model: nn.Module, section: Training, *, biases: dict[str, Tensor] | None = None):
        """`biases`: with which the routers start; by default zero."""
        self.section, self.args = section, model.model_args
        self.routers = {layer: moe.router for layer, moe in list_moes(model)}
        self.calls: dict[int, RouterCall] = {}  # of the newest forward, by layer
        for layer, moe in list_moes(model):
            moe.router.reset(torch.device("cpu"))
            moe.router.forward = partial(self._route, layer, moe.router)
            moe.forward = partial(compute_all_experts, moe)
        if biases:
            set_biases(self.biases, biases)
        initial_biases = {fqn: bias.clone() for fqn, bias in self.biases.items()}
        self.recorded = ExpertRecord(initial_biases) if self.routers else None

    def _route(self, layer: int, router: Router, x: Tensor, routes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        moe = self.args.moe
        logits = x @ router.weight.t()
        scores = logits.softmax(-1) if moe.router_scores == "softmax" else logits.sigmoid()
        biased = (scores + router.expert_bias).detach()
        if routes is None:
            routes = biased.argsort(-1, descending=True)[..., : moe.top_k]
        self.calls[layer] = RouterCall(routes, biased, scores / scores.sum(-1, keepdim=True))
        weights = scores.gather(-1, routes)
        return weights / weights.sum(-1, keepdim=True) if moe.normalize_top_k else weights, routes

    @property
    def biases(self) -> dict[str, Tensor]:
        return {name_bias(layer): router.expert_bias for layer, router in self.routers.items()}

    def sum_balance_losses(self) -> Tensor:
        """Return the auxiliary loss of the newest forward: over layers and experts f x P, mean over sequences."""
        total = torch.zeros(())
        for call in self.calls.values():
            share = call.chosen.float().mean(1) * self.args.moe.n_experts / self.args.moe.top_k  # (B, E)
            total = total + (share * call.probabilities.mean(1)).sum(-1).mean()
        return self.section.expert_balance_loss * total

    @torch.no_grad()
    def move_biases(self) -> None:
        """Move each bias towards an even load, by the routes of the newest forward."""
        for layer, router in self.routers.items():
            load = self.calls[layer].chosen.sum((0, 1)).double()
            router.expert_bias += self.section.expert_bias_rate * torch.sign(load.mean() - load).float()

    def record(self) -> None:
        """Add the newest forward to the record."""

        def stack(of_call: Iterable[Tensor]) -> Tensor:
            by_layer = dict(zip(self.calls, of_call, strict=True))
            dense = torch.zeros_like(next(iter(by_layer.values())))
            return torch.stack([by_layer.get(layer, dense) for layer in range(self.args.n_layers)], -2)

        calls, into = self.calls.values(), self.recorded
        into.routes.append(stack(call.routes for call in calls))
        into.loads.append(stack(call.chosen.sum((0, 1)) for call in calls))
        probabilities = [call.probabilities.detach().double() for call in calls]
        into.entropies.append(stack(-torch.xlogy(p, p).sum()[None] for p in probabilities)[:, 0])
        if into.scores is None:
            into.scores = stack(call.scores for call in calls)


def compute_all_experts(moe: MoE, x: Tensor, routes: Tensor | None = None) -> Tensor:
    """Replace MoE.forward: x (B, S, D) -> (B, S, D)."""
    weights, routes = moe.router(x, routes)
    experts, y = moe.experts, torch.zeros_like(x)
    for expert, (w1, w2, w3) in enumerate(zip(experts.w1, experts.w2, experts.w3, strict=True)):
        weight = (weights * (routes == expert)).sum(-1, keepdim=True)  # (B, S, 1); 0: not of this expert
        y = y + weight * ((F.silu(x @ w1) * (x @ w3)) @ w2)
    return y


def name_bias(layer: int) -> str:
    return f"layers.{layer}.feed_forward.router.expert_bias"


def draw_biases(args: ModelArgs) -> dict[str, Tensor]:
    """Return biases with which loads are uneven: in each layer one expert gets no token, and one gets every token.

    FQN -> (E,) fp32. A token that has but one expert, or all of them, does not go to that last one.
    """
    biases = {}
    n_experts = args.moe.n_experts if args.moe else 0
    for layer in filter(args.is_moe, range(args.n_layers)):
        bias = APART * torch.randn(n_experts, generator=torch.Generator().manual_seed(layer))
        if n_experts > args.moe.top_k:
            bias[layer % n_experts] = NEVER
        if n_experts > args.moe.top_k > 1:
            bias[(layer + 1) % n_experts] = -NEVER
        biases[name_bias(layer)] = bias
    return biases


def draw_routes(args: ModelArgs, n_rows: int, seq_len: int, step: int) -> Tensor:
    """Return random routes (B, S, layers, K): uneven, and one expert of each layer gets no token, if all need not."""
    generator = torch.Generator().manual_seed(step)
    layers, n_experts, top_k = args.n_layers, args.moe.n_experts, args.moe.top_k
    scores = torch.rand(n_rows, seq_len, layers, n_experts, generator=generator)
    scores += torch.linspace(0, 0.5, n_experts)
    scores[..., torch.arange(layers), torch.arange(layers) % n_experts] = NEVER
    return scores.topk(top_k).indices


@torch.no_grad()
def set_biases(biases: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Give the routers of `biases` (of some layers) these values."""
    for fqn, bias in biases.items():
        bias.copy_(values[fqn])
