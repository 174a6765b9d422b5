"""Folders of checkpoints: begun under another name, committed by one rename, deleted the other way round.

    step-20.tmp/   is written              whatever ends in .tmp is swept away when the next save begins
    step-20/       committed               never written again, and its name never used again
    step-10.tmp/   is being deleted        only when a newer one is committed

A death at any instant leaves each name either whole or ending in .tmp. What was found damaged is set aside under
another name, so that nothing is lost and its step can be saved anew.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.checkpoint.manifest import MANIFEST, UNFINISHED, CheckpointError, Manifest, encode, find_steps
from torchtitan_lite.config.files import sync_folder


def begin(final: Path) -> Path:
    """Makes the empty folder in which the checkpoint `final` is written, in place of one that a death has left."""
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final} exists already, and a checkpoint is never overwritten")
    unfinished = name_unfinished(final)
    try:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{unfinished} cannot be made ({error.strerror})") from error
    return unfinished


def sweep(folder: Path) -> None:
    """Deletes saves and deletions that were not finished. For the run that holds the dump folder, and nobody else."""
    for left_over in folder.glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(left_over)


def discard(final: Path, file_names: list[str]) -> None:
    """Delete the save of `final` that failed. What cannot be deleted now is swept away when the next save begins.

    It opens nothing, because the save may have failed for want of file descriptors, which rmtree needs too.
    """
    unfinished = name_unfinished(final)
    with suppress(OSError):
        for name in (*file_names, MANIFEST):
            (unfinished / name).unlink(missing_ok=True)
        unfinished.rmdir()


def name_unfinished(final: Path) -> Path:
    return final.with_name(final.name + UNFINISHED)


def commit(final: Path, manifest: Manifest) -> None:
    """Files of tensors are on the disk already; here their manifest, and then the name of the whole."""
    unfinished, content = name_unfinished(final), encode(manifest)
    try:
        with open(unfinished / MANIFEST, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(unfinished)
        unfinished.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        why = f"{error.strerror}; its {MANIFEST} takes {len(content):,} bytes"
        raise CheckpointError(f"{final} cannot be committed ({why}): it is left out") from error


def prune(folder: Path, *, keep_latest_k: int, keep_every_m: int) -> list[int]:
    """Deletes all but the newest k (0: none) and those of every m-th step (0: none of these). Returns the steps."""
    steps = find_steps(folder)[:-keep_latest_k] if keep_latest_k else []
    retired = [step for step in steps if not (keep_every_m and step % keep_every_m == 0)]
    for step in retired:
        doomed = (folder / f"step-{step}").rename(folder / f"step-{step}{UNFINISHED}")
        shutil.rmtree(doomed)
    return retired


def quarantine(final: Path) -> Path:
    """Renames a damaged checkpoint, so that its step can be saved again. Returns where it is now."""
    number, aside = 1, final.with_name(f"{final.name}.damaged")
    while aside.exists():
        number, aside = number + 1, final.with_name(f"{final.name}.damaged-{number + 1}")
    return final.rename(aside)
