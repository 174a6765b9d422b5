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

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

OutAndLse = tuple[Tensor, Tensor]  # out (B, H, S, E); lse (B, H, S) fp32, contiguous


def prefers_cudnn(query: Tensor) -> bool:
    """Return whether the cuDNN kernel is the fastest on CUDA. Its backward is not deterministic."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    preferred = torch._fused_sdp_choice(query, query, query)
    return SDPBackend(preferred) == SDPBackend.CUDNN_ATTENTION


def attend_to_part(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> OutAndLse:
    """query (B, H, Q, E), key and value (B, K, S, E) -> out (B, H, Q, E), lse (B, H, Q) fp32."""
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    if prefers_cudnn(query):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal
        )
        return out, lse.flatten(2)  # (B, H, Q, 1)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse


def attend_to_part_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. `out` and `lse` are merged over all parts."""
    tensors = (grad_out, query, key, value, out)
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, lse, 0.0, causal)
    # All sequences have the same length, so no cumulative lengths. No dropout, so seed and offset are empty.
    lengths = (None, None, query.shape[2], key.shape[2])
    empty = torch.empty((), dtype=torch.int64, device=query.device)
    if prefers_cudnn(query):
        bias = None
        return aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, lse[..., None], empty, empty, bias, *lengths, 0.0, causal
        )
    return aten._scaled_dot_product_flash_attention_backward(
        *tensors, lse, *lengths, 0.0, causal, empty, empty
    )


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the attention to more keys into (out, lse), both fp32, in place."""
    # Weight of these keys in the softmax over all keys. It cannot overflow.
    weight = torch.sigmoid(part_lse - lse)
    out.lerp_(part_out.float(), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))
