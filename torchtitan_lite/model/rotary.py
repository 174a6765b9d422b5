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
    exponents = (
        torch.arange(0, model_args.head_dim, 2, dtype=torch.float32, device=device)
        / model_args.head_dim
    )
    frequencies = model_args.rope_theta**-exponents
    scaling = model_args.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Number of full turns of each pair within the original context. Pairs with many turns are kept, pairs with less
    # than about one turn are slowed down by `factor`, and pairs in between are interpolated.
    turns = scaling.original_length * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotary_angles(positions: Tensor, model_args: ModelArgs) -> Tensor:
    """Return the factors for `rotate`, (B, S, 1, 3, E) fp32, shared by all heads and layers.

    Three rows of E values: (cos, cos) and (-sin, sin) of each pair for compiled code, and (cos, sin) as complex
    numbers for eager mode. Always fp32: at position 8,191, a bf16 angle would be off by up to 16 radians.
    """
    angles = positions[..., None].float() * rotary_frequencies(
        model_args, positions.device
    )  # (B, S, E/2)
    cos, sin = angles.cos(), angles.sin()
    rows = [torch.stack(pair, dim=-1).flatten(-2) for pair in ((cos, cos), (-sin, sin), (cos, sin))]
    return torch.stack(rows, dim=-2)[:, :, None]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the pairs (x[2i], x[2i+1]) by their angles. x (B, S, heads, E) -> same shape and dtype. fp32 inside.

    Eager mode multiplies complex numbers, which takes a sixth of the time. Inductor does not fuse complex numbers, so
    compiled code swaps the two values of each pair. It loads eight neighbors at once, so x must not be transposed yet.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin, turn = rotation.to(wide).unbind(-2)  # (B, S, 1, E)
    pairs = x.to(wide).unflatten(-1, (-1, 2))  # (B, S, heads, E/2, 2)
    if torch.compiler.is_compiling():
        return (x.to(wide) * cos + pairs.flip(-1).flatten(-2) * sin).type_as(x)
    turned = torch.view_as_complex(pairs) * torch.view_as_complex(turn.unflatten(-1, (-1, 2)))
    return torch.view_as_real(turned).flatten(-2).type_as(x)
