"""The learning rate of a step, as a pure function of its number and of [lr_scheduler]."""

from torchtitan_lite.config.choices import DECAYS
from torchtitan_lite.config.schema import Config, LRScheduler


def learning_rate_factor(section: LRScheduler, step: int) -> float:
    """Return the fraction of the peak learning rate at `step` (0 = first): warm-up, constant, decay to min_lr_factor.

    `total_steps` is resolved. Without decay_ratio the decay starts after the warm-up. A run may end during its warm-up.
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

    They are functions of the step, because a pipeline stage may have no parameter of a group.
    """
    section = config.optimizer
    factor = learning_rate_factor(config.lr_scheduler, step)
    rates = {"lr": section.lr * factor}
    for group in section.groups:
        rates[f"lr/{group.match}"] = section.lr * group.lr * factor
    return rates
