"""Read config.json of a Hugging Face folder into ModelArgs, and write it. Needs no torch.

The architectures are in FAMILIES of models/NAME/table.py. A model with an unsupported feature (other biases, a sliding
window, another activation or RoPE scaling, quantized weights) is refused, because it would load but compute something
else. A model that fits no family cannot be exported.

transformers 5 writes `rope_parameters` with theta and scaling; version 4 writes `rope_theta` and `rope_scaling`. Both
are read. Exports use the format of version 4, which every version reads.

    config.json, generation_config.json   published with the weights: `read_published`
      -> the run                          config.json describes its model: preflight.py
      -> manifest.json of a checkpoint    `run` has both files; runs that start from this checkpoint copy them
      -> an export                        both files, updated after training: `make_config`
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchtitan_lite.config.choices import ATTENTIONS, AttentionRow
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model_rows import SWITCHES, Family, ModelArgs, MoEArgs, RopeScaling
from torchtitan_lite.models.registry import MODELS

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
IN_MANIFEST = "hugging_face"  # key in `run` of a manifest: file name -> content
LENGTH = "max_position_embeddings"
DTYPE_KEYS = ("torch_dtype", "dtype")  # in transformers 4 and 5
DENSE_LAYERS = "mlp_only_layers"  # a list of layer numbers

SCALING_KEYS = {  # field of RopeScaling -> key in config.json; linear scaling uses only the first
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}


class HuggingFaceError(UserError):
    """Raised if a folder has no model that can be loaded here. `problems` lists every problem that was found."""

    def __init__(self, folder: Path, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join([f"{folder} cannot be used:", *(f"  {problem}" for problem in problems)]))


COMMON_CONSTANTS = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "quantization_config": None}


def list_families() -> dict[str, tuple[str, Family]]:
    """Return model_type -> name of the model, and its family."""
    return {kind: (name, row) for name, table in MODELS.items() for kind, row in table.families.items()}


def find_model_type(model_args: ModelArgs) -> str | None:
    """Return the model_type of the first family that computes the same; None: the model has no Hugging Face format."""
    wanted = {switch for switch in SWITCHES if getattr(model_args, switch)}
    for kind, family in MODELS[model_args.name].families.items():
        if set(family.switches) == wanted and bool(family.experts) == (model_args.moe is not None):
            return kind
    return None


def find_family(model_args: ModelArgs) -> Family:
    """Return the family of a model that has one."""
    return MODELS[model_args.name].families[find_model_type(model_args)]


def explain_unwritable(model_args: ModelArgs, attention: str) -> str | None:
    """Explain why a model with this attention cannot be exported to Hugging Face; None if it can."""
    if find_model_type(model_args) is None:
        return f"no family in the table of model.name = {model_args.name!r} computes the same in transformers"
    family = find_family(model_args)
    if model_args.dim % model_args.n_heads and family.divides_dim:
        return f"transformers needs a hidden_size ({model_args.dim}) that is a multiple of {model_args.n_heads} heads"
    if not ATTENTIONS.get(attention, AttentionRow()).is_plain:  # for example in a fork
        return f"model.attention = {attention!r}, but transformers' {family.title} only has causal attention"
    for number in fields(MoEArgs) if model_args.moe else ():
        value = getattr(model_args.moe, number.name)
        if number.name not in family.experts and value != number.default:
            return f"{number.name} = {value!r}, but transformers' {family.title} only supports {number.default!r}"
    return None


# --- read ---


def read_published(folder: Path) -> dict[str, dict[str, Any]]:
    """Return file name -> content of config.json and generation_config.json, if present. Raises HuggingFaceError."""
    return {name: read_json(folder / name) for name in (CONFIG, GENERATION_CONFIG) if (folder / name).exists()}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises HuggingFaceError."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise HuggingFaceError(path.parent, [f"{path.name} is not JSON: {error}"]) from None


def read_model_args(folder: Path) -> ModelArgs:
    """Return the model that config.json describes. Raises HuggingFaceError with all unsupported features."""
    config = read_json(folder / CONFIG)
    families = list_families()
    if config.get("model_type") not in families:
        known = ", ".join(families)
        raise HuggingFaceError(folder, [f"{CONFIG}: model_type = {config.get('model_type')!r}; supported: {known}"])
    model_name, family = families[config["model_type"]]
    config = family.defaults | {key: value for key, value in config.items() if value is not None}
    if "use_sliding_window" in family.must_be and not config.get("use_sliding_window"):
        config.pop("sliding_window", None)  # transformers ignores it
    if "num_local_experts" in config:  # the spelling of transformers 5
        config.setdefault("num_experts", config["num_local_experts"])
    problems = [
        f"{key} = {config[key]!r}; for {family.title} only {value!r} is supported"
        for key, value in (COMMON_CONSTANTS | family.must_be).items()
        if config.get(key, value) != value
    ]
    if set(config.get("layer_types", [])) - {"full_attention"}:
        problems.append(f"layer_types = {config['layer_types']!r}; only full attention is supported")
    dense = config.get(DENSE_LAYERS, [])
    if dense != list(range(len(dense))):
        problems.append(f"{DENSE_LAYERS} = {dense!r}; only the first layers can be dense, such as [0, 1]")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    try:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        model_args = ModelArgs(
            **{name: config[key] for name, key in family.sizes.items()},
            rope_theta=rope.get("rope_theta") or config["rope_theta"],
            rope_scaling=read_scaling(rope, problems),
            tie_embeddings=config.get("tie_word_embeddings", False),
            **dict.fromkeys(family.switches, True),
            name=model_name,
            moe=read_moe(config, family) if family.experts else None,
        )
    except KeyError as error:
        problems.append(f"the key {error} is missing")
    if problems:
        raise HuggingFaceError(folder, [f"{CONFIG}: {problem}" for problem in problems])
    return model_args


def read_scaling(rope: dict[str, Any], problems: list[str]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor = {rope['partial_rotary_factor']!r}; only 1.0 is supported")
    if kind == "llama3":
        return RopeScaling(**{name: rope[key] for name, key in SCALING_KEYS.items()})
    if kind == "linear":
        return RopeScaling(factor=rope["factor"], kind="linear")
    if kind != "default":
        problems.append(f"rope_type = {kind!r}; supported: 'default', 'linear' and 'llama3'")
    return None


def read_moe(config: dict[str, Any], family: Family) -> MoEArgs:
    numbers = {name: config[key] for name, key in family.experts.items()}
    if "n_first_dense_layers" in numbers:
        numbers["n_first_dense_layers"] = len(numbers["n_first_dense_layers"])
    return MoEArgs(**numbers)


# --- write ---


def make_config(
    model_args: ModelArgs,
    *,
    dtype: str,
    bos_id: int | None = None,
    eos_id: int | None = None,
    context: int | None = None,
    published: dict[str, Any] | None = None,
) -> dict[str, object]:
    """Return the content of config.json.

    `dtype`: torch's name of the dtype. `context`: length of the training sequences in tokens, if known. `published`:
    the config.json that came with the weights. All of it is kept, except the dtype, and a context length that is
    shorter than the training sequences.
    """
    if published:
        changed: dict[str, object] = {key: dtype for key in DTYPE_KEYS if key in published} or {DTYPE_KEYS[0]: dtype}
        if context and context > published.get(LENGTH, context):
            changed[LENGTH] = context
        return published | changed
    family, scaling = find_family(model_args), model_args.rope_scaling
    of_moe = {key: getattr(model_args.moe, name) for name, key in family.experts.items()}
    if DENSE_LAYERS in of_moe:
        of_moe[DENSE_LAYERS] = list(range(of_moe[DENSE_LAYERS]))
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": find_model_type(model_args),
        "hidden_act": COMMON_CONSTANTS["hidden_act"],
        **family.must_be,
        **{key: getattr(model_args, name) for name, key in family.sizes.items()},
        **of_moe,
        "rope_theta": model_args.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": model_args.tie_embeddings,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        DTYPE_KEYS[0]: dtype,
    }
    if context is not None:
        config[LENGTH] = context
    if scaling is not None:
        names = SCALING_KEYS if scaling.kind == "llama3" else ("factor",)
        numbers = {SCALING_KEYS[name]: getattr(scaling, name) for name in names}
        config["rope_scaling"] = {"rope_type": scaling.kind, **numbers}
    return config
