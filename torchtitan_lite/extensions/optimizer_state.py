"""Refuse an optimizer whose state no checkpoint would save. Loaded for the optimizers of extensions and forks.

A checkpoint saves the tensors in state[parameter]. A number that an optimizer keeps in state[parameter], in a parameter
group or in an attribute would be reset when a run resumes, so the losses would differ.
"""

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite.config.messages import UserError


def watch_state(optimizer: Optimizer) -> None:
    """Let each step raise UserError if a checkpoint cannot save the state of `optimizer`."""
    before: list[dict] = []  # the attributes and the parameter groups before the step

    def copy_values(optimizer: Optimizer, *_: object) -> None:
        before[:] = [values.copy() for values in (vars(optimizer), *optimizer.param_groups)]

    def check_state(optimizer: Optimizer, *_: object) -> None:
        lost = list_unsaved(optimizer, before)
        if lost:
            raise UserError(
                f"the optimizer keeps {lost[0]}, which no checkpoint saves. "
                "Keep tensors like the parameter, or scalars, in state[parameter]"
            )

    optimizer.register_step_pre_hook(copy_values)
    optimizer.register_step_post_hook(check_state)


def list_unsaved(optimizer: Optimizer, before: list[dict]) -> list[str]:
    """List the state that no checkpoint saves."""
    lost = []
    for owner, state in optimizer.state.items():
        kind = type(getattr(owner, "data", None))
        for name, value in state.items():
            is_scalar = isinstance(value, Tensor) and value.dim() == 0
            # a tensor without the placements of its sharded parameter would be saved by one rank
            if not (is_scalar or isinstance(value, kind | None)):
                lost.append(f"{name} = {value!r} in a state")
    for values, old in zip((vars(optimizer), *optimizer.param_groups), before, strict=True):
        for name, value in values.items():
            if value is not old.get(name):
                lost.append(f"{name} = {value!r} in an attribute or a parameter group")
    return lost
