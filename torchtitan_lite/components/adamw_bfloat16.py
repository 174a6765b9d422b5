"""torch's AdamW with both moments at rest in bfloat16: 12 bytes of training state per parameter instead of 16.

    at rest          weight fp32 4   gradient fp32 4   moments bf16 2 + 2
    while its turn   the moments of one tensor as fp32 copies -> torch's fused kernel -> rounded back

All arithmetic is torch's own in fp32; only what is remembered from step to step is rounded, to 8 significant bits. A
tensor takes its turn alone, so the copies cost 8 bytes per number of the largest local tensor and no more. The price is
memory traffic: 52 bytes per parameter and step, where torch's fused kernel with fp32 moments moves 28.

Why beta2 may not exceed 0.99: in a step without gradient the second moment should fall by the factor beta2. Numbers of
bf16 lie 0.4 to 0.8 % apart, so that a fall of less than half of that is rounded away, in every step: with beta2 = 0.999
one large gradient would brake its weight for good. At 0.99 a fall always counts, if coarsely.

No rank talks: each updates its slices. Sources: AdamW arXiv:1711.05101; bf16 moments: DeepSeek-V3 arXiv:2412.19437.
"""

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from torchtitan_lite.components.checkpoint.staging import share_of


class AdamWBFloat16(AdamW):
    """Built with `fused=True`. State under the names and in the layout of torch's AdamW, for checkpoints."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, object]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=share_of(parameter).device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        at_rest = [share_of(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        exp_avg, exp_avg_sq = (moment.float() for moment in at_rest)
        adamw(
            [share_of(parameter)],
            [share_of(parameter.grad)],
            [exp_avg],
            [exp_avg_sq],
            [],
            [state["step"]],
            fused=True,
            found_inf=getattr(self, "found_inf", None),  # set: the kernel changes nothing, on the device
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, updated in zip(at_rest, (exp_avg, exp_avg_sq), strict=True):
            moment.copy_(updated)
