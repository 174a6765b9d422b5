"""Store both moments of torch's AdamW in bfloat16: 12 bytes of training state per parameter instead of 16.

    between steps        weight fp32 4   gradient fp32 4   moments bf16 2 + 2
    during its update    the moments of one tensor in fp32 -> torch's AdamW -> rounded back

All arithmetic is torch's own in fp32; only the moments are rounded, once per step, to 8 significant bits.

    bytes moved per parameter and step    20    compiled: one kernel that widens, updates and rounds
                                          52    else: copies in fp32 for the fused kernel, one tensor at a time: 8 bytes
                                                more memory per number of the largest local tensor
                                          28    torch's fused kernel with moments in fp32

Why beta2 may not exceed 0.99: in a step without gradient the second moment should fall by the factor beta2. Numbers of
bf16 are 0.4 to 0.8 % apart, so rounding removes a fall of less than half of that, in every step: with beta2 = 0.999 one
large gradient would slow its weight for ever. At 0.99 every fall counts, coarsely.

No communication: each rank updates its slices. Sources: AdamW arXiv:1711.05101; bf16 moments: DeepSeek-V3
arXiv:2412.19437.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw


class AdamWBFloat16(AdamW):
    """Make it with `fused=True`. Its state has the names and layout of torch's AdamW, for checkpoints."""

    compiled_move = None

    def compile(self, backend: str) -> None:
        """Compile one kernel per tensor. Tensors are passed flat, so one graph serves all sizes from the second on."""
        self.compiled_move = torch.compile(move_unless, backend=backend, fullgraph=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            keys = {key: group[key] for key in ("weight_decay", "eps", "amsgrad", "maximize")}
            keys["beta1"], keys["beta2"] = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=local_tensor(parameter).device)
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                move = self._move_compiled if self.compiled_move else self._move_fused
                move(*(local_tensor(tensor).detach() for tensor in tensors), state["step"], group["lr"], keys)

    def _move_fused(
        self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: float, keys: dict
    ) -> None:
        moments = [first.float(), second.float()]
        found_inf = getattr(self, "found_inf", None)  # where it is 1, the kernel changes nothing, on the device
        adamw([weight], [gradient], *([m] for m in moments), [], [step], fused=True, found_inf=found_inf, lr=lr, **keys)
        first.copy_(moments[0])
        second.copy_(moments[1])

    def _move_compiled(
        self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: float, keys: dict
    ) -> None:
        found_inf = getattr(self, "found_inf", None)
        skip = torch.zeros_like(step, dtype=torch.bool) if found_inf is None else found_inf > 0
        flat = [tensor.view(-1) for tensor in (weight, gradient, first, second)]
        # The learning rate as a tensor: a Python number that changes would compile anew.
        self.compiled_move(*flat, step, torch.full_like(step, lr), skip, keys)


def move_unless(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: Tensor, skip: Tensor, keys: dict
) -> None:
    """Run torch's AdamW on fp32 copies, and keep the result unless `skip`, () bool."""
    kept = (weight, first, second, step)
    moved = [tensor.to(torch.float32, copy=True) for tensor in kept]
    new_weight, new_first, new_second, new_step = ([tensor] for tensor in moved)
    lists = new_weight, [gradient], new_first, new_second, [], new_step
    adamw(*lists, foreach=False, fused=False, capturable=True, lr=lr, **keys)
    for old, new in zip(kept, moved, strict=True):
        old.copy_(torch.where(skip, old, new))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's slice of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
