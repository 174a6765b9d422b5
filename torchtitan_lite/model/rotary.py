"""Apply rotary embedding (arXiv:2104.09864): rotate pairs of features of a head by angles that grow with position.

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
    # Number of full turns of each pair within the original context. A frequency with many turns does not change, a
    # frequency with less than about one turn is divided by `factor`, and frequencies in between are interpolated.
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low = scaling.low_freq_factor
    keep = ((turns - low) / (scaling.high_freq_factor - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotary_angles(positions: Tensor, model_args: ModelArgs) -> Tensor:
    """Return the factors for `rotate`, (B, S, 1, E) fp32, shared by all heads and layers.

    The factors are the cosine and the sine of each pair: the first n factors rotate the first n features. Always fp32:
    at position 8,191, a bf16 angle would be off by up to 16 radians.
    """
    frequencies = rotary_frequencies(model_args, positions.device)
    angles = positions[..., None].float() * frequencies  # (B, S, E/2)
    factors = torch.stack((angles.cos(), angles.sin()), dim=-1)
    return factors.flatten(-2)[:, :, None]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the pairs (x[2i], x[2i+1]) by their angles, in fp32. x (B, S, heads, E) -> same shape and dtype."""
    return Rotation.apply(x, rotation)


class Rotation(torch.autograd.Function):
    """Implements `rotate`. Backward rotates the gradient back. Only the factors are saved for backward, and all layers
    share them."""

    @staticmethod
    def forward(ctx, x: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        return turned(x, rotation, direction=1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (rotation,) = ctx.saved_tensors
        return turned(gradient, rotation, direction=-1), None


def turned(x: Tensor, rotation: Tensor, *, direction: int) -> Tensor:
    """Return x (B, S, heads, E) with its pairs rotated forward (1) or back (-1).

    A pair is a complex number, and a rotation is a complex product. Eager code computes this product in one kernel.
    inductor has no kernels for complex numbers, so compiled code uses real products.
    """
    if x.stride(-1) != 1:  # x may be an expanded gradient, with stride 0
        x = x.contiguous()
    if not torch.compiler.is_compiling():
        dtype = torch.promote_types(x.dtype, torch.float32)
        turns = as_complex(rotation.to(dtype))
        product = as_complex(x.to(dtype)) * (turns if direction == 1 else turns.conj())
        return torch.view_as_real(product).flatten(-2).type_as(x)
    even, odd = split_pairs(x)
    if x.dtype == torch.bfloat16:
        cos, sin = split_factors(rotation)
    else:
        cos, sin = split_pairs(rotation)
    sin = sin * direction
    turned_even = even * cos - odd * sin
    turned_odd = odd * cos + even * sin
    return join_pairs(turned_even, turned_odd, x.dtype)


def as_complex(pairs: Tensor) -> Tensor:
    """View (..., E) as complex (..., E/2)."""
    return torch.view_as_complex(pairs.unflatten(-1, (-1, 2)))


def split_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the even and the odd features of x (..., E), each (..., E/2), in fp32 if x is bf16.

    A pair in bf16 is read as one word with the even feature in its low half. The upper half of an fp32 number is the
    same number in bf16.
    """
    if x.dtype == torch.bfloat16:
        words = x.view(torch.int32)
        return (words << 16).view(torch.float32), (words & ~0xFFFF).view(torch.float32)
    return x.unflatten(-1, (-1, 2)).unbind(-1)


def split_factors(rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and the sines of rotation (..., E) fp32, each (..., E/2). One 64-bit word has the cosine and
    the sine of a pair.

    Only for bf16 inputs: with fp32 inputs, torch 2.11 fails to compile this function.
    """
    words = rotation.view(torch.int64)
    return words.int().view(torch.float32), (words >> 32).int().view(torch.float32)


def join_pairs(even: Tensor, odd: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (..., E) in `dtype` from its even and odd features: the inverse of `split_pairs`."""
    if dtype == torch.bfloat16:
        low = even.bfloat16().view(torch.int16).int() & 0xFFFF
        high = odd.bfloat16().view(torch.int16).int() << 16
        return (low | high).view(torch.bfloat16)
    # Cast before flattening. If the cast came last and did not change the dtype, torch 2.11 would compile a wrong
    # gradient.
    pairs = torch.stack((even, odd), dim=-1).to(dtype)
    return pairs.flatten(-2)
