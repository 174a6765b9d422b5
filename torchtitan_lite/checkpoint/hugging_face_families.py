"""The families of transformers' models that ours computes: one row each, and the names of their numbers.

    config.json    {"model_type": "mixtral", "hidden_size": 4096, "num_local_experts": 8, ...}
                                 FAMILIES       THEIR_KEYS          Family.experts

A family is told by two things: a norm of query and key heads, and experts. Needs no torch.
"""

from dataclasses import dataclass, field, fields

from torchtitan_lite.config.flavors import MixtureArgs, ModelArgs

THEIR_KEYS = {  # field of ModelArgs -> theirs; whole numbers
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
THEIR_SCALING_KEYS = {  # field of RopeScaling -> theirs
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
DENSE_LAYERS = "mlp_only_layers"  # a list
MIXTURE_KEYS = {  # field of MixtureArgs -> theirs; a family has some of them
    "n_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn_dim": "moe_intermediate_size",
    "normalize_top_k": "norm_topk_prob",
    "n_first_dense_layers": DENSE_LAYERS,
    "mixture_every": "decoder_sparse_step",
}


@dataclass(frozen=True)
class Family:
    """A model of transformers that ours computes, and its config.json besides THEIR_KEYS."""

    architecture: str
    must_be: dict[str, object]  # key -> the value that our model computes with; a missing key means that value too
    defaults: dict[str, float | bool]  # key that may be missing -> what it means then
    qk_norm: bool = False
    experts: dict[str, str] = field(default_factory=dict)  # field of MixtureArgs -> theirs; others have their default

    @property
    def title(self) -> str:
        return self.architecture.removesuffix("ForCausalLM")

    @property
    def constants(self) -> dict[str, object]:
        """All keys whose value our model fixes."""
        common = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "quantization_config": None}
        return {"architectures": [self.architecture], **common, **self.must_be}


NO_WINDOW = {"sliding_window": None}
OF_QWEN = {"attention_bias": False, "use_sliding_window": False, **NO_WINDOW}
FAMILIES = {  # model_type -> family. One has the norm of query and key heads, or experts, or both, or neither
    "llama": Family(
        "LlamaForCausalLM",
        {"attention_bias": False, "mlp_bias": False},
        {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        NO_WINDOW,
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        experts={
            "n_experts": "num_local_experts",
            "top_k": MIXTURE_KEYS["top_k"],
            "expert_ffn_dim": THEIR_KEYS["ffn_dim"],
        },
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        OF_QWEN,
        {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_key_value_heads": 32, "head_dim": 128},
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        OF_QWEN,
        {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_key_value_heads": 4}
        | {"decoder_sparse_step": 1, "norm_topk_prob": False},
        qk_norm=True,
        experts=MIXTURE_KEYS,
    ),
}
OTHER_SPELLINGS = {"num_experts": "num_local_experts"}  # of transformers 5


def explain_unwritable(args: ModelArgs) -> str | None:
    """Return why a model that is allowed here cannot be a Hugging Face folder, if so."""
    if args.name != "llama3":  # its parameters have no names there, or a Llama would compute something else with them
        return f"model.name = {args.name!r}, and only llama3 has names in Hugging Face's format"
    family = FAMILIES[find_model_type(args)]
    if args.dim % args.n_heads and family is FAMILIES["llama"]:
        return f"transformers wants hidden_size ({args.dim}) to be a multiple of {args.n_heads} heads"
    for number in fields(MixtureArgs) if args.mixture else ():
        value = getattr(args.mixture, number.name)
        if number.name not in family.experts and value != number.default:
            shown, only = show_number(value), show_number(number.default)
            return f"model.{number.name} = {shown}, and transformers' {family.title} has {only} alone"
    return None


def find_model_type(args: ModelArgs) -> str:
    """Return the row of FAMILIES of a model. It may lack keys for some numbers: explain_unwritable."""
    kinds = {(family.qk_norm, bool(family.experts)): name for name, family in FAMILIES.items()}
    return kinds[args.qk_norm, args.mixture is not None]


def show_number(value: object) -> str:
    """Return a value as it is written on the command line."""
    return str(value).lower()
