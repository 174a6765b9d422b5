"""Read the config of a run, with the model of the weights that it starts from. Every tool reads its config here.

    checkpoint.initial_load_path X     [model] is filled in from
      + initial_load_in_hf             the checkpoint that the run resumes, if it does; X may be gone then
                                       else X/config.json

What follows sees a config that has every number of its model: check, plan, verify, certificates and checkpoints agree.
A key that is given, and differs, is refused. Needs no torch.
"""

from dataclasses import replace
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import HuggingFaceError, read_model_args, take_model
from torchtitan_lite.checkpoint.hugging_face_folder import REMEDY
from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps, parse_model_args, read_manifest
from torchtitan_lite.config.flavors import AUTO, ModelArgs
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import ConfigReading, read_config
from torchtitan_lite.config.schema import Config, with_value


def read_run_config(args: list[str], *, restarted: bool = False) -> ConfigReading:
    """Read a config as `read_config` does; dump folder and model are resolved. Raises nothing: see `problems`."""
    reading = read_config(args)
    config, problems = reading.config, list(reading.problems)
    if config.job.dump_folder == AUTO:
        config = with_value(config, "job.dump_folder", f"./outputs/{reading.config_name}")
    if config.checkpoint.initial_load_in_hf and config.checkpoint.initial_load_path:
        try:
            source, theirs = find_model(config, find_resumed_step(config, restarted))
            config = replace(config, model=take_model(config.model, theirs, str(source)))
        except ConfigError as error:
            problems += error.problems
    return replace(reading, config=config, problems=problems)


def find_resumed_step(config: Config, restarted: bool) -> int:
    """Return the last step that is already done: checkpoint.load_step, else that of the newest checkpoint, else 0."""
    if not config.checkpoint.enable or (config.job.overwrite and not restarted):
        return 0
    steps = find_steps(Path(config.job.dump_folder) / config.checkpoint.folder)
    restored = config.checkpoint.load_step
    return max(steps, default=0) if restored == -1 or restarted else restored


def find_model(config: Config, resumed_step: int) -> tuple[Path, ModelArgs]:
    """Return the weights that a run with a Hugging Face folder starts from, and their model. Raises ConfigError."""
    checkpoints = Path(config.job.dump_folder) / config.checkpoint.folder
    for step in reversed(find_steps(checkpoints) if resumed_step else []):
        path = checkpoints / f"step-{step}"
        try:
            if step <= resumed_step:
                return path, parse_model_args(read_manifest(path))
        except (CheckpointError, KeyError, TypeError, AttributeError):  # reported by whoever loads it
            continue
    folder = config.checkpoint.initial_load_path
    try:
        return Path(folder), read_model_args(Path(folder))
    except HuggingFaceError as error:
        raise ConfigError(
            [Problem("checkpoint.initial_load_path", folder, "; ".join(error.problems), REMEDY)]
        ) from None
