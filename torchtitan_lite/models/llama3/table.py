"""The Llama family without torch: Llama 3, 3.1 and 3.2, Mixtral, Qwen2, Qwen3. modules.py has the code.

    FLAVORS       sizes, compared with the model cards by tests
    list_block    the modules of a block, in the order of modules.py
    FAMILIES      names and keys in Hugging Face folders

Mixtral has experts in place of the feed-forward, Qwen2 a bias on queries, keys and values, Qwen3 an RMSNorm of each
query and key head.
"""

import math
from functools import partial

from torchtitan_lite.config.model_rows import (
    ABOVE_ZERO,
    ConfigKey,
    Family,
    ModelArgs,
    ModelTable,
    ModuleRow,
    MoEArgs,
    RopeScaling,
)

# ---------------------------------------------------------------- sizes


# arXiv:2412.15115, Qwen2.5: a bias on queries, keys and values
qwen2 = partial(ModelArgs, norm_eps=1e-6, rope_theta=1e6, qkv_bias=True)
# arXiv:2505.09388: QK-norm; with experts, 8 of 128 per token
qwen3 = partial(ModelArgs, vocab_size=151936, norm_eps=1e-6, rope_theta=1e6, qk_norm=True)
LLAMA_3_1 = RopeScaling(factor=8.0)
LLAMA_3_2 = RopeScaling(factor=32.0)


FLAVORS = {
    # vocabulary: 2,048 tokens of the shipped BPE + Llama 3's 256 special tokens
    "debug": ModelArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=352, vocab_size=2304
    ),
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
    "debug_moe": ModelArgs(128, 4, 4, 2, 32, 352, 2304, moe=MoEArgs(8, top_k=2, expert_ffn_dim=96)),
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

STD = 0.02


def list_block(model_args: ModelArgs, moe: MoEArgs | None = None) -> list[ModuleRow]:
    """List the modules of a block, in the order of modules.py. With `moe`, the block has experts."""
    dim = model_args.dim
    head_dim = model_args.head_dim
    query = model_args.n_heads * head_dim
    key = model_args.n_kv_heads * head_dim
    bias = model_args.qkv_bias
    residual = start_of_residual(model_args)
    rows = [
        ModuleRow("attention_norm", "norm", (dim,), "sequence", 1.0),
        ModuleRow("attention.wq", "linear", (query, dim), "colwise", STD, bias, is_rotated=True),
        ModuleRow("attention.wk", "linear", (key, dim), "colwise", STD, bias, is_rotated=True),
        ModuleRow("attention.wv", "linear", (key, dim), "colwise", STD, bias),
        ModuleRow("attention.wo", "linear", (dim, query), "rowwise", residual),
    ]
    if model_args.qk_norm:
        for name in ("attention.q_norm", "attention.k_norm"):
            rows.append(ModuleRow(name, "norm", (head_dim,), "heads", 1.0, is_rotated=True))
    rows.append(ModuleRow("ffn_norm", "norm", (dim,), "sequence", 1.0))
    if moe:
        return rows + list_expert_rows(model_args, moe)
    return rows + list_swiglu("feed_forward", model_args, model_args.ffn_dim)


def start_of_residual(model_args: ModelArgs) -> float:
    """Return the start of matrices that write to the residual stream.

    It is smaller, which keeps the variance of the stream from growing with depth (as in GPT-2).
    """
    return STD / math.sqrt(2 * model_args.n_layers)


def list_swiglu(name: str, model_args: ModelArgs, ffn_dim: int) -> list[ModuleRow]:
    dim = model_args.dim
    return [
        ModuleRow(f"{name}.w1", "linear", (ffn_dim, dim), "colwise", STD),
        ModuleRow(f"{name}.w2", "linear", (dim, ffn_dim), "rowwise", start_of_residual(model_args)),
        ModuleRow(f"{name}.w3", "linear", (ffn_dim, dim), "colwise", STD),
    ]


def list_expert_rows(model_args: ModelArgs, moe: MoEArgs) -> list[ModuleRow]:
    """List the router, the experts and the shared experts of an MoE feed-forward."""
    dim = model_args.dim
    up = (moe.n_experts, dim, moe.expert_ffn_dim)
    down = (moe.n_experts, moe.expert_ffn_dim, dim)
    residual = start_of_residual(model_args)
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


def list_ends(model_args: ModelArgs) -> list[ModuleRow]:
    """List the modules outside the blocks."""
    dim = model_args.dim
    table = (model_args.vocab_size, dim)
    small = dim**-0.5
    start = small if model_args.tie_embeddings else 1.0
    return [
        ModuleRow("tok_embeddings", "embedding", table, "vocabulary", start),
        ModuleRow("norm", "norm", (dim,), "sequence", 1.0),
        ModuleRow("output", "linear", table, "vocabulary", small),
    ]


# ---------------------------------------------------------------- Hugging Face

SIZES = {  # field of ModelArgs -> key in config.json
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
MIXTRAL_NAMES = {
    "feed_forward.router": "block_sparse_moe.gate",
    "feed_forward.experts.w1": "block_sparse_moe.experts.{}.w1",
    "feed_forward.experts.w2": "block_sparse_moe.experts.{}.w2",
    "feed_forward.experts.w3": "block_sparse_moe.experts.{}.w3",
}
QWEN3_MOE_NAMES = {
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
    "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
    "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
}
# Keys of config.json, with the defaults of transformers 5.23. A test compares them with its classes.
SIZE = ConfigKey(int, ..., least=1)
BOOL = ConfigKey(bool, False)
ONLY_FALSE = ConfigKey(bool, only=(False,))
IGNORED = ConfigKey(is_ignored=True)
SHARED = {
    **dict.fromkeys(SIZES.values(), SIZE),
    "num_key_value_heads": ConfigKey(int | None, least=1),
    "head_dim": ConfigKey(int, least=1),  # missing: hidden_size / num_attention_heads
    "rms_norm_eps": ConfigKey(float, 1e-6, least=0),
    "hidden_act": ConfigKey(str, only=("silu", "swish")),  # two names of one function
    "tie_word_embeddings": BOOL,
    "max_position_embeddings": ConfigKey(int, 32768, least=1),
    "rope_theta": ConfigKey(float, 1e4, least=ABOVE_ZERO),
    "bos_token_id": ConfigKey(int | None),
    "pad_token_id": ConfigKey(int | None),
    "initializer_range": IGNORED,
    "use_cache": IGNORED,
    # Training here has no dropout
    "attention_dropout": ConfigKey(only=(0.0,), is_ignored=True),
}
EXPERTS = {
    "num_experts_per_tok": SIZE,
    # The loss of transformers adds a balance loss if this is true; here training.expert_balance_loss does
    "output_router_logits": ConfigKey(only=(False,), is_ignored=True),
    "router_aux_loss_coef": IGNORED,
}
# A layer has a window if use_sliding_window is true, unless its number is below max_window_layers
WINDOW = {
    "use_sliding_window": BOOL,
    "sliding_window": ConfigKey(int | None, 4096, least=1),
    "max_window_layers": ConfigKey(int, 28, least=0),
}
FAMILIES = {  # model_type -> family; an export has the first that fits
    "llama": Family(
        "LlamaForCausalLM",
        SHARED
        | {
            "head_dim": ConfigKey(int | None, least=1),
            "max_position_embeddings": ConfigKey(int, 2048, least=1),
            "attention_bias": ONLY_FALSE,
            "mlp_bias": ONLY_FALSE,
            "pretraining_tp": IGNORED,
        },
        SIZES,
        NAMES,
        divides_dim=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        SHARED
        | EXPERTS
        | {
            "num_key_value_heads": ConfigKey(int, 8, least=1),
            "head_dim": ConfigKey(int | None, least=1),
            "rms_norm_eps": ConfigKey(float, 1e-5, least=0),
            "max_position_embeddings": ConfigKey(int, 131072, least=1),
            "rope_theta": ConfigKey(float, 1e6, least=ABOVE_ZERO),
            "sliding_window": ConfigKey(int | None, only=(None,)),
            "num_local_experts": SIZE,
            "num_experts": ConfigKey(int, least=1, same_as="num_local_experts"),
            "router_jitter_noise": ConfigKey(only=(0.0,), is_ignored=True),
        },
        SIZES,
        NAMES | MIXTRAL_NAMES,
        experts={
            "n_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "expert_ffn_dim": "intermediate_size",
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        SHARED | WINDOW | {"num_key_value_heads": ConfigKey(int | None, 32, least=1)},
        SIZES,
        NAMES,
        switches=("qkv_bias",),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        SHARED
        | WINDOW
        | {
            "num_key_value_heads": ConfigKey(int | None, 32, least=1),
            "head_dim": ConfigKey(int, 128, least=1),
            "attention_bias": ONLY_FALSE,
        },
        SIZES,
        NAMES,
        switches=("qk_norm",),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        SHARED
        | EXPERTS
        | WINDOW
        | {
            "max_window_layers": ConfigKey(default=0, is_ignored=True),
            "num_key_value_heads": ConfigKey(int, 4, least=1),
            "attention_bias": ONLY_FALSE,
            "num_experts": SIZE,
            "num_local_experts": ConfigKey(int, least=1, same_as="num_experts"),
            "moe_intermediate_size": SIZE,
            "norm_topk_prob": BOOL,
            "decoder_sparse_step": ConfigKey(int, 1, least=1),
            "mlp_only_layers": ConfigKey(list | None, items=int),
        },
        SIZES,
        NAMES | QWEN3_MOE_NAMES,
        switches=("qk_norm",),
        experts={
            "n_experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "expert_ffn_dim": "moe_intermediate_size",
            "normalize_top_k": "norm_topk_prob",
            "n_first_dense_layers": "mlp_only_layers",
            "moe_every": "decoder_sparse_step",
        },
    ),
}

MODEL = ModelTable(FLAVORS, list_block, list_ends, FAMILIES)
