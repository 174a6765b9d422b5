"""Folders of checkpoints: written under another name, committed by one rename, renamed again before they are deleted.

    step-20.tmp/   being written           the next save removes whatever ends in .tmp
    step-20/       committed               never written again; no other checkpoint ever gets this name
    step-10.tmp/   being deleted           only after a newer checkpoint was committed

So at any instant a name without .tmp is a whole checkpoint. A damaged checkpoint is renamed, not deleted, and its step
can be saved again. Exports to Hugging Face folders are made and committed in the same way.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from torchtitan_lite.checkpoint.manifest import (
    CHECKSUMS,
    MANIFEST,
    UNFINISHED,
    CheckpointError,
    Manifest,
    encode,
    find_steps,
)
from torchtitan_lite.config.files import sync_folder

logger = logging.getLogger(__name__)


def name_unfinished(final: Path) -> Path:
    return final.with_name(final.name + UNFINISHED)


def create_unfinished(final: Path) -> Path:
    """Create the empty folder in which `final` is written. Raises CheckpointError if one of the two exists."""
    unfinished = name_unfinished(final)
    for path in (final, unfinished):
        if path.exists():
            raise CheckpointError(f"{path} exists already, and is never overwritten")
    with explain_full_disk(unfinished):
        unfinished.mkdir(parents=True)
    return unfinished


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Raise any error of writing `path` as a CheckpointError that names the free space."""
    try:
        yield
    except Exception as error:  # safetensors has its own class of errors
        free = shutil.disk_usage(path.parent if path.parent.exists() else "/").free
        raise CheckpointError(f"{path} cannot be written, and the disk has {free:,} bytes free: {error}") from error


def write_file(path: Path, content: bytes) -> str:
    """Write a file, wait until it is on the disk, and return its hash. Raises CheckpointError."""
    with explain_full_disk(path), open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file. The caller waits until it is on the disk. Raises CheckpointError."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with explain_full_disk(path):
        path.touch(exist_ok=False)
        mode = path.stat().st_mode  # the one that the umask gives; safetensors makes files that only the owner can read
        save_file(on_host, path, {"format": "pt", **metadata})  # transformers refuses files without the format
        path.chmod(mode)


def commit(final: Path, manifest: Manifest | None = None, hashes: Mapping[str, str] | None = None) -> None:
    """Give the unfinished folder, whose files are on the disk, its final name. A checkpoint has a manifest."""
    unfinished = name_unfinished(final)
    if manifest:
        hashes = {**hashes, MANIFEST: write_file(unfinished / MANIFEST, encode(manifest))}
        lines = [f"{digest}  {name}\n" for name, digest in sorted(hashes.items())]
        write_file(unfinished / CHECKSUMS, "".join(lines).encode())
    with explain_full_disk(final):
        sync_folder(unfinished)
        unfinished.rename(final)
        sync_folder(final.parent)


def discard(final: Path) -> None:
    """Delete the failed save of `final`. If that fails too, the next save of the run deletes it."""
    shutil.rmtree(name_unfinished(final), ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Delete unfinished saves and deletions. Only the run that holds the lock of the dump folder may call this."""
    for partial in folder.glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(partial)


def prune(folder: Path, *, keep_latest_k: int, keep_every_m: int) -> None:
    """Keep the newest k checkpoints (0: keep all) and the checkpoint of every m-th step. Delete the others."""
    for step in find_steps(folder)[:-keep_latest_k] if keep_latest_k else []:
        if not (keep_every_m and step % keep_every_m == 0):
            shutil.rmtree((folder / f"step-{step}").rename(folder / f"step-{step}{UNFINISHED}"))


def quarantine(damaged: list[Path]) -> None:
    """Rename damaged checkpoints, so that their steps can be saved again."""
    for final in damaged:
        number, aside = 1, final.with_name(f"{final.name}.damaged")
        while aside.exists():
            number, aside = number + 1, final.with_name(f"{final.name}.damaged-{number + 1}")
        logger.error(f"{final} is now {final.rename(aside)}: steps from here on are trained again")
