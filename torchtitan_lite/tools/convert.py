"""Convert a checkpoint to a Hugging Face folder.

    outputs/debug, step-200, ...  ->  OUT/config.json, *.safetensors, tokenizer

After a run on conversations, eos_token_id includes the end token of an answer. If the tokenizer has no chat template,
the folder gets the template that `prepare --chat` used.

The launcher runs this tool after a run with checkpoint.last_save_in_hf. `train`, `generate`, `eval` and transformers
can read the folder. Only one file is in memory at a time. OUT is complete or does not exist.
"""

import argparse
import json
from collections.abc import Callable
from glob import escape
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from torchtitan_lite.checkpoint.format import (
    CheckpointError,
    commit,
    create_unfinished,
    discard,
    write_file,
)
from torchtitan_lite.checkpoint.save import write_tensors
from torchtitan_lite.config.block import count_parameters, list_expert_biases, list_shapes
from torchtitan_lite.data.tokenizer import TOKENIZER_CONFIG, Tokenizer
from torchtitan_lite.extensions.hugging_face import find_unit, to_their_order
from torchtitan_lite.extensions.hugging_face_config import END, GENERATION_CONFIG
from torchtitan_lite.extensions.hugging_face_export import (
    cut_into_files,
    explain_unwritable,
    has_conversations,
    make_config_json,
)
from torchtitan_lite.extensions.hugging_face_folder import (
    INDEX,
    SINGLE_FILE,
    name_theirs,
)
from torchtitan_lite.models.registry import CONFIG
from torchtitan_lite.tools.corpora.chat import LLAMA_3, read_chat_format
from torchtitan_lite.tools.model_source import ModelSource, SourceError, open_source
from torchtitan_lite.tools.progress import show_progress

CHAT_TEMPLATE = "chat_template.jinja"
BESIDE_TOKENIZER = (  # patterns of the files that are copied
    "additional_chat_templates/*.jinja",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
)
MOST_FILE_BYTES = 5 * 10**9  # the value that transformers uses


def main(options: argparse.Namespace) -> int:
    """Write the folder. Raises SourceError or CheckpointError."""
    out = options.out.absolute()  # gives "." a name
    if out.exists():
        raise SourceError(f"{out} already exists, and is never overwritten. Name a new folder.")
    source = open_source(options)
    model_args = source.model_args
    checkpoint = source.checkpoint
    if checkpoint is None:
        raise SourceError(
            f"{source.path} is already a Hugging Face folder: train, generate and eval can read it."
        )
    why = explain_unwritable(model_args, source.attention)
    for fqn in list_expert_biases(model_args):
        if not why and checkpoint.read(f"model.{fqn}").any():
            why = (
                f"{fqn} is not zero, and Hugging Face formats have no expert bias. Train with "
                "training.expert_bias_rate = 0, and balance the experts with training.expert_balance_loss"
            )
    if why:
        raise SourceError(
            f"{source.path} cannot be converted: {why}. `eval` can read the checkpoint without a conversion."
        )
    dtype = options.dtype or checkpoint.manifest.tensors["model.norm.weight"].dtype
    try:
        write_folder(source, out, dtype, lambda fqn: checkpoint.read(f"model.{fqn}"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{out} cannot be written: {error}. Free some space, or name a different folder"
        ) from None
    sizes = [file.stat().st_size for file in out.glob("*.safetensors")]
    print(
        f"{options.out}: {count_parameters(model_args):,} parameters from {source.path}, "
        f"{len(sizes)} safetensors, {sum(sizes):,} bytes"
    )
    return 0


def write_folder(source: ModelSource, out: Path, dtype: str, read: Callable[[str], Tensor]) -> None:
    """Write a Hugging Face folder. `read(fqn)` returns a full tensor. Raises CheckpointError."""
    model_args = source.model_args
    tokenizer = source.tokenizer
    contents = dict(source.published)  # file name -> content
    contents[CONFIG] = make_config_json(
        model_args,
        dtype=dtype,
        published=source.published.get(CONFIG),
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        context=source.context,
    )
    torch_dtype = getattr(torch, dtype)
    n_bytes = {}
    for fqn, shape in list_shapes(model_args).items():
        n_bytes[fqn] = prod(shape) * torch_dtype.itemsize
    files = cut_into_files(n_bytes, MOST_FILE_BYTES)
    file_of = {}
    unfinished = create_unfinished(out)
    try:
        for number, fqns in enumerate(files, 1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
            if len(files) == 1:
                name = SINGLE_FILE
            tensors = {}
            for fqn in show_progress(fqns, len(fqns), "tensors"):
                tensor = read(fqn).to(torch_dtype)
                if not tensor.isfinite().all():
                    raise CheckpointError(
                        f"{fqn} is not finite in {dtype}. Use a different --dtype, or an earlier checkpoint"
                    )
                unit = find_unit(fqn, model_args)
                if unit > 1:
                    tensor = to_their_order(tensor, unit)
                matrices = [matrix.t() for matrix in tensor] if tensor.dim() == 3 else [tensor]
                tensors |= zip(name_theirs(fqn, model_args), matrices, strict=True)
            write_tensors(unfinished / name, tensors, {})
            file_of |= dict.fromkeys(tensors, name)
        if len(files) > 1:
            contents[INDEX] = {
                "metadata": {"total_size": sum(n_bytes.values())},
                "weight_map": file_of,
            }
        if source.checkpoint:
            training = source.checkpoint.manifest.run["config"]["training"]
            if has_conversations(training["dataset"]):
                add_chat_format(source, unfinished, contents)
        copy_tokenizer(tokenizer, unfinished, contents)
        for name, content in contents.items():
            text = json.dumps(content, indent=2) + "\n"
            write_file(unfinished / name, text.encode())
        commit(out)
    except BaseException:
        discard(out)
        raise


def add_chat_format(source: ModelSource, out: Path, contents: dict[str, dict]) -> None:
    """Add the end token of an answer to the end tokens. If the tokenizer has no chat template, write one."""
    chat = read_chat_format(source.tokenizer)
    end_id = source.tokenizer.special.get(chat.end)
    if end_id not in {None, *source.end_ids}:
        contents[GENERATION_CONFIG] = {
            **contents.get(GENERATION_CONFIG, {}),
            END: [end_id, *sorted(source.end_ids)],
        }
    if chat.theirs.chat_template == LLAMA_3:
        write_file(out / CHAT_TEMPLATE, LLAMA_3.encode())
    print(f"chat format: {chat.name}; an answer ends with {chat.end}")


def copy_tokenizer(tokenizer: Tokenizer, out: Path, contents: dict[str, dict]) -> None:
    """Copy the tokenizer files that transformers reads, or add a tokenizer to `contents`. "bytes" has no files."""
    path = tokenizer.path
    patterns = [escape(path.name)]
    if path.suffix == ".json":
        patterns += BESIDE_TOKENIZER
    elif path.is_file():
        added = {id: {"content": name, "special": True} for name, id in tokenizer.special.items()}
        contents[TOKENIZER_CONFIG] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": added,
        }
    else:
        print(
            "no tokenizer was written, because transformers has none for bytes: use --tokenizer bytes"
        )
    for pattern in patterns:
        for file in path.parent.glob(pattern):
            if file.name not in contents:
                copied = out / file.relative_to(path.parent)
                copied.parent.mkdir(exist_ok=True)
                write_file(copied, file.read_bytes())
