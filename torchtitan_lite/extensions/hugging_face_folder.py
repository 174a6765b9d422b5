"""Open a Hugging Face folder, and check that every tensor exists before any is loaded. Needs no torch.

    config.json                          describes the model
    model.safetensors                    every tensor
    or model.safetensors.index.json      names the file of each tensor
       model-00001-of-00004.safetensors  ...

    theirs                                           ours
    model.embed_tokens.weight                        tok_embeddings.weight
    model.layers.3.self_attn.q_proj.weight           layers.3.attention.wq.weight
    model.norm.weight                                norm.weight
    lm_head.weight                                   output.weight
    ...mlp.experts.0.gate_proj.weight  (F, D)        ...feed_forward.experts.w1  (experts, D, F)

Modules, shapes and names come from models/NAME/table.py. Shapes are the same on both sides, except that Hugging Face
has one transposed matrix per expert. Hugging Face stores the rows of wq and wk in a different order than this trainer
(hugging_face.py).

A tied model usually stores only the embedding. If a folder has only the head, the model is also tied. If a folder has
two different matrices, the model is not tied. As in transformers, config.json has no effect on tying.
"""

import json
import mmap
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_lite.config.block import list_parameters, list_shapes
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.extensions.foreign_json import read_json
from torchtitan_lite.extensions.hugging_face_config import (
    HuggingFaceError,
    find_family,
    read_model_args,
)
from torchtitan_lite.files import import_extra, refuse_pointer
from torchtitan_lite.models.registry import CONFIG

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # if this file exists, transformers applies a LoRA adapter

# a constant that old versions of transformers saved in every layer
NO_WEIGHTS = "rotary_emb.inv_freq"
FILE_DTYPES = ("F32", "BF16", "F16")  # supported dtypes, as safetensors headers spell them
MOST_NAMED = 8  # maximum number of tensors that a message names
# pattern of files with weights that cannot be used -> what is wrong with such a file, and how to fix it
OTHER_FILES = {
    "*.safetensors": f"has no index: download {INDEX} of the same model, or name a single file {SINGLE_FILE}",
    "*.bin": "is a pickle, which is never opened here: save it as safetensors with transformers",
    "*.pt*": "is a pickle, which is never opened here: download the model in Hugging Face's format",
    "*.gguf": "is in GGUF format: save it as safetensors with transformers (from_pretrained with gguf_file)",
}


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A complete model: the folder has exactly the tensors that its config.json describes."""

    model_args: ModelArgs
    tensors: dict[str, tuple[Path, str]]  # tensor name -> file, and its name in this file


def name_theirs(fqn: str, model_args: ModelArgs) -> list[str]:
    """Return Hugging Face's names of a parameter: a single name, or one per expert."""
    row = list_parameters(model_args)[fqn].row
    prefix = ".".join(["model", *fqn.split(".")[:2], ""]) if fqn.startswith("layers.") else ""
    name = prefix + find_family(model_args).names[row.name]
    if row.kind == "experts":
        return [f"{name.format(expert)}.weight" for expert in range(row.weight[0])]
    return [f"{name}.{fqn.rpartition('.')[2]}"]


def open_folder(path: Path) -> HuggingFaceFolder:
    """Read config.json and the headers of all files. Raises HuggingFaceError with every problem."""
    if (path / ADAPTER).exists():
        raise HuggingFaceError(
            path,
            f"{ADAPTER}: an adapter cannot be loaded. Merge it with peft's merge_and_unload, or remove the file",
        )
    model_args = read_model_args(path)
    tensors = {}
    found = {}  # name -> shape
    file_names = {}  # tensor name -> file name, as in the index
    if not (path / SINGLE_FILE).is_file():  # transformers also prefers this file to the index
        weight_map = read_json(path / INDEX, may_be_missing=True).take("weight_map", dict, {})
        file_names = {name: weight_map.take(name, str) for name in weight_map}
    for file in list_weight_files(path, file_names):
        for name, (dtype, shape) in read_header(file).items():
            if name.endswith(NO_WEIGHTS):
                continue
            why = ""
            if dtype not in FILE_DTYPES:
                why = f"{file.name}: {name} is {dtype}, but weights must be {', '.join(FILE_DTYPES)}. "
                why += "Save them so with transformers"
            elif name in tensors:
                other = tensors[name][0].name
                why = f"{name} is in {other} and in {file.name}. Delete it from one of these files"
            elif (other := file_names.get(name, file.name)) != file.name:
                why = f"{name} is in {file.name}, but {INDEX} names {other}. Download both again"
            if why:
                raise HuggingFaceError(path, why)
            tensors[name] = (file, name)
            found[name] = shape
    if model_args.tie_embeddings:
        model_args = find_tied(model_args, found, tensors)
    expected = {}
    for fqn, shape in list_shapes(model_args).items():
        if len(shape) == 3:
            shape = shape[:0:-1]  # the matrix of an expert is transposed
        expected |= dict.fromkeys(name_theirs(fqn, model_args), shape)
    problems = []
    # list the stored tensors first, because a stored tensor with an unknown name is often the missing tensor under
    # another name
    for name in found | expected:
        stored = found.get(name, "missing")
        described = expected.get(name, "unknown")
        if stored != described:
            problems.append(f"{name} is {stored} in the files, and {described} in {CONFIG}")
    if len(problems) > MOST_NAMED:
        problems[MOST_NAMED:] = [f"and {len(problems) - MOST_NAMED} more"]
    if problems:
        problems += [
            f"Download the folder again, or correct {CONFIG}. If transformers finds all weights, save the model again "
            "with transformers",
            "If names contain module. or _orig_mod., save the model inside that wrapper",
        ]
        raise HuggingFaceError(path, *problems)
    return HuggingFaceFolder(model_args, tensors)


def find_tied(
    model_args: ModelArgs, found: dict[str, tuple], tensors: dict[str, tuple[Path, str]]
) -> ModelArgs:
    """Return the model unchanged, or with untied embeddings if the files have two different matrices.

    If the model stays tied, remove the head from `found` and `tensors`.
    """
    untied = replace(model_args, tie_embeddings=False)
    (embedding,) = name_theirs("tok_embeddings.weight", untied)
    (head,) = name_theirs("output.weight", untied)
    if head not in found:
        return model_args
    if embedding not in found:
        found[embedding] = found[head]
        tensors[embedding] = tensors[head]
    elif read_bytes(*tensors[embedding]) != read_bytes(*tensors[head]):
        return untied
    del found[head]
    return model_args


def read_bytes(path: Path, name: str) -> memoryview:
    """Map the values of a tensor in a safetensors file."""
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(content[:8], "little")
    first, last = json.loads(content[8:start])[name]["data_offsets"]
    values = memoryview(content)[start + first : start + last]
    # comparing eight bytes at a time is faster than comparing single bytes
    return values.cast("Q") if len(values) % 8 == 0 else values


def list_weight_files(path: Path, file_names: dict[str, str]) -> list[Path]:
    """Return the safetensors files of a folder. `file_names` is its index. Raises HuggingFaceError."""
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if not file_names:
        problems = [f"there is no {SINGLE_FILE} and no {INDEX}: download the weights"]
        for pattern, why in OTHER_FILES.items():
            problems += [f"{file.name} {why}" for file in [*path.glob(pattern)][:1]]
        raise HuggingFaceError(path, *problems)
    files = {path / name for name in file_names.values()}
    if missing := sorted(file.name for file in files if not file.is_file()):
        raise HuggingFaceError(
            path,
            f"{INDEX} names {', '.join(missing)}, which is not in the folder: download the folder again",
        )
    return sorted(files)


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return a dict mapping names to (dtype, shape) for every tensor in a file. Raises HuggingFaceError if the file is
    incomplete."""
    safetensors = import_extra("safetensors", "hf")
    described = {}
    try:
        refuse_pointer(path)
        with safetensors.safe_open(path, framework="np") as file:  # "pt" would import torch
            for name in file.keys():
                stored = file.get_slice(name)
                described[name] = (stored.get_dtype(), tuple(stored.get_shape()))
        return described
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise HuggingFaceError(
            path.parent, f"{path} is not a complete safetensors file: {error}. Download it again"
        ) from None
