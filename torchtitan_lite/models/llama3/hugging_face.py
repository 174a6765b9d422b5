"""Describe Llama models in Hugging Face folders: architectures, keys of config.json, tensor names. Needs no torch."""

from torchtitan_lite.config.family_rows import (
    ABOVE_ZERO,
    ANY_NUMBER,
    COUNT,
    NOT_NEGATIVE,
    ConfigKey,
    Family,
)

SIZE_KEYS = {  # field of ModelArgs -> key in config.json
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
MODULE_NAMES = {
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
# Keys of config.json, with the defaults of transformers 5.23. A test compares the defaults with the config classes of
# transformers.
SIZE = ConfigKey(int, ...)
COUNTED = ConfigKey(int, ..., limits=COUNT)
BOOL = ConfigKey(bool, False)
ONLY_FALSE = ConfigKey(bool, only=(False,))
IGNORED_KEY = ConfigKey(is_ignored=True)
SHARED = {
    **dict.fromkeys(SIZE_KEYS.values(), SIZE),
    "num_hidden_layers": COUNTED,
    "num_key_value_heads": ConfigKey(int | None),
    "head_dim": ConfigKey(int),  # if missing: hidden_size / num_attention_heads
    "rms_norm_eps": ConfigKey(float, 1e-6, limits=NOT_NEGATIVE),
    "hidden_act": ConfigKey(str, only=("silu", "swish")),  # both names mean the same function
    "tie_word_embeddings": BOOL,
    "max_position_embeddings": ConfigKey(int, 32768),
    "rope_theta": ConfigKey(float, 1e4, limits=ABOVE_ZERO),
    "bos_token_id": ConfigKey(int | None, limits=ANY_NUMBER),
    "pad_token_id": ConfigKey(int | None, limits=ANY_NUMBER),
    "initializer_range": IGNORED_KEY,
    "use_cache": IGNORED_KEY,
    # Training here has no dropout
    "attention_dropout": ConfigKey(only=(0.0,), is_ignored=True),
}
EXPERTS = {
    "num_experts_per_tok": SIZE,
    # If true, transformers adds a balance loss. This trainer uses training.expert_balance_loss instead
    "output_router_logits": ConfigKey(only=(False,), is_ignored=True),
    "router_aux_loss_coef": IGNORED_KEY,
}
# If use_sliding_window is true, all layers from number max_window_layers on have a window
WINDOW_KEYS = {
    "use_sliding_window": BOOL,
    "sliding_window": ConfigKey(int | None, 4096),
    "max_window_layers": ConfigKey(int, 28, limits=NOT_NEGATIVE),
}
FAMILIES = {  # model_type -> family; an export uses the first family that fits the model
    "llama": Family(
        "LlamaForCausalLM",
        SHARED
        | {
            "head_dim": ConfigKey(int | None),
            "max_position_embeddings": ConfigKey(int, 2048),
            "attention_bias": ONLY_FALSE,
            "mlp_bias": ONLY_FALSE,
            "pretraining_tp": IGNORED_KEY,
        },
        SIZE_KEYS,
        MODULE_NAMES,
        divides_dim=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        SHARED
        | EXPERTS
        | {
            "num_key_value_heads": ConfigKey(int, 8),
            "head_dim": ConfigKey(int | None),
            "rms_norm_eps": ConfigKey(float, 1e-5, limits=NOT_NEGATIVE),
            "max_position_embeddings": ConfigKey(int, 131072),
            "rope_theta": ConfigKey(float, 1e6, limits=ABOVE_ZERO),
            "sliding_window": ConfigKey(int | None),
            "num_local_experts": COUNTED,
            "num_experts": ConfigKey(int, limits=COUNT, same_as="num_local_experts"),
            "router_jitter_noise": ConfigKey(only=(0.0,), is_ignored=True),
        },
        SIZE_KEYS,
        MODULE_NAMES | MIXTRAL_NAMES,
        experts={
            "n_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "expert_ffn_dim": "intermediate_size",
        },
        windows="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        SHARED | WINDOW_KEYS | {"num_key_value_heads": ConfigKey(int | None, 32)},
        SIZE_KEYS,
        MODULE_NAMES,
        switches=("qkv_bias",),
        windows="some",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        SHARED
        | WINDOW_KEYS
        | {
            "num_key_value_heads": ConfigKey(int | None, 32),
            "head_dim": ConfigKey(int, 128),
            "attention_bias": ONLY_FALSE,
        },
        SIZE_KEYS,
        MODULE_NAMES,
        switches=("qk_norm",),
        windows="some",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        SHARED
        | EXPERTS
        | WINDOW_KEYS
        | {
            "max_window_layers": ConfigKey(default=0, is_ignored=True),
            "num_key_value_heads": ConfigKey(int, 4),
            "attention_bias": ONLY_FALSE,
            "num_experts": COUNTED,
            "num_local_experts": ConfigKey(int, limits=COUNT, same_as="num_experts"),
            "moe_intermediate_size": SIZE,
            "norm_topk_prob": BOOL,
            "decoder_sparse_step": ConfigKey(int, 1),
            "mlp_only_layers": ConfigKey(list | None, items=int, limits=ANY_NUMBER),
        },
        SIZE_KEYS,
        MODULE_NAMES | QWEN3_MOE_NAMES,
        switches=("qk_norm",),
        experts={
            "n_experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "expert_ffn_dim": "moe_intermediate_size",
            "normalize_top_k": "norm_topk_prob",
            "n_first_dense_layers": "mlp_only_layers",
            "moe_every": "decoder_sparse_step",
        },
        windows="all",
    ),
}
