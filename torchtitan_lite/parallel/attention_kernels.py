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


@dataclass(frozen=True)
class Kernel:
    """Forward and backward of one kernel. lse is always (B, H, S) fp32, contiguous."""

    attend: Callable[..., tuple[Tensor, Tensor]]  # (query, key, value, causal) -> out (B, H, S, E), lse
    # (grad_out, query, key, value, out, lse, causal) -> gradients of query, key, value
    attend_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def choose_kernel(query: Tensor) -> Kernel:
    if query.device.type == "cpu":
        return KERNELS["cpu"]
    # cuDNN's backward is not deterministic.
    if hasattr(torch, "_fused_sdp_choice") and not torch.are_deterministic_algorithms_enabled():
        if SDPBackend(torch._fused_sdp_choice(query, query, query)) == SDPBackend.CUDNN_ATTENTION:
            return KERNELS["cudnn"]
    return KERNELS["flash"]


def merge_into(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge the attention to more keys into (out, lse), both fp32, in place."""
    weight = torch.sigmoid(new_lse - lse)  # share of the new keys in the softmax over all; cannot overflow
    out.lerp_(new_out.float(), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def attend_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)


def attend_cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, lse, 0.0, causal)


def attend_cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal)
    return out, lse.flatten(2)  # (B, H, S, 1)


def attend_cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # No bias, and no cumulative lengths, because all sequences of a batch have the same length.
    inputs, lengths = (query, key, value, out, lse[..., None]), (None, None, query.shape[2], key.shape[2])
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, *inputs, *no_random_state(query), None, *lengths, 0.0, causal
    )


def attend_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse


def attend_flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        None,  # no cumulative lengths, because all sequences of a batch have the same length
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        *no_random_state(query),
    )


def no_random_state(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty seed and offset, because there is no dropout."""
    return tuple(torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))


KERNELS = {
    "cpu": Kernel(attend_cpu, attend_cpu_backward),
    "cudnn": Kernel(attend_cudnn, attend_cudnn_backward),
    "flash": Kernel(attend_flash, attend_flash_backward),
}
