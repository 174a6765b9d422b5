"""config.json of a Hugging Face folder with a Llama: read as ModelArgs, checked, and written. Needs no torch.

transformers 5 has `rope_parameters`, which contains theta and scaling; version 4 wrote `rope_theta` and `rope_scaling`.
Both are read. The old form is written, because every version reads it. A Llama with a feature that our model lacks
(biases, another activation, another kind of RoPE scaling, quantized weights) is refused: it would load, and compute
something else.
"""

from pathlib import Path
from typing import Any

from torchtitan_lite.config.files import read_json_object
from torchtitan_lite.config.flavors import ModelArgs, RopeScaling
from torchtitan_lite.config.messages import Problem, show_text

CONFIG = "config.json"
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
MUST_BE = {  # key -> the value that our model computes with; a missing key means that value too
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
LARGEST = 2**24  # of any size; the vocabulary of Llama 3 is 2**17
MOST_BYTES = 2**24  # of a JSON file beside the weights; the index of the largest models has a tenth


class HuggingFaceError(ValueError):
    """A folder that does not hold a Llama that we can load. `problems` lists everything that was found."""

    def __init__(self, folder: Path, problems: list[str]):
        self.problems = [show_text(problem) for problem in problems]
        super().__init__("\n".join([f"{folder} cannot be used:", *(f"  {problem}" for problem in self.problems)]))


def read_beside(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` of a folder. Raises HuggingFaceError."""
    try:
        return read_json_object(folder / name, MOST_BYTES)
    except ValueError as error:
        raise HuggingFaceError(folder, [f"{name} {error}"]) from None


def read_model_args(folder: Path) -> ModelArgs:
    """Return the model that `folder`/config.json describes. Raises HuggingFaceError."""
    config = read_beside(folder, CONFIG)
    problems = [
        f"{key} = {config[key]!r}; a Llama here has {value!r}"
        for key, value in MUST_BE.items()
        if config.get(key) not in (value, None)
    ]
    if "model_type" not in config:
        problems.append("no model_type, so it may be any model; a Llama has 'llama'")

    def read(key: str, default: float | None = None, *, values: dict = config, kind: type = int) -> float:
        """Return a positive number; 1 and a problem where there is none."""
        value = default if values.get(key) is None else values[key]
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
    if config.get("head_dim") is None and sizes["dim"] % sizes["n_heads"]:
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
    theta = read("rope_theta", 10_000.0, values=rope if rope.get("rope_theta") is not None else config, kind=float)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        kinds = {"original_length": int}
        numbers = {
            field: read(key, values=rope, kind=kinds.get(field, float)) for field, key in THEIR_SCALING_KEYS.items()
        }
        scaling = RopeScaling(**numbers)
        if scaling.low_freq_factor >= scaling.high_freq_factor and not problems:
            problems.append("low_freq_factor must be below high_freq_factor")
    elif kind != "default":
        problems.append(f"RoPE is scaled by the rule {kind!r}; the rules here are 'default' and 'llama3'")
    norm_eps = read("rms_norm_eps", 1e-6, kind=float)
    if problems:
        raise HuggingFaceError(folder, [f"{CONFIG}: {problem}" for problem in problems])
    tied = config.get("tie_word_embeddings") is True
    return ModelArgs(**sizes, norm_eps=norm_eps, rope_theta=theta, rope_scaling=scaling, tie_embeddings=tied)


def make_config(model_args: ModelArgs, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, object]:
    """Return the content of config.json. `dtype` is torch's name for it."""
    scaling = model_args.rope_scaling
    config: dict[str, object] = {
        **MUST_BE,
        **{key: getattr(model_args, field) for field, key in THEIR_KEYS.items()},
        "rms_norm_eps": model_args.norm_eps,
        "rope_theta": model_args.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": model_args.tie_embeddings,
        # The longest text, in tokens: 8,192 on the model card of Llama 3, 131,072 on those of 3.1 and 3.2.
        "max_position_embeddings": 16 * scaling.original_length if scaling else 8192,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }
    del config["partial_rotary_factor"], config["quantization_config"]  # a missing key means the same to more readers
    if scaling is not None:
        numbers = {key: getattr(scaling, field) for field, key in THEIR_SCALING_KEYS.items()}
        config["rope_scaling"] = {"rope_type": "llama3", **numbers}
    return config


def explain_unwritable(args: ModelArgs) -> str | None:
    """Return why a model that is allowed here cannot be a Hugging Face folder, if so."""
    if args.name != "llama3":  # its parameters have no names there, or a Llama would compute something else with them
        return f"model.name = {args.name!r}, and only llama3 has names in Hugging Face's format"
    if args.dim % args.n_heads:
        return f"transformers wants hidden_size ({args.dim}) to be a multiple of {args.n_heads} heads"
    return None


def compare_shapes(theirs: ModelArgs, ours: ModelArgs, folder: Path) -> list[Problem]:
    """Return why the weights of `folder` cannot be loaded into our model, by key of the run's config.

    An untied model may load a tied one: its head then starts as a copy of the embedding.
    """
    problems = []
    for field, value in vars(ours).items():
        other = getattr(theirs, field)
        # A fork of the model file under another name may load them too, if its parameters are those of a Llama.
        if other == value or field == "name" or (field == "tie_embeddings" and other):
            continue
        remedy = f"Set model.{field} = {str(other).lower() if isinstance(other, bool) else other}"
        if field == "rope_scaling":
            remedy = 'Set model.rope_scaling = "none"' if other is None else "Choose the flavor with that scaling"
        problems.append(Problem(f"model.{field}", value, f"the model in {folder} has {other}", remedy))
    return problems
