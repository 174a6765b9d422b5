"""Check the paths of a run before it starts. Create, lock and empty `job.dump_folder`, to which a run writes its files.

config.toml     as resolved              log.txt, metrics.jsonl, tb/                logs
checkpoint/     step-N/ ...              traces/, comm_traces/, memory_snapshot/    if enabled
wandb/          Weights & Biases if enabled; job.overwrite keeps it, because it may still have to be sent
lock            locked by the run that writes here
"""

import errno
import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config, get_value

logger = logging.getLogger(__name__)

LOCK = "lock"
# Files that a run writes in the dump folder itself
FILES = (LOCK, "config.toml", "log.txt", "metrics.jsonl")
FOLDERS = (  # keys that name a folder inside it
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
)


def check_files(config: Config, restarted: bool) -> list[Problem]:
    """Find every problem with the paths of a run. A job that `restarted` finds its own files there."""
    dump_folder, overwrite = Path(config.job.dump_folder), config.job.overwrite
    problems = check_writable(config, "job.dump_folder") + check_writable(config, "training.cache_folder")
    earlier = [name for name in ("config.toml", "metrics.jsonl") if (dump_folder / name).exists()]
    if earlier and not (config.checkpoint.enable or overwrite or restarted):
        why = f"it holds an earlier run ({earlier[0]})"
        remedy = "Name another folder, or delete that run with --job.overwrite"
        if find_steps(dump_folder / config.checkpoint.folder):
            remedy += ", or resume it with --checkpoint.enable"
        problems.append(Problem("job.dump_folder", str(dump_folder), why, remedy))
    for key in FOLDERS:
        value = get_value(config, key)
        if value in ("", ".", "..") or "/" in value:  # job.overwrite deletes what is in it
            problems.append(Problem(key, value, "it is no name of a folder", "Use a name, such as traces"))
    key, value = "checkpoint.initial_load_path", config.checkpoint.initial_load_path
    if value and overwrite and not restarted and Path(value).resolve().is_relative_to(dump_folder.resolve()):
        problems.append(Problem(key, value, "job.overwrite deletes it first", "Copy it to another place"))
    return problems


def check_writable(config: Config, key: str) -> list[Problem]:
    """Find a folder that this user can neither write nor create."""
    path = Path(get_value(config, key)).absolute()
    nearest = next(above for above in (path, *path.parents) if above.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return []
    why = f"{nearest} is no folder that this user can write"
    return [Problem(key, get_value(config, key), why, "Name another folder")]


def open_dump_folder(folder: Path, config: Config, *, starting_over: bool) -> BinaryIO:
    """Create the folder, lock it for this run, and write the resolved config there. Rank 0 calls this.

    `starting_over` deletes the files of an earlier run first. Returns the open lock file: the lock ends when the file
    is closed, also if the run is killed. Raises CheckpointError if another run has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / LOCK, "ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        why = f"another run is writing to {folder}: wait until it has ended, or name another job.dump_folder"
        raise CheckpointError(why) from None
    except OSError as error:  # Lustre may be mounted without locks
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        logger.warning(f"the file system of {folder} has no locks: nothing stops a second run from writing there")
    if starting_over:
        for path in list_earlier(folder, config):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    (folder / "config.toml").write_text(dump_config_toml(config), encoding="utf-8")
    return lock


def list_earlier(folder: Path, config: Config) -> list[Path]:
    """Return what job.overwrite deletes. FOLDERS themselves are kept: another rank may just have created one."""
    files = [folder / name for name in FILES if name != LOCK]
    inside = [path for key in FOLDERS for path in sorted((folder / get_value(config, key)).glob("*"))]
    return [path for path in files if path.exists()] + inside
