"""Explain why a step failed: which rank and module produced the first NaN or infinity, or what uses the memory.

Loaded only if a step fails. The gradient norm covers the whole model, so all ranks find in the same step that it is not
finite. By then, the tensors no longer show on which rank the first NaN or infinity appeared. A NaN in one pipeline
stage reaches the loss in the last stage, and a NaN on one tp rank reaches the sums on all tp ranks. The weights have
not changed, so all ranks repeat forward and backward with hooks on every module. A hook checks

    forward     the output of the module
    backward    the gradient of its inputs

The hook of an inner module runs before the hook of the outer module, and each hook runs before its module's collective.
All ranks of a pipeline stage run the same hooks in the same order, so the first hook that finds a NaN or infinity names
the origin. Stages run first to last in forward, and last to first in backward.
"""

import itertools
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchtitan_lite.components.log import describe_rank
from torchtitan_lite.config.messages import name_command
from torchtitan_lite.dtensor import local_shard


def find_non_finite(
    parts: list[nn.Module],
    coordinates: dict[str, int],
    repeat: Callable,
) -> str:
    """Name the rank and the module of the first NaN or infinity, in one sentence. Collective.

    `parts` have the gradients of the failed step, and `repeat` computes the same gradients again. Every rank reports
    its first finding. The result is the finding that comes first in this order: weights, outputs of modules, gradients
    of module inputs, gradients of weights.
    """
    rank = describe_rank(dist.get_rank(), coordinates)
    pp_rank = coordinates["pp"]
    calls = itertools.count()
    found: list[tuple[tuple, str]] = []  # (order in the step, description of the finding)

    def check(phase: int, place: int, what: str, values: object) -> None:
        call = next(calls)
        if not is_finite(values):
            found.append(((phase, place, call), f"{rank} was first: {what}"))

    def check_module(fqn, module, args, kwargs, output) -> None:
        name = fqn or "the model"
        check(1, pp_rank, f"the output of {name}", output)
        what = f"the gradient of the input of {name}"
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(check, 2, -pp_rank, what))

    handles = []
    for part in parts:
        for fqn, weight in part.named_parameters():
            check(0, 0, f"the weight {fqn} before the step", weight)
            check(3, 0, f"the gradient of the weight {fqn}", weight.grad)
        for fqn, module in part.named_modules():
            hook = partial(check_module, fqn)
            handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
    with torch.compiler.set_stance("force_eager"):  # compiled code does not call hooks
        repeat()
    for handle in handles:
        handle.remove()
    finding = min(found, default=((4,), "every gradient is finite, but their norm overflows fp32"))
    findings = [None] * dist.get_world_size()
    dist.all_gather_object(findings, finding)
    _, culprit = min(findings)
    return culprit


@torch.no_grad()  # recompute would fail if a hook made autograd save more tensors
def is_finite(tree: object) -> bool:
    """Return whether all floating-point values in the local shards of a tree of tensors are finite."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if not local_shard(leaf).isfinite().all():
                return False
    return True


def explain_out_of_memory(error: Exception, dump_folder: Path, n_ranks: int) -> None:
    """Extend the message of an out-of-memory error with the command that plans the memory of this run."""
    if is_out_of_memory(error):
        config_file = shlex.quote(f"{dump_folder}/config.toml")
        plan = name_command(f"plan --gpus {n_ranks} --config {config_file}")
        # Python 3.10 has no add_note
        error.args = (f"{error}\nTo see what uses the memory: {plan}",)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error, or an error that caused it, is CUDA's out-of-memory error. torch's pipeline wraps
    errors."""
    if error is None:
        return False
    return isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__cause__)
