"""Check the paths of a run before it starts. Create and lock `job.dump_folder`, which contains all files of a run.

    config.toml     the resolved config with job.overwrite = false, so a run with this config never deletes the earlier
                    run
    log.txt, metrics.jsonl, tb/<run name>/     logs; metrics-1.jsonl: records of an earlier start that saved nothing
    checkpoint/     step-N/, run_id          traces/, comm_traces/, memory_snapshot/    if enabled
    hang/           reports of hanging ranks: `python3 -m torchtitan_lite hang FOLDER`
    wandb/          Weights & Biases if enabled; job.overwrite keeps it, because some of it may not be uploaded yet
    wandb_id        id of the run in Weights & Biases
    lock            locked by the run that writes here

A run with checkpoint.load_only writes no file.
"""

import fcntl
import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from torchtitan_lite.checkpoint.format import CheckpointError
from torchtitan_lite.components.log import go_on_unwritten
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.messages import Refused
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.files import replace_text

logger = logging.getLogger(__name__)

LOCAL_FOLDER = "checkpoint.local_folder"
LOCK = "lock"
CONFIG_TOML = "config.toml"  # only the folder of a run contains this file
RUN_ID = "run_id"  # file in checkpoint.folder; its content is the name of the folder with the run's snapshots
HANG = "hang"  # folder of the reports of hanging ranks, with one subfolder for each restart
METRICS = "metrics.jsonl"


def check_files(config: Config, restarted: bool) -> Refused:
    """Find every problem with the paths of a run. If torchrun `restarted` the job, existing files belong to this
    job."""
    section = config.checkpoint
    dump_folder = Path(config.job.dump_folder)
    checkpoints = dump_folder / section.folder
    folders = {"training.cache_folder": Path(config.training.cache_folder)}
    if not section.load_only:
        folders["job.dump_folder"] = dump_folder
        if checkpoints.exists():
            folders["checkpoint.folder"] = checkpoints
        if section.local_folder:
            folders[LOCAL_FOLDER] = Path(section.local_folder)
    for key, folder in folders.items():
        path = folder.absolute()
        nearest = find_nearest(path)
        needed = os.W_OK | os.X_OK
        if nearest == path:
            needed |= os.R_OK  # listing its files needs this permission
        if not (nearest.is_dir() and os.access(nearest, needed)):
            why = f"{nearest} is not a folder that this user can read and write"
            yield key, why, "Name another folder"
    if not config.job.dump_folder:
        yield "job.dump_folder", "it is empty", 'Set it to a folder; "." is the current folder'
    has_run = (dump_folder / CONFIG_TOML).exists() or (dump_folder / METRICS).exists()
    if has_run and not (config.job.overwrite or restarted):
        yield from load_extension("overwrite").check_earlier(section, dump_folder)


def find_nearest(path: Path) -> Path:
    """Return the absolute `path` if it exists, or its nearest existing parent. A broken link counts as existing."""
    return next(above for above in (path, *path.parents) if os.path.lexists(above))


def name_snapshots(local_folder: str, dump_folder: Path) -> Path:
    """Return the folder on each host for the snapshots of all runs in `dump_folder`.

    The name begins with the name of the dump folder. A hash of the whole path makes the name unique.
    """
    path = os.fsencode(dump_folder.absolute())
    beginning = os.path.basename(path)[:64].decode(errors="ignore")  # a name has at most 255 bytes
    return Path(local_folder, f"{beginning}-{hashlib.sha256(path).hexdigest()[:16]}")


def open_dump_folder(config: Config, *, restarted: bool) -> BinaryIO:
    """Create and lock job.dump_folder, and write the resolved config there. Rank 0 calls this.

    job.overwrite deletes the files of an earlier run first, unless torchrun has `restarted` this run. Returns the open
    lock file. The lock is released when the file is closed, or when the process dies. Raises CheckpointError if another
    run holds the lock, or if a file cannot be written.
    """
    folder = Path(config.job.dump_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
        if restarted:  # if the disk is full, the config.toml of the first start is kept
            with go_on_unwritten(str(folder / CONFIG_TOML), set()):
                write_config(folder, config)
            return lock
        if config.job.overwrite:
            load_extension("overwrite").delete_earlier(folder, config)
        write_config(folder, config)
        for earlier in folder.glob(f"{HANG}/restart-*"):
            shutil.rmtree(earlier, ignore_errors=True)
    except OSError as error:
        remedy = "Free some space, or set a different job.dump_folder"
        raise CheckpointError(f"the run cannot start in {folder}: {error}. {remedy}") from None
    return lock


def lock_folder(folder: Path) -> BinaryIO:
    """Lock the folder for this run. Return the open lock file.

    Raises CheckpointError if another run has locked the folder, and OSError if the lock file cannot be opened.
    """
    lock = open(folder / LOCK, "ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise CheckpointError(
            f"another run is writing to {folder}: wait until it ends, or set a different job.dump_folder"
        ) from None
    except OSError:  # a file system without locks, such as some mounts of Lustre
        logger.warning(
            f"the file system of {folder} has no locks, so a second run could write there too"
        )
    return lock


def write_config(folder: Path, config: Config) -> None:
    """Write config.toml. Raises OSError."""
    kept = with_value(config, "job.overwrite", False)
    replace_text(folder / CONFIG_TOML, dump_config_toml(kept))
