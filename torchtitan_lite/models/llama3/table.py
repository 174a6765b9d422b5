"""Describe the Llama family: Llama 3, 3.1, 3.2, Mixtral, Qwen2, Qwen3. Needs no torch; modules.py has the code.

    FLAVORS       sizes; tests compare them with the model cards
    list_block    the modules of a block, in the order of modules.py
    MODEL         the ModelTable: FLAVORS, list_block, and the module with the Hugging Face names

Mixtral has experts in place of the feed-forward network. Qwen2 adds a bias to queries, keys and values. Qwen3 adds an
RMSNorm to each query and key head.
"""

import math
from dataclasses import replace
from functools import lru_cache, partial

from torchtitan_lite.config.model_rows import (
    LAYER_TYPES,
    ModelArgs,
    ModelTable,
    ModuleRow,
    MoEArgs,
    RopeScaling,
)

# ---------------------------------------------------------------- sizes


# arXiv:2412.15115, Qwen2.5: a bias on queries, keys and values
qwen2 = partial(ModelArgs, norm_eps=1e-6, rope_theta=1e6, qkv_bias=True)
# arXiv:2505.09388: QK-norm; the MoE models use 8 of 128 experts for each token
qwen3 = partial(ModelArgs, vocab_size=151936, norm_eps=1e-6, rope_theta=1e6, qk_norm=True)
LLAMA_3_1 = RopeScaling(factor=8.0)
LLAMA_3_2 = RopeScaling(factor=32.0)
# vocabulary: 2,048 tokens of the shipped BPE + Llama 3's 256 special tokens
DEBUG = ModelArgs(
    dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=352, vocab_size=2304
)

FLAVORS = {
    "debug": DEBUG,
    # from torchtitan: ffn_dim is 8/3 of dim, rounded up to a multiple of 256
    "debugmodel": ModelArgs(256, 6, 16, 16, 16, 768, 2048, rope_scaling=LLAMA_3_1),
    "1B": ModelArgs(
        2048,
        16,
        32,
        8,
        64,
        8192,
        128256,
        rope_scaling=LLAMA_3_2,
        tie_embeddings=True,
    ),
    "3B": ModelArgs(
        3072,
        28,
        24,
        8,
        128,
        8192,
        128256,
        rope_scaling=LLAMA_3_2,
        tie_embeddings=True,
    ),
    "8B": ModelArgs(4096, 32, 32, 8, 128, 14336, 128256, rope_scaling=LLAMA_3_1),
    "70B": ModelArgs(8192, 80, 64, 8, 128, 28672, 128256, rope_scaling=LLAMA_3_1),
    "405B": ModelArgs(16384, 126, 128, 8, 128, 53248, 128256, rope_scaling=LLAMA_3_1),
    # 2M parameters, 1.1M active per token
    "debug_moe": replace(DEBUG, moe=MoEArgs(8, top_k=2, expert_ffn_dim=96)),
    # windows in every other layer, and sinks, as in gpt-oss
    "debug_windows": replace(
        DEBUG, sliding_window=64, layer_types=LAYER_TYPES, attention_sinks=True
    ),
    # arXiv:2401.04088: two of eight experts in every layer
    "Mixtral-8x7B": ModelArgs(
        4096, 32, 32, 8, 128, 14336, 32000, rope_theta=1e6, moe=MoEArgs(8, 2, 14336)
    ),
    "Mixtral-8x22B": ModelArgs(
        6144, 56, 48, 8, 128, 16384, 32000, rope_theta=1e6, moe=MoEArgs(8, 2, 16384)
    ),
    "Qwen2.5-0.5B": qwen2(896, 24, 14, 2, 64, 4864, 151936, tie_embeddings=True),
    "Qwen2.5-1.5B": qwen2(1536, 28, 12, 2, 128, 8960, 151936, tie_embeddings=True),
    "Qwen2.5-3B": qwen2(2048, 36, 16, 2, 128, 11008, 151936, tie_embeddings=True),
    "Qwen2.5-7B": qwen2(3584, 28, 28, 4, 128, 18944, 152064),
    "Qwen2.5-14B": qwen2(5120, 48, 40, 8, 128, 13824, 152064),
    "Qwen2.5-32B": qwen2(5120, 64, 40, 8, 128, 27648, 152064),
    "Qwen2.5-72B": qwen2(8192, 80, 64, 8, 128, 29568, 152064),
    "Qwen3-0.6B": qwen3(1024, 28, 16, 8, 128, 3072, tie_embeddings=True),
    "Qwen3-1.7B": qwen3(2048, 28, 16, 8, 128, 6144, tie_embeddings=True),
    "Qwen3-4B": qwen3(2560, 36, 32, 8, 128, 9728, tie_embeddings=True),
    "Qwen3-8B": qwen3(4096, 36, 32, 8, 128, 12288),
    "Qwen3-14B": qwen3(5120, 40, 40, 8, 128, 17408),
    "Qwen3-32B": qwen3(5120, 64, 64, 8, 128, 25600),
    "Qwen3-30B-A3B": qwen3(2048, 48, 32, 4, 128, 6144, moe=MoEArgs(128, 8, 768)),
    "Qwen3-235B-A22B": qwen3(4096, 94, 64, 4, 128, 12288, moe=MoEArgs(128, 8, 1536)),
}

# ---------------------------------------------------------------- modules

STD = 0.02  # standard deviation of the initial weights of most matrices


@lru_cache  # `plan --search` needs the same list very often. The caller must not change the list
def list_block(model_args: ModelArgs, moe: MoEArgs | None = None) -> list[ModuleRow]:
    """List the modules of a block, in the order of modules.py. If `moe` is not None, the block has experts."""
    dim = model_args.dim
    head_dim = model_args.head_dim
    query = model_args.n_heads * head_dim
    key = model_args.n_kv_heads * head_dim
    bias = model_args.qkv_bias
    kv_heads = model_args.n_kv_heads
    residual = find_residual_std(model_args)
    rows = [
        ModuleRow("attention_norm", "norm", (dim,), "sequence", init_mean=1.0),
        ModuleRow("attention.wq", "linear", (query, dim), "colwise", STD, bias, is_rotated=True),
        ModuleRow(
            "attention.wk",
            "linear",
            (key, dim),
            "colwise",
            STD,
            bias,
            kv_heads=kv_heads,
            is_rotated=True,
        ),
        ModuleRow("attention.wv", "linear", (key, dim), "colwise", STD, bias, kv_heads=kv_heads),
        ModuleRow("attention.wo", "linear", (dim, query), "rowwise", residual),
    ]
    if model_args.qk_norm:
        for name in ("attention.q_norm", "attention.k_norm"):
            rows.append(
                ModuleRow(name, "norm", (head_dim,), "heads", init_mean=1.0, is_rotated=True)
            )
    if model_args.attention_sinks:
        heads = (model_args.n_heads,)
        rows.append(ModuleRow("attention.inner.sinks", "norm", heads, "colwise", STD))
    rows.append(ModuleRow("ffn_norm", "norm", (dim,), "sequence", init_mean=1.0))
    if moe:
        return rows + list_expert_rows(model_args, moe)
    return rows + list_swiglu("feed_forward", model_args, model_args.ffn_dim)


def find_residual_std(model_args: ModelArgs) -> float:
    """Return the standard deviation of matrices that write to the residual stream.

    The result is smaller than STD, so the variance of the residual stream does not grow with depth (as in GPT-2).
    """
    return STD / math.sqrt(2 * model_args.n_layers)


def list_swiglu(name: str, model_args: ModelArgs, ffn_dim: int) -> list[ModuleRow]:
    dim = model_args.dim
    return [
        ModuleRow(f"{name}.w1", "linear", (ffn_dim, dim), "colwise", STD),
        ModuleRow(f"{name}.w2", "linear", (dim, ffn_dim), "rowwise", find_residual_std(model_args)),
        ModuleRow(f"{name}.w3", "linear", (ffn_dim, dim), "colwise", STD),
    ]


def list_expert_rows(model_args: ModelArgs, moe: MoEArgs) -> list[ModuleRow]:
    """List the router, the experts and the shared experts of an MoE feed-forward."""
    dim = model_args.dim
    up = (moe.n_experts, dim, moe.expert_ffn_dim)
    down = (moe.n_experts, moe.expert_ffn_dim, dim)
    residual = find_residual_std(model_args)
    rows = [
        ModuleRow("feed_forward.router", "router", up[:2], "sequence", STD),
        ModuleRow("feed_forward.experts.w1", "experts", up, "experts", STD),
        ModuleRow("feed_forward.experts.w2", "experts", down, "experts", residual),
        ModuleRow("feed_forward.experts.w3", "experts", up, "experts", STD),
    ]
    if moe.n_shared_experts:
        shared_dim = moe.n_shared_experts * moe.expert_ffn_dim
        rows += list_swiglu("shared_experts", model_args, shared_dim)
    return rows


@lru_cache
def list_ends(model_args: ModelArgs) -> list[ModuleRow]:
    """List the modules outside the blocks."""
    dim = model_args.dim
    table = (model_args.vocab_size, dim)
    small = dim**-0.5
    embedding_std = small if model_args.tie_embeddings else 1.0
    return [
        ModuleRow("tok_embeddings", "embedding", table, "vocabulary", embedding_std, end="first"),
        ModuleRow("norm", "norm", (dim,), "sequence", init_mean=1.0, end="last"),
        ModuleRow("output", "linear", table, "vocabulary", small, end="last"),
    ]


MODEL = ModelTable(FLAVORS, list_block, list_ends, "models.llama3.hugging_face")
