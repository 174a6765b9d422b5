"""Which tokenizer a run uses: the one that its weights were trained with, where they know it. Needs no torch.

    the run's first weights are those of           model.hf_assets_path = "auto" is
    a checkpoint that it resumes                   what the manifest of that checkpoint names
    checkpoint.initial_load_path                   what the manifest there names
      + initial_load_in_hf                         that Hugging Face folder
    none: initial weights                          assets/tokenizer

Another tokenizer is refused. Its ids are those of other words, and nothing but a high loss would say so.
"""

from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import CONFIG
from torchtitan_lite.checkpoint.manifest import CheckpointError, Manifest, find_steps, read_manifest
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.tokenizer_files import KEY, find_tokenizer, read_vocabulary
from torchtitan_lite.data.vocabulary import Vocabulary

AUTO = "auto"
SHIPPED = "assets/tokenizer"


@dataclass(frozen=True)
class Weights:
    """The weights that a run starts from, and what they say of their tokenizer."""

    path: Path
    assets: str | None  # what model.hf_assets_path would be
    identity: str | None  # of the vocabulary


@dataclass(frozen=True)
class Choice:
    assets: str  # model.hf_assets_path, resolved
    vocabulary: Vocabulary
    notices: list[str]


def choose_tokenizer(config: Config, resumed_step: int) -> Choice:
    """The tokenizer of the run. Raises ConfigError where there is none, or another than that of the weights."""
    named = None if config.model.hf_assets_path == AUTO else config.model.hf_assets_path
    weights = find_weights(config, resumed_step)
    if weights is None:
        return Choice(named or SHIPPED, read_vocabulary(named or SHIPPED), [])
    assets = named or weights.assets
    if assets is None:
        why = f"no tokenizer comes with the weights in {weights.path}"
        raise ConfigError([Problem(KEY, AUTO, why, "Name the one that they were trained with")])
    vocabulary = read_vocabulary(assets)
    if weights.identity not in (None, vocabulary.identity):
        why = f"the weights in {weights.path} were trained with another tokenizer, so its ids mean other words to them"
        if named is None:
            remedy = f"{assets}, which they name, has changed: name the one that they were trained with"
        else:
            remedy = f"Leave it out to have theirs ({weights.assets})" if weights.assets else "Name theirs"
        raise ConfigError([Problem(KEY, assets, why, remedy)])
    if named is None:
        notice = f"the tokenizer is that of the weights in {weights.path}: {vocabulary.path}"
    else:
        notice = f"{weights.path} does not say whether {KEY} = {named!r} is the tokenizer of its weights"
    return Choice(assets, vocabulary, [notice] * (named is None or weights.identity is None))


def find_weights(config: Config, resumed_step: int) -> Weights | None:
    """Those that the run resumes, else those of initial_load_path. What cannot be read there, other checks report."""
    section = config.checkpoint
    folder = Path(config.job.dump_folder) / section.folder
    for step in reversed(find_steps(folder) if resumed_step else []):
        if step <= resumed_step and (manifest := find_manifest(folder / f"step-{step}")):
            return describe_checkpoint(folder / f"step-{step}", manifest)
    if not (section.enable and section.initial_load_path):
        return None
    path = Path(section.initial_load_path)
    if section.initial_load_in_hf:
        return describe_hugging_face(path) if (path / CONFIG).is_file() else None
    manifest = find_manifest(path)
    return manifest and describe_checkpoint(path, manifest)


def find_manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def describe_checkpoint(path: Path, manifest: Manifest) -> Weights:
    """What a manifest says, if it does: nothing in it is believed."""
    config, identity = manifest.run.get("config"), manifest.fingerprint.get("tokenizer")
    model = config.get("model") if isinstance(config, dict) else None
    assets = model.get("hf_assets_path") if isinstance(model, dict) else None
    return Weights(path, *(text if isinstance(text, str) else None for text in (assets, identity)))


def describe_hugging_face(path: Path) -> Weights:
    """The tokenizer beside the weights, if there is one that can be read here."""
    assets = str(path.absolute())
    if find_tokenizer(assets) is None:
        return Weights(path, None, None)
    try:
        return Weights(path, assets, read_vocabulary(assets).identity)
    except ConfigError:  # says why where it is the one that the run would use
        return Weights(path, assets, None)
