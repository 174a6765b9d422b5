"""AdamW with both moments in bfloat16: 12 bytes of training state per parameter instead of 16.

    between steps        weight fp32 4   gradient fp32 4   moments bf16 2 + 2
    during an update     moments of one tensor in fp32 -> torch's AdamW -> rounded to bf16

All arithmetic is torch's, in fp32. Only the moments are rounded to 8 significant bits, once per step.

    bytes moved per parameter and step    20    compiled: one kernel clips, converts, updates and rounds
                                          56    eager: fp32 copies for the fused kernel, one tensor at a time; needs 8
                                                extra bytes per element of the largest local tensor
                                          32    torch's fused kernel with fp32 moments

Why beta2 must not exceed 0.99: in a step without a gradient, the second moment should decay by the factor beta2. bf16
values are 0.4 to 0.8 % apart, and rounding undoes any decay smaller than half of that. With beta2 = 0.999, one large
gradient would slow down its weight forever. With 0.99 the decay always has an effect, although a coarse one.

No communication: each rank updates its own shards. Sources: AdamW arXiv:1711.05101; bf16 moments: DeepSeek-V3
arXiv:2412.19437.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

# A compiled kernel loads 16 bytes at a time for the shape (dynamic, 16), but 4 bytes for (dynamic,). Shards whose size
# is no multiple of 16 are rare. If a model has both, torch.compile makes both dims dynamic, and all loads are 4 bytes.
ROW = 16


class AdamWBFloat16(AdamW):
    """Construct it with `fused=True`. The state has the same names and layout as torch's AdamW, for checkpoints."""

    compiled_update = None
    grad_scale: Tensor | None = None  # () fp32: divide gradients by this
    found_inf: Tensor | None = None  # () fp32: if 1, skip the update

    def compile(self, backend: str) -> None:
        """Compile the update of a tensor. From the second size on, a single kernel serves all sizes."""
        self.compiled_update = torch.compile(update_unless, backend=backend, fullgraph=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            # Largest first, because inductor tunes the kernel for all sizes on the second size that it sees.
            parameters = [p for p in group["params"] if p.grad is not None]
            parameters.sort(key=Tensor.numel, reverse=True)
            keys = {key: group[key] for key in ("weight_decay", "eps", "amsgrad", "maximize")}
            keys["beta1"], keys["beta2"] = group["betas"]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                self.update(parameter, group["lr"], keys)
            n_steps = [self.state[parameter]["step"] for parameter in parameters]
            if n_steps and self.found_inf is None:
                torch._foreach_add_(n_steps, 1)
            elif n_steps:  # a list of tensors, because a single tensor would be read by the host
                torch._foreach_add_(n_steps, [1 - self.found_inf] * len(n_steps))

    def initialize_state(self, parameter: Tensor) -> None:
        """Allocate the moments, and the step count, () fp32. A checkpoint needs a count per parameter, as in torch."""
        moments = {
            key: torch.zeros_like(parameter, dtype=torch.bfloat16)
            for key in ("exp_avg", "exp_avg_sq")
        }
        n_steps = torch.zeros((), device=local_tensor(parameter).device)
        self.state[parameter] = {"step": n_steps, **moments}

    def update(self, parameter: Tensor, lr: float, keys: dict) -> None:
        """Update one parameter and its moments, but not its step count."""
        state = self.state[parameter]
        n_steps = state["step"]
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        tensors = [local_tensor(tensor).detach() for tensor in tensors]
        if self.compiled_update:
            shape = (-1, ROW) if tensors[0].numel() % ROW == 0 else (-1,)
            rows = [tensor.view(shape) for tensor in tensors]
            lr = torch.full_like(n_steps, lr)  # every new value of a Python number would recompile
            self.compiled_update(*rows, n_steps, lr, self.grad_scale, self.found_inf, keys)
            return
        weight, gradient, *moments = tensors
        precise = [moment.float() for moment in moments]
        adamw(
            [weight],
            [gradient],
            precise[:1],
            precise[1:],
            [],
            [n_steps.clone()],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            lr=lr,
            **keys,
        )
        for moment, updated in zip(moments, precise, strict=True):
            moment.copy_(updated)


def update_unless(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    n_steps: Tensor,
    lr: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    keys: dict,
) -> None:
    """Run torch's AdamW on fp32 copies, and keep the result unless `found_inf`."""
    if grad_scale is not None:
        gradient = gradient / grad_scale
    old = (weight, first, second)
    new = [tensor.to(torch.float32, copy=True) for tensor in old]
    lists = [new[0]], [gradient], [new[1]], [new[2]], [], [n_steps.clone()]
    adamw(*lists, foreach=False, fused=False, capturable=True, lr=lr, **keys)
    for tensor, updated in zip(old, new, strict=True):
        tensor.copy_(updated if found_inf is None else torch.where(found_inf > 0, tensor, updated))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself if it is not a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
