"""AdamW with both moments in bfloat16: 12 bytes of training state per parameter instead of 16.

    between steps        weight fp32 4   gradient fp32 4   moments bf16 2 + 2
    during an update     moments of one tensor in fp32 -> torch's AdamW -> rounded to bf16

All arithmetic is torch's, in fp32. Only the moments are rounded to 8 significant bits, once per step.

    bytes moved per parameter and step    56    one tensor at a time; needs 8 extra bytes per element of the largest
                                                local tensor
                                          32    torch's fused kernel with fp32 moments

Why beta2 must not exceed 0.99: in a step without a gradient, the second moment should decay by the factor beta2. bf16
values are 0.4 to 0.8 % apart, and rounding undoes any decay smaller than half of that. With beta2 = 0.999, one large
gradient would slow down its weight forever. With 0.99 the decay always has an effect, although a coarse one.

No communication: each rank updates its own shards. Sources: AdamW arXiv:1711.05101; bf16 moments: DeepSeek-V3
arXiv:2412.19437.
"""

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from torchtitan_lite.dtensor import local_shard


class AdamWBFloat16(AdamW):
    """Construct it with `fused=True`. The state has the same names and layout as torch's AdamW, for checkpoints."""

    grad_scale: Tensor | None = None  # () fp32: divide gradients by this
    found_inf: Tensor | None = None  # () fp32: if 1, skip the update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter: Tensor, group: dict) -> None:
        """Update one parameter, its moments and its step count."""
        weight = local_shard(parameter)
        state = self.state[parameter]
        if not state:  # a step count per parameter, () fp32, as in torch: tensors in a checkpoint share no storage
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        first = local_shard(state["exp_avg"])
        second = local_shard(state["exp_avg_sq"])
        first32 = first.float()
        second32 = second.float()
        beta1, beta2 = group["betas"]
        adamw(
            [weight],
            [local_shard(parameter.grad)],
            [first32],
            [second32],
            [],
            [state["step"]],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        first.copy_(first32)
        second.copy_(second32)
