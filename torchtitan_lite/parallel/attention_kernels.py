"""Attention of some queries to some of their keys: parts of one attention are computed apart and merged.

    softmax over all keys      = merge of (out, lse) of any parts that the keys are cut into
    lse (B, H, S)              = log of the sum of exp(scores) over the keys of the part: its weight in the merge
    gradients of a part        = what the same kernel's backward gives for the *merged* out and lse

A part is causal (as many queries as keys, which start at the same position) or not masked at all, so no S x S mask is
ever made. A kernel keeps its scores to itself; all other tensors that it takes or returns are no larger than query.

    device   dtype       kernel
    cpu      any         torch's CPU flash attention
    cuda     bf16, fp16  cuDNN's, on GPUs for which torch's SDPA prefers it: Hopper, Blackwell
    cuda     bf16, fp16  else FlashAttention 2; head_dim must be a multiple of 8
    cuda     fp32        memory-efficient attention, which needs as many key heads as query heads: they are repeated

The CUDA kernels were not run on a GPU: their arguments are checked on meta tensors, their numbers by tests that need a
GPU.

Legend: B batch, S sequence, H query heads, K key/value heads, E head dim.
Sources: online softmax arXiv:1805.02867; FlashAttention arXiv:2205.14135, 2307.08691.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """Two functions that agree on how lse looks: (B, H, S) fp32, contiguous."""

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
    in_flash = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return KERNELS["flash" if in_flash else "efficient"]


def merge_into(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge the attention to other keys into (out, lse), both fp32, in place."""
    weight = torch.sigmoid(new_lse - lse)  # of the new keys in the softmax over both: never overflows
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
    # No bias, and no cumulative lengths: the sequences of a batch are equally long.
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
        None,  # no cumulative lengths: the sequences of a batch are equally long
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        *no_random_state(query),
    )


def attend_efficient(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    n = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal)
    return out, lse[..., : query.shape[2]].contiguous()  # it comes padded to a multiple of 32


def attend_efficient_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    n = query.shape[1] // key.shape[1]
    grad_query, grad_key, grad_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        query,
        key.repeat_interleave(n, 1),
        value.repeat_interleave(n, 1),
        None,
        out,
        F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf")),
        *no_random_state(query),
        0.0,
        [True, True, True, False],
        causal,
    )
    return grad_query, grad_key.unflatten(1, (-1, n)).sum(2), grad_value.unflatten(1, (-1, n)).sum(2)


def no_random_state(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty seed and offset: there is no dropout."""
    return tuple(torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))


KERNELS = {
    "cpu": Kernel(attend_cpu, attend_cpu_backward),
    "cudnn": Kernel(attend_cudnn, attend_cudnn_backward),
    "flash": Kernel(attend_flash, attend_flash_backward),
    "efficient": Kernel(attend_efficient, attend_efficient_backward),
}

SDPA_KERNELS = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "plain matmuls, slow, with all scores in memory",
}


def describe_attention(config: Config, model_args: ModelArgs, layout: Layout, device: torch.device) -> str:
    """Name the kernel that attention runs on, and its input, for the log. `config` is resolved.

    causal       torch's SDPA takes the first of its own list that can: cuDNN on Hopper and Blackwell (torch lists it
                 first only where cuDNN is recent enough to be right), FlashAttention on other GPUs, flash on a CPU
    causal, cp   KERNELS of this file, because only these return lse
    document     flex attention, compiled, on CUDA; an explicit mask on a CPU

    The answer for SDPA comes from the function by which it decides.
    """
    if config.model.attention == "document":
        return "flex attention, compiled" if device.type == "cuda" else "an explicit mask of the documents"
    if config.model.attention != "causal":
        return f"model.attention = {config.model.attention!r}, as its module computes it"
    seq_len, dtype = config.training.seq_len // layout.cp, getattr(torch, config.training.mixed_precision_param)
    head_dim, options = model_args.head_dim, {"dtype": dtype, "device": device, "requires_grad": True}
    query, key = (
        torch.empty(1, n_heads // layout.tp, seq_len, head_dim, **options)
        for n_heads in (model_args.n_heads, model_args.n_kv_heads)
    )
    if layout.cp > 1:
        (kernel,) = [name for name, kernel in KERNELS.items() if kernel is choose_kernel(query)]
        kernel += f", {config.parallelism.context_parallel_rotate_method} over cp"
    else:
        kernel = SDPA_KERNELS[SDPBackend(torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True))]
    return f"{kernel} ({seq_len} tokens, {query.shape[1]} heads of {head_dim}, {dtype})".replace("torch.", "")
