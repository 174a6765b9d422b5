"""A Hugging Face folder with a Llama, checked down to the last tensor before anything is loaded. Needs no torch.

    config.json                          the shape of the model
    model.safetensors                    every tensor
    or model.safetensors.index.json      which file has which tensor
       model-00001-of-00004.safetensors  ...

    theirs                                           ours
    model.embed_tokens.weight                        tok_embeddings.weight
    model.layers.3.self_attn.q_proj.weight           layers.3.attention.wq.weight
    model.norm.weight                                norm.weight
    lm_head.weight (missing if tied)                 output.weight (the same)

Modules and shapes come from config/flavors.py; only the mapping of names is here. Shapes are the same on both sides.
The order of the rows of wq and wk differs: hugging_face.py.

config.json of transformers 5 has `rope_parameters`, which contains theta and scaling; version 4 wrote `rope_theta` and
`rope_scaling`. Both are read. The old form is written, because every version reads it. A Llama with a feature that our
model lacks (biases, another activation, another kind of RoPE scaling, quantized weights) is refused: it would load, and
compute something else.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.manifest import DTYPE_BYTES
from torchtitan_lite.config.files import parse_json_object, read_json_object
from torchtitan_lite.config.flavors import ModelArgs, RopeScaling, list_llama_block
from torchtitan_lite.config.messages import Problem, show_text

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

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
THEIR_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
NO_WEIGHTS = "rotary_emb.inv_freq"  # a constant that old versions of transformers saved with every layer
PUBLISHED = ("F32", "BF16", "F16")  # dtypes of published weights; no other is read
MOST_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_NAMED = 8  # tensors in a message
REMEDY = "Name a folder as transformers saves a Llama, with config.json and safetensors files"


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


# --- config.json ---


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


# --- names and files ---


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A complete Llama: every tensor of its config.json is there, and no other."""

    path: Path
    model_args: ModelArgs
    files: dict[str, Path]  # by our FQN, in the order of the model; output.weight too if it is tied


def list_tensors(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Return FQN -> global shape of every parameter of a Llama, in the order of the model. A tied head has none."""
    tensors: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (args.vocab_size, args.dim)}
    for layer in range(args.n_layers):
        tensors |= {f"layers.{layer}.{module.name}.weight": module.weight for module in list_llama_block(args)}
    tensors["norm.weight"] = (args.dim,)
    if not args.tie_embeddings:
        tensors["output.weight"] = (args.vocab_size, args.dim)
    return tensors


def their_name(fqn: str) -> str:
    """layers.3.attention.wq.weight -> model.layers.3.self_attn.q_proj.weight."""
    module = fqn.removesuffix(".weight")
    if not module.startswith("layers."):
        return f"{THEIR_MODULES[module]}.weight"
    _, layer, inside = module.split(".", 2)
    return f"model.layers.{layer}.{THEIR_MODULES[inside]}.weight"


def name_in_file(fqn: str, args: ModelArgs) -> str:
    """Return the name of a parameter's tensor: of a tied head, that of the embedding."""
    return their_name("tok_embeddings.weight" if fqn == "output.weight" and args.tie_embeddings else fqn)


def open_folder(path: Path) -> HuggingFaceFolder:
    """Read config.json and the headers of all files. Raises HuggingFaceError with everything that is wrong."""
    args = read_model_args(path)
    found = {name: entry for name, entry in read_entries(path).items() if not name.endswith(NO_WEIGHTS)}
    n_layers = count_layers(set(found))
    if n_layers != args.n_layers:  # before the names of as many layers as the file says are listed
        why = f"{CONFIG}: num_hidden_layers = {args.n_layers}, and the files hold layers 0 to {n_layers - 1}"
        raise HuggingFaceError(path, [why if n_layers else "the files hold no tensor named as those of a Llama"])

    expected = {their_name(fqn): size for fqn, size in list_tensors(args).items()}
    problems = [
        *describe_names("missing", expected.keys() - found),
        *describe_names("unknown", found.keys() - expected),
    ]
    if args.tie_embeddings and "lm_head.weight" in found:
        problems.append(
            f"{CONFIG} ties lm_head to embed_tokens; set tie_word_embeddings to false to keep its own weight"
        )
    for name in sorted(expected.keys() & found):
        file, seen = found[name]
        if seen != expected[name]:
            problems.append(f"{file.name}: {name} is {list(seen)}, and {CONFIG} calls for {list(expected[name])}")
    if problems:
        raise HuggingFaceError(path, problems)
    fqns = dict.fromkeys([*list_tensors(args), "output.weight"])
    return HuggingFaceFolder(path, args, {fqn: found[name_in_file(fqn, args)][0] for fqn in fqns})


def count_layers(names: set[str]) -> int:
    """Return how many layers the tensors with these names have, if layers are numbered from 0."""
    inside = {f"{name}.weight" for name in THEIR_MODULES.values()}
    numbers = [name.split(".", 3)[2:] for name in names if name.startswith("model.layers.") and name.count(".") > 2]
    return 1 + max((int(n) for n, rest in numbers if n.isdecimal() and len(n) < 9 and rest in inside), default=-1)


def describe_names(kind: str, names: set[str]) -> list[str]:
    shown = sorted(names)[:MOST_NAMED]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return [f"{kind}: {', '.join(shown)}{more}"] if names else []


def read_entries(path: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return file and shape of every tensor in the folder, by their name."""
    if (path / SINGLE_FILE).is_file():  # transformers too looks for it first
        return read_header(path, SINGLE_FILE)
    if not (path / INDEX).is_file():
        why = f"there is no {SINGLE_FILE} and no {INDEX}"
        if pickles := sorted(file.name for file in path.glob("*.bin")):
            why += f"; {pickles[0]} is a pickle, which is never opened here: have transformers save it as safetensors"
        raise HuggingFaceError(path, [why])

    file_of = read_beside(path, INDEX).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise HuggingFaceError(path, [f"{INDEX} has no weight_map"])
    for name, file in file_of.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise HuggingFaceError(path, [f"{INDEX} says that {name} is in {file!r}, which is no file of this folder"])
    files = sorted(set(file_of.values()))
    if missing := [file for file in files if not (path / file).is_file()]:
        raise HuggingFaceError(path, [f"{INDEX} names files that are not there: {', '.join(missing)}"])
    entries = {}
    for file in files:
        held, named = read_header(path, file), {name for name, place in file_of.items() if place == file}
        problems = describe_names(f"{INDEX} names, and {file} does not hold", named - held.keys())
        problems += describe_names(f"{file} holds, and {INDEX} does not name there", held.keys() - named)
        if problems:
            raise HuggingFaceError(path, problems)
        entries |= held
    return entries


def read_header(folder: Path, file: str) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return file and shape of every tensor of one file, by name. Raises HuggingFaceError.

    `check` runs without torch, which the safetensors library needs even to list a file. So names, dtypes, shapes and
    the size of the file are checked here; offsets, when the library opens the file to load it.
    """
    path = folder / file
    entries, n_data_bytes = {}, 0
    try:
        n_file_bytes = path.stat().st_size
        with open(path, "rb") as stream:
            n_header_bytes = int.from_bytes(stream.read(8), "little")
            if not 0 < n_header_bytes <= min(MOST_HEADER_BYTES, n_file_bytes - 8):
                raise ValueError(f"its {n_file_bytes} bytes cannot contain its header")
            header = parse_json_object(stream.read(n_header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            match entry:
                case {"dtype": str(dtype), "shape": [*sizes]} if all(type(n) is int and n >= 0 for n in sizes):
                    pass
                case _:
                    raise ValueError(f"the entry of {name!r} is not as the format has it")
            if dtype not in PUBLISHED:
                raise ValueError(f"{name} is of type {dtype}, and only {', '.join(PUBLISHED)} are read")
            entries[name] = (path, tuple(sizes))
            n_data_bytes += prod(sizes) * DTYPE_BYTES[dtype]
        if 8 + n_header_bytes + n_data_bytes != n_file_bytes:
            raise ValueError(f"it has {n_file_bytes} bytes, and its header needs {8 + n_header_bytes + n_data_bytes}")
    except ValueError as error:
        raise HuggingFaceError(folder, [f"{path} is not a whole safetensors file: {error}"]) from None
    except OSError as error:
        raise HuggingFaceError(folder, [f"{file} cannot be read ({error.strerror})"]) from None
    return entries
