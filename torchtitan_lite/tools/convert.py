"""Converts a checkpoint to a Hugging Face folder, or back. One tensor at a time is in memory; OUT is whole or absent.

    outputs/debug, step-200, ...  ->  OUT/config.json, *.safetensors, tokenizer: for transformers and others
    Hugging Face folder           ->  OUT/manifest.json, *.safetensors: weights at step 0, for a run that starts from
                                      them (--checkpoint.initial_load_path OUT)

Exit status: 0 fine, 1 it failed, 2 wrong input.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.hugging_face import Export, explain_biases, write_folder
from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, IN_MANIFEST, HuggingFaceError
from torchtitan_lite.checkpoint.hugging_face_families import explain_unwritable
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.checkpoint.storage import convert_dtype, write_checkpoint
from torchtitan_lite.config.block import count_parameters, list_expert_biases
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.data.vocabulary import CONFIG as TOKENIZER_CONFIG
from torchtitan_lite.tools.model_source import ModelSource, SourceError, open_source

FINAL_NORM = "norm.weight"
BESIDE_TOKENIZER = (TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def main(options: argparse.Namespace) -> int:
    """Exit status: 0 fine, 1 it failed, 2 wrong input, 130 stopped by Ctrl-C."""
    try:
        print(convert(options))
    except (SourceError, HuggingFaceError) as error:
        print(error, file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Stopped. {options.out} was not made.", file=sys.stderr)
        return 130
    return 0


def convert(options: argparse.Namespace) -> str:
    """Convert, and return the text to print. Raises SourceError, HuggingFaceError, CheckpointError."""
    started_s = time.monotonic()
    out, to_checkpoint, most_file_bytes = options.out, (options.source / CONFIG).is_file(), int(options.file_gb * 1e9)
    check_out(out, to_checkpoint)
    source = open_source(options.source, tokenizer=options.tokenizer, verify=not options.no_verify)
    args = source.model_args
    if not to_checkpoint:
        biases = {fqn: source.read(fqn) for fqn in list_expert_biases(args)}
        if why := explain_unwritable(args) or explain_biases(biases):
            raise SourceError(f"{source.path} cannot be a Hugging Face folder: {why}.")
    norm_dtype = source.read(FINAL_NORM).dtype
    dtype = options.dtype or str(norm_dtype).removeprefix("torch.")

    def read(fqn: str) -> Tensor:
        tensor = source.read(fqn)
        # Weights of several dtypes become one dtype that nobody has chosen only if nothing is lost.
        if not options.dtype and torch.promote_types(tensor.dtype, norm_dtype) != norm_dtype:
            raise SourceError(f"{fqn} is {tensor.dtype}, and {FINAL_NORM} {norm_dtype}. Choose one type with --dtype.")
        return tensor

    if to_checkpoint:
        write_weights(out, source, read, getattr(torch, dtype), most_file_bytes)
    else:
        about = {"context": source.context, "published": source.published}
        about |= describe_tokenizer(source.tokenizer)
        write_folder(out, read, Export(args, dtype, most_file_bytes, **about))
    return describe(options, source, dtype, seconds=time.monotonic() - started_s)


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the arguments of Export that the tokenizer decides. Plain bytes have no files."""
    path, files = tokenizer.path, {}
    if path.suffix == ".json":
        beside = map(path.with_name, (path.name, *BESIDE_TOKENIZER))
        files = {each.name: each.read_bytes() for each in beside if each.is_file()}
    elif path.is_file():
        files = {path.name: path.read_bytes(), TOKENIZER_CONFIG: describe_tokenizer_model(tokenizer)}
    return {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "tokenizer_files": files}


def describe_tokenizer_model(tokenizer: Tokenizer) -> bytes:
    """Return the tokenizer_config.json by which transformers reads tokenizer.model."""
    flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    added = {str(id): {"content": name, "special": True, **flags} for name, id in tokenizer.special.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
    }
    return (json.dumps(config, indent=2) + "\n").encode()


def check_out(out: Path, to_checkpoint: bool) -> None:
    """Raise SourceError if OUT exists, if it is being written, or if its name is that of another step."""
    if out.exists():
        raise SourceError(f"OUT {out} exists already, and is never overwritten")
    if to_checkpoint and out.name.startswith("step-") and out.name != "step-0":
        raise SourceError(f"OUT {out} names a step, and weights without a run are at step 0. Give step-0, or a name.")


def write_weights(
    out: Path, source: ModelSource, read: Callable[[str], Tensor], dtype: torch.dtype, most_file_bytes: int
) -> None:
    """Write a checkpoint of weights alone. Its manifest says what `generate` needs, as that of a run does."""
    config = {
        "model": {"name": "llama3", "hf_assets_path": str(source.tokenizer.path)},
        "training": {"seq_len": source.context},
    }
    about = {
        "fingerprint": {"shape": asdict(source.model_args), "tokenizer": source.tokenizer.identity},
        "run": {"config": config, "converted_from": str(source.path.absolute()), IN_MANIFEST: source.published},
    }
    tensors = {f"model.{fqn}": (dtype, size) for fqn, size in list_tensors(source.model_args).items()}
    biases = {f"model.{fqn}": (torch.float32, size) for fqn, size in list_expert_biases(source.model_args).items()}

    def read_converted(name: str) -> Tensor:
        if name in biases:  # Hugging Face's models of these families have none
            return torch.zeros(biases[name][1])
        fqn = name.removeprefix("model.")
        return convert_dtype(fqn, read(fqn), dtype)

    write_checkpoint(out, 0, tensors | biases, read_converted, most_file_bytes=most_file_bytes, **about)


def describe(options: argparse.Namespace, source: ModelSource, dtype: str, *, seconds: float) -> str:
    files = sorted(options.out.glob("*.safetensors"))
    numbers = {
        "source": str(source.path),
        "out": str(options.out),
        "parameters": count_parameters(source.model_args),
        "dtype": dtype,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "seconds": round(seconds, 3),
    }
    if options.json:
        return json.dumps(numbers)
    in_files = "one file" if len(files) == 1 else f"{len(files)} files"
    return (
        f"{options.out}: {numbers['parameters']:,} parameters of {source.path} in {dtype}, "
        f"{numbers['bytes'] / 1e6:,.1f} MB in {in_files}, in {seconds:.1f} s"
    )
