"""Find the weights that a run starts from: a checkpoint to resume, or checkpoint.initial_load_path. Loads no tensor.

checkpoint in the dump folder    the newest readable one, or checkpoint.load_step: the run continues from its step
checkpoint elsewhere             its weights; also its step and optimizer state, unless initial_load_model_only
Hugging Face folder              its weights
"""

from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_lite.checkpoint.format import (
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    find_steps,
    parse_model_args,
    read_manifest,
    require_files,
)
from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, IN_MANIFEST, read_published
from torchtitan_lite.checkpoint.hugging_face_folder import open_folder
from torchtitan_lite.config.arguments import explain_hub_name
from torchtitan_lite.config.messages import ConfigError, Problem, UserError
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config, get_value

PATH = "checkpoint.initial_load_path"


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, with their model and tokenizer."""

    path: Path
    model_args: ModelArgs
    assets: str  # folder of the tokenizer they were trained with
    # config.json and generation_config.json, if they came from a Hugging Face folder
    published: dict[str, dict]
    manifest: Manifest | None = None  # None: a Hugging Face folder
    is_resumed: bool = False  # the checkpoint is in the dump folder


def find_resumed(config: Config, restarted: bool) -> Weights | None:
    """Return the checkpoint to resume from: load_step, or the newest readable one. Raises ConfigError."""
    section = config.checkpoint
    if not section.enable:
        return None
    folder = Path(config.job.dump_folder) / section.folder
    starts_over = config.job.overwrite and not restarted
    steps = [] if starts_over else find_steps(folder)
    key = "job.dump_folder"
    if section.load_step != -1 and not restarted:
        key = "checkpoint.load_step"
        # A run that saves would save the later steps a second time.
        usable = steps if section.load_only else steps[-1:]
        if section.load_step not in usable:
            why = f"the run has the steps {steps}, and resumes from the last one without load_only"
            remedy = f"Use {usable}" if usable else "Leave it out to start from the beginning"
            raise ConfigError([Problem(key, section.load_step, why, remedy)])
        steps = [section.load_step]
    remedy = "Restore the checkpoint from a copy or make it readable, or start another run: --job.dump_folder=FOLDER"
    reasons = []
    for step in reversed(steps):
        try:
            return replace(describe_checkpoint(folder / f"step-{step}"), is_resumed=True)
        except CheckpointError as error:
            reasons.append(str(error))
            if not isinstance(error, DamagedCheckpoint):
                break  # it may be good: an earlier one would train its steps again
    else:
        if not reasons or section.local_folder:  # the run may resume from a snapshot
            return None
    raise ConfigError([Problem(key, get_value(config, key), "; ".join(reasons), remedy)])


def find_initial(config: Config) -> Weights | None:
    """Return the weights in initial_load_path, a checkpoint or a Hugging Face folder. Raises ConfigError."""
    name = config.checkpoint.initial_load_path
    if not name:
        return None
    path = Path(name)
    try:
        if why := explain_hub_name(name):
            raise UserError(why)
        if not path.is_dir():
            raise UserError(f"there is no folder {path.absolute()}")
        if not (path / CONFIG).is_file():
            return describe_checkpoint(path)
        model_args = replace(open_folder(path).model_args, name=config.model.name)
        return Weights(path, model_args, str(path.absolute()), read_published(path))
    except UserError as error:
        remedy = "Name a checkpoint, such as outputs/debug/checkpoint/step-200, or a complete Hugging Face folder"
        raise ConfigError([Problem(PATH, name, str(error), remedy)]) from None


def describe_checkpoint(path: Path) -> Weights:
    """Read the manifest of a checkpoint: its model and tokenizer. Raises CheckpointError."""
    manifest = read_manifest(path)
    require_files(path)
    assets = manifest.run["config"]["model"]["hf_assets_path"]
    return Weights(
        path, parse_model_args(manifest), assets, manifest.run.get(IN_MANIFEST, {}), manifest
    )
