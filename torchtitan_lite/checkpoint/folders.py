"""Checkpoint folders: written under a temporary name, committed by a rename, and renamed again before deletion.

    step-20.tmp/   being written           the next save removes all folders that end in .tmp
    step-20/       committed               never written to again, and never overwritten
    step-10.tmp/   being deleted           only after a newer checkpoint is committed

At any time, a folder without .tmp is a complete checkpoint. A damaged checkpoint is renamed, not deleted, so its step
can be saved again. Exports to Hugging Face folders are written and committed in the same way.
"""

import errno
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

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def name_unfinished(final: Path) -> Path:
    return final.with_name(final.name + UNFINISHED)


def create_unfinished(final: Path) -> Path:
    """Create the temporary folder for `final`. Raises CheckpointError if it or `final` exists."""
    unfinished = name_unfinished(final)
    for path in (final, unfinished):
        if path.exists():
            raise CheckpointError(f"{path} already exists, and is never overwritten")
    with explain_write_error(unfinished):
        unfinished.mkdir(parents=True)
    return unfinished


@contextmanager
def explain_write_error(path: Path) -> Iterator[None]:
    """Turn any error while writing `path` into a CheckpointError. If there is no room, report the free disk space."""
    try:
        yield
    except Exception as error:  # safetensors has its own exception class, whose message ends with the system's reason
        reason = str(error)
        if any(os.strerror(number) in reason for number in NO_ROOM):
            free = shutil.disk_usage(path.parent if path.parent.exists() else "/").free
            reason = f"no room, the disk has {free:,} bytes free: {reason}"
        raise CheckpointError(f"{path} cannot be written: {reason}") from error


def write_file(path: Path, content: bytes) -> str:
    """Write a file, flush it to disk, and return its hash. Raises CheckpointError."""
    with explain_write_error(path), open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file. The caller must flush it to disk. Raises CheckpointError."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with explain_write_error(path):
        path.touch(exist_ok=False)
        mode = (
            path.stat().st_mode
        )  # from the umask; safetensors creates files that only the owner can read
        save_file(
            on_host, path, {"format": "pt", **metadata}
        )  # transformers refuses files without "format"
        path.chmod(mode)


def commit(
    final: Path, manifest: Manifest | None = None, hashes: Mapping[str, str] | None = None
) -> None:
    """Rename the unfinished folder to `final`. Its files must be on disk. With a manifest, write that first."""
    unfinished = name_unfinished(final)
    if manifest:
        hashes = {**hashes, MANIFEST: write_file(unfinished / MANIFEST, encode(manifest))}
        lines = [f"{digest}  {name}\n" for name, digest in sorted(hashes.items())]
        write_file(unfinished / CHECKSUMS, "".join(lines).encode())
    with explain_write_error(final):
        sync_folder(unfinished)
        unfinished.rename(final)
        sync_folder(final.parent)


def discard(final: Path) -> None:
    """Delete the failed save of `final`. If this fails too, the next save of the run deletes it."""
    shutil.rmtree(name_unfinished(final), ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Delete unfinished saves and deletions. Only the run that has locked the dump folder may call this."""
    for partial in folder.glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(partial)


def prune(folder: Path, *, keep_latest_k: int, keep_every_m: int) -> None:
    """Keep the newest k checkpoints (0: all), and every checkpoint whose step is a multiple of m. Delete the others."""
    for step in find_steps(folder)[:-keep_latest_k] if keep_latest_k else []:
        if not (keep_every_m and step % keep_every_m == 0):
            shutil.rmtree((folder / f"step-{step}").rename(folder / f"step-{step}{UNFINISHED}"))


def quarantine(damaged: list[Path]) -> None:
    """Rename damaged checkpoints. Their steps can then be saved again."""
    for final in damaged:
        number, aside = 1, final.with_name(f"{final.name}.damaged")
        while aside.exists():
            number, aside = number + 1, final.with_name(f"{final.name}.damaged-{number + 1}")
        logger.error(f"{final} was renamed to {final.rename(aside)}; its steps are trained again")
