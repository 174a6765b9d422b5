"""Read the config of a run, with the weights that it starts from: their model and tokenizer, and what is wrong there.

checkpoint.initial_load_path        step-200 of another run, or a checkpoint that `convert` made
  + initial_load_in_hf              a Hugging Face folder, whose config.json gives what [model] leaves out
checkpoint.last_save_in_hf          what this run exports

    the run's first weights are those of           model.hf_assets_path = "auto" is
    a checkpoint that it resumes                   what the manifest of that checkpoint names
    checkpoint.initial_load_path                   what the manifest there names
      + initial_load_in_hf                         that Hugging Face folder
    none: initial weights                          assets/tokenizer

Every tool reads its config here, so that check, plan, verify, certificates and checkpoints see every number of the
model. A number of [model] that is given and differs is refused, and so is another tokenizer than that of the weights:
its ids are those of other words, and nothing but a high loss would say so. Needs no torch.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import (
    CONFIG,
    HuggingFaceError,
    find_published,
    read_model_args,
    read_published,
    take_model,
)
from torchtitan_lite.checkpoint.hugging_face_families import explain_unwritable
from torchtitan_lite.checkpoint.hugging_face_folder import REMEDY, open_folder
from torchtitan_lite.checkpoint.manifest import CheckpointError, Manifest, find_steps, parse_model_args, read_manifest
from torchtitan_lite.config.flavors import AUTO, ModelArgs
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import ConfigReading, read_config
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.data.tokenizer import KEY as TOKENIZER
from torchtitan_lite.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer

PATH = "checkpoint.initial_load_path"
SHIPPED = "assets/tokenizer"


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
        except HuggingFaceError as error:
            problems.append(Problem(PATH, config.checkpoint.initial_load_path, "; ".join(error.problems), REMEDY))
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


def list_resumed(config: Config, resumed_step: int) -> Iterator[tuple[Path, Manifest]]:
    """Yield the sound checkpoints up to `resumed_step`, newest first. Whoever loads the others says what is wrong."""
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    for step in reversed(find_steps(folder) if resumed_step else []):
        path = folder / f"step-{step}"
        try:
            if step <= resumed_step:
                yield path, read_manifest(path)
        except CheckpointError:
            continue


def find_model(config: Config, resumed_step: int) -> tuple[Path, ModelArgs]:
    """Return the weights that a run with a Hugging Face folder starts from, and their model."""
    for path, manifest in list_resumed(config, resumed_step):
        try:
            return path, parse_model_args(manifest)
        except (KeyError, TypeError, AttributeError):  # reported by whoever loads it
            continue
    folder = Path(config.checkpoint.initial_load_path)
    return folder, read_model_args(folder)


# ---------------------------------------------------------------- do the weights fit?


def check_initial_load(config: Config, model_args: ModelArgs) -> list[Problem]:
    """Return why the initial weights cannot be loaded into this model. Not called for a run that resumes."""
    section, path = config.checkpoint, config.checkpoint.initial_load_path
    if not path:
        if not section.initial_load_in_hf:
            return []
        why, remedy = f"there is no {PATH}", "Name the Hugging Face folder there"
        return [Problem("checkpoint.initial_load_in_hf", True, why, remedy)]
    if section.initial_load_in_hf and not section.initial_load_model_only:
        why = "a Hugging Face folder has neither optimizer state nor step"
        return [Problem("checkpoint.initial_load_model_only", False, why, "Set it to true")]
    try:
        if section.initial_load_in_hf:  # [model] has the sizes in its config.json already
            open_folder(Path(path))
            read_published(Path(path))
            return []
        manifest = read_manifest(Path(path))
    except HuggingFaceError as error:
        return [Problem(PATH, path, "; ".join(error.problems), REMEDY)]
    except CheckpointError as error:
        return [Problem(PATH, path, str(error), "Name a checkpoint, such as outputs/debug/checkpoint/step-200")]
    if not section.initial_load_model_only and Path(path).name != f"step-{manifest.step}":
        why = f"the run would continue from step {manifest.step}, and the name does not say so"
        return [Problem(PATH, path, why, f"Name it step-{manifest.step}, or set checkpoint.initial_load_model_only")]
    expected, seen = json.loads(json.dumps(asdict(model_args))), manifest.fingerprint.get("shape")
    if seen == expected:
        return []
    seen = seen if isinstance(seen, dict) else {}
    names = [name for name in expected if seen.get(name) != expected[name]]
    different = ", ".join(f"{name} {seen.get(name)!r} instead of {expected[name]!r}" for name in names)
    return [Problem(PATH, path, f"it is of another model: {different}", "Set the keys of [model] to those")]


def check_export(config: Config, model_args: ModelArgs) -> list[Problem]:
    """Return why this model cannot be exported for transformers."""
    if config.checkpoint.enable and config.checkpoint.last_save_in_hf and (why := explain_unwritable(model_args)):
        return [Problem("checkpoint.last_save_in_hf", True, why, "Set it to false, or change [model]")]
    return []


# ---------------------------------------------------------------- which tokenizer were they trained with?


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, and what came with them."""

    path: Path
    assets: str | None  # what model.hf_assets_path would be
    identity: str | None  # of the tokenizer
    published: dict[str, dict]  # config.json and generation_config.json, if they ever were in a Hugging Face folder


@dataclass(frozen=True)
class TokenizerChoice:
    assets: str  # model.hf_assets_path, resolved
    tokenizer: Tokenizer
    notices: list[str]


def choose_tokenizer(config: Config, weights: Weights | None) -> TokenizerChoice:
    """Return the tokenizer of the run. Raises ConfigError if there is none, or another than that of the weights."""
    named = None if config.model.hf_assets_path == AUTO else config.model.hf_assets_path
    if weights is None:
        return TokenizerChoice(named or SHIPPED, load_tokenizer(named or SHIPPED), [])
    assets = named or weights.assets
    if assets is None:
        why = f"no tokenizer comes with the weights in {weights.path}"
        raise ConfigError([Problem(TOKENIZER, AUTO, why, "Name the one that they were trained with")])
    tokenizer = load_tokenizer(assets)
    if weights.identity not in (None, tokenizer.identity):
        why = f"the weights in {weights.path} were trained with another tokenizer, so its ids mean other words to them"
        if named is None:
            remedy = f"{assets}, which they name, has changed: name the one that they were trained with"
        else:
            remedy = f"Leave it out to have theirs ({weights.assets})" if weights.assets else "Name theirs"
        raise ConfigError([Problem(TOKENIZER, assets, why, remedy)])
    notices = []
    if named is None:
        notices = [f"the tokenizer is that of the weights in {weights.path}: {tokenizer.path}"]
    elif weights.identity is None:
        notices = [f"{weights.path} does not say whether {TOKENIZER} = {named!r} is the tokenizer of its weights"]
    return TokenizerChoice(assets, tokenizer, notices)


def find_weights(config: Config, resumed_step: int) -> Weights | None:
    """Return those that the run resumes, else those of initial_load_path. Other checks report what is wrong there."""
    for path, manifest in list_resumed(config, resumed_step):
        return describe_checkpoint(path, manifest)
    path = Path(config.checkpoint.initial_load_path)
    if not config.checkpoint.initial_load_path:
        return None
    if config.checkpoint.initial_load_in_hf:
        return describe_hugging_face(path) if (path / CONFIG).is_file() else None
    try:
        return describe_checkpoint(path, read_manifest(path))
    except CheckpointError:
        return None


def describe_checkpoint(path: Path, manifest: Manifest) -> Weights:
    """Return what the manifest says; its values may have any type."""
    config, identity = manifest.run.get("config"), manifest.fingerprint.get("tokenizer")
    model = config.get("model") if isinstance(config, dict) else None
    assets = model.get("hf_assets_path") if isinstance(model, dict) else None
    texts = (text if isinstance(text, str) else None for text in (assets, identity))
    return Weights(path, *texts, find_published(manifest.run))


def describe_hugging_face(path: Path) -> Weights:
    """Return what is beside the weights, as far as it can be read here."""
    assets = str(path.absolute())
    try:
        published = read_published(path)
    except HuggingFaceError:  # check_initial_load reports it
        published = {}
    if find_tokenizer(assets) is None:
        return Weights(path, None, None, published)
    try:
        return Weights(path, assets, load_tokenizer(assets).identity, published)
    except ConfigError:  # raised again if it is the one that the run would use
        return Weights(path, assets, None, published)
