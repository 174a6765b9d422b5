"""Initial weights that depend on (seed, FQN) only: bit-equal on every mesh of the same device type.

    every rank:  draw the full tensor with a generator seeded by hash(seed, "layers.3.attention.wq.weight")
                 keep the slice that this rank holds            (drawn for dp_shard=2)
                 rank 0: rows [:H*E/2]     rank 1: rows [H*E/2:]

Nothing travels. The price is that each rank draws each tensor in full, one at a time; the peak is one tensor.
Letting every rank draw its own slice is what goes wrong: with equal seeds all slices are copies of each other, with
different seeds the model depends on the layout.

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
    """Initialise the parameters of `part` by the model's rule `init_parameter(fqn, full, model_args, generator)`.

    `device`: where to draw, if not where the parameters are. Devices draw different numbers.
    """
    for fqn, parameter in part.named_parameters():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device or parameter.device)
        generator = torch.Generator(full.device).manual_seed(seed_of(seed, fqn))
        init_parameter(fqn, full, part.model_args, generator)
        copy_local_shard(parameter, full)


def copy_local_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's slice of `full` into `parameter`. No communication: every rank has the same `full`."""
    if isinstance(parameter, DTensor):
        own = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(own.to_local())
    else:
        parameter.copy_(full)


def seed_of(seed: int, fqn: str) -> int:
    """Return 63 bits of a hash, so that neighboring seeds and names have unrelated streams."""
    digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
