"""Refuse an optimizer whose state no checkpoint would save. Loaded for the optimizers of extensions and forks.

A checkpoint saves the tensors in state[parameter]. A number that an optimizer keeps in state[parameter], in a parameter
group or in an attribute would be reset when a run resumes, so the losses would differ. A DTensor with the placement
Partial is refused too. For example, a mean over a sharded dim stays Partial until `redistribute` adds the terms of the
ranks.
"""

from collections.abc import Iterator

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite.config.messages import UserError


def watch_state(optimizer: Optimizer) -> None:
    """Make each step raise UserError if a checkpoint cannot save the state of `optimizer`."""
    before: list[
        tuple[dict, dict]
    ] = []  # attributes and parameter groups, with copies from before the step

    def copy_values(optimizer: Optimizer, *_: object) -> None:
        before[:] = [
            (values, values.copy()) for values in (vars(optimizer), *optimizer.param_groups)
        ]

    def check_state(optimizer: Optimizer, *_: object) -> None:
        for lost in find_unsaved(optimizer, before):
            raise UserError(
                f"the optimizer keeps {lost}, which no checkpoint saves. "
                "In state[parameter], keep only scalars, and tensors like the parameter without partial sums"
            )

    optimizer.register_step_pre_hook(copy_values)
    optimizer.register_step_post_hook(check_state)


def find_unsaved(optimizer: Optimizer, before: list[tuple[dict, dict]]) -> Iterator[str]:
    """Yield descriptions of the state that no checkpoint saves."""
    for owner, state in optimizer.state.items():
        kind = type(getattr(owner, "data", None))  # NoneType if the key is not a parameter
        for name, value in state.items():
            is_scalar = isinstance(value, Tensor) and value.dim() == 0 and kind is not type(None)
            placements = getattr(value, "placements", ())
            is_partial = any(placement.is_partial() for placement in placements)
            # A tensor without the placements of its sharded parameter would be saved by one rank, and a partial sum by
            # none.
            if is_partial or not (is_scalar or isinstance(value, kind | None)):
                yield f"{name} = {value!r:.80} in a state"
    for values, old in before:
        for name, value in values.items():
            if value is not old.get(name):
                yield f"{name} = {value!r:.80} in an attribute or a parameter group"
