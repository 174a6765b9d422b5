"""Which kernel attention will run on: asked once, so that the log says it and a slow one is no secret.

    causal         torch's SDPA, which takes the first of its own list that can: on Hopper and Blackwell cuDNN (torch
                   has it first only where cuDNN is recent enough to be right), on other GPUs FlashAttention; on a CPU
                   its flash kernel
    causal, cp     attention_kernels.py, which needs log-sum-exps
    documents      flex attention, compiled, on CUDA; an explicit mask on a CPU

Nothing is chosen here: the question goes to the function by which SDPA decides. No rank talks, nothing is changed.
"""

import torch
from torch.nn.attention import SDPBackend

from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.parallel.attention_kernels import KERNELS, choose_kernel

SDPA_KERNELS = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "plain matmuls, slow, with all scores in memory",
}


def describe_attention(config: Config, shape: ModelArgs, layout: Layout, device: torch.device) -> str:
    """The kernel of this run and what it is given, for the log. `config` is resolved."""
    if config.model.attention == "document":
        return "flex attention, compiled" if device.type == "cuda" else "an explicit mask of the documents"
    seq_len, dtype = config.training.seq_len // layout.cp, getattr(torch, config.training.mixed_precision_param)
    query, key = (
        torch.empty(1, n_heads // layout.tp, seq_len, shape.head_dim, dtype=dtype, device=device, requires_grad=True)
        for n_heads in (shape.n_heads, shape.n_kv_heads)
    )
    if layout.cp > 1:
        (kernel,) = [name for name, kernel in KERNELS.items() if kernel is choose_kernel(query)]
        kernel += f", {config.parallelism.context_parallel_rotate_method} over cp"
    else:
        kernel = SDPA_KERNELS[SDPBackend(torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True))]
    return f"{kernel} ({seq_len} tokens, {query.shape[1]} heads of {shape.head_dim}, {dtype})".replace("torch.", "")
