"""Raise an error for an optimizer that the trainer cannot call, that fails inside torch, or that has unsaved state.
This file is loaded for all optimizers except AdamW and SGD.

A checkpoint saves the tensors in state[parameter], and resuming restores the tensors that the first step creates.
Resuming would reset a number in state[parameter], in a parameter group or in an attribute. It would also reset a
tensor, a list or a second optimizer in an attribute. The losses would then differ from the losses of an unbroken run. A
state that is a DTensor with the placement Partial is not supported. For example, a mean over a sharded dim stays
Partial until `redistribute` reduces it over the ranks.
"""

from collections.abc import Iterator
from inspect import signature
from types import MethodType

from torch import OutOfMemoryError, Tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite.config.messages import UserError

MUTABLE = (Tensor, list, dict, set, Optimizer)
# attributes and options of torch's optimizers, and the attributes that update_weights sets
OF_TORCH = {*vars(Optimizer([Tensor()], {})), "params", "param_names", "grad_scale", "found_inf"}


def build_watched(
    builder: type[Optimizer], n_moments: int, groups: list[dict], **kernels: bool
) -> Optimizer:
    """Build an optimizer, and make each step raise UserError if it fails in torch, or if resuming would lose state.

    Raises UserError if the class does not accept the arguments that build_optimizer passes.
    """
    name = f"{builder.__module__}.{builder.__name__}"
    remedy = (
        f"The trainer calls the class with groups and {', '.join(kernels)}, and calls step without a closure. "
        "Parameters are DTensors, and each group has lr, betas, eps and weight_decay. Write a class that needs no "
        "other arguments, and name its file in extensions/ in the optimizer's row of OPTIMIZERS (config/choices.py)"
    )
    try:
        signature(builder).bind(groups, **kernels)
        signature(builder.step).bind(None)
    except TypeError as error:
        raise UserError(f"{name} cannot be used ({error}). {remedy}") from None
    optimizer = builder(groups, **kernels)

    def step(self: Optimizer) -> None:
        # id of a dict (attributes, a parameter group, the state of a parameter) -> copy from before the step
        earlier = {
            id(values): values.copy()
            for values in (vars(self), *self.param_groups, *self.state.values())
        }
        try:
            builder.step(self)
        except OutOfMemoryError:
            raise
        except (TypeError, RuntimeError) as error:
            if name.startswith("torch."):  # the traceback would show only lines of torch
                raise UserError(f"{name} cannot be used ({error}). {remedy}") from error
            raise
        for kept, value, place in find_unsaved(self, earlier):
            text = " ".join(repr(value).split())  # the repr of a tensor may have several lines
            raise UserError(
                f"the optimizer keeps {kept} = {text:.80} in {place}, which no resume would restore. "
                "Create all entries of state[parameter] in the first step: scalar tensors, or tensors that have the "
                "class of the parameter and are not Partial. Subclass an optimizer instead of storing one in an "
                "attribute, and store constants in a tuple"
            )
        if any(self.state.values()) and not n_moments:
            raise UserError(
                f"{name} keeps state, but n_moments is 0 in its row (config/choices.py). Set n_moments to the number "
                "of fp32 values per parameter"
            )

    optimizer.step = MethodType(step, optimizer)
    return optimizer


def find_unsaved(
    optimizer: Optimizer, earlier: dict[int, dict]
) -> Iterator[tuple[str, object, str]]:
    """Yield each state that resuming would lose: its name, its value, and where it is stored."""
    for owner, state in optimizer.state.items():
        before = earlier.get(id(state), state)
        for name, value in state.items():
            if name not in before or not is_saved(owner, value):
                yield name, value, "a state"
    for values in (vars(optimizer), *optimizer.param_groups):
        for name, value in values.items():
            is_kept = isinstance(value, MUTABLE) and name not in OF_TORCH
            if is_kept or value is not earlier[id(values)].get(name):
                yield name, value, "an attribute or a parameter group"


def is_saved(owner: object, value: object) -> bool:
    """Return whether a checkpoint saves `value`, an entry in the optimizer state of the parameter `owner`."""
    if value is None or not isinstance(owner, Tensor):
        return value is None
    if not isinstance(value, Tensor):
        return False
    # no rank would save a DTensor of partial sums
    if any(placement.is_partial() for placement in getattr(value, "placements", ())):
        return False
    # If the state of a DTensor is not a DTensor, only one rank would save it, although each rank has different values
    # for its shard of the parameter.
    return value.dim() == 0 or isinstance(value, type(owner.data))
