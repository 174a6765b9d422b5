"""Find the rank and the line that made the first NaN or infinity, after a step whose gradient norm was not finite.

The norm is one number for the whole model, so every rank knows at the same step *that* something went wrong. The
tensors that a rank still holds do not say *who* was first: a NaN of the first pipeline stage is in the loss of the last
one, a NaN of tp rank 0 is in the sums of every tp rank, and FSDP gives the sum of all ranks' gradients to the owner of
a shard. So all ranks repeat forward and backward of the step (the weights were not updated) and look at every operator:

    inputs finite, output not      this rank made it: the origin
    inputs not finite              an earlier operator made it
    a collective, a receive        another rank made it

If the repeated step is finite, the answer is "unknown". Each rank sends its finding to all others, some hundred bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_lite.components.log import describe_rank
from torchtitan_lite.tools.plan.call_sites import CallSites

COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")  # libraries whose results come from other ranks
UNINITIALIZED = ("aten::empty", "aten::new_empty")  # prefixes: results hold whatever was in that memory before
MASKS = ("aten::where", "aten::masked_fill", "aten::full", "aten::scalar_tensor")  # infinity is right there


@dataclass(frozen=True)
class Origin:
    """An operator that made numbers that are not finite out of finite ones."""

    walk: str  # forward, recompute or backward
    module: str  # FQN; "" outside of the model
    line: str  # "model/llama3.py:118"
    operator: str  # "aten.mm"

    def __str__(self) -> str:
        module = self.module or "no module"
        return f"{self.operator} in the {self.walk or 'loss'} of {module} ({self.line})"


@dataclass(frozen=True)
class Finding:
    """What one rank knows about the step."""

    rank: int
    coordinates: dict[str, int]  # on the mesh
    loss_is_finite: bool  # of its own tokens, in the step itself
    gradients_are_finite: bool  # its slices, in the step itself
    bad_weight: str | None  # FQN of the first parameter that was not finite before the step
    origin: Origin | None  # in the repeated step


def find_non_finite(
    local_loss: Tensor,
    parts: list[nn.Module],
    coordinates: dict[str, int],
    repeat: Callable[[], object],
    *,
    composed: Mapping[OpOverload, Callable],
) -> str:
    """Return one sentence: which rank made the first number that is not finite. Collective.

    `local_loss` and the gradients in `parts` are those of the step; `repeat` computes them again. `composed`: operators
    that consist of others, collectives among them -> the function that calls those.
    """
    parameters = {fqn: parameter for part in parts for fqn, parameter in part.named_parameters()}
    bad_weight = next((fqn for fqn, parameter in parameters.items() if not is_finite(parameter)), None)
    gradients_are_finite = all(is_finite(parameter.grad) for parameter in parameters.values())  # before `repeat`
    watch = OriginWatch(parts, composed)
    with torch.compiler.set_stance("force_eager"), watch:  # compiled code shows no operators
        repeat()
    own = Finding(
        dist.get_rank(),
        coordinates,
        loss_is_finite=is_finite(local_loss),
        gradients_are_finite=gradients_are_finite,
        bad_weight=bad_weight,
        origin=watch.origin,
    )
    findings: list = [None] * dist.get_world_size()
    dist.all_gather_object(findings, own)
    return name_culprit(findings)


class OriginWatch(TorchDispatchMode):
    """Dispatch mode: inspect the result of every operator until one is the origin. The host waits at each of them."""

    def __init__(self, parts: list[nn.Module], composed: Mapping[OpOverload, Callable]):
        super().__init__()
        self.composed = composed
        self.parts, self.call_sites = parts, CallSites()
        self.call_sites.name_modules(parts)
        self.origin: Origin | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they call the operator again on their plain tensors
        kwargs = kwargs or {}
        site, name, node = self.call_sites.find(), func._schema.name, torch._C._current_autograd_node()
        if node is not None and not site.module:  # a hook in backward
            forward = self.call_sites.find_forward(node)
            module = forward.module or self.find_owner(getattr(node, "variable", None))
            site = replace(forward, module=module, line=forward.line or site.line, walk="backward")
        if func in self.composed:
            with self:
                return self.composed[func](*args, **kwargs)
        # A view computes nothing, and its input may be a buffer that a collective is still writing.
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if self.origin or is_view or func.namespace in COLLECTIVES or name.startswith(UNINITIALIZED):
            return func(*args, **kwargs)
        changes_inputs = func._schema.is_mutable
        were_finite = changes_inputs and are_finite((args, kwargs))
        result = func(*args, **kwargs)
        results = (result, args, kwargs) if changes_inputs else result
        if not are_finite(results, or_infinite=name.startswith(MASKS)):
            if were_finite if changes_inputs else are_finite((args, kwargs)):
                self.origin = Origin(site.walk, site.module, site.line, str(func._overloadpacket))
        return result

    def find_owner(self, weight: Tensor | None) -> str:
        """Return the FQN of the module that holds this parameter now: FSDP swaps parameters while a module computes."""
        owners = {id(each): fqn for part in self.parts for fqn, each in part.named_parameters()}
        return owners.get(id(weight), "").rpartition(".")[0]


def are_finite(tree: object, *, or_infinite: bool = False) -> bool:
    """Return whether every floating-point number in a tree of tensors is finite (or infinite, if `or_infinite`)."""
    return all(is_finite(leaf, or_infinite=or_infinite) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def is_finite(tensor: Tensor | None, *, or_infinite: bool = False) -> bool:
    """Apply `are_finite` to this rank's slice of one tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor is None or isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.is_floating_point():
        return True  # fake tensors, with which DTensor finds shapes, hold nothing
    if tensor.untyped_storage().nbytes() == 0:  # FSDP has freed it
        return True
    if tensor.element_size() == 1:  # float8, which torch.isfinite does not take
        tensor = tensor.float()
    return not bool((tensor.isnan() if or_infinite else ~tensor.isfinite()).any())


def name_culprit(findings: list[Finding]) -> str:
    """Return the sentence, from the findings of all ranks."""
    if weights := [finding for finding in findings if finding.bad_weight]:
        rank = describe_rank(weights[0].rank, weights[0].coordinates)
        return f"the weight {weights[0].bad_weight} on {rank} was not finite before the step"
    # No gradient is made before the activations, and in forward no stage works before the one in front of it, whose
    # ranks have lower numbers: pp is the outermost dim of the mesh.
    if made := [finding for finding in findings if finding.origin]:
        first = min(made, key=lambda each: (each.origin.walk == "backward", each.rank))
        others = ", ".join(str(finding.rank) for finding in made if finding is not first)
        rank = describe_rank(first.rank, first.coordinates)
        return f"{rank} made the first: {first.origin}" + f" (others: ranks {others})" * bool(others)
    if all(finding.loss_is_finite and finding.gradients_are_finite for finding in findings):
        return "every loss and every gradient is finite: together they are more than fp32 holds"
    bad = ", ".join(str(finding.rank) for finding in findings if not finding.loss_is_finite)
    losses = f"the losses of ranks {bad} were not finite" if bad else "every loss was finite"
    return f"unknown which rank made the first, because none did when the step was repeated; {losses}"
