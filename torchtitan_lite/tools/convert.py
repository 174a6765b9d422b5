"""`convert`: a checkpoint to a Hugging Face folder, or back. One tensor at a time is in memory."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, HuggingFaceError, find_unwritable
from torchtitan_lite.checkpoint.hugging_face_export import Export, convert_dtype, write_folder
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors
from torchtitan_lite.checkpoint.manifest import UNFINISHED, CheckpointError
from torchtitan_lite.checkpoint.one_process import CheckpointWriter
from torchtitan_lite.config.command_lines import make_convert_parser
from torchtitan_lite.config.flavors import count_parameters
from torchtitan_lite.data.tokenizer_files import describe_for_export
from torchtitan_lite.model.llama3 import Llama3
from torchtitan_lite.tools.model_source import ModelSource, SourceError, open_source
from torchtitan_lite.tools.prepare import Progress

FINAL_NORM = "norm.weight"


def main(args: list[str]) -> int:
    options = make_convert_parser().parse_args(args)
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
        return 1
    return 0


def convert(options: argparse.Namespace) -> str:
    """Does it, and returns what to print. Raises SourceError, HuggingFaceError, CheckpointError."""
    started_s = time.monotonic()
    to_checkpoint = (options.source / CONFIG).is_file()
    refuse_out(options.out, to_checkpoint)
    with open_source(options.source, tokenizer=options.tokenizer, verify=not options.no_verify) as source:
        if source.model_class is not Llama3:
            raise SourceError(f"{source.path} is no Llama, and Hugging Face folders here are those of Llama.")
        dtype = options.dtype or str(source.read(FINAL_NORM).dtype).removeprefix("torch.")
        n_bytes = count_parameters(source.shape) * source.read(FINAL_NORM).dtype.itemsize
        progress = Progress(n_bytes, 0, stream=sys.stderr)

        def read(fqn: str) -> Tensor:
            tensor = source.read(fqn)
            if not options.dtype:
                refuse_loss(fqn, tensor, dtype)
            progress.add(tensor.nbytes)
            return tensor

        try:
            if to_checkpoint:
                write_checkpoint(options.out, source, read, dtype)
            else:
                refuse_unwritable(source)
                export = Export(
                    source.shape, dtype, int(options.file_gb * 1e9), **describe_for_export(source.tokenizer.vocabulary)
                )
                write_folder(options.out, read, export)
        finally:
            progress.clear()
        return describe(options, source, dtype, seconds=time.monotonic() - started_s)


def refuse_out(out: Path, to_checkpoint: bool) -> None:
    """Nothing is overwritten, and a checkpoint has no name that says another step."""
    unfinished = out.with_name(out.name + UNFINISHED) if out.name else out
    if out.exists() or out.is_symlink():
        raise SourceError(f"{out} exists. Give another OUT: nothing is overwritten.")
    if unfinished.exists():
        why = "another conversion is at work there, or one was killed"
        raise SourceError(f"{unfinished} exists: {why}. Where none is at work, delete it.")
    if to_checkpoint and out.name.startswith("step-") and out.name != "step-0":
        raise SourceError(f"OUT {out} names a step, and weights without a run are at step 0. Give step-0, or a name.")


def refuse_unwritable(source: ModelSource) -> None:
    for why in find_unwritable(source.shape):
        raise SourceError(f"{source.path} cannot be a Hugging Face folder: {why}.")


def refuse_loss(fqn: str, tensor: Tensor, dtype: str) -> None:
    """Weights of several types become one that nobody has chosen: only without a loss."""
    target = getattr(torch, dtype)
    if torch.promote_types(tensor.dtype, target) != target:
        raise SourceError(f"{fqn} is {tensor.dtype}, and {FINAL_NORM} {target}. Choose one type with --dtype.")


def write_checkpoint(out: Path, source: ModelSource, read: Callable[[str], Tensor], dtype: str) -> None:
    """A checkpoint of weights alone. It says what `generate` needs to know, as one of a run does."""
    torch_dtype, sizes = getattr(torch, dtype), list_tensors(source.shape)
    tokenizer_path = source.tokenizer.vocabulary.path
    if tokenizer_path.is_file():  # plain bytes have none
        tokenizer_path = tokenizer_path.absolute()
    facts = {"shape": asdict(source.shape), "tokenizer": source.tokenizer.identity}
    config = {
        "model": {"name": "llama3", "hf_assets_path": str(tokenizer_path)},
        "training": {"seq_len": source.context},
    }
    run = {"config": config, "converted_from": str(source.path.absolute())}
    tensors = {f"model.{fqn}": (torch_dtype, size) for fqn, size in sizes.items()}
    with CheckpointWriter(out, 0, tensors, facts=facts, run=run) as writer:
        for fqn in sizes:
            writer.write(f"model.{fqn}", convert_dtype(fqn, read(fqn), torch_dtype))
        writer.commit()


def describe(options: argparse.Namespace, source: ModelSource, dtype: str, *, seconds: float) -> str:
    files = sorted(options.out.glob("*.safetensors"))
    numbers = {
        "source": str(source.path),
        "out": str(options.out),
        "parameters": count_parameters(source.shape),
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
