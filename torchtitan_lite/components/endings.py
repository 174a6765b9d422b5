"""Report how a run ends: a small file per rank for the launcher, and for the user the command that continues.

TORCHELASTIC_ERROR_FILE    {"status": 1, "message": "rank 3 failed: ..."}    tools/agent.py reads the first one
"""

import json
import os
import shlex
import signal
import sys
from pathlib import Path

from torchtitan_lite.config.messages import name_command
from torchtitan_lite.config.reader import drop_keys, read_config
from torchtitan_lite.config.schema import ONE_SHOT, Config, Metrics, get_value


def describe_signal(status: int) -> str:
    """Describe the exit status 128 + number of a run that a signal has stopped."""
    return f"stopped by {signal.Signals(status - 128).name}"


def write_ending(status: int, message: str) -> bool:
    """Write why this rank ends to the file that torchrun names. Return whether no rank of this host has ended before.

    `status`: exit status of the run. `message`: one line, which torchrun reads, too. The first ending of a process
    counts.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return True
    file = Path(name)
    earlier = list(file.parent.parent.glob(f"*/{file.name}"))
    if file not in earlier:
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"status": status, "message": message}))
        unfinished.rename(file)
    return not earlier


def describe_newest(
    newest: Path | None,
    config: Config,
    args: list[str],
    *,
    is_own: bool = True,
) -> str:
    """Name the newest checkpoint and the command that resumes from it.

    `args`: the arguments of the run. If the checkpoint `is_own` (saved by this run), the command leaves out the keys in
    ONE_SHOT, which have already acted. Otherwise it repeats the run's command.
    """
    if newest is None or config.checkpoint.load_only:
        return "nothing is saved"
    command = ["train", *args]
    if is_own:
        command = drop_keys(command, ONE_SHOT)
        in_file = read_config(command[1:]).config
        for key, off in ONE_SHOT.items():
            if get_value(in_file, key) != get_value(Config(), key):
                command.append(off)
    ngpu = os.environ.get("NGPU")
    variable = f"NGPU={ngpu} " if ngpu else ""
    return f"newest checkpoint {newest}; to continue: {variable}{name_command(shlex.join(command))}"


def name_views(folder: Path, section: Metrics) -> str:
    """Return the commands that show the curves of the run in `folder`."""
    name = shlex.quote(str(folder))
    views = name_command(f"report {name}")
    if section.enable_tensorboard:
        python = os.path.relpath(sys.executable)
        if python.startswith(".."):
            python = sys.executable
        views += f", or {python} -m tensorboard.main --logdir {name}/{section.save_tb_folder}"
    return views
