"""Refuse an optimizer whose state no checkpoint would save. Loaded for the optimizers of extensions and forks.

A checkpoint saves the tensors in state[parameter]. A number that an optimizer keeps in state[parameter] or in a
parameter group would be reset when a run resumes, so the losses would differ.
"""

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite.config.messages import UserError


def watch_first_step(optimizer: Optimizer) -> None:
    """Until `optimizer` has state, let each step raise UserError if a checkpoint cannot save its state."""
    before: list[dict] = []

    def copy_groups(optimizer: Optimizer, *_: object) -> None:
        before[:] = [group.copy() for group in optimizer.param_groups]

    def check_state(optimizer: Optimizer, *_: object) -> None:
        lost = list_unsaved(optimizer, before)
        if lost:
            raise UserError(
                f"the optimizer keeps {lost[0]}, which no checkpoint saves. Keep tensors in state[parameter]"
            )
        if optimizer.state:
            for hook in hooks:
                hook.remove()

    hooks = [
        optimizer.register_step_pre_hook(copy_groups),
        optimizer.register_step_post_hook(check_state),
    ]


def list_unsaved(optimizer: Optimizer, before: list[dict]) -> list[str]:
    """List the state that no checkpoint saves. `before`: the parameter groups before the step."""
    parameters = {parameter for group in before for parameter in group["params"]}
    lost = []
    for owner, state in optimizer.state.items():
        if owner not in parameters:
            lost.append(f"state[{owner!r}]")
            continue
        for name, value in state.items():
            if not isinstance(value, Tensor | None):
                lost.append(f"{name} = {value!r} in the state of a parameter")
    for group, old in zip(optimizer.param_groups, before, strict=True):
        changed = [name for name in group if group[name] is not old.get(name)]
        lost += [f"{name} = {group[name]!r} in a parameter group" for name in changed]
    return lost
