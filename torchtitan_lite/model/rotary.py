"""Rotary embedding (arXiv:2104.09864): turn pairs of features of a head by angles that grow with the position.

Pairs follow Meta's order: the neighboring features (2i, 2i+1) of a head are rotated together.

Legend: B batch, S sequence, E head dim.
"""

import math

import torch
from torch import Tensor

from torchtitan_lite.config.model_rows import ModelArgs


def rotary_frequencies(model_args: ModelArgs, device: torch.device) -> Tensor:
    """Return the radians per position for each rotary pair, (E/2,) fp32, with RopeScaling applied."""
    features = torch.arange(0, model_args.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = model_args.rope_theta ** (-features / model_args.head_dim)
    scaling = model_args.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Number of full turns of each pair within the original context. Pairs with many turns are kept, pairs with less
    # than about one turn are slowed down by `factor`, and pairs in between are interpolated.
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low = scaling.low_freq_factor
    keep = ((turns - low) / (scaling.high_freq_factor - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotary_angles(positions: Tensor, model_args: ModelArgs) -> Tensor:
    """Return the factors for `rotate`, (B, S, 1, 2, E) fp32, shared by all heads and layers.

    Two rows of E values: (cos, cos) and (-sin, sin) of each pair. Always fp32: at position 8,191, a bf16 angle would be
    off by up to 16 radians.
    """
    frequencies = rotary_frequencies(model_args, positions.device)
    angles = positions[..., None].float() * frequencies  # (B, S, E/2)
    cos = angles.cos()
    sin = angles.sin()
    pairs = torch.stack((cos, cos, -sin, sin), dim=-1)
    return pairs.unflatten(-1, (2, 2)).transpose(-3, -2).flatten(-2)[:, :, None]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the pairs (x[2i], x[2i+1]) by their angles. x (B, S, heads, E) -> same shape and dtype. fp32 inside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = rotation.unbind(-2)  # (B, S, 1, E)
    pairs = wide.unflatten(-1, (-1, 2))
    swapped = pairs.flip(-1).flatten(-2)
    rotated = wide * cos + swapped * sin
    return rotated.type_as(x)
