"""Checkpoints in one process, for tools: one tensor at a time is in memory, however large the model is.

checkpoint = open_checkpoint(Path("outputs/debug/checkpoint/step-40"))
checkpoint.read("model.norm.weight")

write_checkpoint(Path("out/step-0"), 0, {"model.norm.weight": (torch.float32, (64,))}, read)
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import inf, prod
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.manifest import (
    Chunk,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    TensorRecord,
    name_file,
    read_manifest,
)
from torchtitan_lite.checkpoint.tensor_files import (
    DTYPE_NAMES,
    DTYPES,
    Entries,
    TensorFileReader,
    TensorFileWriter,
    cut_into_files,
    find_damage,
)


class OpenCheckpoint:
    """A checkpoint whose manifest is read. Files are opened when their tensors are read."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.readers: dict[str, TensorFileReader] = {}
        # Name -> dtype and shape of the whole tensor.
        self.tensors = {name: (DTYPES[record.dtype], record.shape) for name, record in manifest.tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, on the CPU. Raises KeyError if there is none, DamagedCheckpoint for a damaged file."""
        record = self.manifest.tensors[name]
        tensor = torch.empty(record.shape, dtype=DTYPES[record.dtype])
        for chunk in record.chunks:
            if chunk.file not in self.readers:
                path = self.folder / chunk.file
                self.readers[chunk.file] = TensorFileReader(path, self.manifest.files[chunk.file])
            box = tensor
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                box = box.narrow(dim, offset, size)
            box.copy_(self.readers[chunk.file].read(name, record, chunk, (0,) * len(chunk.sizes), chunk.sizes))
        return tensor


def open_checkpoint(folder: Path, *, verify: bool = True) -> OpenCheckpoint:
    """Open the checkpoint `folder` (a step-N). With `verify`, read and hash all its files first.

    Raises CheckpointError where there is none, DamagedCheckpoint naming the first damaged file.
    """
    manifest = read_manifest(folder)
    if verify:
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing releases the interpreter
            found = threads.map(lambda name: find_damage(folder / name, manifest.files[name]), manifest.files)
            damage = [problem for problem in found if problem]
        if damage:
            more = f" (and {len(damage) - 1} more of its files)" if len(damage) > 1 else ""
            raise DamagedCheckpoint(f"{damage[0]}{more}")
    return OpenCheckpoint(folder, manifest)


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: Entries,
    read: Callable[[str], Tensor],
    *,
    fingerprint: Mapping[str, object] | None = None,
    run: Mapping[str, object] | None = None,
    most_file_bytes: float = inf,
) -> None:
    """Write `tensors`, in their order, as a new checkpoint. `read(name)` returns each of them when it is needed.

    Raises CheckpointError if `folder` or an unfinished one exists, or cannot be written; then nothing is left.
    """
    n_bytes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
    records: dict[str, TensorRecord] = {}
    files: dict[str, FileRecord] = {}
    unfinished = folders.create_unfinished(folder)
    try:
        for number, names in enumerate(cut_into_files(n_bytes, most_file_bytes)):
            file_name = name_file(number)
            with TensorFileWriter(unfinished / file_name, {name: tensors[name] for name in names}) as file:
                for name in names:
                    file.write(name, read(name))
                files[file_name] = file.finish()
            for name in names:
                dtype, shape = tensors[name][0], tuple(tensors[name][1])
                chunks = (Chunk(file_name, (0,) * len(shape), shape),) if 0 not in shape else ()
                records[name] = TensorRecord(DTYPE_NAMES[dtype], shape, chunks)
        folders.commit(folder, Manifest(step, dict(fingerprint or {}), dict(run or {}), files, records))
    except BaseException:
        folders.discard(folder)
        raise
