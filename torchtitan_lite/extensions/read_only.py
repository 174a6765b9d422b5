"""Let a run with checkpoint.load_only load a checkpoint and train without writing files. Needs no torch."""

from dataclasses import replace
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


def turn_off_files(given: UserConfig) -> UserConfig:
    """Turn off everything that writes files, and add a notice that says so."""
    config = given.config
    ignored = []
    for key, off in READ_ONLY.items():
        if get_value(config, key) != off:
            config = with_value(config, key, off)
            if key in given.chosen:
                ignored.append(key)
    notice = f"checkpoint.load_only: the run writes nothing to {Path(config.job.dump_folder)}, only to the screen"
    if ignored:
        notice += f". It ignores {', '.join(ignored)}"
    problems = list(given.problems)
    if config.job.overwrite:
        why = "it would delete the run that checkpoint.load_only reads"
        problems.append(Problem("job.overwrite", True, why, "Set one of the two keys to false"))
    notices = (*given.notices, notice)
    return replace(given, config=config, problems=tuple(problems), notices=notices)
