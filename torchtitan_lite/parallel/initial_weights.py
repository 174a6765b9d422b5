"""Initial weights that depend only on (seed, FQN): bit-equal on every mesh of the same device type.

    every rank:  draw the full tensor with a generator seeded by hash(seed, "layers.3.attention.wq.weight")
                 keep the local shard                           (drawn for dp_shard=2)
                 rank 0: rows [:H*E/2]     rank 1: rows [H*E/2:]

No communication. The cost: each rank draws every tensor in full, one at a time, so the peak is one full tensor.
If each rank drew only its shard, the result would be wrong: with equal seeds all shards would be copies of each other,
and with different seeds the model would depend on the layout.

Effect: parts are filled in place.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def initialize_weights(
    part: nn.Module, init_parameter: Callable, seed: int, device: torch.device | None = None
) -> None:
    """Initialize the parameters of `part` with the model's `init_parameter(fqn, full, model_args, generator)`.

    `device`: where to draw, if not on the parameters' device. CPU and GPU draw different values.
    """
    for fqn, parameter in part.named_parameters():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device or parameter.device)
        generator = torch.Generator(full.device).manual_seed(seed_of(seed, fqn))
        init_parameter(fqn, full, part.model_args, generator)
        copy_local_shard(parameter, full)


def copy_local_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of `full` into `parameter`. No communication: every rank has the same `full`."""
    if isinstance(parameter, DTensor):
        own = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(own.to_local())
    else:
        parameter.copy_(full)


def seed_of(seed: int, fqn: str) -> int:
    """Return 63 bits of a hash, so that similar seeds and names give unrelated random streams."""
    digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
