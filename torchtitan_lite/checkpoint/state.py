"""What a checkpoint of training contains: tensors, by names that do not depend on the layout, and nothing else.

    model.layers.3.attention.wq.weight            the weight, by its FQN in the whole model; of a mixture also the bias
    optimizer.layers.3.attention.wq.weight.exp_avg

The learning rate, the position in the data and the initial weights are functions of step and seed, and a step draws no
random numbers. So the step, which is in the manifest, restores all of them on any layout. For the same reason there are
no seed checkpoints, with which other trainers give every layout the same start: here every layout has it anyway.
"""

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint.manifest import CheckpointError


def name_weights(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters by their names in a checkpoint."""
    return {f"model.{fqn}": parameter.detach() for fqn, parameter in parameters.items()}


def name_tensors(parameters: dict[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters and all tensors of the optimizer state, by their names in a checkpoint."""
    named = name_weights(parameters)
    for fqn, parameter in parameters.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                named[f"optimizer.{fqn}.{name}"] = value
    return named


def create_optimizer_state(optimizer: Optimizer) -> None:
    """Make the optimizer allocate its state, by a step with gradients and learning rate of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_step(lr_scheduler: LRScheduler, step: int) -> None:
    """Set the learning rate that follows `step` finished steps."""
    lr_scheduler.last_epoch = step - 1
    lr_scheduler.step()


def convert_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor. Raises CheckpointError where a finite number becomes an infinity in float16."""
    converted = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise CheckpointError(f"{name} has numbers beyond 65,504, the largest of float16: choose bfloat16 or float32")
    return converted
