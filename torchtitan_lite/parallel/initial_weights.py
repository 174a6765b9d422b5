"""Initialize weights that depend only on (seed, FQN): bitwise identical on every mesh of the same device type.

    every rank:  draw the full tensor with a generator seeded by hash(seed, "layers.3.attention.wq.weight")
                 keep the local shard                           (drawn for dp_shard=2)
                 rank 0: rows [:H*E/2]     rank 1: rows [H*E/2:]

No communication. Each rank draws every full tensor, one at a time, so the peak memory includes one full tensor. Drawing
only the local shard would be wrong: with equal seeds, all shards would be copies of each other; with different seeds,
the model would depend on the layout.

Effect: parts are filled in-place.
"""

import hashlib

import torch
from torch import Tensor, nn

from torchtitan_lite.config.block import Parameter, list_parameters
from torchtitan_lite.dtensor import copy_local_shard


@torch.no_grad()
def initialize_weights(part: nn.Module, seed: int, device: torch.device | None = None) -> None:
    """Initialize the parameters of `part` as defined in the table of its model.

    `device`: draw on this device instead of the parameters' device. CPU and GPU draw different values.
    """
    table = list_parameters(part.model_args)
    for fqn, parameter in part.named_parameters():
        if fqn not in table:
            # A tied head has no initial values: it becomes a copy of the embedding on the first pipeline stage
            # (tied_embeddings.py).
            continue
        full = torch.empty(parameter.shape, device=device or parameter.device)
        # 63 bits of a hash: similar seeds and names give unrelated random streams
        digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
        own_seed = int.from_bytes(digest[:8], "little") >> 1
        generator = torch.Generator(full.device).manual_seed(own_seed)
        fill_tensor(full, table[fqn], generator)
        copy_local_shard(parameter, full)


def fill_tensor(full: Tensor, entry: Parameter, generator: torch.Generator) -> None:
    """Fill the full tensor of one parameter with 0 for a bias, otherwise with normal values. `entry.row` has the mean
    and the standard deviation. If the standard deviation is 0, as for a norm, all values are equal to the mean.

    Normal values are clamped at three standard deviations; `trunc_normal_` would be slower.
    """
    std = entry.row.init_std
    if entry.is_bias:
        full.zero_()
    else:
        full.normal_(std=std, generator=generator).clamp_(-3 * std, 3 * std)
        full += full.new_tensor(entry.row.init_mean)
