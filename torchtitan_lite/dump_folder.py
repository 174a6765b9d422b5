"""Open `job.dump_folder`, to which a run writes everything, and lock it: one run at a time writes there.

config.toml     as resolved              log.txt, metrics.jsonl, tb/                logs
checkpoint/     step-N/ ...              traces/, comm_traces/, memory_snapshot/    if enabled
wandb/          files of Weights & Biases if enabled; job.overwrite leaves them, for they may still have to be sent
timeline.svg, timeline.json              the work of each pipeline rank in an early step: picture, Chrome trace
lock            locked by the run that writes here
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config, get_value

LOCK = "lock"
# Files that a run writes in the dump folder itself; metrics.jsonl.new becomes metrics.jsonl
FILES = (LOCK, "config.toml", "log.txt", "metrics.jsonl", "metrics.jsonl.new", "timeline.svg", "timeline.json")
FOLDERS = (  # keys that name a folder inside it
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
)


def open_dump_folder(folder: Path, config: Config, *, starting_over: bool) -> BinaryIO:
    """Make the folder, lock it for this run, and write the resolved config there. Rank 0 calls this.

    `starting_over` deletes an earlier run's files first. Returns the lock, and raises what `hold` raises.
    """
    lock = hold(folder)
    if starting_over:
        for name in FILES:
            if name != LOCK:
                (folder / name).unlink(missing_ok=True)
        for key in FOLDERS:
            empty(folder / get_value(config, key))
    (folder / "config.toml").write_text(dump_config_toml(config), encoding="utf-8")
    return lock


def hold(folder: Path) -> BinaryIO:
    """Lock a dump folder for as long as the returned file is open. The system closes the file of a killed run.

    Raises CheckpointError if another run has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / LOCK, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError(
            f"another run is writing to {folder}: wait until it has ended, or name another job.dump_folder"
        ) from None
    return file


def check_still_held(lock: BinaryIO) -> None:
    """Raise CheckpointError if the folder of this lock was deleted, moved or replaced since `hold`."""
    path = Path(lock.name)
    try:
        if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
            return
    except FileNotFoundError:
        pass
    raise CheckpointError(
        f"the dump folder {path.parent} was deleted or moved while the run was at work, and with it what the run has "
        "logged and saved"
    )


@contextmanager
def explain_lost_folder(lock: BinaryIO | None) -> Iterator[None]:
    """Context manager: raise CheckpointError for an OSError inside if the folder of this lock is lost."""
    try:
        yield
    except OSError:
        if lock is not None:
            check_still_held(lock)
        raise


def empty(folder: Path) -> None:
    """Delete everything in the folder, if it exists, and keep the folder: another rank may just have made it."""
    for path in folder.glob("*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
