"""Find steps whose learning rate is not above 0. Loaded only if the schedule is shorter than the run, or if the last
rate is not above 0."""

from bisect import bisect_left

from torchtitan_lite.config.learning_rate import learning_rate_factor
from torchtitan_lite.config.schema import Config

# A rate below this fraction of the peak is treated as 0. Even a cosine decay over ten million steps stays above this
# fraction until the last step.
NEGLIGIBLE = 1e-14


def describe_idle_steps(config: Config, resumed_step: int) -> list[str]:
    """Return a notice if the rate is not above 0 before the last step, or if the rate never decays."""
    section = config.lr_scheduler
    n_steps = config.training.steps
    peak = config.optimizer.lr

    def is_idle(step: int) -> bool:
        return peak * learning_rate_factor(section, step) <= peak * NEGLIGIBLE

    # Find the first idle step by bisection: the rate starts above 0, rises, then falls. The search leaves out the last
    # step, where a rate of 0 is normal.
    idle_step = bisect_left(range(n_steps - 1), True, lo=resumed_step, key=is_idle)
    if idle_step < n_steps - 1:
        rate = peak * learning_rate_factor(section, idle_step)
        keys = f"optimizer.lr = {peak:g}, lr_scheduler.total_steps = {section.total_steps}"
        why = f"{keys}, warmup_steps = {section.warmup_steps}, min_lr_factor = {section.min_lr_factor:g}"
        return [
            f"the learning rate falls to {rate:.3g} at step {idle_step + 1} of {n_steps} ({why})"
        ]
    if section.total_steps < section.warmup_steps <= n_steps:
        return [
            "lr_scheduler.warmup_steps exceeds lr_scheduler.total_steps "
            f"({section.warmup_steps} > {section.total_steps}), so the rate does not decay before the warm-up ends"
        ]
    return []
