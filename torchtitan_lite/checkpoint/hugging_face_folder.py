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

Modules and shapes come from config/flavors.py; only the mapping of names is here. Shapes are the same on both sides,
but for experts. The order of the rows of wq and wk differs: hugging_face.py.

Experts of a layer, E of them, D model dim, F inner width. Published folders have matrices of each; transformers 5 has
stacks in memory, which `save_pretrained(..., save_original_format=False)` writes. Both are read, the first is written.

    ours                        (E, D, F)    feed_forward.experts.w1
    Mixtral, of each    E times (F, D)       block_sparse_moe.experts.0.w1.weight
    Qwen3-MoE, of each  E times (F, D)       mlp.experts.0.gate_proj.weight
    stacked             (E, 2F, D)           mlp.experts.gate_up_proj: w1 is rows [:F] of each expert, w3 rows [F:]
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, HuggingFaceError, read_beside, read_model_args
from torchtitan_lite.checkpoint.hugging_face_families import FAMILIES, find_model_type
from torchtitan_lite.checkpoint.manifest import DTYPE_BYTES
from torchtitan_lite.config.files import parse_json_object
from torchtitan_lite.config.flavors import ModelArgs, list_llama_block

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
STACKED = {  # the same where all experts are in one tensor
    "feed_forward": "mlp",
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts.w1": "mlp.experts.gate_up_proj",
    "feed_forward.experts.w2": "mlp.experts.down_proj",
    "feed_forward.experts.w3": "mlp.experts.gate_up_proj",
}
NO_WEIGHTS = "rotary_emb.inv_freq"  # a constant that old versions of transformers saved with every layer
PUBLISHED = ("F32", "BF16", "F16")  # dtypes of published weights; no other is read
MOST_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_NAMED = 8  # tensors in a message
REMEDY = "Name a folder as transformers saves a Llama, Mixtral or Qwen3, with config.json and safetensors files"


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A complete model: every tensor of its config.json is there, and no other."""

    path: Path
    model_args: ModelArgs
    files: dict[str, Path]  # by their name
    stacked: bool  # all experts of a layer are in one tensor


@dataclass(frozen=True)
class Place:
    """Where one of our parameters is in their format, or the matrix of one expert."""

    name: str  # of their tensor
    shape: tuple[int, ...]  # of the whole of it
    expert: int | None = None  # whose matrix it is, transposed; None: the parameter is not of experts
    first_row: int = 0

    def index(self, *box: slice) -> tuple[int | slice, ...]:
        """Return what to index their tensor with, to get this box of the place."""
        rows = slice(self.first_row + box[0].start, self.first_row + box[0].stop)
        of_stack = (self.expert,) if len(self.shape) == 3 else ()
        return (*of_stack, rows, *box[1:])


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


def their_module(module: str, args: ModelArgs, *, stacked: bool = False) -> str:
    """layers.3.attention.wq -> model.layers.3.self_attn.q_proj."""
    if not module.startswith("layers."):
        return THEIR_MODULES[module]
    _, layer, inside = module.split(".", 2)
    of_mixture = {} if not args.is_mixture(int(layer)) else STACKED if stacked else THEIR_EXPERTS[find_model_type(args)]
    return f"model.layers.{layer}.{of_mixture.get(inside) or THEIR_MODULES[inside]}"


def locate(fqn: str, shape: tuple[int, ...], args: ModelArgs, *, stacked: bool = False) -> list[Place]:
    """Return where a parameter of this shape is: in one place, or for each expert in its own. A tied head has none."""
    if fqn == "output.weight" and args.tie_embeddings:
        fqn = "tok_embeddings.weight"
    theirs = their_module(fqn.removesuffix(".weight"), args, stacked=stacked)
    if len(shape) < 3:
        return [Place(f"{theirs}.weight", tuple(shape))]
    n_experts, n_in, n_out = shape
    if not stacked:
        return [Place(f"{theirs.format(expert)}.weight", (n_out, n_in), expert) for expert in range(n_experts)]
    sharing = [name for name, other in STACKED.items() if theirs.endswith(other) and ".experts." in name]
    first_row = n_out * [fqn.endswith(name) for name in sharing].index(True)
    whole = (n_experts, n_out * len(sharing), n_in)
    return [Place(theirs, whole, expert, first_row) for expert in range(n_experts)]


def open_folder(path: Path) -> HuggingFaceFolder:
    """Read config.json and the headers of all files. Raises HuggingFaceError with everything that is wrong."""
    args = read_model_args(path)
    found = {name: entry for name, entry in read_entries(path).items() if not name.endswith(NO_WEIGHTS)}
    n_layers = count_layers(set(found))
    if n_layers != args.n_layers:  # before the names of as many layers as the file says are listed
        why = f"{CONFIG}: num_hidden_layers = {args.n_layers}, and the files hold layers 0 to {n_layers - 1}"
        raise HuggingFaceError(path, [why if n_layers else "the files hold no tensor named as those of a Llama"])
    stacked, n_experts = count_experts(found)
    if args.mixture and args.mixture.n_experts != n_experts:  # for the same reason
        key = FAMILIES[find_model_type(args)].experts["n_experts"]
        why = f"{CONFIG}: {key} = {args.mixture.n_experts}, and the files hold {n_experts} experts of a layer"
        raise HuggingFaceError(path, [why])

    places = [place for item in list_tensors(args).items() for place in locate(*item, args, stacked=stacked)]
    expected = {place.name: place.shape for place in places}
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
    return HuggingFaceFolder(path, args, {name: found[name][0] for name in expected}, stacked)


def count_layers(names: set[str]) -> int:
    """Return how many layers the tensors with these names have, if layers are numbered from 0."""
    inside = {f"{name}.weight" for name in THEIR_MODULES.values()}
    numbers = [name.split(".", 3)[2:] for name in names if name.startswith("model.layers.") and name.count(".") > 2]
    return 1 + max((int(n) for n, rest in numbers if n.isdecimal() and len(n) < 9 and rest in inside), default=-1)


def count_experts(found: dict[str, tuple[Path, tuple[int, ...]]]) -> tuple[bool, int]:
    """Return whether the experts of a layer are stacked, and how many a layer has."""
    stacks = [shape for name, (_, shape) in found.items() if name.endswith(STACKED["feed_forward.experts.w1"])]
    numbers = {number[1] for name in found if (number := re.search(r"\.experts\.([0-9]+)\.", name))}
    return bool(stacks), max([len(numbers), *(shape[0] for shape in stacks if shape)])


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
    headers = {file: read_header(path, file) for file in files}
    named, held = set(file_of.items()), {(name, file) for file, entries in headers.items() for name in entries}
    problems = []
    for kind, pairs in (("names, and the files do not hold", named - held), ("does not name there", held - named)):
        problems += describe_names(f"{INDEX} {kind}", {f"{name} in {file}" for name, file in pairs})
    if problems:
        raise HuggingFaceError(path, problems)
    return {name: entry for entries in headers.values() for name, entry in entries.items()}


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
