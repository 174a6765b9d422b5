"""Checkpoints in one process, for tools: one tensor at a time is in memory, however large the model is.

with open_checkpoint(Path("outputs/debug/checkpoint/step-40")) as checkpoint:
    checkpoint.read("model.norm.weight")

with CheckpointWriter(Path("out/step-0"), 0, {"model.norm.weight": (torch.float32, (64,))}) as writer:
    writer.write("model.norm.weight", tensor)
    writer.commit()
"""

import os
import shutil
from collections.abc import Mapping
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
    name_entry,
    read_manifest,
)
from torchtitan_lite.checkpoint.storage import name_file
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
    """A checkpoint whose manifest is read. Files are opened when their tensors are read. A context manager."""

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
            entry, start = name_entry(name, record, chunk), (0,) * len(chunk.sizes)
            box = tensor
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                box = box.narrow(dim, offset, size)
            box.copy_(self.readers[chunk.file].read(entry, record.dtype, chunk.sizes, start, chunk.sizes))
        return tensor

    def __enter__(self) -> "OpenCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.readers.clear()  # closes the files


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


class CheckpointWriter:
    """Write `tensors`, in their order, to a new checkpoint `folder`, which exists after `commit` and not before.

    A context manager: what was not committed is deleted. Every method raises CheckpointError.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        tensors: Entries,
        *,
        fingerprint: Mapping[str, object] | None = None,
        run: Mapping[str, object] | None = None,
        most_file_bytes: float = inf,
    ):
        n_bytes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
        self.file_of: dict[str, str] = {}
        self.entries: dict[str, dict[str, tuple]] = {}  # by file
        for number, names in enumerate(cut_into_files(n_bytes, most_file_bytes)):
            self.file_of |= dict.fromkeys(names, name_file(number))
            self.entries[name_file(number)] = {name: tensors[name] for name in names}
        records = {}
        for name, (dtype, shape) in tensors.items():
            shape = tuple(shape)
            chunks = (Chunk(self.file_of[name], (0,) * len(shape), shape),) if 0 not in shape else ()
            records[name] = TensorRecord(DTYPE_NAMES[dtype], shape, chunks)
        files: dict[str, FileRecord] = {}
        self.manifest = Manifest(step, dict(fingerprint or {}), dict(run or {}), files, records)
        self.folder, self.file = folder, None
        self.unfinished = folders.create_unfinished(folder, replace=True)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, which may be on any device."""
        file_name = self.file_of[name]
        if self.file is None:
            self.file = TensorFileWriter(self.unfinished / file_name, self.entries[file_name])
        self.file.write(name, tensor)
        if not self.file.missing:
            self.manifest.files[file_name] = self.file.finish()
            self.file.file.close()
            self.file = None

    def commit(self) -> None:
        """Make the checkpoint visible. Called after the last tensor."""
        assert self.manifest.files.keys() == self.entries.keys(), f"{self.folder}: not every tensor was written"
        folders.commit(self.folder, self.manifest)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.file.close()
        shutil.rmtree(self.unfinished, ignore_errors=True)
