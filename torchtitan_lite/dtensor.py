"""This rank's shard of a DTensor: the only file that takes DTensors apart. Nothing here communicates.

    wq.weight (H*E, D), tp=2          rank 0                  rank 1
    the parameter                     DTensor                 DTensor              optimizer, checkpoints, FSDP
    self.weight in its own forward    rows [:H*E/2]           rows [H*E/2:]        plain tensors, Shard(0)
    its gradient                      of these rows           of these rows        plain until FSDP has reduced it
    norm.weight (D,), replicated      all                     all                  plain tensors
    its gradient                      of this rank's tokens   of this rank's       DTensor, Partial: FSDP sums over tp

A module of tensor or expert parallel computes with plain tensors in its own forward. On two loaded CPU cores, torch's
own styles, which compute with DTensors, trained at 0.54 of this speed (tp2, gloo, November 2026).
"""

from collections.abc import Sequence
from functools import cache, lru_cache

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

# many tensors are alike, and torch makes a view for each FSDP rank if tp splits the same dim
locate_shard = lru_cache(_compute_local_shape_and_global_offset)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself if it is not a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def find_shard(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return this rank's shard of a tensor, and the index of its first element in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, [0] * tensor.dim()
    mesh = tensor.device_mesh
    coordinate = tuple(mesh.get_coordinate())
    _, begin = locate_shard(tensor.shape, mesh.shape, coordinate, tensor.placements)
    return tensor.to_local(), begin


def count_replicas(tensor: Tensor) -> int:
    """Return the number of ranks that hold the same shard of a tensor; 1 if it is not a DTensor."""
    if not isinstance(tensor, DTensor):
        return 1
    n_replicas = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            n_replicas *= size
    return n_replicas


# ---------------------------------------------------------------- modules that compute with their local shards


def shard_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: dict[str, Placement],
    hidden: tuple[str, ...] = (),
) -> None:
    """Shard the parameters of `module` (on meta) that are in `placements`, and let its forward read local shards.

    The module's own forward reads the parameters in `hidden` as None. The class of the module becomes a subclass; FQNs
    do not change.
    """
    names = tuple(name for name in placements if getattr(module, name, None) is not None)
    for name in names:
        full = getattr(module, name)
        own = distribute_tensor(full, mesh, [placements[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(own))
    module.__class__ = make_local(type(module), names, hidden)


@cache  # compiled code is shared by modules of one class
def make_local(
    cls: type[nn.Module], names: tuple[str, ...], hidden: tuple[str, ...]
) -> type[nn.Module]:
    """Return a subclass of `cls` whose forward reads local shards. All other code reads the DTensors."""

    def forward(self: nn.Module, *inputs, **options):
        # nn.Module.__setattr__ costs the host ten times as much
        object.__setattr__(self, "is_in_forward", True)
        try:
            return cls.forward(self, *inputs, **options)
        finally:
            object.__setattr__(self, "is_in_forward", False)

    fields = {"is_in_forward": False, "forward": forward}
    for name in names:
        fields[name] = read_locally(name, is_hidden=name in hidden)
    return type(f"Local{cls.__name__}", (cls,), fields)


def read_locally(name: str, *, is_hidden: bool) -> property:
    """Return a property that reads the local shard of a parameter if the module is in its own forward."""

    def read(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        if not module.is_in_forward:
            return parameter
        return None if is_hidden else differentiable_shard(parameter)

    return property(read)


def differentiable_shard(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, for computing with it."""
    if not isinstance(parameter, DTensor):  # FSDP gathered the shard (parallel/fsdp.py)
        return parameter
    return parameter.to_local(grad_placements=find_gradient_placements(parameter))


def find_gradient_placements(parameter: DTensor) -> tuple[Placement, ...]:
    """Return the placements of a gradient: Partial along mesh dims that replicate the parameter.

    Along these dims, the gradient of each rank covers only the rank's own tokens.
    """
    return tuple(Partial() if each.is_replicate() else each for each in parameter.placements)
