"""Read config.json of a Hugging Face folder into ModelArgs. Needs no torch.

FAMILIES in models/NAME/hugging_face.py lists the architectures, with one row for each key of their config.json.
EVERY_FAMILY lists the keys that all architectures share. A feature that is not supported (such as a bias, an activation
or a RoPE scaling that the model lacks, or quantized weights) raises an error, because the model would load, but compute
wrong outputs. As in transformers, keys that are in neither FAMILIES nor EVERY_FAMILY have no effect. A notice names
these keys.

transformers 5 writes `rope_parameters` with theta and scaling; version 4 writes `rope_theta` and `rope_scaling`. Both
forms are read.

    config.json, generation_config.json   published with the weights (`read_published`)
      -> the run                          config.json describes the model of the run (preflight.py)
      -> manifest.json of a checkpoint    `run` contains both files; runs that start from this checkpoint copy them
      -> an export                        contains both files, updated after training (hugging_face_export.py)
"""

from math import inf
from pathlib import Path
from typing import Any

from torchtitan_lite.config.family_rows import ABOVE_ZERO, NOT_NEGATIVE, ConfigKey, Family
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model_rows import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    ModelArgs,
    MoEArgs,
    RopeScaling,
)
from torchtitan_lite.extensions.families import find_model_type, load_families
from torchtitan_lite.extensions.foreign_json import JsonObject, has_kind, read_json, shorten_value
from torchtitan_lite.models.registry import CONFIG, LENGTH, MODELS

GENERATION_CONFIG = "generation_config.json"
DTYPE_KEYS = ("torch_dtype", "dtype")  # (key in transformers 4, key in transformers 5)
DENSE_LAYERS = "mlp_only_layers"  # this key has a list of layer numbers
TIE_KEY = "tie_word_embeddings"
END = "eos_token_id"
ORIGINAL_LENGTH = "original_max_position_embeddings"
SCALINGS = {  # kind of scaling -> field of RopeScaling -> key of config.json
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

    def __init__(self, folder: Path, *problems: str):
        super().__init__("\n  ".join([f"{folder} cannot be used:", *problems]))


ABSENT = ConfigKey(only=(None,), kind=dict | list | str | None)
IGNORED = ConfigKey(is_ignored=True)
SCALE = ConfigKey(float, ..., limits=ABOVE_ZERO)
FULL_ROTATION = ConfigKey(int | float | None, only=(1.0, None))
UNREAD = """
architectures attn_implementation auto_map chunk_size_feed_forward experts_implementation
gradient_checkpointing id2label is_encoder_decoder label2id name_or_path num_labels
output_attentions output_hidden_states problem_type return_dict transformers_version model_type
""".split()
EVERY_FAMILY = {  # keys that transformers reads for every architecture
    END: ConfigKey(int | list | None, limits=NOT_NEGATIVE, items=int),
    "layer_types": ConfigKey(list | None, items=str),
    "rope_parameters": ConfigKey(dict | None),
    "rope_scaling": ConfigKey(dict | None),
    "partial_rotary_factor": FULL_ROTATION,
    ORIGINAL_LENGTH: ConfigKey(int),
    "is_causal": ConfigKey(bool, only=(True,)),
    "quantization_config": ABSENT,
    "per_layer_config": ConfigKey(dict | None, only=(None, {})),
    "fusion_config": ABSENT,
    "transformers_weights": ABSENT,  # transformers would load the weights file that this key names
    # transformers would ignore config.json, and read the files that this key names
    "configuration_files": ABSENT,
    **dict.fromkeys((*DTYPE_KEYS, *UNREAD), IGNORED),
}
ROPE_KEYS = {  # inside rope_parameters or rope_scaling
    "rope_theta": SCALE,
    "partial_rotary_factor": FULL_ROTATION,
    "factor": SCALE,
    "low_freq_factor": SCALE,
    "high_freq_factor": SCALE,
    ORIGINAL_LENGTH: ConfigKey(int, ...),
}


def find_family(model_args: ModelArgs) -> Family:
    """Return the Hugging Face family of a model. The model must have a family."""
    return load_families(model_args.name)[find_model_type(model_args)]


def list_families() -> dict[str, tuple[str, Family]]:
    """Return a dict mapping each model_type to (name of the first model that supports this type, family)."""
    found = {}
    for name in MODELS:
        for kind, row in load_families(name).items():
            found.setdefault(kind, (name, row))
    return found


def read_published(folder: Path) -> dict[str, JsonObject]:
    """Return a dict mapping file names to contents, for config.json and generation_config.json, if present. Raises
    UserError."""
    published = {}
    for name in (CONFIG, GENERATION_CONFIG):
        if (folder / name).exists():
            content = read_json(folder / name)
            end_ids = content.get(END)
            if why := explain_wrong(end_ids, EVERY_FAMILY[END], name):
                raise UserError(f"{folder / name}: {END} = {shorten_value(end_ids)}; {why}")
            published[name] = content
    return published


def read_model_args(folder: Path) -> ModelArgs:
    """Return the model that config.json describes.

    Raises HuggingFaceError with every value that is invalid or not supported, and UserError for a file that is not
    JSON.
    """
    content = read_json(folder / CONFIG)
    families = list_families()
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        raise HuggingFaceError(
            folder,
            f"{CONFIG}: model_type = {kind!r}; supported: {', '.join(families)}. "
            "Use such a model, or add yours to models/",
        )
    model_name, family = families[kind]
    config, problems = read_keys(content, EVERY_FAMILY | family.keys, family.title)
    rope = {}
    if not problems:
        rope, problems = read_rope(content, config, family)
    if not problems:
        # missing sizes follow from other sizes
        if config["num_key_value_heads"] is None:
            config["num_key_value_heads"] = config["num_attention_heads"]
        if config["head_dim"] is None:
            config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        problems = find_unsupported(config, family)
    if problems:
        remedy = f"Correct {CONFIG} if a value is wrong. Otherwise use a different model"
        raise HuggingFaceError(folder, *(f"{CONFIG}: {problem}" for problem in problems), remedy)
    moe = None
    if family.experts:
        config[DENSE_LAYERS] = count_dense(config)
        moe = MoEArgs(**name_fields(config, family.experts))
    scaling = None
    if rope["rope_type"] != "default":
        keys = SCALINGS[rope["rope_type"]]
        scaling = RopeScaling(**name_fields(rope, keys), kind=rope["rope_type"])
    return ModelArgs(
        **name_fields(config, family.sizes),
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        tie_embeddings=config[TIE_KEY],
        **dict.fromkeys(family.switches, True),
        **read_windows(config, family),
        name=model_name,
        moe=moe,
    )


def read_windows(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of ModelArgs that describe sliding windows. If keys conflict, use the key that transformers
    would use."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    types = [SLIDING] * config["num_hidden_layers"]
    if family.windows == "some":
        n_full = config["max_window_layers"]
        types[:n_full] = [FULL] * len(types[:n_full])
        types = config["layer_types"] or types
    if window is None or SLIDING not in types:
        return {}
    return {"sliding_window": window, "layer_types": tuple(types) if FULL in types else ()}


def name_fields(config: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
    """Return a dict mapping fields to values, for some fields of a dataclass. `keys` maps each field to a key of
    `config`."""
    return {name: config[key] for name, key in keys.items()}


def read_keys(
    content: JsonObject, rows: dict[str, ConfigKey], title: str
) -> tuple[dict[str, Any], list[str]]:
    """Return a dict mapping keys to values for every row, and a list of problems. A missing key has its default.

    `title` is the name of the family.
    """
    config = {key: row.default for key, row in rows.items()}
    problems = []
    for key, row in rows.items():
        if key in content and not row.is_ignored:
            value = content[key]
            config[row.same_as or key] = value
            if why := explain_wrong(value, row, title):
                problems.append(f"{content.place}{key} = {shorten_value(value)}; {why}")
    for key, value in config.items():
        if value is ...:
            problems.append(f"{content.place}{key} is missing; it must be {name_kind(rows[key])}")
    return config, problems


def explain_wrong(value: Any, row: ConfigKey, title: str) -> str:
    """Explain why a key cannot have this value. Returns "" if the value is valid."""
    items = value if isinstance(value, list) else []
    if not has_kind(value, row.kind) or not all(has_kind(each, row.items) for each in items):
        return f"it must be {name_kind(row)}"
    if row.only and value not in row.only:
        return f"for {title} only {shorten_value(row.only[0])} is supported"
    for number in [value, *items]:
        if has_kind(number, float) and number not in row.limits:
            return f"it must be {row.limits}"
    return ""


def name_kind(row: ConfigKey) -> str:
    """Return the type of a key, such as "int" or "list[int] | None"."""
    name = row.kind.__name__ if isinstance(row.kind, type) else str(row.kind)
    if row.items is not object:
        name = name.replace("list", f"list[{row.items.__name__}]")
    return name.replace("None", "null")


def read_rope(
    content: JsonObject, config: dict[str, Any], family: Family
) -> tuple[dict[str, Any], list[str]]:
    """Return rope_type and the values of its keys, and a list of problems.

    If both rope_scaling and rope_parameters are set, rope_scaling wins, as in transformers.
    """
    name = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    rope = content.take(name, dict, JsonObject(content.path, {}))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ("default", *SCALINGS):
        return {}, [f"rope_type = {kind!r}; supported: {', '.join(['default', *SCALINGS])}"]
    for key, value in rope.items():
        if isinstance(value, dict):
            return {}, [
                f"{name}.{key} = {shorten_value(value)}; only one RoPE for all layers is supported"
            ]
    rope.setdefault("rope_theta", config["rope_theta"])
    keys = list_rope_keys(kind)
    if ORIGINAL_LENGTH in keys:
        if config[ORIGINAL_LENGTH]:
            rope[ORIGINAL_LENGTH] = config[ORIGINAL_LENGTH]
        rope.setdefault(ORIGINAL_LENGTH, config[LENGTH])
    values, problems = read_keys(rope, {key: ROPE_KEYS[key] for key in keys}, family.title)
    if not problems and values.get("low_freq_factor", 0) > values.get("high_freq_factor", inf):
        problems.append(f"{name}.low_freq_factor is larger than high_freq_factor")
    return values | {"rope_type": kind}, problems


def list_rope_keys(kind: str) -> list[str]:
    """Return the keys inside rope_parameters or rope_scaling that are used with a rope_type."""
    return ["rope_theta", "partial_rotary_factor", *SCALINGS.get(kind, {}).values()]


def find_unsupported(config: dict[str, Any], family: Family) -> list[str]:
    """Find contradictory values and unsupported layers."""
    problems = []
    dim, n_layers = config["hidden_size"], config["num_hidden_layers"]
    n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["head_dim"]
    if family.divides_dim and dim % n_heads:
        problems.append(f"num_attention_heads = {n_heads}; it must divide hidden_size = {dim}")
    if n_heads % n_kv_heads:
        problems.append(
            f"num_key_value_heads = {n_kv_heads}; it must divide num_attention_heads = {n_heads}"
        )
    if head_dim < 2 or head_dim % 2:
        problems.append(f"head_dim = {head_dim}; rotary embedding needs an even number")
    types = config["layer_types"] or [FULL] * n_layers
    why = ""
    if len(types) != n_layers or not set(types) <= set(LAYER_TYPES):
        why = f"it must have one of {', '.join(LAYER_TYPES)} for each of {n_layers} layers"
    elif SLIDING in types and family.windows != "some":
        why = f"for {family.title} only {FULL} is supported"
    elif SLIDING in types and not read_windows(config, family):
        why = "use_sliding_window is false, or sliding_window is null"
    if why:
        problems.append(f"layer_types = {shorten_value(types)}; {why}")
    if not family.experts:
        return problems
    n_experts, top_k = config[family.experts["n_experts"]], config[family.experts["top_k"]]
    if top_k > n_experts:
        problems.append(f"{family.experts['top_k']} = {top_k}; there are {n_experts} experts")
    if count_dense(config) is None:
        problems.append(
            f"{DENSE_LAYERS} = {shorten_value(config[DENSE_LAYERS])}; "
            "only the first layers can be dense, such as [0, 1]"
        )
    return problems


def count_dense(config: dict[str, Any]) -> int | None:
    """Return the number of dense layers at the start of the model, or None if the config also lists dense layers
    elsewhere."""
    n_layers = config["num_hidden_layers"]
    step = config.get("decoder_sparse_step", 1)
    dense = config.get(DENSE_LAYERS) or []
    n_first = 0
    while n_first in dense:
        n_first += 1
    theirs = [layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers)]
    ours = [layer >= n_first and (layer + 1) % step == 0 for layer in range(n_layers)]
    return n_first if ours == theirs else None


def list_ignored(content: dict[str, Any], model_args: ModelArgs) -> list[str]:
    """List the settings of a config.json that this trainer ignores."""
    family = list_families()[content["model_type"]][1]
    rows = EVERY_FAMILY | family.keys
    notices = []
    unknown = []
    for key, value in content.items():
        row = rows.get(key)
        if row is None and value and not key.startswith("_"):
            unknown.append(f"{key} = {shorten_value(value)}")
        elif row and row.is_ignored and row.only and value not in row.only:
            notices.append(
                f"{CONFIG}: {key} = {shorten_value(value)} has no effect in this trainer"
            )
    name = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    rope = content.get(name) or {}
    used = {"rope_type", "type", *list_rope_keys(rope.get("rope_type", rope.get("type")))}
    if content.get("rope_scaling") and content.get("rope_parameters"):
        notices.append(f"{CONFIG}: rope_scaling is used, and rope_parameters is ignored")
    unknown += [f"{name}.{key} = {shorten_value(rope[key])}" for key in rope if key not in used]
    theta = content.get("rope_theta")
    if theta and rope.get("rope_theta", theta) != theta:
        unknown.append(f"rope_theta = {theta}, beside {name}.rope_theta")
    if content.get(ORIGINAL_LENGTH) and ORIGINAL_LENGTH not in used:
        unknown.append(f"{ORIGINAL_LENGTH} = {content[ORIGINAL_LENGTH]}")
    if unknown:
        why = f"keys without effect, here and in transformers' {family.title}"
        notices.append(f"{CONFIG}: {why}: {', '.join(unknown)}")
    if content.get(TIE_KEY) and not model_args.tie_embeddings:
        notices.append(
            f"{CONFIG}: {TIE_KEY} = true, but the files have two different matrices, "
            "so the model is not tied, as in transformers"
        )
    return notices
