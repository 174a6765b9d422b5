"""A Hugging Face folder with a model, checked down to the last tensor before anything is loaded. Needs no torch.

    config.json                          the shape of the model
    model.safetensors                    every tensor
    or model.safetensors.index.json      which file has which tensor
       model-00001-of-00004.safetensors  ...

    theirs                                           ours
    model.embed_tokens.weight                        tok_embeddings.weight
    model.layers.3.self_attn.q_proj.weight           layers.3.attention.wq.weight
    model.norm.weight                                norm.weight
    lm_head.weight (missing if tied)                 output.weight (the same)
    ...mlp.experts.0.gate_proj.weight  (F, D)        ...feed_forward.experts.w1  (experts, D, F)

Modules and shapes come from config/block.py; only the mapping of names is here. Shapes are the same on both sides,
but for experts, which they have as a matrix of each. The order of the rows of wq and wk differs: hugging_face.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, HuggingFaceError, read_beside, read_model_args
from torchtitan_lite.checkpoint.hugging_face_families import find_model_type
from torchtitan_lite.config.block import list_llama_block
from torchtitan_lite.config.flavors import ModelArgs

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

THEIR_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
THEIR_EXPERTS = {  # model_type -> the same for mixture layers; {} is the number of an expert
    "mixtral": {
        "feed_forward.router": "block_sparse_moe.gate",
        "feed_forward.experts.w1": "block_sparse_moe.experts.{}.w1",
        "feed_forward.experts.w2": "block_sparse_moe.experts.{}.w2",
        "feed_forward.experts.w3": "block_sparse_moe.experts.{}.w3",
    },
    "qwen3_moe": {
        "feed_forward.router": "mlp.gate",
        "feed_forward.experts.w1": "mlp.experts.{}.gate_proj",
        "feed_forward.experts.w2": "mlp.experts.{}.down_proj",
        "feed_forward.experts.w3": "mlp.experts.{}.up_proj",
    },
}
NO_WEIGHTS = "rotary_emb.inv_freq"  # a constant that old versions of transformers saved with every layer
PUBLISHED = ("F32", "BF16", "F16")  # dtypes of published weights; no other is read
MOST_NAMED = 8  # tensors in a message
REMEDY = "Name a folder as transformers saves a Llama, Mixtral or Qwen3, with config.json and safetensors files"


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A complete model: every tensor of its config.json is there, and no other."""

    path: Path
    model_args: ModelArgs
    files: dict[str, Path]  # by the tensors' names


@dataclass(frozen=True)
class Place:
    """A tensor of theirs that is one of our parameters, or the matrix of one expert, transposed."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None


def list_tensors(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Return FQN -> global shape of every parameter, in the order of the model. A tied head has none."""
    tensors: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (args.vocab_size, args.dim)}
    for layer in range(args.n_layers):
        for module in list_llama_block(args, args.mixture if args.is_mixture(layer) else None):
            suffix = "" if module.split == "experts" else ".weight"
            tensors[f"layers.{layer}.{module.name}{suffix}"] = module.weight
    tensors["norm.weight"] = (args.dim,)
    if not args.tie_embeddings:
        tensors["output.weight"] = (args.vocab_size, args.dim)
    return tensors


def their_module(module: str, args: ModelArgs) -> str:
    """layers.3.attention.wq -> model.layers.3.self_attn.q_proj."""
    if not module.startswith("layers."):
        return THEIR_MODULES[module]
    _, layer, inside = module.split(".", 2)
    of_mixture = THEIR_EXPERTS[find_model_type(args)] if args.is_mixture(int(layer)) else {}
    return f"model.layers.{layer}.{of_mixture.get(inside) or THEIR_MODULES[inside]}"


def locate(fqn: str, shape: tuple[int, ...], args: ModelArgs) -> list[Place]:
    """Return where a parameter of this shape is: in one place, or for each expert in its own. A tied head has none."""
    if fqn == "output.weight" and args.tie_embeddings:
        fqn = "tok_embeddings.weight"
    theirs = their_module(fqn.removesuffix(".weight"), args)
    if len(shape) < 3:
        return [Place(f"{theirs}.weight", tuple(shape))]
    n_experts, n_in, n_out = shape
    return [Place(f"{theirs.format(expert)}.weight", (n_out, n_in), expert) for expert in range(n_experts)]


def open_folder(path: Path) -> HuggingFaceFolder:
    """Read config.json and the headers of all files. Raises HuggingFaceError with everything that is wrong."""
    args = read_model_args(path)
    entries = {name: entry for file in list_files(path) for name, entry in read_header(file).items()}
    found = {name: entry for name, entry in entries.items() if not name.endswith(NO_WEIGHTS)}
    expected = {place.name: place.shape for item in list_tensors(args).items() for place in locate(*item, args)}
    problems = []
    for kind, names in {"missing": expected.keys() - found, "unknown": found.keys() - expected}.items():
        shown, more = sorted(names)[:MOST_NAMED], len(names) - MOST_NAMED
        problems += [f"{kind}: {', '.join(shown)}" + f", and {more} more" * (more > 0)] if names else []
    for name in sorted(expected.keys() & found):
        file, dtype, shape = found[name]
        if shape != expected[name] or dtype not in PUBLISHED:
            problems.append(f"{file.name}: {name} is {dtype} {list(shape)}, and {CONFIG} says {list(expected[name])}")
    if problems:
        raise HuggingFaceError(path, problems)
    return HuggingFaceFolder(path, args, {name: found[name][0] for name in expected})


def list_files(path: Path) -> list[Path]:
    """Return the files of tensors in a folder. Raises HuggingFaceError."""
    if (path / SINGLE_FILE).is_file():  # transformers too looks for it first
        return [path / SINGLE_FILE]
    if not (path / INDEX).is_file():
        why = f"there is no {SINGLE_FILE} and no {INDEX}"
        if pickles := sorted(file.name for file in path.glob("*.bin")):
            why += f"; {pickles[0]} is a pickle, which is never opened here: have transformers save it as safetensors"
        raise HuggingFaceError(path, [why])
    return [path / name for name in sorted(set(read_beside(path, INDEX).get("weight_map", {}).values()))]


def read_header(path: Path) -> dict[str, tuple[Path, str, tuple[int, ...]]]:
    """Return file, dtype and shape of every tensor of one file, by name. Raises HuggingFaceError.

    The safetensors library needs torch even to list a file. It checks everything else when the file is loaded.
    """
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            n_bytes = file.tell() + max(entry["data_offsets"][1] for entry in header.values() if "dtype" in entry)
        if n_bytes != path.stat().st_size:
            raise ValueError(f"it has {path.stat().st_size} bytes, and its header needs {n_bytes}")
        header.pop("__metadata__", None)
        return {name: (path, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise HuggingFaceError(path.parent, [f"{path} is not a whole safetensors file: {error}"]) from None
