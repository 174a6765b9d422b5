"""Hugging Face's config.json of a Llama and our ModelArgs: one model in two vocabularies.

    ours              theirs                             where theirs is missing
    dim               hidden_size
    n_kv_heads        num_key_value_heads                num_attention_heads
    head_dim          head_dim                           hidden_size / num_attention_heads
    norm_eps          rms_norm_eps                       1e-6
    rope_theta        rope_theta                         10,000
    rope_scaling      rope_scaling                       none

transformers 5 writes `rope_parameters`, which holds the theta and the scaling; version 4 wrote `rope_theta` and
`rope_scaling`. Both are read. The old one is written, because every version reads it.

What a Llama of theirs can be and ours cannot (biases, another activation, another kind of scaled RoPE, quantized
weights) is refused: loading such a model would compute something else without a word.
"""

import os
from pathlib import Path
from typing import Any

from torchtitan_lite.config.flavors import ModelArgs, RopeScaling
from torchtitan_lite.config.json_file import in_one_line, read_json_object
from torchtitan_lite.config.schema import Problem

CONFIG = "config.json"
ARCHITECTURE = "LlamaForCausalLM"

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
    "architectures": [ARCHITECTURE],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
GENERATION_CONFIG = "generation_config.json"
LARGEST = 2**24  # of any size; the vocabulary of Llama 3 is 2**17
MOST_BYTES = 2**24  # of a JSON file beside the weights; the index of the largest models has a tenth


class HuggingFaceError(ValueError):
    """A folder that is no Llama that we can load. Holds everything that was found."""

    def __init__(self, folder: Path, problems: list[str]):
        self.problems = [in_one_line(problem) for problem in problems]
        super().__init__("\n".join([f"{folder} cannot be used:", *(f"  {problem}" for problem in self.problems)]))


def read_beside(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` of a folder. Raises HuggingFaceError."""
    try:
        return read_json_object(folder / name, MOST_BYTES)
    except ValueError as error:
        raise HuggingFaceError(folder, [f"{name} {error}"]) from None


def read_shape(folder: Path) -> ModelArgs:
    """The shape that `folder`/config.json describes. Raises HuggingFaceError."""
    config = read_beside(folder, CONFIG)
    problems = [
        f"{CONFIG}: {key} = {config[key]!r}; a Llama here has {value!r}"
        for key, value in MUST_BE.items()
        if config.get(key) not in (value, None)
    ]
    if "model_type" not in config:
        problems.append(f"{CONFIG}: no model_type, so it may be any model; a Llama has 'llama'")
    reader = NumberReader(problems)
    sizes = read_sizes(config, reader)
    theta, scaling = read_rope(config, reader)
    norm_eps = reader.number(config, "rms_norm_eps", 1e-6)
    if problems:
        raise HuggingFaceError(folder, problems)
    tied = config.get("tie_word_embeddings") is True
    return ModelArgs(**sizes, norm_eps=norm_eps, rope_theta=theta, rope_scaling=scaling, tie_embeddings=tied)


class NumberReader:
    """Takes numbers out of parsed JSON, and notes what is none."""

    def __init__(self, problems: list[str]):
        self.problems = problems

    def size(self, values: dict, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more; 1 where there is none, which is then a problem."""
        value = values.get(key)
        value = default if value is None else value
        if type(value) is int and 0 < value <= LARGEST:
            return value
        self.problems.append(f"{CONFIG}: {key} = {value!r}; a whole number from 1 to {LARGEST} is needed")
        return 1

    def number(self, values: dict, key: str, default: float | None = None) -> float:
        """A number above zero."""
        value = values.get(key)
        value = default if value is None else value
        if type(value) in (int, float) and 0 < value < 1e30:
            return float(value)
        self.problems.append(f"{CONFIG}: {key} = {value!r}; a number above 0 is needed")
        return 1.0


def read_sizes(config: dict, reader: NumberReader) -> dict[str, int]:
    required = ("dim", "n_layers", "n_heads", "ffn_dim", "vocab_size")
    sizes = {field: reader.size(config, THEIR_KEYS[field]) for field in required}
    sizes["n_kv_heads"] = reader.size(config, THEIR_KEYS["n_kv_heads"], default=sizes["n_heads"])
    sizes["head_dim"] = reader.size(config, THEIR_KEYS["head_dim"], default=sizes["dim"] // sizes["n_heads"])
    if config.get("head_dim") is None and sizes["dim"] % sizes["n_heads"]:
        reader.problems.append(f"{CONFIG}: hidden_size {sizes['dim']} is no multiple of {sizes['n_heads']} heads")
    if sizes["n_heads"] % sizes["n_kv_heads"]:
        reader.problems.append(
            f"{CONFIG}: {sizes['n_heads']} heads cannot share {sizes['n_kv_heads']} key/value heads evenly"
        )
    if not reader.problems and sizes["head_dim"] % 2:
        reader.problems.append(f"{CONFIG}: head_dim = {sizes['head_dim']}; rotary embedding turns pairs of numbers")
    return sizes


def read_rope(config: dict, reader: NumberReader) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, in either spelling; where a file has both, the old one counts, as in transformers 5."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        reader.problems.append(f"{CONFIG}: rope_scaling = {rope!r} is no JSON object")
        return 1.0, None
    theta = reader.number(rope if rope.get("rope_theta") is not None else config, "rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        reader.problems.append(f"{CONFIG}: RoPE is scaled by the rule {kind!r}; the rules here are 'default', 'llama3'")
        return theta, None
    scaling = RopeScaling(
        factor=reader.number(rope, "factor"),
        low_freq_factor=reader.number(rope, "low_freq_factor"),
        high_freq_factor=reader.number(rope, "high_freq_factor"),
        original_length=reader.size(rope, "original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor and not reader.problems:
        reader.problems.append(f"{CONFIG}: low_freq_factor must be below high_freq_factor")
    return theta, scaling


def describe_shape(
    shape: ModelArgs, *, dtype: str, max_length: int, bos_id: int | None, eos_id: int | None
) -> dict[str, object]:
    """config.json of this shape. `dtype` is the name that torch has for it; `max_length` is in tokens."""
    config: dict[str, object] = {
        **MUST_BE,
        **{key: getattr(shape, field) for field, key in THEIR_KEYS.items()},
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": shape.tie_embeddings,
        "max_position_embeddings": max_length,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }
    del config["partial_rotary_factor"], config["quantization_config"]  # missing says the same, and to more readers
    if shape.rope_scaling is not None:
        numbers = {key: getattr(shape.rope_scaling, field) for field, key in THEIR_SCALING_KEYS.items()}
        config["rope_scaling"] = {"rope_type": "llama3", **numbers}
    return config


def find_unwritable(shape: ModelArgs) -> list[str]:
    """What transformers refuses of a shape that is a model here."""
    if shape.dim % shape.n_heads:
        return [f"transformers wants hidden_size ({shape.dim}) to be a multiple of {shape.n_heads} heads"]
    return []


def compare_shapes(theirs: ModelArgs, ours: ModelArgs, folder: Path) -> list[Problem]:
    """What keeps the weights of `folder` out of a run with the shape `ours`, by key of the run's config.

    A tied model may be loaded into an untied one: its head then begins as a copy of the embedding.
    """
    problems = []
    for field, value in vars(ours).items():
        other = getattr(theirs, field)
        if other == value or (field == "tie_embeddings" and other):
            continue
        remedy = f"Set model.{field} = {str(other).lower() if isinstance(other, bool) else other}"
        if field == "rope_scaling":
            remedy = 'Set model.rope_scaling = "none"' if other is None else "Choose the flavor with that scaling"
        problems.append(Problem(f"model.{field}", value, f"the model in {folder} has {other}", remedy))
    return problems


def read_end_ids(folder: Path) -> frozenset[int]:
    """Tokens after which a text ends, as the folder's generation_config.json has them, else its config.json.

    None where neither says so. Raises HuggingFaceError where one says what is no id.
    """
    for name in (GENERATION_CONFIG, CONFIG):
        if not os.path.exists(folder / name):
            continue
        named = read_beside(folder, name).get("eos_token_id")
        ids = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(id) is int and id >= 0 for id in ids):
            raise HuggingFaceError(folder, [f"{name}: eos_token_id = {named!r}; the id of a token, or a list of ids"])
        if ids:
            return frozenset(ids)
    return frozenset()
