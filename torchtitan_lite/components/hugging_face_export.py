"""Writes a Llama as a Hugging Face folder, one tensor at a time, from one process or from all ranks of a run.

    OUT.tmp/   each pipeline stage gathers its tensors, one after the other; its first rank writes them
               the first rank of all adds index, config.json and tokenizer
    barrier    every file is there and on disk
    OUT        one rename

                                       stage 0                   stage 1         (drawn for pp 2, three files)
    model-00001-of-00003.safetensors   embedding, layers 0 to 3
    model-00002-of-00003.safetensors                             layers 4 to 6
    model-00003-of-00003.safetensors                             layer 7, norm, head

Beside its share a rank holds one whole tensor. The sizes of all tensors follow from the shape, so every file's header
is written before the first number of its data is known.
"""

import ctypes
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.components.hugging_face import IN_ROTARY_ORDER, to_their_order
from torchtitan_lite.components.shards import sync_folder
from torchtitan_lite.hugging_face_config import CONFIG, describe_shape
from torchtitan_lite.hugging_face_folder import INDEX, SINGLE_FILE, list_tensors, their_name
from torchtitan_lite.safetensors_header import DTYPE_BYTES, make_header
from torchtitan_lite.sizes import Shape
from torchtitan_lite.vocabulary import Vocabulary

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # torch's name -> safetensors'
MOST_FILE_BYTES = 5 * 10**9  # as transformers has it
# Files that make the folder usable, copied from beside the tokenizer: the tokenizer, and how to generate.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


class ExportError(RuntimeError):
    """A model that could not be written, and why."""


@dataclass(frozen=True)
class Export:
    """What is written, but for the numbers."""

    shape: Shape
    dtype: str  # a key of TYPES
    vocabulary: Vocabulary | None = None  # whose files are copied, if they are Hugging Face's
    most_file_bytes: int = MOST_FILE_BYTES  # a larger tensor has a file of its own


@dataclass(frozen=True)
class PlannedFile:
    name: str
    fqns: list[str]


def export_weights(out: Path, parameters: dict[str, Tensor], export: Export) -> None:
    """Writes all parameters of a run as the folder `out`. Collective. Raises ExportError where it exists."""
    rank, unfinished = dist.get_rank(), out.with_name(out.name + ".tmp")
    if out.exists():
        raise ExportError(f"{out} exists already, and an export is never overwritten")
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that died while exporting
        unfinished.mkdir(parents=True)
    held: list = [None] * dist.get_world_size()
    dist.all_gather_object(held, list(parameters))  # names only; and nobody writes before the folder is there
    files = plan_files(export, assign_writers(export.shape, held))
    for writer, planned in files:
        if writer == rank:
            write_file(unfinished / planned.name, planned.fqns, export, lambda fqn: gather(parameters[fqn]))
        elif planned.fqns[0] in parameters:  # this rank is of the same stage, and holds a share of each of them
            for fqn in planned.fqns:
                gather(parameters[fqn])
    dist.barrier()
    if rank == 0:
        finish_folder(unfinished, [planned for _, planned in files], export)
        commit_folder(unfinished, out)
    dist.barrier()


def write_folder(unfinished: Path, read: Callable[[str], Tensor], export: Export) -> None:
    """Fills an empty folder in one process; `read(fqn)` gives each tensor when its turn has come."""
    files = [planned for _, planned in plan_files(export, {0: list(list_tensors(export.shape))})]
    for planned in files:
        write_file(unfinished / planned.name, planned.fqns, export, read)
    finish_folder(unfinished, files, export)


def assign_writers(shape: Shape, held: list[list[str]]) -> dict[int, list[str]]:
    """The parameters that each rank writes, in the order of the model: the first rank that holds one writes it."""
    writers: dict[int, list[str]] = {}
    for fqn in list_tensors(shape):
        writer = next(rank for rank, fqns in enumerate(held) if fqn in fqns)
        writers.setdefault(writer, []).append(fqn)
    return writers


def plan_files(export: Export, writers: dict[int, list[str]]) -> list[tuple[int, PlannedFile]]:
    """Every file with its writer. A file has one writer, and more than `most_file_bytes` in one tensor only."""
    sizes = list_tensors(export.shape)
    bytes_of = {fqn: math.prod(size) * DTYPE_BYTES[TYPES[export.dtype]] for fqn, size in sizes.items()}
    cut: list[tuple[int, list[str]]] = []
    for writer, fqns in writers.items():
        n_bytes = math.inf  # of the file that is being filled: the first tensor begins one
        for fqn in fqns:
            if n_bytes + bytes_of[fqn] > export.most_file_bytes:
                cut.append((writer, []))
                n_bytes = 0
            cut[-1][1].append(fqn)
            n_bytes += bytes_of[fqn]
    if len(cut) == 1:
        return [(cut[0][0], PlannedFile(SINGLE_FILE, cut[0][1]))]
    names = [f"model-{number:05}-of-{len(cut):05}.safetensors" for number in range(1, len(cut) + 1)]
    return [(writer, PlannedFile(name, fqns)) for name, (writer, fqns) in zip(names, cut, strict=True)]


def gather(parameter: Tensor) -> Tensor:
    """The whole of one parameter. Collective over the ranks that share it: all-gathers its bytes."""
    return parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def write_file(path: Path, fqns: list[str], export: Export, read: Callable[[str], Tensor]) -> None:
    """One safetensors file, on the disk when this returns. Holds one tensor at a time."""
    sizes = list_tensors(export.shape)
    with open(path, "wb") as file:
        file.write(make_header({their_name(fqn): (TYPES[export.dtype], sizes[fqn]) for fqn in fqns}))
        for fqn in fqns:
            file.write(view_bytes(to_theirs(fqn, read(fqn), export)))
        file.flush()
        os.fsync(file.fileno())


def to_theirs(fqn: str, tensor: Tensor, export: Export) -> Tensor:
    """One parameter as their file has it: dtype, order of rows, and in the memory of the host."""
    converted = tensor.to(getattr(torch, export.dtype))
    if export.dtype == "float16" and not converted.isfinite().all():
        raise ExportError(f"{fqn} has numbers beyond 65,504, the largest of float16: export bfloat16 or float32")
    if fqn.endswith(IN_ROTARY_ORDER):
        converted = to_their_order(converted, export.shape.head_dim)
    return converted.cpu().contiguous()


def view_bytes(tensor: Tensor) -> ctypes.Array:
    """The bytes of a contiguous tensor on the CPU, as files take them, without a copy."""
    view = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    view.owner = tensor  # which must live as long as its bytes are looked at
    return view


def finish_folder(folder: Path, files: list[PlannedFile], export: Export) -> None:
    """Adds all that is no tensor: the index where there are several files, config.json, the tokenizer's files."""
    vocabulary = export.vocabulary
    if len(files) > 1:
        n_bytes = sum(math.prod(size) for size in list_tensors(export.shape).values())
        n_bytes *= DTYPE_BYTES[TYPES[export.dtype]]
        weight_map = {their_name(fqn): planned.name for planned in files for fqn in planned.fqns}
        index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
        write_durably(folder / INDEX, make_json(index))
    config = describe_shape(
        export.shape,
        dtype=export.dtype,
        max_length=choose_max_length(export.shape),
        bos_id=vocabulary.bos_id if vocabulary else None,
        eos_id=vocabulary.eos_id if vocabulary else None,
    )
    write_durably(folder / CONFIG, make_json(config))
    for source in find_tokenizer_files(vocabulary):
        write_durably(folder / source.name, source.read_bytes())


def choose_max_length(shape: Shape) -> int:
    """Tokens of the longest text, as the model cards of Llama 3 (8,192) and of 3.1 and 3.2 (131,072) have it."""
    return 16 * shape.rope_scaling.original_length if shape.rope_scaling else 8192


def find_tokenizer_files(vocabulary: Vocabulary | None) -> list[Path]:
    """What transformers would read of a tokenizer: nothing of one that is not Hugging Face's."""
    if vocabulary is None or vocabulary.path.name != "tokenizer.json":
        return []
    return [path for name in TOKENIZER_FILES if (path := vocabulary.path.with_name(name)).is_file()]


def make_json(value: dict) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def write_durably(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def commit_folder(unfinished: Path, out: Path) -> None:
    """Gives a finished folder its name: from now on, and not before, it is there."""
    sync_folder(unfinished)
    unfinished.rename(out)
    sync_folder(out.parent)
