"""Build the optimizer and the learning-rate schedule; measure the gradient norm; skip spikes; clip and update.

Sources: AdamW arXiv:1711.05101; warm-up, stable, decay (WSD) arXiv:2404.06395.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer as TorchOptimizer

from torchtitan_lite.components.shutdown import SIGNALS
from torchtitan_lite.config.choices import OPTIMIZERS
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.learning_rate import learning_rate_factor
from torchtitan_lite.config.schema import LRScheduler, Optimizer
from torchtitan_lite.dtensor import count_replicas, local_shard

NORMS = "gradient_norms"  # key in the optimizer's state, beside its parameters
UNKNOWN_NORM = 1e18  # above every norm; finite, so that `verify` can compare checkpoints

# optimizer.name, a row of config/choices.py -> optimizer for all parameters of this rank. It reads the keys of its
# groups, and ignores those that it does not know. The optimizers of extensions are in their files.
BUILDERS = {
    "AdamW": AdamW,
    "SGD": SGD,
}


def build_optimizer(
    section: Optimizer, parameters: dict[str, Tensor], dtype: str = "float32"
) -> TorchOptimizer:
    """Build one optimizer for all parameters (by FQN). Only Muon communicates, and uses the compute dtype `dtype`."""
    row = OPTIMIZERS[section.name]
    if section.moments_dtype == "bfloat16":  # `check` allows it only for fused AdamW
        builder = load_extension("adamw_bfloat16").AdamWBFloat16
    elif row.extension:
        builder = getattr(load_extension(row.extension), section.name)
    else:
        builder = BUILDERS[section.name]
    # DTensor has no fused SGD (torch 2.13), so foreach replaces `fused`.
    has_fused_kernel = row.has_fused_kernel
    fused = section.implementation == "fused" and has_fused_kernel
    foreach = section.implementation != "for-loop" and not fused
    # One parameter group per mesh, because torch's kernels need all DTensors on one mesh. Experts have another mesh.
    groups: dict[object, dict] = {}
    for fqn, parameter in parameters.items():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh not in groups:
            groups[mesh] = {
                "params": [],
                "lr": section.lr,
                "betas": (section.beta1, section.beta2),
                "eps": section.eps,
                "weight_decay": section.weight_decay,
                "compute_dtype": getattr(torch, dtype),
            }
        groups[mesh]["params"].append((fqn, parameter))
    return builder(list(groups.values()), fused=fused, foreach=foreach)


def build_lr_scheduler(section: LRScheduler, optimizer: TorchOptimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: learning_rate_factor(section, step))


@torch.no_grad()
def measure_grad_norm(parameters: Iterable[Tensor], stop_signal: int) -> tuple[Tensor, Tensor]:
    """Compute the 2-norm of all gradients of the model, and decide on all ranks together whether to stop.

    `stop_signal`: the signal that this rank received, one of SIGNALS, or 0.
    Returns the norm, () fp32, and the signal that stops all ranks, () int64: 0 for none; the last of SIGNALS wins.
    """
    # Work on local shards: planning a DTensor operation costs more than summing a small tensor.
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            n_copies = count_replicas(gradient)
            by_copies[n_copies].append(local_shard(gradient))
    # If n ranks hold the same shard (a norm weight under tp), each counts 1/n of it, so the sum counts it once.
    squares = 0
    for n_copies, shards in by_copies.items():
        squares = squares + sum_squares(shards) / n_copies
    # Fill the flags on the device, because a copy from the host would wait for the device.
    flags = [squares.new_full((), stop_signal == number) for number in SIGNALS]
    numbers = torch.stack([squares, *flags])
    dist.all_reduce(numbers)  # 40 bytes over all ranks
    squares, *n_ranks = numbers.unbind()
    stop: int | Tensor = 0
    for number, n_received in zip(SIGNALS, n_ranks, strict=True):
        stop = torch.where(n_received > 0, int(number), stop)
    return squares.sqrt().float(), stop


def remember_norms(optimizer: TorchOptimizer, window: int, device: torch.device) -> None:
    """Add an empty history of `window` norms to the optimizer's state, with which it is saved: see skip_spike."""
    history = torch.full((window,), UNKNOWN_NORM, device=device)
    skipped = torch.zeros((), device=device)
    optimizer.state[NORMS] = {"history": history, "skipped": skipped}


@torch.no_grad()
def skip_spike(optimizer: TorchOptimizer, grad_norm: Tensor, factor: float) -> Tensor:
    """Return the norm, () fp32, or infinity if it is a spike: more than `factor` times the running median.

    The median is over the last training.spike_window finite norms, including this norm and the norms of skipped steps.
    While less than half of them are known, no step is skipped. A skipped step does not change the weights, so skipping
    cannot lower norms that have risen for good. Because the history has these norms too, the median then rises after
    half of the window, and the run continues.
    All ranks have the same norm and history, so they decide the same. `factor` 0 turns this off. The history stays on
    the device.
    """
    if factor == 0:
        return grad_norm
    state = optimizer.state[NORMS]
    history = state["history"]
    newer = torch.cat([history[1:], grad_norm[None]])
    history.copy_(torch.where(grad_norm.isfinite(), newer, history))
    is_spike = grad_norm > factor * history.median()
    state["skipped"] += is_spike
    return grad_norm.masked_fill(is_spike, math.inf)


def sum_squares(tensors: list[Tensor]) -> Tensor:
    """Sum the squares of all values in `tensors`, which are on one device. Returns () float64.

    A CPU adds fp32 values one by one. The error depends on the number of values on a rank, so clipping would depend on
    the layout (tests/ranks/test_optim.py). So CPU tensors are summed in float64. A GPU sums in a tree, which is
    accurate in fp32.
    """
    dtype = torch.float64 if tensors[0].device.type == "cpu" else None
    norms = torch.stack(torch._foreach_norm(tensors, dtype=dtype))
    return norms.double().square().sum()


@torch.no_grad()
def update_weights(optimizer: TorchOptimizer, grad_norm: Tensor, max_norm: float) -> Tensor:
    """Clip the gradients to a norm of at most `max_norm` and step the optimizer, if the norm is finite.

    `max_norm` 0 turns clipping off. If the norm is not finite, gradients, weights and moments do not change. Returns
    whether the norm is finite, () bool on the device.
    Fused kernels read the scale and the flag on the device (as with torch.amp.GradScaler), and clip during the update.
    Other optimizers need an extra pass over the gradients and one host-device synchronization per step.
    """
    finite = grad_norm.isfinite()
    limit = max_norm or math.inf
    divisor = ((grad_norm + 1e-6) / limit).clamp(min=1.0)  # 1e-6 as in torch.nn.utils
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale = divisor
        optimizer.found_inf = (~finite).float()
        optimizer.step()
    elif finite:
        gradients = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradients.append(local_shard(parameter.grad))
        torch._foreach_div_(gradients, divisor)
        optimizer.step()
    return finite
