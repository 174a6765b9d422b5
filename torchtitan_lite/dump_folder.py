"""Check the paths of a run before it starts. Create, lock and empty `job.dump_folder`, which holds all files of a run.

config.toml     the resolved config      log.txt, metrics.jsonl, tb/<run name>/     logs
checkpoint/     step-N/, run_id          traces/, comm_traces/, memory_snapshot/    if enabled
hang/           what hanging ranks did: `python3 -m torchtitan_lite hang FOLDER`
wandb/          Weights & Biases if enabled; job.overwrite keeps it, because some of it may not be uploaded yet
wandb_id        id of the run in Weights & Biases
lock            locked by the run that writes here
"""

import fcntl
import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from torchtitan_lite.checkpoint.format import (
    CHECKSUMS,
    MANIFEST,
    UNFINISHED,
    CheckpointError,
    find_steps,
)
from torchtitan_lite.config.checks import Problems
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config, get_value

logger = logging.getLogger(__name__)

LOCAL_FOLDER = "checkpoint.local_folder"
LOCK = "lock"
CONFIG_TOML = "config.toml"  # marks the folder of a run
RUN_ID = "run_id"  # in checkpoint.folder: names the snapshots of the run
HANG = "hang"  # folder with what hanging ranks did, one folder inside for each restart
FILES = ("log.txt", "metrics.jsonl", "wandb_id", f"{HANG}/restart-*")
FOLDERS = {  # keys that name a folder inside job.dump_folder -> what a run writes there, and job.overwrite deletes
    "checkpoint.folder": (
        f"step-*/{MANIFEST}",
        f"step-*/{CHECKSUMS}",
        f"step-*{UNFINISHED}",
        "step-*-hf",
        RUN_ID,
    ),
    "metrics.save_tb_folder": ("*/events.out.tfevents.*", "events.out.tfevents.*"),
    "profiling.save_traces_folder": ("step-*/rank-*.json",),
    "profiling.save_memory_snapshot_folder": ("step-*/rank-*.pickle",),
    "comm.save_traces_folder": ("rank_*",),
}


def check_files(config: Config, restarted: bool) -> Problems:
    """Find every problem with the paths of a run. If torchrun `restarted` the job, the files there are its own."""
    problems = Problems(config)
    dump_folder = Path(config.job.dump_folder)
    starts_over = config.job.overwrite and not restarted
    keys = ["job.dump_folder", "training.cache_folder"]
    if config.checkpoint.local_folder:
        keys.append(LOCAL_FOLDER)
    for key in keys:
        path = Path(get_value(config, key)).absolute()
        nearest = find_nearest(path)
        needed = os.W_OK | os.X_OK
        if nearest == path:
            needed |= os.R_OK  # to find what is in it
        if not (nearest.is_dir() and os.access(nearest, needed)):
            why = f"{nearest} is not a folder that this user can read and write"
            problems.refuse(key, why, "Name another folder")
    goes_on = config.checkpoint.enable or starts_over or restarted
    if (dump_folder / CONFIG_TOML).exists() and not goes_on:
        remedy = "Name another folder, or delete that run with --job.overwrite"
        if find_steps(dump_folder / config.checkpoint.folder):
            remedy += ", or resume it with --checkpoint.enable"
        problems.refuse("job.dump_folder", f"it has an earlier run ({CONFIG_TOML})", remedy)
    for key in FOLDERS:
        value = get_value(config, key)
        if value in ("", ".", "..") or "/" in value:
            why = "it is not the name of a folder"
            problems.refuse(key, why, "Use a plain name, such as traces")
    initial = config.checkpoint.initial_load_path
    is_inside = initial and Path(initial).resolve().is_relative_to(dump_folder.resolve())
    if is_inside and starts_over:
        key = "checkpoint.initial_load_path"
        problems.refuse(key, "job.overwrite deletes it first", "Copy it elsewhere")
    return problems


def find_nearest(path: Path) -> Path:
    """Return an absolute path, or the nearest of its parents that exists."""
    return next(above for above in (path, *path.parents) if above.exists())


def name_snapshots(local_folder: str, dump_folder: Path) -> Path:
    """Return the folder on each host for the snapshots of all runs in `dump_folder`.

    Its name begins with that of the dump folder. A hash of the whole path makes it unique.
    """
    path = os.fsencode(dump_folder.absolute())
    beginning = os.path.basename(path)[:64].decode(errors="ignore")  # a name has at most 255 bytes
    return Path(local_folder, f"{beginning}-{hashlib.sha256(path).hexdigest()[:16]}")


def check_snapshots(config: Config, snapshot_bytes: int) -> Problems:
    """Check the free space for snapshots on this host. During a save there are three: the last two, and the new one."""
    problems = Problems(config)
    section = config.checkpoint
    n_saved = (config.training.steps - 1) // section.local_interval
    needed = min(3, n_saved) * snapshot_bytes
    if not section.local_folder or section.load_only or not needed:
        return problems
    folder = name_snapshots(section.local_folder, Path(config.job.dump_folder)).absolute()
    replaced = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    free = shutil.disk_usage(find_nearest(folder)).free + replaced
    if free < needed:
        size = f"{needed / GIB:.3g} GiB of snapshots"
        why = f"this host needs space for {size}, but has only {free / GIB:.3g} GiB there"
        remedy = "Free some space, name a folder on another file system, or leave this key out"
        problems.refuse(LOCAL_FOLDER, why, remedy)
    return problems


def open_dump_folder(folder: Path, config: Config, *, starting_over: bool) -> BinaryIO:
    """Create the folder, lock it for this run, and write the resolved config there. Rank 0 calls this.

    `starting_over` deletes the files of an earlier run first. Returns the open lock file. The lock is released when the
    file is closed, or when the process dies. Raises CheckpointError if another run holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / LOCK, "ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        why = f"another run is writing to {folder}: wait until it ends, or set another job.dump_folder"
        raise CheckpointError(why) from None
    except OSError:  # Lustre may be mounted without locks
        logger.warning(
            f"the file system of {folder} has no locks, so a second run could write there too"
        )
    if starting_over:
        for path in list_earlier(folder, config):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    (folder / CONFIG_TOML).write_text(dump_config_toml(config), encoding="utf-8")
    return lock


def list_earlier(folder: Path, config: Config) -> list[Path]:
    """List the paths that job.overwrite deletes: only what a run has written, never another file."""
    paths = set()
    if (folder / CONFIG_TOML).exists():  # a run was here, so these are its files
        for pattern in FILES:
            paths.update(folder.glob(pattern))
    for key, patterns in FOLDERS.items():
        inside = folder / get_value(config, key)
        for pattern in patterns:
            for path in inside.glob(pattern):
                # The first part: a checkpoint or a trace is deleted with its folder, step-N.
                paths.add(inside / path.relative_to(inside).parts[0])
    return sorted(paths)
