"""What a checkpoint of training holds: tensors under names that no layout changes, and nothing else.

    model.layers.3.attention.wq.weight            the weight, as it is called in the whole model
    optimizer.layers.3.attention.wq.weight.exp_avg

The learning rate, the position in the data, and the initial weights are functions of step and seed; a step draws no
random numbers. So the step, which the manifest knows, restores all of these, on any layout. For the same reason there
are no seed checkpoints, by which other trainers give all layouts one start: here every layout starts alike without.
"""

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer


def name_weights(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """FQN -> parameter, as a checkpoint names them."""
    return {f"model.{fqn}": parameter.detach() for fqn, parameter in parameters.items()}


def name_tensors(parameters: dict[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and all tensors of the optimizer's state."""
    named = name_weights(parameters)
    for fqn, parameter in parameters.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                named[f"optimizer.{fqn}.{name}"] = value
    return named


def create_optimizer_state(parameters: dict[str, Tensor], optimizer: Optimizer) -> None:
    """Makes the optimizer allocate its state, by a step with gradients and learning rate of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_step(lr_scheduler: LRScheduler, step: int) -> None:
    """The learning rate after `step` steps."""
    lr_scheduler.last_epoch = step - 1
    lr_scheduler.step()
