"""Convert between DTensors, local shards and full tensors. The core converts tensors only with the functions in this
file, which do not communicate.

    wq.weight (H*E, D), tp=2          rank 0                  rank 1
    the parameter                     DTensor                 DTensor              optimizer, checkpoints, FSDP
    unsharded by FSDP, in forward     rows [:H*E/2]           rows [H*E/2:]        plain tensors, Shard(0)
    gradient of wq.weight             of these rows           of these rows        plain until FSDP has reduced it
    norm.weight (D,), replicated      all                     all                  plain tensors
    gradient of norm.weight           from rank 0's tokens    from rank 1's        plain; summed over tp by fsdp.py

Under tensor and expert parallel, modules compute with plain tensors. torch's own parallel styles compute with DTensors;
on two loaded CPU cores, training with these styles ran at 0.54 times the speed of training with plain tensors (tp2,
gloo, November 2026).
"""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

# Cached, because many tensors have the same shape. torch's function is slow if tp and FSDP split the same dim, because
# it creates a view for each FSDP rank.
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


def copy_local_shard(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of `full` into `tensor`. Every rank has the same `full`."""
    if isinstance(tensor, DTensor):
        full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(full)


def count_replicas(tensor: Tensor) -> int:
    """Return the number of ranks that have the same shard of a tensor; 1 if it is not a DTensor."""
    if not isinstance(tensor, DTensor):
        return 1
    n_replicas = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            n_replicas *= size
    return n_replicas


# ---------------------------------------------------------------- modules with sharded parameters


def shard_parameters(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Shard the parameters of `module` (on the meta device) that `placements` lists by name. FQNs do not change."""
    for name, placement in placements.items():
        full = getattr(module, name, None)
        if full is not None:
            own = distribute_tensor(full, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(own, full.requires_grad))
