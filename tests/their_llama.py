"""Makes transformers' config of a model from the sizes of ours. Several tests compare our model with transformers'."""

from transformers import (
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from torchtitan_lite.config.model_rows import ModelArgs


def make_their_config(args: ModelArgs, **options) -> PreTrainedConfig:
    """Return the config of transformers' model of these sizes."""
    rope = {"rope_theta": args.rope_theta, "rope_type": "default"}
    if args.rope_scaling:
        numbers = vars(args.rope_scaling)
        rope |= {"rope_type": numbers["kind"], "factor": numbers["factor"]}
        if numbers["kind"] == "llama3":
            rope |= {name: numbers[name] for name in ("low_freq_factor", "high_freq_factor")}
            rope["original_max_position_embeddings"] = numbers["original_length"]
    moe, of_experts, width = args.moe, {}, args.ffn_dim
    if moe:
        of_experts = {"num_experts_per_tok": moe.top_k, "num_local_experts": moe.n_experts}
        width = moe.expert_ffn_dim
    if moe and args.qk_norm:
        width = args.ffn_dim
        of_experts |= {
            "num_experts": of_experts.pop("num_local_experts"),
            "moe_intermediate_size": moe.expert_ffn_dim,
            "norm_topk_prob": moe.normalize_top_k,
            "mlp_only_layers": list(range(moe.n_first_dense_layers)),
            "decoder_sparse_step": moe.moe_every,
        }
    windows = {}
    if args.sliding_window:
        windows = {"use_sliding_window": True, "sliding_window": args.sliding_window}
        if args.layer_types:
            windows["layer_types"] = list(args.layer_types)
    dense = Qwen2Config if args.qkv_bias else LlamaConfig
    kinds = {(False, False): dense, (False, True): MixtralConfig, (True, False): Qwen3Config}
    return kinds.get((args.qk_norm, moe is not None), Qwen3MoeConfig)(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=width,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=args.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=args.tie_embeddings,
        max_position_embeddings=131072,
        **of_experts,
        **windows,
        **options,
    )
