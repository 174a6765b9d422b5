"""The files of a run, looked at before it starts: each has a place of its own, can be written, and nothing that is read
is deleted first. Writes nothing.
"""

import os
from pathlib import Path

from torchtitan_lite.config.schema import Config, PathLimits, Problem
from torchtitan_lite.config.values import get_value
from torchtitan_lite.dump_folder import FILES, FOLDERS

READ = (  # keys that name files which a run reads
    "model.hf_assets_path",
    "training.dataset",
    "validation.dataset",
    "parallelism.pipeline_parallel_schedule_csv",
    "checkpoint.initial_load_path",
)


def check_files(config: Config, restarted: bool) -> list[Problem]:
    """What is wrong with the places of a run. A job that torchrun `restarted` finds its own files there."""
    problems = check_dump_folder(config, restarted)
    places, collisions = place_folders(config)
    problems += collisions
    for key in FOLDERS if not problems else ():
        value = get_value(config, key)
        problems += check_writable(key, os.path.join(config.job.dump_folder, value), value)
    problems += check_writable("training.cache_folder", config.training.cache_folder)
    return problems + check_cache(config, places) + check_deleted(config, places, restarted)


def check_dump_folder(config: Config, restarted: bool) -> list[Problem]:
    """A run must be able to write its files, and must not mix them with those of an earlier run."""
    key, value = "job.dump_folder", config.job.dump_folder
    if problems := check_writable(key, value):
        return problems
    earlier = [name for name in ("config.toml", "metrics.jsonl") if (Path(value) / name).exists()]
    if not earlier or config.checkpoint.enable or config.job.overwrite or restarted:
        return []
    why = f"it holds an earlier run ({earlier[0]})"
    remedy = "Resume that run with --checkpoint.enable, delete it with --job.overwrite, or name another folder"
    return [Problem(key, value, why, remedy)]


def place_folders(config: Config) -> tuple[dict[Path, str], list[Problem]]:
    """Where the files and folders of the dump folder are, and what each is. Folders must stay inside, and apart:
    `job.overwrite` empties each of them.
    """
    dump_folder, default = find_place(config.job.dump_folder), Config()
    places, problems = {dump_folder / name: f"the run's {name}" for name in FILES}, []
    # Those that are as they were come first: the others are the ones to change.
    for key in sorted(FOLDERS, key=lambda key: get_value(config, key) != get_value(default, key)):
        value = get_value(config, key)
        path = Path(value)
        if path.is_absolute() or ".." in path.parts or path == Path("."):
            why = "it is not a folder inside job.dump_folder"
            problems.append(Problem(key, value, why, "Use a name such as traces, or sub/traces"))
            continue
        place = find_place(config.job.dump_folder, value)
        if other := find_overlap(place, places):
            why = f"it shares its place with {other}"
            problems.append(Problem(key, value, why, "Use a name that no other file or folder of the run has"))
        places[place] = f"{key} = {value!r}"
    return places, problems


def check_cache(config: Config, places: dict[Path, str]) -> list[Problem]:
    """Tokens and compiled code of all runs must not be in what one of them may empty."""
    key, value = "training.cache_folder", config.training.cache_folder
    inside = [what for place, what in places.items() if find_place(value).is_relative_to(place)]
    return [
        Problem(key, value, f"it is in {what}, which job.overwrite empties", "Use another folder") for what in inside
    ]


def check_deleted(config: Config, places: dict[Path, str], restarted: bool) -> list[Problem]:
    """A run that starts over deletes an earlier run's files before it reads its own."""
    problems = []
    for key in READ if config.job.overwrite and not restarted else ():
        values = get_value(config, key)
        for value in [values] if isinstance(values, str) else values:
            what = next(
                (what for place, what in places.items() if value and find_place(value).is_relative_to(place)), ""
            )
            if what:
                problems.append(Problem(key, value, f"job.overwrite deletes {what} first", "Copy it to another place"))
    return problems


def find_place(*names: str) -> Path:
    """The path without links, of something that need not be there."""
    return Path(os.path.realpath(os.path.join(*names)))


def find_overlap(place: Path, places: dict[Path, str]) -> str | None:
    """What is at this place, in it, or around it."""
    overlaps = (what for other, what in places.items() if place.is_relative_to(other) or other.is_relative_to(place))
    return next(overlaps, None)


def check_writable(key: str, folder: str, value: str | None = None) -> list[Problem]:
    """A folder that can be written, or made below the nearest one that is there. `value`: of the key, where shorter."""
    value, remedy = folder if value is None else value, "Name a folder that this user can write, or make"
    if not folder:
        return [Problem(key, value, "it names no folder", "Name one, or . for the working directory")]
    path = Path(folder).absolute()
    n_bytes, most = len(os.fsencode(path)), PathLimits.path_bytes
    if n_bytes > most:
        why = f"with all folders above it, it has {n_bytes} bytes, which leaves too few for the files in it"
        return [Problem(key, value, why, f"Use a place of at most {most} bytes")]
    nearest = next(above for above in (path, *path.parents) if os.path.lexists(above))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return []
    why = f"{nearest} is not a folder" if not nearest.is_dir() else f"{nearest} is not writable"
    return [Problem(key, value, why, remedy)]
