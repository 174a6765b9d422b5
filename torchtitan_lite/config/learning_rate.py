"""Compute the learning rate of a step from its number and [lr_scheduler]. All functions are pure."""

from bisect import bisect_left

from torchtitan_lite.config.choices import DECAYS
from torchtitan_lite.config.schema import Config, LRScheduler

# A rate below this fraction of the peak counts as 0. Even a cosine decay over ten million steps stays above it until
# its last step.
NEGLIGIBLE = 1e-14


def learning_rate_factor(section: LRScheduler, step: int) -> float:
    """Return the fraction of the peak learning rate at `step`, counted from 0.

    The schedule is a warm-up, a constant rate, and a decay to min_lr_factor.

    `total_steps` is resolved. Without decay_ratio the decay starts right after the warm-up. A run may end before its
    warm-up does.
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
    left = DECAYS[section.decay_type](progress)
    return section.min_lr_factor + (1 - section.min_lr_factor) * left


def list_rates(config: Config, step: int) -> dict[str, float]:
    """Return the learning rates of a step (0 = first): "lr", and "lr/PATTERN" for each of optimizer.groups.

    They are computed from the step, not read from the optimizer: a pipeline stage may have no parameter of a group.
    """
    section = config.optimizer
    factor = learning_rate_factor(config.lr_scheduler, step)
    rates = {"lr": section.lr * factor}
    for group in section.groups:
        rates[f"lr/{group.match}"] = section.lr * group.lr * factor
    return rates


# ---------------------------------------------------------------- notices


def describe_unusual_rates(config: Config, resumed_step: int) -> list[str]:
    """Return a notice if the rate is 0 before the last step, and another if it never reaches its peak.

    `config` is resolved.
    """
    section = config.lr_scheduler
    n_steps = config.training.steps
    notices = []
    if section.total_steps < n_steps or config.optimizer.lr == 0:
        notices += describe_idle_steps(config, resumed_step)
    if section.warmup_steps > n_steps:
        highest = learning_rate_factor(section, n_steps - 1)
        why = f"the learning rate only reaches {100 * highest:.3g}% of optimizer.lr"
        lengths = f"{section.warmup_steps} of {n_steps} steps"
        if highest < 0.999:
            notices.append(f"lr_scheduler.warmup_steps is longer than the run, {lengths}: {why}")
    return notices


def describe_idle_steps(config: Config, resumed_step: int) -> list[str]:
    """Return a notice if the rate is 0 before the last step, or if it never decays."""
    section = config.lr_scheduler
    n_steps = config.training.steps
    peak = config.optimizer.lr

    def is_idle(step: int) -> bool:
        return peak * learning_rate_factor(section, step) <= peak * NEGLIGIBLE

    # Find the first idle step by bisection: the rate starts above 0, rises, then falls. The last step is not searched,
    # because its rate may be 0.
    idle_step = bisect_left(range(n_steps - 1), True, lo=resumed_step, key=is_idle)
    if idle_step < n_steps - 1:
        rate = peak * learning_rate_factor(section, idle_step)
        keys = f"optimizer.lr = {peak:g}, lr_scheduler.total_steps = {section.total_steps}"
        why = f"{keys}, warmup_steps = {section.warmup_steps}, min_lr_factor = {section.min_lr_factor:g}"
        where = f"step {idle_step + 1} of {n_steps}"
        return [f"the learning rate falls to {rate:.3g} at {where} ({why})"]
    if section.total_steps < section.warmup_steps <= n_steps:
        lengths = f"{section.warmup_steps} and {section.total_steps} steps"
        keys = "lr_scheduler.warmup_steps is longer than lr_scheduler.total_steps"
        return [f"{keys}, {lengths}: no decay before the end of the warm-up"]
    return []
