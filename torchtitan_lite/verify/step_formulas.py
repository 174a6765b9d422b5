"""Schedule, clipping and optimizers in float64, by their formulas: how every reference makes its steps.

    schedule   linear warm-up, a stable stretch, decay            arXiv:2404.06395
    clipping   g <- g min(1, max_norm / (||g|| + 1e-6))           documentation of torch.nn.utils.clip_grad_norm_
    AdamW      w <- (1 - lr wd) w - lr m' / (sqrt(v') + eps)      arXiv:1711.05101; m', v': corrected for their start
    SGD        w <- w - lr (g + wd w)                             documentation of torch.optim.SGD; no momentum

Nothing here calls components/optim.py or torch.optim: a mistake that both sides share would not be seen. Each formula
treats each number by itself, so that a rank can apply it to the slices that it holds. A fork adds a row to FORMULAS for
its optimizer; without one `verify` says that its updates have no reference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from torchtitan_lite.config.schema import LRScheduler, Optimizer

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
