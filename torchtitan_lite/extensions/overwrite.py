"""job.overwrite: a run deletes the files of an earlier run in its folder first. Needs no torch.

It deletes only what a run writes, never another file. A run that torchrun restarts keeps its own files.
"""

import shutil
from pathlib import Path

from torchtitan_lite.checkpoint.format import CHECKSUMS, MANIFEST, UNFINISHED
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.dump_folder import CONFIG_TOML, HANG, METRICS, RUN_ID, read_earlier

FILES = ("log.txt", METRICS, "metrics-[0-9]*.jsonl", "wandb_id", f"{HANG}/restart-*")
FOLDERS = {  # key of a folder inside job.dump_folder -> what a run writes there and job.overwrite deletes
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


def delete_earlier(folder: Path, config: Config) -> None:
    """Delete the files of an earlier run. Raises OSError."""
    for path in list_earlier(folder, config):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def list_earlier(folder: Path, config: Config) -> list[Path]:
    """List the paths that job.overwrite deletes: only what a run has written, never another file."""
    paths = set()
    earlier = read_earlier(folder) or {}
    if (folder / CONFIG_TOML).exists():  # a run was here, so these are its files
        for pattern in FILES:
            paths.update(folder.glob(pattern))
    for key, patterns in FOLDERS.items():
        value = get_value(config, key)
        for name in {value, earlier.get(key, value)}:
            inside = folder / name
            for pattern in patterns:
                for path in inside.glob(pattern):
                    # The first part of the path: a checkpoint or a trace is deleted with its folder, step-N.
                    paths.add(inside / path.relative_to(inside).parts[0])
    return sorted(paths)
