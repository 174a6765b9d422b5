"""Skip steps whose gradient norm is a spike (more than K times the running median). training.skip_spikes is K.

    norms     1.0 1.1 0.9 ... 1.0 | 9.0     | 1.1        the window: the last training.spike_window finite norms
    median                    1.0 | 1.0     | 1.0
    step                  applied | skipped | applied

The window includes the gradient norm of the current step, and the gradient norms of skipped steps. No step is skipped
until half of the window is filled. If gradient norms stay high, skipping does not help, because a skipped step does not
change the weights. After half a window of high norms, the median is high too, and steps are applied again.

All ranks have the same gradient norm and history, so they make the same decision without communication. The history
stays on the device. Checkpoints store the history and the number of skipped steps as spike_filter.history and
spike_filter.skipped.
"""

import logging
import math

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

UNKNOWN_NORM = 1e18  # above any gradient norm, but finite, because `verify` subtracts the values of two checkpoints


class SpikeFilter:
    """The last `window` gradient norms, and the number of skipped steps."""

    def __init__(self, factor: float, window: int, device: torch.device):
        self.factor = factor
        self.history = torch.full((window,), UNKNOWN_NORM, device=device)
        self.skipped = torch.zeros((), device=device)
        # the median at the last logged step if this step was skipped, otherwise infinity
        self.skipped_above = math.inf

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors in a checkpoint, by name."""
        return {"spike_filter.history": self.history, "spike_filter.skipped": self.skipped}

    @torch.no_grad()
    def judge(self, grad_norm: Tensor) -> Tensor:
        """Add the gradient norm of this step, () fp32, to the history. Return whether this norm is a spike, () bool."""
        newer = torch.cat([self.history[1:], grad_norm[None]])
        self.history.copy_(torch.where(grad_norm.isfinite(), newer, self.history))
        is_spike = grad_norm > self.factor * self.history.median()
        self.skipped += is_spike
        return is_spike

    def describe(self, step: int, grad_norm: float, *, is_applied: bool) -> dict[str, float]:
        """Return skipped_steps and, if this step was skipped, skipped_above, for the record of a step.

        Log a warning when steps are applied again because the median has risen.
        """
        fields: dict[str, float] = {"skipped_steps": int(self.skipped)}
        median = self.history.median().item()
        if not is_applied:
            fields["skipped_above"] = median
        elif grad_norm > self.factor * self.skipped_above:
            window = f"the last {len(self.history)} steps (training.spike_window)"
            why = f"the median gradient norm of {window} rose from {self.skipped_above:.4g} to {median:.4g}"
            logger.warning(
                f"step {step}: steps with norms as high as this one are no longer skipped, because {why}"
            )
        self.skipped_above = math.inf if is_applied else median
        return fields
