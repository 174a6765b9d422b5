"""Checkpoints without ranks: read one tensor at a time, and written one tensor at a time. For tools.

    checkpoint = open_checkpoint(Path("outputs/debug/checkpoint/step-40"))
    checkpoint.read("model.norm.weight")

    with CheckpointWriter(Path("out/step-0"), 0, {"model.norm.weight": (torch.float32, (64,))}) as writer:
        writer.write("model.norm.weight", tensor)
        writer.commit()

Neither holds more than one tensor, however large the model is.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.manifest import (
    Chunk,
    DamagedCheckpoint,
    Manifest,
    TensorRecord,
    name_entry,
    read_manifest,
)
from torchtitan_lite.checkpoint.tensor_files import (
    DTYPES,
    NAMES,
    Entries,
    TensorFileReader,
    TensorFileWriter,
    find_damage,
)

ONLY_FILE = "rank-00000.safetensors"


class OpenCheckpoint:
    """A checkpoint whose manifest is read. Files are opened as their tensors are asked for."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.readers: dict[str, TensorFileReader] = {}

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> dtype and shape of the whole tensor."""
        return {name: (DTYPES[record.dtype], record.shape) for name, record in self.manifest.tensors.items()}

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. Raises KeyError where there is none, DamagedCheckpoint for a damaged file."""
        record = self.manifest.tensors[name]
        tensor = torch.empty(record.shape, dtype=DTYPES[record.dtype])
        for chunk in record.chunks:
            box = tensor
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                box = box.narrow(dim, offset, size)
            begin = (0,) * len(chunk.sizes)
            entry = name_entry(name, record, chunk)
            self.open(chunk.file).read_into(box, entry, chunk.sizes, record.dtype, begin)
        return tensor

    def open(self, file: str) -> TensorFileReader:
        if file not in self.readers:
            self.readers[file] = TensorFileReader(self.folder / file, self.manifest.files[file])
        return self.readers[file]

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()

    def __enter__(self) -> "OpenCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(folder: Path, *, verify: bool = True) -> OpenCheckpoint:
    """The checkpoint `folder` (a step-N). With `verify`, all its files are read and hashed first.

    Raises CheckpointError where there is none, DamagedCheckpoint naming the first file that is not as it was.
    """
    manifest = read_manifest(folder)
    if verify:
        raise_damage(hash_files(folder, manifest, manifest.files))
    return OpenCheckpoint(folder, manifest)


def hash_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """What is wrong with these files, after reading all of them."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashing leaves the interpreter free
        return [
            damage
            for damage in threads.map(lambda name: find_damage(folder / name, manifest.files[name]), names)
            if damage
        ]


def raise_damage(damage: list[str]) -> None:
    if damage:
        more = f" (and {len(damage) - 1} more files of it)" if len(damage) > 1 else ""
        raise DamagedCheckpoint(f"{damage[0]}{more}")


class CheckpointWriter:
    """Writes `tensors`, in their order, to a new checkpoint `folder`, which appears with `commit` and not before."""

    def __init__(
        self,
        folder: Path,
        step: int,
        tensors: Entries,
        *,
        facts: Mapping[str, object] | None = None,
        run: Mapping[str, object] | None = None,
    ):
        records = {}
        for name, (dtype, shape) in tensors.items():
            shape = tuple(shape)
            chunks = (Chunk(ONLY_FILE, (0,) * len(shape), shape),) if 0 not in shape else ()
            records[name] = TensorRecord(NAMES[dtype], shape, chunks)
        self.manifest = Manifest(step, dict(facts or {}), dict(run or {}), {}, records)
        self.folder = folder
        self.unfinished = folders.begin(folder)
        self.file = TensorFileWriter(self.unfinished / ONLY_FILE, tensors)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor, on any device. Raises CheckpointError where it cannot be written."""
        self.file.write(name, tensor)

    def commit(self) -> None:
        """After the last tensor: from here on there is a checkpoint."""
        folders.commit(self.folder, replace(self.manifest, files={ONLY_FILE: self.file.finish()}))

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """What was not committed is deleted."""
        self.file.close()
        shutil.rmtree(self.unfinished, ignore_errors=True)
