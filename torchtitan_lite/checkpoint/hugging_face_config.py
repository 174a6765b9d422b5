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

from dataclasses import fields
from pathlib import Path
from typing import Any

from torchtitan_lite.config.choices import ATTENTIONS, AttentionRow
from torchtitan_lite.config.files import JsonObject, read_json
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model_rows import SWITCHES, Family, ModelArgs, MoEArgs, RopeScaling
from torchtitan_lite.models.registry import MODELS

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
IN_MANIFEST = "hugging_face"  # key in `run` of a manifest: file name -> content
LENGTH = "max_position_embeddings"
DTYPE_KEYS = ("torch_dtype", "dtype")  # in transformers 4 and 5
DENSE_LAYERS = "mlp_only_layers"  # a list of layer numbers
ORIGINAL_LENGTH = "original_max_position_embeddings"
SCALINGS = {  # kind -> field of RopeScaling -> key
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_length": ORIGINAL_LENGTH,
    },
}


class HuggingFaceError(UserError):
    """Raised if a folder has no model that can be loaded here. Lists every problem that was found."""

    def __init__(self, folder: Path, problems: list[str]):
        super().__init__("\n  ".join([f"{folder} cannot be used:", *problems]))


COMMON_CONSTANTS = {"hidden_act": "silu", "partial_rotary_factor": 1.0}


def list_families() -> dict[str, tuple[str, Family]]:
    """Return model_type -> name of the first model that has it, and its family."""
    found = {}
    for name, table in MODELS.items():
        for kind, row in table.families.items():
            found.setdefault(kind, (name, row))
    return found


def find_model_type(model_args: ModelArgs) -> str | None:
    """Return the model_type of the first family that computes the same; None: the model has no Hugging Face format."""
    wanted = {switch for switch in SWITCHES if getattr(model_args, switch)}
    has_experts = model_args.moe is not None
    for kind, family in MODELS[model_args.name].families.items():
        if set(family.switches) == wanted and bool(family.experts) == has_experts:
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
    theirs = f"transformers' {family.title}"
    if model_args.dim % model_args.n_heads and family.divides_dim:
        return f"{theirs} needs a hidden_size ({model_args.dim}) that is a multiple of {model_args.n_heads} heads"
    if not ATTENTIONS.get(attention, AttentionRow()).is_plain:  # for example in a fork
        return f"model.attention = {attention!r}, but {theirs} only has causal attention"
    if model_args.moe is None:
        return None
    for number in fields(MoEArgs):
        value = getattr(model_args.moe, number.name)
        if number.name not in family.experts and value != number.default:
            return f"{number.name} = {value!r}, but {theirs} only supports {number.default!r}"
    return None


# --- read ---


def read_published(folder: Path) -> dict[str, JsonObject]:
    """Return file name -> content of config.json and generation_config.json, if present. Raises UserError."""
    published = {}
    for name in (CONFIG, GENERATION_CONFIG):
        if (folder / name).exists():
            published[name] = read_json(folder / name)
    return published


def read_model_args(folder: Path) -> ModelArgs:
    """Return the model that config.json describes.

    Raises HuggingFaceError with all unsupported features, and UserError for a value that is missing or has no sense.
    """
    content = read_json(folder / CONFIG)
    families = list_families()
    kind = content.take("model_type", str, None)
    if kind not in families:
        why = f"{CONFIG}: model_type = {kind!r}; supported: {', '.join(families)}"
        raise HuggingFaceError(folder, [why])
    model_name, family = families[kind]
    given = {key: value for key, value in content.items() if value is not None}
    config = JsonObject(content.path, family.defaults | given)
    if "use_sliding_window" in family.must_be and not config.get("use_sliding_window"):
        config.pop("sliding_window", None)  # transformers ignores it
    if "num_local_experts" in config:  # the spelling of transformers 5
        config.setdefault("num_experts", config["num_local_experts"])
    rope = config.take("rope_scaling", dict, {})
    if not rope:
        rope = config.take("rope_parameters", dict, JsonObject(content.path, {}))
    rope["rope_type"] = rope.take("rope_type", str, None) or rope.take("type", str, "default")
    for key in ("rope_theta", "partial_rotary_factor"):  # in the same place in both versions
        if key in rope:
            config[key] = rope[key]
    if problems := find_unsupported(config, family, rope):
        raise HuggingFaceError(folder, [f"{CONFIG}: {problem}" for problem in problems])
    n_heads = config.take("num_attention_heads", int)
    config.setdefault("num_key_value_heads", n_heads)
    config.setdefault("head_dim", config.take("hidden_size", int) // n_heads)
    moe = None
    if family.experts:
        config[DENSE_LAYERS] = len(config.get(DENSE_LAYERS, []))
        moe = MoEArgs(**take_fields(config, MoEArgs, family.experts))
    return ModelArgs(
        **take_fields(config, ModelArgs, family.sizes),
        rope_theta=config.take("rope_theta", float),
        rope_scaling=read_scaling(rope, config),
        tie_embeddings=config.take("tie_word_embeddings", bool, False),
        **dict.fromkeys(family.switches, True),
        name=model_name,
        moe=moe,
    )


def take_fields(config: JsonObject, kind: type, keys: dict[str, str]) -> dict[str, Any]:
    """Return field -> value for fields of the dataclass `kind`. `keys`: field -> key of config."""
    types = {each.name: each.type for each in fields(kind)}
    return {name: config.take(key, types[name]) for name, key in keys.items()}


def find_unsupported(config: JsonObject, family: Family, rope: JsonObject) -> list[str]:
    """Find keys whose values our model does not compute."""
    problems = []
    for key, value in (COMMON_CONSTANTS | family.must_be).items():
        if config.get(key, value) != value:
            supported = f"for {family.title} only {value!r} is supported"
            problems.append(f"{key} = {config[key]!r}; {supported}")
    layer_types = config.take("layer_types", list, [])
    if set(layer_types) - {"full_attention"}:
        problems.append(f"layer_types = {layer_types!r}; only full attention is supported")
    dense = config.take(DENSE_LAYERS, list, [])
    if dense != list(range(len(dense))):
        why = "only the first layers can be dense, such as [0, 1]"
        problems.append(f"{DENSE_LAYERS} = {dense!r}; {why}")
    kind = rope["rope_type"]
    if kind not in ("default", *SCALINGS):
        problems.append(f"rope_type = {kind!r}; supported: 'default', 'linear' and 'llama3'")
    return problems


def read_scaling(rope: JsonObject, config: JsonObject) -> RopeScaling | None:
    """Return the RoPE scaling. A missing original length is max_position_embeddings, as in transformers."""
    kind = rope["rope_type"]
    if kind == "default":
        return None
    rope[ORIGINAL_LENGTH] = rope.get(ORIGINAL_LENGTH) or config.get(LENGTH)
    return RopeScaling(**take_fields(rope, RopeScaling, SCALINGS[kind]), kind=kind)


# --- write ---


def name_values(source: object, keys: dict[str, str]) -> dict[str, Any]:
    """Return key -> value for some fields of a dataclass. `keys`: field -> key."""
    return {key: getattr(source, name) for name, key in keys.items()}


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
        changed: dict[str, object] = {key: dtype for key in DTYPE_KEYS if key in published}
        if context and context > (published.get(LENGTH) or context):
            changed[LENGTH] = context
        return published | changed
    family = find_family(model_args)
    scaling = model_args.rope_scaling
    of_moe = name_values(model_args.moe, family.experts)
    if DENSE_LAYERS in of_moe:
        of_moe[DENSE_LAYERS] = list(range(of_moe[DENSE_LAYERS]))
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": find_model_type(model_args),
        "hidden_act": COMMON_CONSTANTS["hidden_act"],
        **family.must_be,
        **name_values(model_args, family.sizes),
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
        values = name_values(scaling, SCALINGS[scaling.kind])
        config["rope_scaling"] = {"rope_type": scaling.kind, **values}
    return config
