"""Check whether a run may use a dump folder in which an earlier run has written. Loaded if there is such a run."""

import shlex
from pathlib import Path

from torchtitan_lite.checkpoint.format import find_steps
from torchtitan_lite.config.messages import Problems
from torchtitan_lite.config.reader import flatten_table, load_toml


def read_earlier(config_toml: Path) -> dict[str, object]:
    """Return key -> value in the config of the earlier run; {} if its file is lost."""
    try:
        return dict(flatten_table(load_toml(config_toml)))
    except ValueError:
        return {}


def check_earlier(problems: Problems, config_toml: Path) -> None:
    """Refuse an earlier run in the dump folder, unless this run resumes it, or it ended before it could save."""
    earlier = read_earlier(config_toml)
    section = problems.config.checkpoint
    saved_in = earlier.get("checkpoint.folder", section.folder)
    why = "it has an earlier run, which saved no checkpoints"
    remedy = "Name another folder"
    if not section.load_only:
        remedy += ", or delete that run with --job.overwrite"
    resuming = []
    if find_steps(config_toml.parent / saved_in):
        why = f"it has an earlier run, with checkpoints in {saved_in}"
        if not section.enable:
            resuming.append("--checkpoint.enable")
        if saved_in != section.folder:
            resuming.append(f"--checkpoint.folder={shlex.quote(saved_in)}")
        if not resuming:
            return
        remedy += f", or resume it with {' '.join(resuming)}"
    elif section.load_only or (section.enable and earlier.get("checkpoint.enable", True)):
        return
    problems.refuse("job.dump_folder", why, remedy)
