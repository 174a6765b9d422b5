"""Folders of checkpoints: written under another name, committed by one rename, renamed again before they are deleted.

    step-20.tmp/   being written           the next save removes whatever ends in .tmp
    step-20/       committed               never written again; no other checkpoint ever gets this name
    step-10.tmp/   being deleted           only after a newer checkpoint was committed

So whenever the process dies, each name is either whole or ends in .tmp. A damaged checkpoint is renamed, not deleted,
and its step can be saved again. Exports to Hugging Face folders are made and committed in the same way.
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import inf, prod
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.manifest import (
    MANIFEST,
    UNFINISHED,
    CheckpointError,
    Chunk,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    TensorRecord,
    encode,
    find_steps,
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
from torchtitan_lite.config.files import sync_folder

logger = logging.getLogger(__name__)


def name_unfinished(final: Path) -> Path:
    return final.with_name(final.name + UNFINISHED)


def check_free(final: Path) -> None:
    """Raise CheckpointError if `final` exists, or if it is being written."""
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final} exists already, and is never overwritten")
    if (unfinished := name_unfinished(final)).exists():
        why = "another process is writing it, or was killed"
        raise CheckpointError(f"{unfinished} exists: {why}. If none is writing it, delete it.")


def create_unfinished(final: Path) -> Path:
    """Create the empty folder in which `final` is written. Raises CheckpointError, also if somebody else writes it."""
    check_free(final)
    unfinished = name_unfinished(final)
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{unfinished} cannot be made ({error.strerror})") from error
    return unfinished


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk. Raises CheckpointError."""
    try:
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = f"{error.strerror}; its {path.name} takes {len(content):,} bytes"
        raise CheckpointError(f"{path} cannot be written ({why})") from error


def commit(final: Path, manifest: Manifest | None = None) -> None:
    """Give the unfinished folder, whose files are on the disk, its final name. Writes the manifest of a checkpoint."""
    unfinished = name_unfinished(final)
    if manifest:
        write_file(unfinished / MANIFEST, encode(manifest))
    try:
        sync_folder(unfinished)
        unfinished.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        raise CheckpointError(f"{final} cannot be committed ({error.strerror}): it is left out") from error


def discard(final: Path) -> None:
    """Delete the failed save of `final`. What cannot be deleted now, the next save of the run removes."""
    shutil.rmtree(name_unfinished(final), ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Delete unfinished saves and deletions. Only the run that holds the lock of the dump folder may call this."""
    for partial in folder.glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(partial)


def prune(folder: Path, *, keep_latest_k: int, keep_every_m: int) -> list[int]:
    """Delete all checkpoints but the newest k (0: delete none) and those of every m-th step. Return their steps."""
    steps = find_steps(folder)[:-keep_latest_k] if keep_latest_k else []
    pruned = [step for step in steps if not (keep_every_m and step % keep_every_m == 0)]
    for step in pruned:
        shutil.rmtree((folder / f"step-{step}").rename(folder / f"step-{step}{UNFINISHED}"))
    return pruned


def quarantine(damaged: list[Path]) -> None:
    """Rename damaged checkpoints, so that their steps can be saved again."""
    for final in damaged:
        number, aside = 1, final.with_name(f"{final.name}.damaged")
        while aside.exists():
            number, aside = number + 1, final.with_name(f"{final.name}.damaged-{number + 1}")
        logger.error(f"{final} is now {final.rename(aside)}: steps from here on are trained again")


# --- in one process, for tools: one tensor at a time is in memory, however large the model is ---


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
    unfinished = create_unfinished(folder)
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
        commit(folder, Manifest(step, dict(fingerprint or {}), dict(run or {}), files, records))
    except BaseException:
        discard(folder)
        raise
