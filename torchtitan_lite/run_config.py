"""Read the config of a run and find the weights that it starts from, their model and their tokenizer. No torch.

    the run starts from                  model.flavor = "auto" means    model.hf_assets_path = "auto" means
    a checkpoint that it resumes         the model in its manifest      the tokenizer that its manifest names
    initial_load_path: a checkpoint      the model in its manifest      the tokenizer that its manifest names
    initial_load_path: a Hugging Face    the model in its config.json   the tokenizer in that folder
      folder
    initial weights                      debug                          assets/tokenizer

Every tool reads its config here, so all of them see the same model. A tokenizer that is not the one the weights were
trained with is refused: the same ids would mean other words, and a high loss would be the only symptom.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import (
    CONFIG,
    IN_MANIFEST,
    LENGTH,
    HuggingFaceError,
    read_model_args,
    read_published,
)
from torchtitan_lite.checkpoint.hugging_face_folder import REMEDY
from torchtitan_lite.checkpoint.manifest import CheckpointError, Manifest, find_steps, parse_model_args, read_manifest
from torchtitan_lite.config.flavors import AUTO, ModelArgs
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import ConfigReading, read_config
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.data.tokenizer import KEY as TOKENIZER
from torchtitan_lite.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer

PATH = "checkpoint.initial_load_path"
SHIPPED = "assets/tokenizer"
HIGHEST_LR = 1e-4  # for trained weights; configs/finetune.toml has a tenth of it


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, and what came with them."""

    path: Path
    model_args: ModelArgs
    assets: str | None  # what model.hf_assets_path = "auto" means; None: no tokenizer came with them
    tokenizer: str | None  # its identity; None: not known
    published: dict[str, dict]  # config.json and generation_config.json if they came from a Hugging Face folder
    step: int | None  # of the checkpoint; None: a Hugging Face folder
    manifest: Manifest | None = None  # of the checkpoint


@dataclass(frozen=True)
class RunConfig(ConfigReading):
    """A config whose dump folder and model are resolved."""

    weights: Weights | None  # None: the run starts from initial weights
    resumed_step: int  # the last step that is already done; 0: the run does not resume


def read_run_config(args: list[str], *, restarted: bool = False) -> RunConfig:
    """Read a config as `read_config` does, and the weights that it names. Raises nothing: see `problems`."""
    reading = read_config(args)
    config, problems, notices, weights = reading.config, list(reading.problems), list(reading.notices), None
    if config.job.dump_folder == AUTO:
        config = with_value(config, "job.dump_folder", name_dump_folder(config, reading.config_name))
    resumed_step = find_resumed_step(config, restarted)
    try:
        weights = find_weights(config, resumed_step)
    except ConfigError as error:
        problems += error.problems
    if weights and config.model.flavor == AUTO:
        config = replace(config, model=replace(config.model, row=weights.model_args))
    section = config.checkpoint
    if weights and (weights.published or (section.initial_load_path and section.initial_load_model_only)):
        config = adapt_to_weights(config, weights, reading.given, notices)
    return RunConfig(config, problems, notices, reading.config_name, reading.given, weights, resumed_step)


def name_dump_folder(config: Config, config_name: str) -> str:
    """Return what job.dump_folder = "auto" means. The name of runs/mine/checkpoint/step-9 is "mine"."""
    if not config.checkpoint.initial_load_path:
        return f"./outputs/{config_name}"
    path = Path(config.checkpoint.initial_load_path).absolute()
    return f"./outputs/finetune-{(path.parents[1] if path.parent.name == config.checkpoint.folder else path).name}"


def adapt_to_weights(config: Config, weights: Weights, given: frozenset[str], notices: list[str]) -> Config:
    """Return the config with the defaults for trained weights, and add notices. A key that is `given` stays."""
    context = weights.published.get(CONFIG, {}).get(LENGTH, config.training.seq_len)
    if context < config.training.seq_len and "training.seq_len" not in given:
        config = with_value(config, "training.seq_len", context)
        notices.append(f"training.seq_len is {context}, the context of the weights")
    if weights.model_args.mixture and "training.expert_bias_rate" not in given:
        config = with_value(config, "training.expert_bias_rate", 0.0)
        notices.append("training.expert_bias_rate is 0, because no Hugging Face folder has a bias of experts")
    if config.optimizer.lr > HIGHEST_LR:
        why = "is high for trained weights: they may lose what they have learned"
        notices.append(f"optimizer.lr = {config.optimizer.lr:g} {why}. configs/finetune.toml has 1e-5")
    return config


def find_resumed_step(config: Config, restarted: bool) -> int:
    """Return checkpoint.load_step, or the step of the newest checkpoint; 0 if the run does not resume.

    A job that torchrun `restarted` resumes its own newest checkpoint.
    """
    if not config.checkpoint.enable or (config.job.overwrite and not restarted):
        return 0
    steps = find_steps(Path(config.job.dump_folder) / config.checkpoint.folder)
    load_step = config.checkpoint.load_step
    return max(steps, default=0) if load_step == -1 or restarted else load_step


def find_weights(config: Config, resumed_step: int) -> Weights | None:
    """Return the weights that the run resumes, or the weights in initial_load_path. Raises ConfigError."""
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    for step in reversed(find_steps(folder) if resumed_step else []):
        try:
            if step <= resumed_step:
                return describe_checkpoint(folder / f"step-{step}")
        except CheckpointError:  # a damaged one; restore_or_load reports it
            continue
    if not (path := config.checkpoint.initial_load_path):
        return None
    try:
        if (Path(path) / CONFIG).is_file():
            return describe_hugging_face(Path(path), config.model.name)
        return describe_checkpoint(Path(path))
    except HuggingFaceError as error:
        raise ConfigError([Problem(PATH, path, "; ".join(error.problems), REMEDY)]) from None
    except CheckpointError as error:
        remedy = "Name a checkpoint, such as outputs/debug/checkpoint/step-200, or a Hugging Face folder"
        raise ConfigError([Problem(PATH, path, str(error), remedy)]) from None


def describe_checkpoint(path: Path) -> Weights:
    """Return what the manifest of a checkpoint says about its weights. Raises CheckpointError."""
    manifest = read_manifest(path)
    assets = manifest.run.get("config", {}).get("model", {}).get("hf_assets_path")
    identity = manifest.fingerprint.get("tokenizer")
    published = manifest.run.get(IN_MANIFEST, {})
    return Weights(path, parse_model_args(manifest), assets, identity, published, manifest.step, manifest)


def describe_hugging_face(path: Path, name: str) -> Weights:
    """Return what a Hugging Face folder says about its weights. Raises HuggingFaceError. `name`: model.name."""
    model_args, published, assets = replace(read_model_args(path), name=name), read_published(path), None
    if find_tokenizer(str(path.absolute())) is not None:
        assets = str(path.absolute())
    return Weights(path, model_args, assets, None, published, step=None)


# ---------------------------------------------------------------- the tokenizer


@dataclass(frozen=True)
class TokenizerChoice:
    assets: str  # model.hf_assets_path, resolved
    tokenizer: Tokenizer
    notices: list[str]


def choose_tokenizer(config: Config, weights: Weights | None) -> TokenizerChoice:
    """Return the tokenizer of the run. Raises ConfigError if there is none, or not the one of the weights."""
    named = None if config.model.hf_assets_path == AUTO else config.model.hf_assets_path
    if weights is None:
        return TokenizerChoice(named or SHIPPED, load_tokenizer(named or SHIPPED), [])
    assets = named or weights.assets
    if assets is None:
        why = f"no tokenizer comes with the weights in {weights.path}"
        raise ConfigError([Problem(TOKENIZER, AUTO, why, "Name the one that they were trained with")])
    tokenizer = load_tokenizer(assets)
    identity = weights.tokenizer
    if identity is None and named and weights.assets:  # a Hugging Face folder is not asked unless it matters
        identity = load_tokenizer(weights.assets).identity
    if identity not in (None, tokenizer.identity):
        why = f"the weights in {weights.path} were trained with another tokenizer, whose ids mean other words"
        if named is None:
            remedy = f"{assets} has changed since: name the tokenizer that they were trained with"
        else:
            remedy = f"Leave it out to use theirs ({weights.assets})" if weights.assets else "Name theirs"
        raise ConfigError([Problem(TOKENIZER, assets, why, remedy)])
    notices = []
    if named is None:
        notices = [f"the tokenizer is that of the weights in {weights.path}: {tokenizer.path}"]
    elif identity is None:
        notices = [f"{weights.path} does not say whether {TOKENIZER} = {named!r} is the tokenizer of its weights"]
    return TokenizerChoice(assets, tokenizer, notices)
