"""Convert a checkpoint to a Hugging Face folder.

    outputs/debug, step-200, ...  ->  OUT/config.json, *.safetensors, tokenizer

The launcher runs this after a run with checkpoint.last_save_in_hf. `train`, `generate` and `eval` can read the folder,
and so can transformers. Only one file is in memory at a time. OUT is complete or does not exist.
"""

import argparse
import json
import time
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.format import (
    CheckpointError,
    commit,
    create_unfinished,
    discard,
    name_unfinished,
    write_file,
)
from torchtitan_lite.checkpoint.hugging_face import find_unit, to_their_order
from torchtitan_lite.checkpoint.hugging_face_config import (
    CONFIG,
    GENERATION_CONFIG,
    explain_unwritable,
    make_config,
)
from torchtitan_lite.checkpoint.hugging_face_folder import (
    INDEX,
    SINGLE_FILE,
    list_tensors,
    name_theirs,
)
from torchtitan_lite.checkpoint.save import write_tensors
from torchtitan_lite.config.block import count_parameters, list_expert_biases
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.data.vocabulary import CONFIG as TOKENIZER_CONFIG
from torchtitan_lite.tools.model_source import ModelSource, SourceError, open_source

BESIDE_TOKENIZER = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION_CONFIG,
)
MOST_FILE_BYTES = 5 * 10**9  # as in transformers


def main(options: argparse.Namespace) -> int:
    started_s = time.monotonic()
    out = options.out.absolute()  # "." too has a name then
    for path in (out, name_unfinished(out)):
        if path.exists():
            raise SourceError(f"{path} already exists, and is never overwritten. Name a new folder")
    source = open_source(options.source, tokenizer=options.tokenizer, verify=not options.no_verify)
    convert(source, out, options.dtype)
    sizes = [file.stat().st_size for file in out.glob("*.safetensors")]
    numbers = {
        "source": str(source.path),
        "out": str(options.out),
        "parameters": count_parameters(source.model_args),
        "files": len(sizes),
        "bytes": sum(sizes),
        "seconds": round(time.monotonic() - started_s, 3),
    }
    text = "{out}: {parameters:,} parameters from {source}, {bytes:,} bytes in {files} files, {seconds} s"
    print(json.dumps(numbers) if options.json else text.format(**numbers))
    return 0


def convert(source: ModelSource, out: Path, dtype: str | None) -> None:
    """Write the folder `out`. dtype None: keep the dtype of the checkpoint. Raises SourceError or CheckpointError."""
    model_args, checkpoint = source.model_args, source.checkpoint
    if checkpoint is None:
        raise SourceError(
            f"{source.path} is already a Hugging Face folder: train, generate and eval can read it"
        )
    if why := explain_unwritable(model_args, source.attention):
        raise SourceError(f"{source.path} cannot be converted: {why}")
    if moved := [
        fqn for fqn in list_expert_biases(model_args) if checkpoint.read(f"model.{fqn}").any()
    ]:
        why = f"{moved[0]} is not zero, and Hugging Face formats have no expert bias"
        remedy = "Train with training.expert_bias_rate = 0, and balance the experts with training.expert_balance_loss"
        raise SourceError(f"{source.path} cannot be converted: {why}. {remedy}.")
    dtype = dtype or checkpoint.manifest.tensors["model.norm.weight"].dtype
    about = {
        "tokenizer": source.tokenizer,
        "context": source.context,
        "published": source.published,
    }
    write_folder(out, model_args, dtype, lambda fqn: checkpoint.read(f"model.{fqn}"), **about)


def write_folder(
    out: Path,
    model_args: ModelArgs,
    dtype: str,
    read: Callable[[str], Tensor],
    *,
    tokenizer: Tokenizer,
    context: int | None = None,
    published: dict[str, dict] | None = None,
) -> None:
    """Write a Hugging Face folder. `read(fqn)` returns a full tensor. Raises CheckpointError.

    For `context` and `published` see ModelSource.
    """
    published = published or {}
    about = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "context": context}
    config = make_config(model_args, dtype=dtype, published=published.get(CONFIG), **about)
    contents = list_tokenizer_files(tokenizer) | {CONFIG: encode(config)}
    if GENERATION_CONFIG in published:
        contents[GENERATION_CONFIG] = encode(published[GENERATION_CONFIG])
    torch_dtype = getattr(torch, dtype)
    n_bytes = {
        fqn: prod(shape) * torch_dtype.itemsize for fqn, shape in list_tensors(model_args).items()
    }
    cut = cut_into_files(n_bytes, MOST_FILE_BYTES)
    names = [f"model-{number:05}-of-{len(cut):05}.safetensors" for number in range(1, len(cut) + 1)]
    names = names if len(cut) > 1 else [SINGLE_FILE]
    unfinished, file_of = create_unfinished(out), {}
    try:
        for name, fqns in zip(names, cut, strict=True):
            theirs = {}
            for fqn in fqns:
                tensor = to_finite(fqn, read(fqn), torch_dtype)
                if (unit := find_unit(fqn, model_args)) > 1:
                    tensor = to_their_order(tensor, unit)
                matrices = [matrix.t() for matrix in tensor] if tensor.dim() == 3 else [tensor]
                theirs |= zip(name_theirs(fqn, model_args), matrices, strict=True)
            write_tensors(unfinished / name, theirs, {})
            file_of |= dict.fromkeys(theirs, name)
        if len(cut) > 1:
            contents[INDEX] = encode(
                {"metadata": {"total_size": sum(n_bytes.values())}, "weight_map": file_of}
            )
        for name, content in contents.items():
            write_file(unfinished / name, content)
        commit(out)
    except BaseException:
        discard(out)
        raise


def cut_into_files(n_bytes: dict[str, int], most_file_bytes: int) -> list[list[str]]:
    """Distribute tensors (name -> bytes) over files of at most `most_file_bytes`. A larger tensor gets its own file."""
    files: list[list[str]] = []
    filled = 0  # bytes in the last file
    for name, size in n_bytes.items():
        if not files or filled + size > most_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def to_finite(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to `dtype`. Raises CheckpointError if a finite value becomes infinite in float16."""
    converted = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise CheckpointError(
            f"{name} has values beyond 65,504, the float16 maximum: choose bfloat16 or float32"
        )
    return converted


def list_tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return name -> content for the tokenizer files that transformers reads. Plain bytes have none."""
    path = tokenizer.path
    if path.suffix == ".json":
        beside = map(path.with_name, (path.name, *BESIDE_TOKENIZER))
        return {each.name: each.read_bytes() for each in beside if each.is_file()}
    if not path.is_file():
        return {}
    flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    added = {
        str(id): {"content": name, "special": True, **flags}
        for name, id in tokenizer.special.items()
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
    }
    return {path.name: path.read_bytes(), TOKENIZER_CONFIG: encode(config)}


def encode(value: dict) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
