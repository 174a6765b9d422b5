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
from pathlib import Path

from torchtitan_lite.checkpoint.manifest import MANIFEST, UNFINISHED, CheckpointError, Manifest, encode, find_steps
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
