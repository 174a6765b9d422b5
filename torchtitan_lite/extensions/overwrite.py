"""Handle an earlier run in job.dump_folder: resume it, refuse to start, or delete it (job.overwrite). Needs no torch.

job.overwrite deletes only files that a run writes. A run that torchrun restarts keeps its own files.
"""

import shlex
import shutil
from pathlib import Path

from torchtitan_lite.checkpoint.format import CHECKSUMS, MANIFEST, UNFINISHED, find_steps
from torchtitan_lite.config.messages import Refused
from torchtitan_lite.config.reader import flatten_table, load_toml
from torchtitan_lite.config.schema import Checkpoint, Config, get_value
from torchtitan_lite.dump_folder import CONFIG_TOML, HANG, METRICS, RUN_ID

FILES_OF_RUN = ("log.txt", METRICS, "metrics-[0-9]*.jsonl", "wandb_id", f"{HANG}/restart-*")
# key of a folder inside job.dump_folder -> files that a run writes there, and that job.overwrite deletes
FOLDERS_OF_RUN = {
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


def read_earlier(folder: Path) -> dict[str, object]:
    """Return a dict mapping keys to values in the config of the run that wrote to `folder`, or {} if its config.toml is
    lost."""
    try:
        return dict(flatten_table(load_toml(folder / CONFIG_TOML)))
    except ValueError:
        return {}


def check_earlier(section: Checkpoint, folder: Path) -> Refused:
    """Report a problem if the dump folder contains an earlier run. Reports nothing if this run resumes the earlier run,
    or if the earlier run ended before its first save."""
    earlier = read_earlier(folder)
    saved_in = earlier.get("checkpoint.folder", section.folder)
    why = "the folder has an earlier run, which saved no checkpoints"
    remedy = "Name another folder"
    if not section.load_only:
        remedy += ", or delete that run with --job.overwrite"
    resuming = []
    if find_steps(folder / saved_in):
        why = f"the folder has an earlier run, with checkpoints in {saved_in}"
        if not section.enable:
            resuming.append("--checkpoint.enable")
        if saved_in != section.folder:
            resuming.append(f"--checkpoint.folder={shlex.quote(saved_in)}")
        if not resuming:
            return
        remedy += f", or resume it with {' '.join(resuming)}"
    elif section.load_only or (section.enable and earlier.get("checkpoint.enable", True)):
        return
    yield "job.dump_folder", why, remedy


def delete_earlier(folder: Path, config: Config) -> None:
    """Delete the files of an earlier run. Raises OSError."""
    for path in list_earlier(folder, config):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def list_earlier(folder: Path, config: Config) -> list[Path]:
    """List the paths that job.overwrite deletes: only files that a run has written."""
    paths = set()
    earlier = read_earlier(folder)
    # config.toml shows that a run used this folder, so the files with these names belong to the run
    if (folder / CONFIG_TOML).exists():
        for pattern in FILES_OF_RUN:
            paths.update(folder.glob(pattern))
    for key, patterns in FOLDERS_OF_RUN.items():
        value = get_value(config, key)
        for name in {value, earlier.get(key, value)}:
            inside = folder / name
            for pattern in patterns:
                for path in inside.glob(pattern):
                    # Delete the first part of the path. For example, step-N is the folder of a checkpoint or a trace.
                    paths.add(inside / path.relative_to(inside).parts[0])
    return sorted(paths)
