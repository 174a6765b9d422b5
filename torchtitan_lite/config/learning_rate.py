"""Compute the learning rate of a step from its number and [lr_scheduler]. All functions are pure."""

from collections.abc import Iterator
from math import isfinite

from torchtitan_lite.config.choices import DECAYS
from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Config, LRScheduler


def learning_rate_factor(section: LRScheduler, step: int) -> float:
    """Return the fraction of the peak learning rate at step `step` (the first step is 0).

    The schedule is a warm-up, a constant rate, and a decay to min_lr_factor.

    `total_steps` is resolved. Without decay_ratio, the decay starts right after the warm-up. A run may end before the
    warm-up ends. Raises UserError if a fork's decay has no finite value.
    """
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    decay_ratio = 1.0 if section.decay_ratio is None else section.decay_ratio
    decay_start = max(
        section.warmup_steps, section.total_steps - round(decay_ratio * section.total_steps)
    )
    if step < decay_start:
        return 1.0
    progress = min(1.0, (step - decay_start) / max(1, section.total_steps - decay_start))
    try:
        left = DECAYS[section.decay_type](progress)
        if isfinite(left):
            return section.min_lr_factor + (1 - section.min_lr_factor) * left
    except (ArithmeticError, ValueError) as error:
        left = repr(error)
    raise UserError(
        f"lr_scheduler.decay_type = {section.decay_type!r}: the decay gives {left} in step {step + 1}. "
        "Correct its function in DECAYS (config/choices.py)"
    )


def list_rates(config: Config, step: int) -> dict[str, float]:
    """Return "lr" -> learning rate of step `step` (the first step is 0), and "lr/PATTERN" -> rate of each group.

    Groups are the tables of optimizer.groups. The rates are computed from the step and not read from the optimizer,
    because a pipeline stage may have no parameter of a group.
    """
    section = config.optimizer
    factor = learning_rate_factor(config.lr_scheduler, step)
    rates = {"lr": section.lr * factor}
    for group in section.groups:
        rates[f"lr/{group.match}"] = section.lr * group.lr * factor
    return rates


# ---------------------------------------------------------------- notices


def describe_unusual_rates(config: Config, resumed_step: int) -> Iterator[str]:
    """Yield a notice if the learning rate is not above 0 before the last step, and a notice if the rate never reaches
    its peak.

    `config` is resolved.
    """
    section = config.lr_scheduler
    n_steps = config.training.steps
    # the scheduler also computes the factor after the last step
    learning_rate_factor(section, n_steps)
    last = learning_rate_factor(section, n_steps - 1)
    if section.total_steps < n_steps or config.optimizer.lr * last <= 0:
        yield from load_module("config.idle_steps").describe_idle_steps(config, resumed_step)
    if section.warmup_steps > n_steps and last < 0.999:
        yield (
            f"lr_scheduler.warmup_steps exceeds the number of steps ({section.warmup_steps} > {n_steps}): "
            f"the learning rate only reaches {100 * last:.3g}% of optimizer.lr"
        )
