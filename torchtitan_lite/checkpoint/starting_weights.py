"""Find the weights that a run starts from: a checkpoint to resume, or checkpoint.initial_load_path. Loads no tensor.

checkpoint in the dump folder    the newest readable one, or checkpoint.load_step: the run continues from its step
                                 (a run that saves continues from its last step only)
checkpoint elsewhere             its weights; also its step and optimizer state, unless initial_load_model_only
Hugging Face folder              its weights
"""

import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_lite.checkpoint.format import (
    IN_MANIFEST,
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    find_steps,
    parse_model_args,
    read_manifest,
    require_files,
)
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.messages import ConfigError, Problem, UserError
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Checkpoint, Config, get_value
from torchtitan_lite.files import explain_hub_name
from torchtitan_lite.models.registry import CONFIG, LENGTH

PATH = "checkpoint.initial_load_path"
NOT_ONLY = (
    "checkpoint.no_initial_load_model_only"  # argument: with the optimizer state and the step
)


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
    notices: tuple[str, ...] = ()  # what config.json says, but this trainer does not do

    @property
    def context_length(self) -> int | None:
        """Tokens that the weights were trained for, if their config.json says so."""
        return self.published.get(CONFIG, {}).get(LENGTH)


def find_resumed(config: Config, restarted: bool) -> Weights | None:
    """Return the checkpoint to resume from: load_step, or the newest readable one. Raises ConfigError."""
    section = config.checkpoint
    if not section.enable:
        return None
    folder = Path(config.job.dump_folder) / section.folder
    starts_over = config.job.overwrite and not restarted
    steps = [] if starts_over else find_steps(folder)
    key = "job.dump_folder"
    if names_step(section, steps, restarted):
        key = "checkpoint.load_step"
        steps = [section.load_step]
    elif section.load_step != -1 and not restarted:
        check_went_on(section, folder, steps)
    remedy = "Restore the checkpoint from a copy or make it readable, or start another run: --job.dump_folder=FOLDER"
    reasons = []
    for step in reversed(steps):
        try:
            weights = describe_checkpoint(folder / f"step-{step}")
            if not restarted:  # a restarted job resolves in every rank, and misses a file when it opens it
                require_files(weights.path)
            return replace(weights, is_resumed=True)
        except CheckpointError as error:
            reasons.append(str(error))
            if not isinstance(error, DamagedCheckpoint):
                break  # it may be good: an earlier one would train its steps again
    else:
        if not reasons or section.local_folder:  # the run may resume from a snapshot
            return None
    raise ConfigError([Problem(key, get_value(config, key), "; ".join(reasons), remedy)])


def names_step(section: Checkpoint, steps: list[int], restarted: bool) -> bool:
    """Return whether load_step is the step to load. A run that saves would save later steps a second time.

    A job that torchrun restarts continues from what it has saved.
    """
    if section.load_only:
        return section.load_step in steps
    return section.load_step in steps[-1:] and not restarted


def check_went_on(section: Checkpoint, folder: Path, steps: list[int]) -> None:
    """Check a load_step that is not the last step: a run may have gone on from it, with the same command.

    Raises ConfigError.
    """
    step = section.load_step
    for later in steps:
        if later > step and not section.load_only:
            with suppress(CheckpointError):
                saved = read_manifest(folder / f"step-{later}").run["config"]
                if saved["checkpoint"]["load_step"] == step:
                    return
    why = f"the run has the steps {steps}, and resumes from the last one without load_only"
    remedy = "Leave it out to start from the beginning"
    if steps:
        remedy = f"Use {steps if section.load_only else steps[-1:]}"
    if step in steps:
        path = shlex.quote(str(folder / f"step-{step}"))
        instead = f"--job.dump_folder=FOLDER --{PATH}={path} --{NOT_ONLY}"
        remedy += f". To go back and train on from there, replace it by {instead}"
    raise ConfigError([Problem("checkpoint.load_step", step, why, remedy)])


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
            weights = describe_checkpoint(path)
            require_files(path)
            return weights
        folder = load_extension("hugging_face_folder").open_folder(path)
        model_args = replace(folder.model_args, name=config.model.name)
        reading = load_extension("hugging_face_config")
        published = reading.read_published(path)
        notices = tuple(reading.list_ignored(published[CONFIG], model_args))
        return Weights(path, model_args, str(path.absolute()), published, notices=notices)
    except UserError as error:
        remedy = "Name a checkpoint, such as outputs/debug/checkpoint/step-200, or a complete Hugging Face folder"
        raise ConfigError([Problem(PATH, name, str(error), remedy)]) from None


def describe_checkpoint(path: Path) -> Weights:
    """Read the manifest of a checkpoint: its model and tokenizer. Raises CheckpointError."""
    manifest = read_manifest(path)
    assets = manifest.run["config"]["model"]["hf_assets_path"]
    return Weights(
        path, parse_model_args(manifest), assets, manifest.run.get(IN_MANIFEST, {}), manifest
    )
