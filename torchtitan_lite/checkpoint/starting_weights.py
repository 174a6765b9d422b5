"""Find the weights that a run starts from: a checkpoint to resume, or checkpoint.initial_load_path. Loads no tensor.

checkpoint in the dump folder    the run continues from the step of the newest readable checkpoint, or of
                                 checkpoint.load_step. A run that saves checkpoints continues only from its last
                                 step
checkpoint elsewhere             the run loads its weights; also its step and optimizer state, unless
                                 initial_load_model_only is set
Hugging Face folder              the run loads its weights
"""

import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torchtitan_lite.checkpoint.format import (
    IN_MANIFEST,
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    find_steps,
)
from torchtitan_lite.checkpoint.read import read_manifest, require_files
from torchtitan_lite.config.block import list_shapes
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.messages import ConfigError, Problem, Problems, UserError
from torchtitan_lite.config.model import MODEL_SIZES
from torchtitan_lite.config.model_rows import AUTO, ModelArgs
from torchtitan_lite.config.reader import flatten_table
from torchtitan_lite.config.schema import Checkpoint, Config, get_value
from torchtitan_lite.models.registry import CONFIG, MODELS

INITIAL_LOAD_PATH = "checkpoint.initial_load_path"
# argument that also loads optimizer state and step
NOT_ONLY = "checkpoint.no_initial_load_model_only"
# Fields of ModelArgs that must be equal in the run and in the loaded weights. They determine the shape or the meaning
# of tensors, or make modules share tensors
SIZES = (*MODEL_SIZES, "tie_embeddings")


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, with their model and tokenizer."""

    path: Path
    model_args: ModelArgs
    assets: str  # folder of the tokenizer that the weights were trained with
    # config.json and generation_config.json, if the initial weights came from a Hugging Face folder
    published: dict[str, dict]
    manifest: Manifest | None = None  # None for a Hugging Face folder
    is_resumed: bool = False  # the checkpoint is in the dump folder
    # one line for each ignored setting of config.json, and for each checkpoint that is newer than this one but cannot
    # be read
    notices: tuple[str, ...] = ()


def find_resumed(config: Config, restarted: bool) -> Weights | None:
    """Return the checkpoint to resume from: load_step, or the newest readable one. Raises ConfigError."""
    section = config.checkpoint
    folder = Path(config.job.dump_folder) / section.folder
    starts_over = config.job.overwrite and not (restarted or section.load_only)
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
            # in a restarted job, every rank runs this function, and reports a missing file later, when it opens the
            # file
            if not restarted:
                require_files(weights.path)
            skipped = [f"{reason}; the run resumes from step {step}" for reason in reasons]
            return replace(weights, is_resumed=True, notices=tuple(skipped))
        except CheckpointError as error:
            reasons.append(str(error))
            if not isinstance(error, DamagedCheckpoint):
                # Do not fall back to an earlier checkpoint: this checkpoint may be intact, and the run would repeat
                # steps.
                break
    else:
        if not reasons or section.local_folder:  # the run may resume from a snapshot
            return None
    raise ConfigError(Problem(key, get_value(config, key), "; ".join(reasons), remedy))


def names_step(section: Checkpoint, steps: list[int], restarted: bool) -> bool:
    """Return whether the run may load checkpoint.load_step.

    A run that saves may load only its last step; otherwise the run would save the later steps a second time. A job that
    torchrun has restarted ignores load_step, and resumes from its own newest checkpoint.
    """
    if section.load_only:
        return section.load_step in steps
    return section.load_step in steps[-1:] and not restarted


def check_went_on(section: Checkpoint, folder: Path, steps: list[int]) -> None:
    """Accept a load_step other than the last step if a run with the same command has already continued from it.

    Raises ConfigError otherwise.
    """
    step = section.load_step
    for later in steps:
        if later > step and not section.load_only:
            with suppress(CheckpointError):
                saved = read_manifest(folder / f"step-{later}").run["config"]
                if saved["checkpoint"]["load_step"] == step:
                    return
    why = f"the run has checkpoints of steps {steps}, and resumes only from the last step unless load_only is set"
    remedy = "Leave it out to start from the beginning"
    if steps:
        remedy = f"Use {steps if section.load_only else steps[-1:]}"
    if step in steps:
        path = shlex.quote(str(folder / f"step-{step}"))
        remedy += (
            f". To train again from step {step}, use these options instead: "
            f"--job.dump_folder=FOLDER --{INITIAL_LOAD_PATH}={path} --{NOT_ONLY}"
        )
    raise ConfigError(Problem("checkpoint.load_step", step, why, remedy))


def find_initial(config: Config) -> Weights:
    """Return the weights in initial_load_path, which is a checkpoint or a Hugging Face folder. Raises ConfigError."""
    name = config.checkpoint.initial_load_path
    path = Path(name)
    try:
        if why := load_extension("hub_names").explain_hub_name(name):
            raise UserError(why)
        if not path.is_dir():
            raise UserError(f"there is no folder {path.absolute()}")
        if not (path / CONFIG).is_file():
            weights = describe_checkpoint(path)
            require_files(path)
            return weights
        return describe_folder(path)
    except UserError as error:
        problem = Problem(
            INITIAL_LOAD_PATH,
            name,
            str(error),
            "Name a checkpoint, such as outputs/debug/checkpoint/step-200, or a complete Hugging Face folder",
        )
        raise ConfigError(problem) from None


def check_loaded_model(problems: Problems, weights: Weights) -> None:
    """Check that a run of this model can use the weights.

    Adds problems to `problems`, and a notice if the two models differ. If the run also loads the optimizer state, its
    model must equal the model of the weights. Otherwise, the two models may differ in settings that change neither the
    shape nor the meaning of a tensor.
    """
    model_args = problems.model_args
    config = problems.config
    theirs = dict(flatten_table(asdict(weights.model_args)))
    ours = dict(flatten_table(asdict(model_args)))
    differences = {}
    for name in theirs | ours:
        if ours.get(name) != theirs.get(name):
            differences[name] = f"{name} {ours.get(name)} instead of {theirs.get(name)}"
    if not differences:
        return
    is_continued = weights.is_resumed or not config.checkpoint.initial_load_model_only
    unlike = [text for name, text in differences.items() if is_continued or name in SIZES]
    wanted = list_shapes(model_args)
    stored = list_shapes(weights.model_args)
    lacking = [fqn for fqn, shape in stored.items() if wanted.get(fqn) != shape]
    if lacking and not unlike:
        unlike.append(
            f"this model has no tensor of the same name and shape for {', '.join(abbreviate(lacking))}"
        )
    if unlike:
        chosen = [f"model.{name}" for name in differences if getattr(config.model, name, None)]
        key = chosen[0] if chosen and config.model.flavor == AUTO else "model.flavor"
        remedy = 'Leave out [model] and set flavor "auto" to use that model'
        if weights.is_resumed:
            remedy += ", or use a different job.dump_folder"
        problems.refuse(key, f"it is not the model in {weights.path}: {', '.join(unlike)}", remedy)
    problems.notices.append(
        f"the model differs from the one in {weights.path}: {', '.join(differences.values())}"
    )
    if added := [fqn for fqn in wanted if fqn not in stored]:
        problems.notices.append(
            f"{len(added)} parameters are not in {weights.path}, "
            f"and start from initial weights: {', '.join(abbreviate(added))}"
        )


def abbreviate(fqns: Iterable[str]) -> list[str]:
    """Return the distinct FQNs, with `*` instead of layer numbers."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", fqn) for fqn in fqns))


def describe_folder(path: Path) -> Weights:
    """Read the config files of a Hugging Face folder: its model and tokenizer. Raises UserError."""
    model_args = load_extension("hugging_face_folder").open_folder(path).model_args
    reading = load_extension("hugging_face_config")
    published = reading.read_published(path)
    notices = tuple(reading.list_ignored(published[CONFIG], model_args))
    return Weights(path, model_args, str(path.absolute()), published, notices=notices)


def describe_checkpoint(path: Path) -> Weights:
    """Read the manifest of a checkpoint: its model and tokenizer. Raises CheckpointError."""
    manifest = read_manifest(path)
    assets = manifest.run["config"]["model"]["hf_assets_path"]
    return Weights(
        path, parse_model_args(manifest), assets, manifest.run.get(IN_MANIFEST, {}), manifest
    )


def parse_model_args(manifest: Manifest) -> ModelArgs:
    """Return the ModelArgs in the fingerprint.

    Raises CheckpointError if this code does not have the model, or if the model's table no longer lists the tensors of
    the checkpoint.
    """
    shape = manifest.fingerprint["shape"]
    model = shape["name"]
    if model not in MODELS:
        raise CheckpointError(
            f"its model is {model!r}, but this code has only {', '.join(MODELS)}: use the code that saved the weights"
        )
    model_args = parse_fields(type(MODELS[model].flavors["debug"]), shape)
    stored = {
        name.removeprefix("model."): tuple(record.shape)
        for name, record in manifest.tensors.items()
        if name.startswith("model.") and not name.endswith("expert_bias")
    }
    different = dict(list_shapes(model_args).items() ^ stored.items())
    if stored and different and not manifest.host:  # a snapshot has only the stages of its host
        raise CheckpointError(
            f"models/{model} has changed since this checkpoint was saved: {', '.join(abbreviate(sorted(different)))}. "
            "Use the code that saved the checkpoint, or give the changed model a new name in models/registry.py"
        )
    return model_args


def parse_fields(kind: type, values: dict[str, Any]) -> Any:
    """Build a dataclass from a JSON object. Raises CheckpointError for unknown fields, which a fork may have added."""
    hints = get_type_hints(kind)
    unknown = [f"{name} = {values[name]!r}" for name in values if name not in hints]
    if unknown:
        raise CheckpointError(
            f"its model has unknown fields: {', '.join(unknown)}: use the code that saved the weights"
        )
    parsed = {}
    for name, value in values.items():
        if isinstance(value, dict):
            hint = hints[name]
            value = parse_fields((*get_args(hint), hint)[0], value)  # MoEArgs of `MoEArgs | None`
        parsed[name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
    return kind(**parsed)
