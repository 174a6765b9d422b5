"""The learning rate of a step, as a pure function of its number and of [lr_scheduler]."""

from torchtitan_lite.config.choices import DECAYS
from torchtitan_lite.config.schema import Config, LRScheduler

# times the peak. The last steps of a cosine decay over ten million steps are above this
NEGLIGIBLE = 1e-14


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


def describe_unusual_rates(config: Config, resumed_step: int) -> list[str]:
    """Return a notice if the rate of a resolved config is 0 before the last step, and one if the peak is never reached.

    The schedule is computed at 1,000 steps of the run, and at the ends of its phases.
    """
    section = config.lr_scheduler
    n_steps = config.training.steps
    steps = set(range(0, n_steps, max(1, n_steps // 1000)))
    for end in (resumed_step, section.warmup_steps, section.total_steps, n_steps):
        steps.update(range(max(0, end - 2), min(end + 2, n_steps)))
    peak = config.optimizer.lr
    rates = {step: peak * learning_rate_factor(section, step) for step in sorted(steps)}
    idle_steps = [step for step, rate in rates.items() if rate <= peak * NEGLIGIBLE]
    idle_steps = [step for step in idle_steps if resumed_step <= step < n_steps - 1]
    notices = []
    if idle_steps:
        rate = rates[idle_steps[0]]
        keys = f"optimizer.lr = {peak:g}, lr_scheduler.total_steps = {section.total_steps}"
        why = f"{keys}, warmup_steps = {section.warmup_steps}, min_lr_factor = {section.min_lr_factor:g}"
        where = f"step {idle_steps[0] + 1} of {n_steps}"
        notices.append(f"the learning rate falls to {rate:.3g} at {where} ({why})")
    highest = max(learning_rate_factor(section, step) for step in steps)
    if highest < 0.999:
        why = f"the learning rate only reaches {100 * highest:.3g}% of optimizer.lr"
        lengths = f"{section.warmup_steps} of {n_steps} steps"
        notices.append(f"lr_scheduler.warmup_steps is longer than the run, {lengths}: {why}")
    return notices
