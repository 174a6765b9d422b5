"""Transformers' own description of a Llama, from the sizes of ours: the oracle's side of several tests."""

from transformers import LlamaConfig

from torchtitan_lite.config.flavors import ModelArgs


def make_their_config(args: ModelArgs, **options) -> LlamaConfig:
    """Return the config of transformers' Llama of these sizes."""
    rope = {"rope_theta": args.rope_theta, "rope_type": "default"}
    if args.rope_scaling:
        numbers = vars(args.rope_scaling)
        rope |= {"rope_type": numbers["kind"], "factor": numbers["factor"]}
        if numbers["kind"] == "llama3":
            rope |= {name: numbers[name] for name in ("low_freq_factor", "high_freq_factor")}
            rope["original_max_position_embeddings"] = numbers["original_length"]
    return LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.ffn_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=args.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=args.tie_embeddings,
        max_position_embeddings=131072,
        **options,
    )
