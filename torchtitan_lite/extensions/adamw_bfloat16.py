"""Run AdamW with both moments in bfloat16. Training state takes 12 bytes per parameter instead of 16.

    bytes between steps   weight fp32 4   gradient fp32 4   moments bf16 2 + 2
    bytes moved           20 per parameter and step: weight and moments are read and written, the gradient is read
                          (28 with fp32 moments)

All arithmetic is in fp32. Only the moments are rounded, once per step, to 8 significant bits. On CUDA (never run),
`move` is compiled to two kernels per tensor: the update and the step count. On a CPU, `move` runs operator by operator.

Because of this rounding, beta2 must not exceed 0.99. In a step with a zero gradient, the second moment should decay by
the factor beta2. Neighboring bf16 values differ by 0.4 to 0.8 %, and rounding undoes any decay that is smaller than
half of this difference. With beta2 = 0.999, the second moment would never decay, so one large gradient would slow down
the updates of the weight forever. With beta2 = 0.99, rounding makes the decay coarse, but never undoes it.

There is no communication, because each rank updates its own shards. Sources: AdamW arXiv:1711.05101; bf16 moments:
DeepSeek-V3 arXiv:2412.19437.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from torchtitan_lite.dtensor import local_shard
from torchtitan_lite.extensions.stochastic_rounding import round_stochastically


class AdamWBFloat16(AdamW):
    """AdamW with bf16 moments. Construct it with `fused=True`. The state has the names and layout of torch's AdamW."""

    grad_scale: Tensor | None = None  # () fp32; gradients are divided by this number
    found_inf: Tensor | None = None  # () fp32; 1 to skip the update, otherwise 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            device = local_shard(group["params"][0]).device
            # Scalars are passed as tensors, because `move` would be recompiled for each new Python number.
            rate = torch.full((), group["lr"], device=device)
            scale = torch.ones_like(rate) if self.grad_scale is None else self.grad_scale
            skipped = torch.zeros_like(rate) if self.found_inf is None else self.found_inf
            betas = group["betas"]
            eps = group["eps"]
            decay = group["weight_decay"]
            update = compile_move() if device.type == "cuda" else move
            # salts start at 2, because torch.compile would specialize on 0 and 1
            for salt, parameter in enumerate(group["params"], 2):
                if parameter.grad is not None:
                    tensors = self.flatten(parameter)
                    update(*tensors, rate, scale, skipped, salt, betas, eps, decay)

    def flatten(self, parameter: Tensor) -> list[Tensor]:
        """Return the first arguments of `move` as flat tensors, so one compiled graph is enough for all shapes."""
        first, second, step = self.list_state(parameter)
        gradient = local_shard(parameter.grad).reshape(-1)  # it may be transposed
        weight, first, second = [
            local_shard(tensor).view(-1) for tensor in (parameter, first, second)
        ]
        return [weight, gradient, first, second, step]

    def list_state(self, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return both moments and the step count of a parameter."""
        state = self.state[parameter]
        if not state:  # as in torch, each parameter has its own step count, () fp32
            state["step"] = torch.zeros((), device=local_shard(parameter).device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]


def move(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    rate: Tensor,
    scale: Tensor,
    skipped: Tensor,
    salt: int,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update one weight, its moments and its step count in-place, unless `skipped` is 1.

    `rate`, `scale`, `skipped` and `step` are tensors of shape (). `salt` is the number of the weight
    (stochastic_rounding.py).
    """
    beta1, beta2 = betas
    is_applied = skipped == 0
    step.add_(is_applied)
    gradient = gradient.float() / scale
    new_first = torch.lerp(first.float(), gradient, 1 - beta1)
    new_second = beta2 * second.float() + (1 - beta2) * gradient * gradient
    root = (new_second / (1 - beta2**step)).sqrt()
    change = new_first / (1 - beta1**step) / (root + eps)
    moved = weight.float() * (1 - rate * weight_decay) - rate * change
    if weight.dtype == torch.bfloat16:
        moved = round_stochastically(moved, step, salt)
    weight.copy_(torch.where(is_applied, moved, weight))
    first.copy_(torch.where(is_applied, new_first, first))
    second.copy_(torch.where(is_applied, new_second, second))


@cache
def compile_move() -> Any:
    return torch.compile(move, dynamic=True, fullgraph=True)
