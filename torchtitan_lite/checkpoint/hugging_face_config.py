"""config.json of a Hugging Face folder: read as ModelArgs, checked, and written. Needs no torch.

Llama, Mixtral, Qwen3 and Qwen3-MoE are rows of FAMILIES (hugging_face_families.py).

transformers 5 has `rope_parameters`, which contains theta and scaling; version 4 wrote `rope_theta` and `rope_scaling`.
Both are read. A model with a feature that ours lacks (biases, a sliding window, another activation, another kind of
RoPE scaling, quantized weights) is refused: it would load, and compute something else. So is the export of a model for
which no family has keys.

    config.json, generation_config.json   what its authors said of the model: `read_published`
      -> the run                          the first is the model: run_config.py
      -> manifest.json of a checkpoint    `run` has both; a run that resumes or starts from it passes them on
      -> an export                        both, but for what training has changed: `make_config`

An export of a model that never was in such a folder has the old form of config.json, which every version reads.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.hugging_face_families import (
    DENSE_LAYERS,
    FAMILIES,
    NO_WINDOW,
    OTHER_SPELLINGS,
    THEIR_KEYS,
    THEIR_SCALING_KEYS,
    Family,
    find_model_type,
)
from torchtitan_lite.config.flavors import MixtureArgs, ModelArgs, RopeScaling

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
IN_MANIFEST = "hugging_face"  # key in `run` of a manifest: name of a file -> its content
LENGTH = "max_position_embeddings"
DTYPE_KEYS = ("torch_dtype", "dtype")  # of transformers 4 and 5
LARGEST = 2**24  # of any size; the vocabulary of Llama 3 is 2**17


class HuggingFaceError(ValueError):
    """A folder that does not hold a model that we can load. `problems` lists everything that was found."""

    def __init__(self, folder: Path, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join([f"{folder} cannot be used:", *(f"  {problem}" for problem in self.problems)]))


def read_beside(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` of a folder. Raises HuggingFaceError."""
    try:
        return json.loads((folder / name).read_bytes())
    except (OSError, ValueError) as error:
        raise HuggingFaceError(folder, [f"{name} cannot be read as JSON: {error}"]) from None


def read_published(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> content of config.json and generation_config.json, where there is one. Raises HuggingFaceError."""
    return {name: read_beside(folder, name) for name in (CONFIG, GENERATION_CONFIG) if (folder / name).exists()}


def find_published(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the same from `run` of a manifest; empty if the weights never were in a Hugging Face folder."""
    held = run.get(IN_MANIFEST)
    held = held if isinstance(held, dict) else {}
    return {name: held[name] for name in (CONFIG, GENERATION_CONFIG) if isinstance(held.get(name), dict)}


def read_model_args(folder: Path) -> ModelArgs:
    """Return the model that `folder`/config.json describes. Raises HuggingFaceError."""
    return parse_model_args(read_beside(folder, CONFIG), folder)


def parse_model_args(config: dict[str, Any], folder: Path) -> ModelArgs:
    """Return the model that the content of a config.json describes. Raises HuggingFaceError, which names `folder`."""
    problems, kind_of_model = [], config.get("model_type")
    if kind_of_model is None:
        problems.append("no model_type, so it may be any model; a Llama has 'llama'")
    elif kind_of_model not in list(FAMILIES):
        problems.append(f"model_type = {kind_of_model!r}; those here are {', '.join(map(repr, FAMILIES))}")
    family = FAMILIES["llama" if problems else kind_of_model]
    if "use_sliding_window" in family.must_be and not config.get("use_sliding_window"):
        config = config | NO_WINDOW  # as transformers reads it
    problems += [
        f"{key} = {config[key]!r}; a {family.title} here has {value!r}"
        for key, value in family.constants.items()
        if config.get(key) not in (value, None)
    ]
    if set(config.get("layer_types") or []) - {"full_attention"}:
        problems.append(f"layer_types = {config['layer_types']!r}; a {family.title} here has full attention alone")

    def read(key: str, default: float | None = None, *, values: dict = config, kind: type = int) -> float:
        """Return a positive number; 1 and a problem where there is none."""
        value = values.get(key)
        value = values.get(OTHER_SPELLINGS.get(key)) if value is None else value
        value = family.defaults.get(key, default) if value is None else value
        if kind is int and type(value) is int and 0 < value <= LARGEST:
            return value
        if kind is float and type(value) in (int, float) and 0 < value < 1e30:
            return float(value)
        wanted = f"a whole number from 1 to {LARGEST}" if kind is int else "a number above 0"
        problems.append(f"{key} = {value!r}; {wanted} is needed")
        return 1

    sizes = {field: read(THEIR_KEYS[field]) for field in ("dim", "n_layers", "n_heads", "ffn_dim", "vocab_size")}
    sizes["n_kv_heads"] = read("num_key_value_heads", sizes["n_heads"])
    sizes["head_dim"] = read("head_dim", sizes["dim"] // sizes["n_heads"])
    if "head_dim" not in family.defaults and config.get("head_dim") is None and sizes["dim"] % sizes["n_heads"]:
        problems.append(f"hidden_size {sizes['dim']} is no multiple of {sizes['n_heads']} heads")
    if sizes["n_heads"] % sizes["n_kv_heads"]:
        problems.append(f"{sizes['n_heads']} heads cannot share {sizes['n_kv_heads']} key/value heads evenly")
    if not problems and sizes["head_dim"] % 2:
        problems.append(f"head_dim = {sizes['head_dim']}; rotary embedding needs pairs of numbers")

    scaling = None
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}  # as transformers 5 reads a file with both
    if not isinstance(rope, dict):
        problems.append(f"rope_scaling = {rope!r} is no JSON object")
        rope = {}
    theta = read("rope_theta", values=rope if rope.get("rope_theta") is not None else config, kind=float)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        problems.append(f"partial_rotary_factor = {rope['partial_rotary_factor']!r}; a {family.title} here has 1.0")
    if kind == "llama3":
        kinds = {"original_length": int}
        numbers = {
            field: read(key, values=rope, kind=kinds.get(field, float)) for field, key in THEIR_SCALING_KEYS.items()
        }
        scaling = RopeScaling(**numbers)
        if scaling.low_freq_factor >= scaling.high_freq_factor and not problems:
            problems.append("low_freq_factor must be below high_freq_factor")
    elif kind == "linear":
        scaling = RopeScaling(factor=read("factor", values=rope, kind=float), kind="linear")
    elif kind != "default":
        problems.append(f"RoPE is scaled by the rule {kind!r}; the rules here are 'default', 'linear' and 'llama3'")
    norm_eps = read("rms_norm_eps", kind=float)
    args = ModelArgs(
        **sizes,
        norm_eps=norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=config.get("tie_word_embeddings") is True,
        qk_norm=family.qk_norm,
        mixture=read_mixture(config, family, read, problems) if family.experts else None,
    )
    if not problems and args.mixture and not any(map(args.is_mixture, range(args.n_layers))):
        problems.append("no layer has experts")
    if problems:
        raise HuggingFaceError(folder, [f"{CONFIG}: {problem}" for problem in problems])
    return args


def read_mixture(
    config: dict[str, Any], family: Family, read: Callable[[str], int], problems: list[str]
) -> MixtureArgs:
    """Return what a config.json says of experts. Appends to `problems`. `read` returns a positive whole number."""
    numbers: dict[str, Any] = {}
    for name, key in family.experts.items():
        if key == DENSE_LAYERS:
            dense = config.get(key) or []
            if not isinstance(dense, list) or dense != list(range(len(dense))):
                problems.append(f"{key} = {dense!r}; only the first n layers can be without experts, [0, 1] for two")
                dense = []
            numbers[name] = len(dense)
        elif isinstance(family.defaults.get(key), bool):
            numbers[name] = family.defaults[key] if config.get(key) is None else config[key]
            if type(numbers[name]) is not bool:
                problems.append(f"{key} = {config[key]!r}; true or false is needed")
        else:
            numbers[name] = read(key)
    mixture = MixtureArgs(**numbers)
    if mixture.top_k > mixture.n_experts:
        problems.append(f"{family.experts['top_k']} = {mixture.top_k}, and a layer has {mixture.n_experts} experts")
    return mixture


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

    `dtype` is torch's name for it. `context`: tokens of the longest text that the model has learnt to read, if that is
    known. `published`: the config.json that the weights came with. It is kept, but for the dtype, for an embedding that
    was untied, and for texts that were longer in training. Raises HuggingFaceError if it describes another model.
    """
    tied = model_args.tie_embeddings
    if published:
        theirs = parse_model_args(published, Path(CONFIG))
        if replace(theirs, **{name: getattr(model_args, name) for name in list_free(theirs)}) != model_args:
            raise HuggingFaceError(Path(CONFIG), ["the one in the checkpoint describes another model than its weights"])
        changed: dict[str, object] = {key: dtype for key in DTYPE_KEYS if key in published} or {DTYPE_KEYS[0]: dtype}
        if tied != theirs.tie_embeddings:
            changed["tie_word_embeddings"] = tied
        if context and context > (read_length(published) or context):
            changed[LENGTH] = context
        return published | changed
    scaling, model_type = model_args.rope_scaling, find_model_type(model_args)
    family = FAMILIES[model_type]
    of_mixture = {key: getattr(model_args.mixture, name) for name, key in family.experts.items()}
    if DENSE_LAYERS in of_mixture:
        of_mixture[DENSE_LAYERS] = list(range(of_mixture[DENSE_LAYERS]))
    config: dict[str, object] = {
        "model_type": model_type,
        **family.constants,
        **{key: getattr(model_args, name) for name, key in THEIR_KEYS.items()},
        **of_mixture,
        "rms_norm_eps": model_args.norm_eps,
        "rope_theta": model_args.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        LENGTH: context,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        DTYPE_KEYS[0]: dtype,
    }
    del config["partial_rotary_factor"], config["quantization_config"]  # a missing key means the same to more readers
    if context is None:
        del config[LENGTH]
    if scaling is not None:
        names = THEIR_SCALING_KEYS if scaling.kind == "llama3" else ("factor",)
        numbers = {THEIR_SCALING_KEYS[name]: getattr(scaling, name) for name in names}
        config["rope_scaling"] = {"rope_type": scaling.kind, **numbers}
    return config


def read_length(config: dict[str, Any]) -> int | None:
    """Return the tokens of the longest text that a config.json names, or None if it names none."""
    value = config.get(LENGTH)
    return value if isinstance(value, int) and value > 0 else None


def list_free(theirs: ModelArgs) -> list[str]:
    """List the fields in which a model may differ from `theirs` and still have its weights."""
    unused = ["ffn_dim"] if theirs.n_mixture_layers == theirs.n_layers else []  # no layer is dense
    return ["tie_embeddings", "name", *unused]
