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
    """Return the factors for `rotate`, (B, S, 1, 2, E/2) fp32, shared by all heads and layers.

    The first row has the cosine of each pair, the second its sine. Always fp32: at position 8,191, a bf16 angle would
    be off by up to 16 radians.
    """
    frequencies = rotary_frequencies(model_args, positions.device)
    angles = positions[..., None].float() * frequencies  # (B, S, E/2)
    return torch.stack((angles.cos(), angles.sin()), dim=-2)[:, :, None]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the pairs (x[2i], x[2i+1]) by their angles. x (B, S, heads, E) -> same shape and dtype. fp32 inside."""
    return Rotation.apply(x, rotation)


class Rotation(torch.autograd.Function):
    """`rotate`. The gradient is rotated back. Only the angles are kept for backward, and all layers share them."""

    @staticmethod
    def forward(ctx, x: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        cos, sin = rotation.unbind(-2)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (rotation,) = ctx.saved_tensors
        cos, sin = rotation.unbind(-2)
        return turned(gradient, cos, -sin), None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, S, heads, E) with its pairs rotated. cos, sin (B, S, 1, E/2).

    A pair is a complex number. Eager code multiplies them in one kernel. inductor does not write kernels for complex
    numbers, so compiled code has the product written out.
    """
    if not torch.compiler.is_compiling():
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        product = pairs * torch.complex(cos, sin)
        return torch.view_as_real(product).flatten(-2).type_as(x)
    if x.dtype == torch.bfloat16:
        even, odd = split_words(x)
    else:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned_even = even * cos - odd * sin
    turned_odd = odd * cos + even * sin
    if x.dtype == torch.bfloat16:
        return join_words(turned_even, turned_odd)
    return torch.stack((turned_even, turned_odd), dim=-1).flatten(-2).type_as(x)


def split_words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the even and the odd features of x (..., E) bf16, each (..., E/2) fp32.

    A pair is read as one 32-bit word with the even feature in its low half. The upper half of an fp32 number is the
    same number in bf16.
    """
    words = x.view(torch.int32)
    even = (words << 16).view(torch.float32)
    odd = (words & ~0xFFFF).view(torch.float32)
    return even, odd


def join_words(even: Tensor, odd: Tensor) -> Tensor:
    """Return (..., E) bf16 from its even and odd features, each (..., E/2) fp32: `split_words` backward."""
    low = even.bfloat16().view(torch.int16).int() & 0xFFFF
    high = odd.bfloat16().view(torch.int16).int() << 16
    return (low | high).view(torch.bfloat16)
