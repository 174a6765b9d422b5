"""Build the command that continues a run. Loaded when a run stops early."""

import os
import shlex
from pathlib import Path

from torchtitan_lite.config.messages import name_command
from torchtitan_lite.config.reader import find_key, read_config
from torchtitan_lite.config.schema import ONE_SHOT, Config, get_value


def describe_newest(
    newest: Path | None,
    config: Config,
    args: list[str],
    *,
    is_own: bool = True,
) -> str:
    """Name the newest checkpoint and the command that resumes from it.

    `args`: the arguments of the run. If this run has saved the checkpoint (`is_own`), the command omits the keys in
    ONE_SHOT, which have already been applied. Otherwise, the command contains all arguments.
    """
    if newest is None or config.checkpoint.load_only:
        return "nothing is saved"
    given = ["train", *args]
    command = given
    if is_own:
        command = []
        is_dropped = False
        for argument in given:
            if argument.startswith("--"):
                name = argument.partition("=")[0][2:].replace("-", "_")
                is_dropped = find_key(name.replace(".no_", ".")) in ONE_SHOT
            if not is_dropped:
                command.append(argument)
        in_file = read_config(command[1:]).config
        for key, off in ONE_SHOT.items():
            if get_value(in_file, key) != get_value(Config(), key):
                command.append(off)
    ngpu = os.environ.get("NGPU")
    variable = f"NGPU={ngpu} " if ngpu else ""
    return f"newest checkpoint {newest}; to continue: {variable}{name_command(shlex.join(command))}"
