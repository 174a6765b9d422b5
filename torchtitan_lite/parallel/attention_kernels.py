"""Attention kernels that return out and lse, so that attention to parts of the keys can be computed and then merged.

    softmax over all keys      = merge of (out, lse) over any partition of the keys
    lse (B, H, S)              = log-sum-exp of the scores over the keys of a part: its weight in the merge
    gradients of a part        = backward of the same kernel, called with the *merged* out and lse

A part is either causal (its queries and keys are at the same positions) or not masked at all. So no S x S
mask is ever stored. Kernels do not store their scores; their other inputs and outputs are no larger than query.

    device   kernel
    cpu      torch's CPU flash attention
    cuda     cuDNN, on GPUs for which torch's SDPA prefers it: Hopper, Blackwell
    cuda     FlashAttention 2 on other GPUs

The CUDA kernels support bf16 and fp16, and a head_dim that is a multiple of 8 up to 256; config/checks.py refuses
anything else. They were never run on a GPU. Their arguments are checked on meta tensors; GPU tests check their results.

Legend: B batch, S sequence, H query heads, K key/value heads, E head dim.
Sources: online softmax arXiv:1805.02867; FlashAttention arXiv:2205.14135, 2307.08691.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

Attention = tuple[Tensor, Tensor]  # out (B, H, S, E); lse (B, H, S) fp32, contiguous
Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key, value


@dataclass(frozen=True)
class Kernel:
    """Forward and backward of one kernel, with the arguments of attend_cpu and attend_cpu_backward."""

    attend: Callable[..., Attention]
    attend_backward: Callable[..., Gradients]


def choose_kernel(query: Tensor) -> Kernel:
    if query.device.type == "cpu":
        return KERNELS["cpu"]
    # cuDNN's backward is not deterministic.
    if hasattr(torch, "_fused_sdp_choice") and not torch.are_deterministic_algorithms_enabled():
        preferred = torch._fused_sdp_choice(query, query, query)
        if SDPBackend(preferred) == SDPBackend.CUDNN_ATTENTION:
            return KERNELS["cudnn"]
    return KERNELS["flash"]


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the attention to more keys into (out, lse), both fp32, in place."""
    # Weight of these keys in the softmax over all keys. It cannot overflow.
    weight = torch.sigmoid(part_lse - lse)
    out.lerp_(part_out.float(), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def attend_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Attention:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)


def attend_cpu_backward(*inputs: Tensor, causal: bool) -> Gradients:
    """`inputs`, here and below: grad_out, query, key, value, out, lse."""
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, causal)


def attend_cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Attention:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal
    )
    return out, lse.flatten(2)  # (B, H, S, 1)


def attend_cudnn_backward(*inputs: Tensor, causal: bool) -> Gradients:
    *others, lse = inputs
    return aten._scaled_dot_product_cudnn_attention_backward(
        *others,
        lse[..., None],
        *no_random_state(lse),
        None,  # no bias
        *describe_lengths(inputs),
        0.0,
        causal,
    )


def attend_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Attention:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse


def attend_flash_backward(*inputs: Tensor, causal: bool) -> Gradients:
    return aten._scaled_dot_product_flash_attention_backward(
        *inputs,
        *describe_lengths(inputs),
        0.0,
        causal,
        *no_random_state(inputs[0]),
    )


def describe_lengths(inputs: tuple[Tensor, ...]) -> tuple[None, None, int, int]:
    """Return the lengths of queries and keys, without cumulative lengths: all sequences of a batch have the same."""
    _, query, key, *_ = inputs
    return None, None, query.shape[2], key.shape[2]


def no_random_state(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty seed and offset, because there is no dropout."""
    empty = torch.empty((), dtype=torch.int64, device=like.device)
    return empty, empty


KERNELS = {
    "cpu": Kernel(attend_cpu, attend_cpu_backward),
    "cudnn": Kernel(attend_cudnn, attend_cudnn_backward),
    "flash": Kernel(attend_flash, attend_flash_backward),
}
