"""After a step whose gradient norm was not finite: which rank made the first number that is not, and where?

The norm is one number for the whole model, so every rank knows at the same step *that* something went wrong. What a
rank still holds does not say *who* was first: a NaN of the first pipeline stage is in the loss of the last one, one of
tp rank 0 is in every tp rank's sums, and FSDP hands the sum of all ranks' gradients to the holder of a shard. So all
ranks repeat the forward and backward of the step (the weights were not updated) and look at every operator:

    inputs finite, output not      this rank made it: the origin
    inputs not finite              it was handed on
    a collective, a receive        it came from another rank

Where the repeated step is finite, or no rank made anything, the answer is "unknown". Each rank then sends what it found
to all others: one object of some hundred bytes.
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

from torchtitan_lite.components.places import Places

COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")  # libraries whose results come from other ranks
UNINITIALIZED = ("aten::empty", "aten::new_empty")  # and all that begin so: whatever was in that memory before
MASKS = ("aten::where", "aten::masked_fill", "aten::full", "aten::scalar_tensor")  # infinity: there is nothing to see


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
    """What one rank found."""

    rank: int
    coordinates: dict[str, int]  # on the mesh
    loss_is_finite: bool  # of its own tokens, in the step itself
    gradients_are_finite: bool  # as far as this rank holds them, in the step itself
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
    """Say in one sentence which rank made the first number that is not finite. Collective.

    `local_loss` and the gradients in `parts` are those of the step; `repeat` makes them once more. `composed`: the
    operators that consist of others, collectives among them, and the functions that call these.
    """
    parameters = {fqn: parameter for part in parts for fqn, parameter in part.named_parameters()}
    bad_weights = [fqn for fqn, parameter in parameters.items() if not is_finite(parameter)]
    gradients_are_finite = all(is_finite(parameter.grad) for parameter in parameters.values())
    watch = OriginWatch(parts, composed)
    with torch.compiler.set_stance("force_eager"), watch:  # compiled code shows no operators
        repeat()
    own = Finding(
        dist.get_rank(),
        coordinates,
        loss_is_finite=is_finite(local_loss),
        gradients_are_finite=gradients_are_finite,
        bad_weight=next(iter(bad_weights), None),
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
        self.parts, self.places = parts, Places()
        self.places.name_modules(parts)
        self.origin: Origin | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they take themselves apart first, and come again as plain tensors
        kwargs = kwargs or {}
        place, name, node = self.places.find(), func._schema.name, torch._C._current_autograd_node()
        if node is not None and not place.module:  # a hook in backward
            made = self.places.place_of(node)
            module = made.module or self.find_owner(getattr(node, "variable", None))
            place = replace(made, module=module, line=made.line or place.line, walk="backward")
        if func in self.composed:
            with self:
                return self.composed[func](*args, **kwargs)
        passes_on = func.namespace in COLLECTIVES or name.startswith(UNINITIALIZED) or is_view(func)
        if self.origin or passes_on:
            return func(*args, **kwargs)
        changes_inputs = func._schema.is_mutable
        were_finite = changes_inputs and are_finite((args, kwargs))
        result = func(*args, **kwargs)
        results = (result, args, kwargs) if changes_inputs else result
        if not are_finite(results, or_infinite=name.startswith(MASKS)):
            if were_finite if changes_inputs else are_finite((args, kwargs)):
                self.origin = Origin(place.walk, place.module, place.line, str(func._overloadpacket))
        return result

    def find_owner(self, weight: Tensor | None) -> str:
        """Return the FQN of the module that holds this parameter now: FSDP swaps parameters while a module computes."""
        owners = {id(each): fqn for part in self.parts for fqn, each in part.named_parameters()}
        return owners.get(id(weight), "").rpartition(".")[0]


def is_view(func: OpOverload) -> bool:
    """Return whether an operator computes nothing: its input may be a buffer that a collective is still writing."""
    return any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)


def are_finite(tree: object, *, or_infinite: bool = False) -> bool:
    """Return whether no floating-point number in a tree of tensors is NaN or, unless `or_infinite`, infinite."""
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
    """Write the sentence, from what all ranks found."""
    weights = [finding for finding in findings if finding.bad_weight]
    if weights:
        first = weights[0]
        return f"the weight {first.bad_weight} on {describe_place(first)} was not finite before the step"
    # No gradient is made before the activations, and in forward no stage works before the one in front of it.
    made = [finding for finding in findings if finding.origin]
    if made:
        first = min(made, key=lambda each: (each.origin.walk == "backward", each.coordinates["pp"], each.rank))
        others = ", ".join(str(finding.rank) for finding in made if finding is not first)
        return f"{describe_place(first)} made the first: {first.origin}" + f" (others: ranks {others})" * bool(others)
    if all(finding.loss_is_finite and finding.gradients_are_finite for finding in findings):
        return "every loss and every gradient is finite: together they are more than fp32 holds"
    bad = ", ".join(str(finding.rank) for finding in findings if not finding.loss_is_finite)
    losses = f"the losses of ranks {bad} were not finite" if bad else "every loss was finite"
    return f"unknown which rank made the first, because none did when the step was repeated; {losses}"


def describe_place(finding: Finding) -> str:
    place = ", ".join(f"{dim} {coordinate}" for dim, coordinate in finding.coordinates.items())
    return f"rank {finding.rank} ({place})"
