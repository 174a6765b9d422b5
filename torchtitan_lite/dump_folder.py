"""Check the paths of a run before it starts; open `job.dump_folder`, to which it writes everything, and lock it.

One run at a time writes there. Each folder must be writable and apart from the others, and a run must not delete a file
that it reads.

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
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import PATH_BYTES, Config, get_value

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
READ = (  # keys that name files which a run reads
    "model.hf_assets_path",
    "training.dataset",
    "training.dataset_path",
    "validation.dataset",
    "validation.dataset_path",
    "parallelism.pipeline_parallel_schedule_csv",
    "checkpoint.initial_load_path",
)


# ---------------------------------------------------------------- before the start: nothing is written


def check_files(config: Config, restarted: bool) -> list[Problem]:
    """Find every problem with the paths of a run. A job that torchrun `restarted` finds its own files there."""
    problems = check_dump_folder(config, restarted)
    emptied, collisions = check_folders(config)
    problems += collisions
    for key in FOLDERS if not problems else ():
        value = get_value(config, key)
        problems += check_writable(key, os.path.join(config.job.dump_folder, value), value)
    key, value = "training.cache_folder", config.training.cache_folder
    problems += check_writable(key, value)
    for name in find_containing(value, emptied):  # all runs share the cache
        problems.append(Problem(key, value, f"it is in {name}, which job.overwrite empties", "Use another folder"))
    for key in READ if config.job.overwrite and not restarted else ():
        values = get_value(config, key)
        for value in filter(None, [values] if isinstance(values, str) else values):
            if names := find_containing(value, emptied):
                why, remedy = f"job.overwrite deletes {names[0]} first", "Copy it to another place"
                problems.append(Problem(key, value, why, remedy))
    return problems


def check_dump_folder(config: Config, restarted: bool) -> list[Problem]:
    """Find a dump folder that cannot be written, or that holds the files of an earlier run."""
    key, value = "job.dump_folder", config.job.dump_folder
    if problems := check_writable(key, value):
        return problems
    earlier = [name for name in ("config.toml", "metrics.jsonl") if (Path(value) / name).exists()]
    if not earlier or config.checkpoint.enable or config.job.overwrite or restarted:
        return []
    why = f"it holds an earlier run ({earlier[0]})"
    remedy = "Resume that run with --checkpoint.enable, delete it with --job.overwrite, or name another folder"
    return [Problem(key, value, why, remedy)]


def check_folders(config: Config) -> tuple[dict[Path, str], list[Problem]]:
    """Return path -> name of each file and folder that job.overwrite empties, and what is wrong with these.

    Folders must be inside the dump folder and apart from each other, because each of them is emptied alone.
    """
    default, problems = Config(), []
    emptied = {resolve_path(config.job.dump_folder) / name: f"the run's {name}" for name in FILES}
    # Keys at their defaults come first: of two that collide, the one that the user has set is to be changed.
    for key in sorted(FOLDERS, key=lambda key: get_value(config, key) != get_value(default, key)):
        value = get_value(config, key)
        if Path(value).is_absolute() or ".." in Path(value).parts or Path(value) == Path("."):
            why = "it is not a folder inside job.dump_folder"
            problems.append(Problem(key, value, why, "Use a name such as traces, or sub/traces"))
            continue
        path = resolve_path(config.job.dump_folder, value)
        overlaps = [name for other, name in emptied.items() if path.is_relative_to(other) or other.is_relative_to(path)]
        if overlaps:
            why = f"it overlaps with {overlaps[0]}"
            problems.append(Problem(key, value, why, "Use a name that no other file or folder of the run has"))
        emptied[path] = f"{key} = {value!r}"
    return emptied, problems


def find_containing(path: str, folders: dict[Path, str]) -> list[str]:
    """Return the names of the folders that contain `path`, or equal it."""
    return [name for folder, name in folders.items() if resolve_path(path).is_relative_to(folder)]


def resolve_path(*names: str) -> Path:
    """Return the path without links. It need not exist."""
    return Path(os.path.realpath(os.path.join(*names)))


def check_writable(key: str, folder: str, value: str | None = None) -> list[Problem]:
    """Find a folder that can neither be written nor made below the nearest existing one.

    `value`: of the key, where it differs from `folder`.
    """
    value = folder if value is None else value
    if not folder:
        return [Problem(key, value, "it names no folder", "Name one, or . for the working directory")]
    path = Path(folder).absolute()
    if (n_bytes := len(os.fsencode(path))) > PATH_BYTES:
        why = f"its absolute path has {n_bytes} bytes, which leaves too few for the files in it"
        return [Problem(key, value, why, f"Use a place of at most {PATH_BYTES} bytes")]
    nearest = next(above for above in (path, *path.parents) if os.path.lexists(above))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return []
    why = f"{nearest} is not a folder" if not nearest.is_dir() else f"{nearest} is not writable"
    return [Problem(key, value, why, "Name a folder that this user can write, or make")]


# ---------------------------------------------------------------- at the start, and while it runs


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
