"""Let a run with checkpoint.load_only load a checkpoint and train without writing files. Needs no torch."""

from pathlib import Path

from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.reader import UserConfig
from torchtitan_lite.config.schema import get_value, with_value

# keys that make a run write files -> the value that turns this off
READ_ONLY = {
    "metrics.enable_tensorboard": False,
    "metrics.enable_wandb": False,
    "profiling.enable_profiling": False,
    "profiling.enable_memory_snapshot": False,
    "comm.hang_seconds": 0,
    "comm.trace_buf_size": 0,
    "checkpoint.local_folder": "",
    "checkpoint.last_save_in_hf": False,
}


def turn_off_files(given: UserConfig) -> None:
    """Turn off everything that writes files, and add a notice that says so."""
    ignored = []
    for key, off in READ_ONLY.items():
        if get_value(given.config, key) != off:
            given.config = with_value(given.config, key, off)
            if key in given.chosen:
                ignored.append(key)
    job = given.config.job
    notice = f"checkpoint.load_only: the run writes nothing to {Path(job.dump_folder)}, only to the screen"
    if ignored:
        notice += f". It ignores {', '.join(ignored)}"
    given.notices.append(notice)
    if job.overwrite:
        why = "it would delete the run that checkpoint.load_only reads"
        remedy = "Set one of the two keys to false"
        given.problems.append(Problem("job.overwrite", True, why, remedy))
