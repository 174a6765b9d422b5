"""Let a module compute with its local shards: parameters are DTensors at rest, plain tensors in its own forward.

    wq.weight (H*E, D), tp=2          rank 0                  rank 1
    module._parameters["weight"]      DTensor                 DTensor              optimizer, checkpoints, FSDP
    module.weight in forward          rows [:H*E/2]           rows [H*E/2:]        plain tensors, Shard(0)
    its gradient                      of these rows           of these rows        DTensor, Shard(0)
    norm.weight (D,), replicated      all                     all                  plain tensors
    its gradient                      of this rank's tokens   of this rank's       DTensor, Partial: FSDP sums over tp

tensor_parallel.py (mesh dim tp) and expert_parallel.py (ep) use it. It exchanges nothing: FSDP all-reduces a Partial
gradient, D*4 bytes for a norm, before its reduction over data-parallel ranks.

Effect: parameters become DTensors, and the class of the module a subclass that reads them locally. FQNs do not change.
"""

from functools import cache

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor


def shard_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: dict[str, Placement],
    hidden: tuple[str, ...] = (),
) -> None:
    """Shard the parameters of `module` (on meta) that are in `placements`, and let its forward read local shards.

    `hidden`: parameters that its forward reads as None.
    """
    names = []
    for name, placement in placements.items():
        full = getattr(module, name, None)
        if full is not None:
            own = distribute_tensor(full, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(own))
            names.append(name)
    module.__class__ = make_local(type(module), tuple(names), hidden)


@cache  # compiled code is shared by modules of one class
def make_local(
    cls: type[nn.Module], names: tuple[str, ...], hidden: tuple[str, ...]
) -> type[nn.Module]:
    """Return a subclass of `cls` that reads these parameters locally."""
    fields = {}
    for name in names:
        fields[name] = read_locally(name, is_hidden=name in hidden)
    return type(f"Local{cls.__name__}", (cls,), fields)


def read_locally(name: str, *, is_hidden: bool) -> property:
    """Return a property that reads the local shard of a parameter.

    FSDP reads its own shards by name too, outside of forward. Their mesh has more dims.
    """

    def read(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        if parameter.device_mesh.ndim > 1:
            return parameter
        return None if is_hidden else local_tensor(parameter)

    return property(read)


def local_tensor(parameter: DTensor) -> Tensor:
    """Return this rank's shard of a parameter."""
    return parameter.to_local(grad_placements=find_gradient_placements(parameter))


def find_gradient_placements(parameter: DTensor) -> tuple[Placement, ...]:
    """Return the placement of a gradient, which covers only this rank's tokens if all ranks have the parameter."""
    return tuple(Partial() if each.is_replicate() else each for each in parameter.placements)
