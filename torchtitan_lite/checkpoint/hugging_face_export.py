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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.agreement import do_on_rank_0, raise_on_all_ranks
from torchtitan_lite.checkpoint.hugging_face import IN_ROTARY_ORDER, to_their_order
from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, describe_shape
from torchtitan_lite.checkpoint.hugging_face_folder import INDEX, SINGLE_FILE, list_tensors, their_name
from torchtitan_lite.checkpoint.manifest import UNFINISHED, CheckpointError
from torchtitan_lite.checkpoint.safetensors_header import DTYPE_BYTES, make_header
from torchtitan_lite.config.files import sync_folder
from torchtitan_lite.config.flavors import ModelArgs

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # torch's name -> safetensors'
MOST_FILE_BYTES = 5 * 10**9  # as transformers has it


@dataclass(frozen=True)
class Export:
    """What is written, but for the numbers."""

    shape: ModelArgs
    dtype: str  # a key of TYPES
    most_file_bytes: int = MOST_FILE_BYTES  # a larger tensor has a file of its own
    # Of the tokenizer: two special tokens, and the files that are put beside the weights, name -> content.
    bos_id: int | None = None
    eos_id: int | None = None
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedFile:
    name: str
    writer: int  # rank
    fqns: list[str]


def begin_folder(out: Path, unfinished: Path) -> None:
    """Makes the folder in which `out` is written. Raises CheckpointError where one of them is there."""
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists already, and an export is never overwritten")
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError:
        why = "another export is at work there, or one was killed"
        raise CheckpointError(f"{unfinished} exists: {why}. Where none is at work, delete it.") from None
    except OSError as error:
        raise CheckpointError(f"{unfinished} cannot be made ({error.strerror})") from None


def export_weights(out: Path, parameters: dict[str, Tensor], export: Export, *, group: dist.ProcessGroup) -> None:
    """Writes all parameters of a run as the folder `out`. Collective; `group` is of all ranks, with gloo.

    Raises CheckpointError, on every rank, where `out` exists or cannot be written; then nothing of it is left.
    """
    rank, unfinished = dist.get_rank(group), out.with_name(out.name + UNFINISHED)
    do_on_rank_0(group, lambda: begin_folder(out, unfinished))
    held: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, list(parameters), group=group)  # names only
    files = plan_files(export, assign_writers(export.shape, held))
    try:
        raise_on_all_ranks(group, lambda: write_own_files(unfinished, parameters, files, export, rank))
        do_on_rank_0(group, lambda: finish_folder(unfinished, out, files, export))
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_own_files(
    folder: Path, parameters: dict[str, Tensor], files: list[PlannedFile], export: Export, rank: int
) -> None:
    """Gathers this stage's tensors, in the order of all its ranks, and writes those files that are this rank's."""
    failure = None
    for planned in files:
        gathered = (gather(parameters[fqn]) for fqn in planned.fqns if fqn in parameters)
        if planned.writer == rank and failure is None:
            try:
                write_file(folder / planned.name, planned.fqns, gathered, export)
            except CheckpointError as error:
                failure = error  # raised later: until then the other ranks of the stage count on this one
        for _ in gathered:
            pass
    if failure:
        raise failure


def write_folder(out: Path, read: Callable[[str], Tensor], export: Export) -> None:
    """Writes the folder `out` in one process; `read(fqn)` gives each tensor when its turn has come."""
    unfinished = out.with_name(out.name + UNFINISHED)
    begin_folder(out, unfinished)
    try:
        files = plan_files(export, {0: list(list_tensors(export.shape))})
        for planned in files:
            write_file(unfinished / planned.name, planned.fqns, map(read, planned.fqns), export)
        finish_folder(unfinished, out, files, export)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def assign_writers(shape: ModelArgs, held: list[list[str]]) -> dict[int, list[str]]:
    """The parameters that each rank writes, in the order of the model: the first rank that holds one writes it."""
    writers: dict[int, list[str]] = {}
    for fqn in list_tensors(shape):
        writer = next(rank for rank, fqns in enumerate(held) if fqn in fqns)
        writers.setdefault(writer, []).append(fqn)
    return writers


def plan_files(export: Export, writers: dict[int, list[str]]) -> list[PlannedFile]:
    """Every file. It has one writer, and more than `most_file_bytes` in one tensor only."""
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
    names = [f"model-{number:05}-of-{len(cut):05}.safetensors" for number in range(1, len(cut) + 1)]
    if len(cut) == 1:
        names = [SINGLE_FILE]
    return [PlannedFile(name, writer, fqns) for name, (writer, fqns) in zip(names, cut, strict=True)]


def gather(parameter: Tensor) -> Tensor:
    """The whole of one parameter. Collective over the ranks that share it: all-gathers its bytes."""
    return parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def write_file(path: Path, fqns: list[str], tensors: Iterator[Tensor], export: Export) -> None:
    """One safetensors file, on the disk when this returns. Holds one tensor at a time."""
    sizes = list_tensors(export.shape)
    header = make_header({their_name(fqn): (TYPES[export.dtype], sizes[fqn]) for fqn in fqns})
    with explain_write_error(path), open(path, "wb") as file:
        file.write(header)
        for fqn in fqns:  # no name is given to the tensor: it is gone before the next one comes
            file.write(view_bytes(to_theirs(fqn, next(tensors), export)))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def explain_write_error(path: Path) -> Iterator[None]:
    """Names the file, and the room that there is, where one cannot be written."""
    try:
        yield
    except OSError as error:
        written, disk = path.stat().st_size if path.exists() else 0, os.statvfs(path.parent)
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}): {written:,} bytes were, "
            f"and the disk has {disk.f_bavail * disk.f_frsize:,} free"
        ) from error


def to_theirs(fqn: str, tensor: Tensor, export: Export) -> Tensor:
    """One parameter as their file has it: dtype, order of rows, and in the memory of the host."""
    converted = convert_dtype(fqn, tensor, getattr(torch, export.dtype))
    if fqn.endswith(IN_ROTARY_ORDER):
        converted = to_their_order(converted, export.shape.head_dim)
    return converted.cpu().contiguous()


def convert_dtype(fqn: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Raises CheckpointError where float16 makes an infinity of a number."""
    converted = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise CheckpointError(f"{fqn} has numbers beyond 65,504, the largest of float16: choose bfloat16 or float32")
    return converted


def view_bytes(tensor: Tensor) -> ctypes.Array:
    """The bytes of a contiguous tensor on the CPU, as files take them, without a copy."""
    view = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    view.owner = tensor  # which must live as long as its bytes are looked at
    return view


def finish_folder(unfinished: Path, out: Path, files: list[PlannedFile], export: Export) -> None:
    """Adds all that is no tensor, and gives the folder its name: from now on, and not before, it is there."""
    config = describe_shape(
        export.shape,
        dtype=export.dtype,
        max_length=choose_max_length(export.shape),
        bos_id=export.bos_id,
        eos_id=export.eos_id,
    )
    contents = {CONFIG: make_json(config)}
    if len(files) > 1:
        contents[INDEX] = make_json(make_index(files, export))
    contents |= export.tokenizer_files
    for name, content in contents.items():
        with explain_write_error(unfinished / name), open(unfinished / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    with explain_write_error(out):
        sync_folder(unfinished)
        unfinished.rename(out)
        sync_folder(out.parent)


def make_index(files: list[PlannedFile], export: Export) -> dict[str, object]:
    """Which file holds which tensor, as transformers has it."""
    n_values = sum(math.prod(size) for size in list_tensors(export.shape).values())
    n_bytes = n_values * DTYPE_BYTES[TYPES[export.dtype]]
    weight_map = {their_name(fqn): planned.name for planned in files for fqn in planned.fqns}
    return {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}


def choose_max_length(shape: ModelArgs) -> int:
    """Tokens of the longest text, as the model cards of Llama 3 (8,192) and of 3.1 and 3.2 (131,072) have it."""
    return 16 * shape.rope_scaling.original_length if shape.rope_scaling else 8192


def make_json(value: dict) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
