"""Build the optimizer and the learning-rate schedule; measure the gradient norm; clip gradients; update weights.

Sources: AdamW arXiv:1711.05101; warm-up, stable, decay (WSD) arXiv:2404.06395.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer as TorchOptimizer

from torchtitan_lite.config.choices import OPTIMIZERS
from torchtitan_lite.config.extensions import find_code, load_extension
from torchtitan_lite.config.learning_rate import learning_rate_factor
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import LRScheduler, Optimizer, ParameterGroup
from torchtitan_lite.dtensor import count_replicas, local_shard


def build_optimizer(
    section: Optimizer, parameters: dict[str, Tensor], dtype: str = "float32"
) -> TorchOptimizer:
    """Build one optimizer for all parameters (FQN -> tensor). `dtype`: the compute dtype of Muon; all other optimizers
    ignore it.

    Every parameter group contains the options of all optimizers. Each optimizer ignores the options that it does not
    use.
    """
    row = OPTIMIZERS[section.name]
    builder = find_code(row.extension, section.name, "torch.optim")
    # config/features.py allows bfloat16 moments only for fused AdamW
    if section.moments_dtype == "bfloat16":
        builder = load_extension("adamw_bfloat16").AdamWBFloat16
    # Each group in optimizer.groups becomes one parameter group per mesh, because torch's kernels require that all
    # DTensors have the same mesh. Experts have a second mesh.
    groups: dict[tuple, dict] = {}
    factors = ParameterGroup("")  # by default, the factors of lr and weight_decay are 1
    for fqn, parameter in parameters.items():
        if section.groups:
            factors = load_extension("parameter_groups").find_group(section.groups, fqn)
        options = {
            "params": [],
            "lr": section.lr * factors.lr,
            "betas": (section.beta1, section.beta2),
            "eps": section.eps,
            "weight_decay": section.weight_decay * factors.weight_decay,
            "compute_dtype": getattr(torch, dtype),
        }
        group = groups.setdefault((factors, getattr(parameter, "device_mesh", None)), options)
        group["params"].append((fqn, parameter))
    # DTensor has no fused SGD (torch 2.13), so foreach replaces `fused`.
    fused = section.implementation == "fused" and row.has_fused_kernel
    foreach = section.implementation != "for-loop" and not fused
    kernels = {"foreach": foreach}
    if fused or row.extension:
        kernels["fused"] = fused  # only some of torch's optimizers have this argument
    if section.name not in ("AdamW", "SGD"):
        builder = partial(load_extension("optimizer_state").build_watched, builder, row.n_moments)
    return builder(list(groups.values()), **kernels)


def build_lr_scheduler(section: LRScheduler, optimizer: TorchOptimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: learning_rate_factor(section, step))


def require_gradients(gradients: dict[str, Tensor | None]) -> None:
    """Raise UserError if parameters (by FQN) have no gradient, because they would never be trained."""
    unreached = [fqn for fqn, gradient in gradients.items() if gradient is None]
    if unreached:
        raise UserError(
            f"no gradient reaches {', '.join(unreached)}: the loss does not depend on them. "
            "Use them in forward, or remove them from modules.py and table.py of the model"
        )


@torch.no_grad()
def sum_gradient_squares(parameters: Iterable[Tensor]) -> Tensor:
    """Return this rank's contribution to the squared 2-norm of all gradients, () float64. The caller sums over
    ranks.

    A CPU adds fp32 values one by one, so the rounding error grows with the number of values on a rank. With fp32 sums
    on a CPU, clipping would depend on the layout (tests/ranks/test_optim.py). Therefore CPU tensors are summed in
    float64. A GPU sums in a tree, which is accurate enough in fp32.
    """
    # Use local shards: for a small tensor, DTensor takes longer to plan the operation than to compute the sum.
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            n_copies = count_replicas(gradient)
            by_copies[n_copies].append(local_shard(gradient))
    total = torch.zeros((), dtype=torch.float64, device=parameter.device)
    dtype = torch.float64 if total.device.type == "cpu" else torch.float32
    for n_copies, shards in by_copies.items():
        norms = torch.stack(torch._foreach_norm(shards, dtype=dtype))
        # If n ranks have the same shard (such as a norm weight under tp), each rank adds 1/n of the squares.
        total += norms.double().square().sum() / n_copies
    return total


@torch.no_grad()
def update_weights(
    optimizer: TorchOptimizer, grad_norm: Tensor, max_norm: float, is_spike: Tensor | None = None
) -> Tensor:
    """Clip the gradients to a norm of at most `max_norm` and step the optimizer, if the norm is finite and not a spike.

    Otherwise gradients, weights and moments do not change. `max_norm` 0 turns clipping off. Returns whether the step
    was applied, () bool on the device.
    Fused kernels clip during the update. They read the divisor of the gradients, and the flag that skips the step, on
    the device (as with torch.amp.GradScaler). Optimizers without a fused kernel need an extra pass over the gradients
    and one host-device synchronization per step.
    """
    applied = grad_norm.isfinite()
    if is_spike is not None:
        applied &= ~is_spike
    limit = max_norm or math.inf
    divisor = ((grad_norm + 1e-6) / limit).clamp(min=1.0)  # 1e-6 as in torch.nn.utils
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale = divisor
        optimizer.found_inf = (~applied).float()
        optimizer.step()
    elif applied:
        gradients = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradients.append(local_shard(parameter.grad))
        if gradients:  # there is no gradient if every parameter of this rank is frozen
            torch._foreach_div_(gradients, divisor)
        optimizer.step()
    return applied
