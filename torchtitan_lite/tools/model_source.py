"""Open the model that `generate`, `eval` and `convert` read, and load all its weights in one process.

    step-200/                       a checkpoint: its manifest describes the model and names the tokenizer
    checkpoint/, outputs/debug/     the newest checkpoint there
    config.json, *.safetensors      Hugging Face: config.json describes the model, the tokenizer is beside it

Weights go from file to model one tensor at a time, and are converted on the way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.checkpoint.hugging_face import read_tensor
from torchtitan_lite.checkpoint.hugging_face_config import (
    CONFIG,
    GENERATION_CONFIG,
    LENGTH,
    HuggingFaceError,
    find_published,
    read_length,
    read_published,
)
from torchtitan_lite.checkpoint.hugging_face_folder import open_folder
from torchtitan_lite.checkpoint.manifest import MANIFEST, find_steps, parse_model_args
from torchtitan_lite.checkpoint.storage import OpenCheckpoint, open_checkpoint
from torchtitan_lite.config.block import list_expert_biases
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.model.moe import list_mixtures
from torchtitan_lite.step import MODELS

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}  # a CPU is slower in bfloat16


class SourceError(ValueError):
    """A source or a prompt cannot be used."""


@dataclass(frozen=True)
class ModelSource:
    """A model that is described, and not yet in memory."""

    path: Path
    model_args: ModelArgs
    model_class: Callable[..., nn.Module]
    attention: str  # a key of config/choices.py: ATTENTIONS
    tokenizer: Tokenizer
    end_ids: frozenset[int]  # tokens after which a text ends
    context: int | None  # tokens that it was trained to read, if that is known
    context_key: str  # where that is written
    published: dict[str, dict[str, Any]]  # config.json and generation_config.json that the weights came with, if any
    has_biases: bool  # of experts: a Hugging Face folder has none
    read: Callable[[str], Tensor]  # FQN -> the whole tensor, on the CPU, in the dtype of its file


def open_source(path: Path, *, tokenizer: str | None, verify: bool) -> ModelSource:
    """Open `path`. Raises SourceError where there is no model, CheckpointError or HuggingFaceError for a bad one."""
    if (path / CONFIG).is_file():
        return describe_hugging_face(path, tokenizer)
    return describe_checkpoint(open_checkpoint(find_checkpoint(path), verify=verify), tokenizer)


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a step-N, else the newest one in it or in its folder checkpoint/."""
    if (path / MANIFEST).is_file():
        return path
    for folder in (path, path / "checkpoint"):
        if steps := find_steps(folder):
            return folder / f"step-{steps[-1]}"
    why = "holds no checkpoint and no model of Hugging Face" if path.is_dir() else "is not a folder"
    folders = {each for root in (path, path.parent, Path("outputs")) for each in root.glob("*/checkpoint")}
    runs = sorted(folder.parent for folder in folders if find_steps(folder))
    there = f"There is {', '.join(map(str, runs[:5]))}" if runs else "A run with --checkpoint.enable makes one"
    raise SourceError(f"{path} {why}. {there}. Or name a folder with {CONFIG}.")


def describe_checkpoint(checkpoint: OpenCheckpoint, tokenizer: str | None) -> ModelSource:
    """Return what the manifest describes. Checks that its tensors are there before memory is allocated for them."""
    path, manifest = checkpoint.folder, checkpoint.manifest
    try:
        config = manifest.run.get("config", {})
        section, published = config.get("model", {}), find_published(manifest.run)
        trained, length = config.get("training", {}).get("seq_len"), read_length(published.get(CONFIG, {}))
        trained = trained if isinstance(trained, int) and trained > 0 else None
        model_class, _ = MODELS[section.get("name", "llama3")]
        model_args = parse_model_args(manifest)
        difference = find_difference(model_args, model_class, checkpoint)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
        why = f"{type(error).__name__} {error}"
        raise SourceError(f"{path}: its {MANIFEST} does not describe a model that is known here: {why}.") from None
    if difference:
        raise SourceError(f"{path}: {difference}")
    assets = tokenizer or section.get("hf_assets_path")
    found = find_tokenizer(assets, model_args, path)
    if not tokenizer and manifest.fingerprint.get("tokenizer", found.identity) != found.identity:
        why = f"{assets} holds another tokenizer than the one that it was trained with"
        raise SourceError(f"{path}: {why}. Name the right one with --tokenizer, which is not compared.")
    if not published and found.path.is_file():  # the folder of the tokenizer may name further end tokens
        beside = read_published(found.path.parent)
    else:
        beside = published
    return ModelSource(
        path=path,
        model_args=model_args,
        model_class=model_class,
        attention=section.get("attention", "causal"),  # a converted model does not say
        tokenizer=found,
        end_ids=read_end_ids(beside, path) | {found.eos_id},
        context=max(trained or 0, length or 0) or None,  # a model that was trained further still reads long texts
        context_key=LENGTH if (length or 0) > (trained or 0) else "training.seq_len",
        published=published,
        has_biases=True,
        read=lambda fqn: checkpoint.read(f"model.{fqn}"),
    )


def find_difference(args: ModelArgs, model_class: Callable[..., nn.Module], checkpoint: OpenCheckpoint) -> str | None:
    """Return what the checkpoint's weights lack to be this model."""
    held = {name: size for name, (_, size) in checkpoint.tensors.items()}
    if args.n_layers > len(held):
        return f"it holds {len(held)} tensors, and its {MANIFEST} calls for {args.n_layers} layers."
    with torch.device("meta"):
        model = model_class(args)
    sizes = {fqn: tuple(parameter.shape) for fqn, parameter in model.named_parameters()} | list_expert_biases(args)
    for fqn, expected in sizes.items():
        seen = held.get(f"model.{fqn}")
        if seen != expected:
            problem = "is missing" if seen is None else f"has the shape {list(seen)}"
            return f"model.{fqn} {problem}, and its {MANIFEST} calls for {list(expected)}."
    return None


def describe_hugging_face(path: Path, tokenizer: str | None) -> ModelSource:
    folder, published = open_folder(path), read_published(path)
    found = find_tokenizer(tokenizer or str(path.absolute()), folder.model_args, path)
    return ModelSource(
        path=path,
        model_args=folder.model_args,
        model_class=MODELS["llama3"][0],
        attention="causal",
        tokenizer=found,
        end_ids=read_end_ids(published, path) | {found.eos_id},
        context=read_length(published[CONFIG]),
        context_key=LENGTH,
        published=published,
        has_biases=False,
        read=partial(read_tensor, folder),
    )


def read_end_ids(published: dict[str, dict[str, Any]], place: Path) -> frozenset[int]:
    """Return the tokens that end a text: eos_token_id of generation_config.json, else of config.json, else none.

    Raises HuggingFaceError for a value that is not a token id.
    """
    for name in (GENERATION_CONFIG, CONFIG):
        value = published.get(name, {}).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int and id >= 0 for id in ids):
            raise HuggingFaceError(place, [f"{name}: eos_token_id = {value!r}; the id of a token, or a list of ids"])
        if ids:
            return frozenset(ids)
    return frozenset()


def find_tokenizer(assets: object, args: ModelArgs, path: Path) -> Tokenizer:
    """Load the tokenizer. Raises SourceError if there is none, or if it has more tokens than the model."""
    if not isinstance(assets, str):
        raise SourceError(f"{path} does not say which tokenizer it was trained with. Name it with --tokenizer FOLDER.")
    try:
        tokenizer = load_tokenizer(assets)
    except ConfigError as error:
        why = error.problems[0].why
        raise SourceError(f"{path}: its tokenizer is not found: {why}. Name it with --tokenizer FOLDER.") from None
    if tokenizer.vocab_size > args.vocab_size:
        why = f"the tokenizer {assets} has {tokenizer.vocab_size} tokens, and the model {args.vocab_size}"
        raise SourceError(f"{path}: {why}. Name the right one with --tokenizer.")
    return tokenizer


def build_model(source: ModelSource, device: torch.device) -> nn.Module:
    """Return the model with its weights."""
    args = source.model_args
    with torch.device("meta"):
        model = source.model_class(args, attention=source.attention)
    model.to(DTYPES[device.type]).to_empty(device=device).eval()
    for _, mixture in list_mixtures(model):
        mixture.router.reset(device)
    if args.tie_embeddings:  # to_empty made two tensors of the one
        model.output.weight = model.tok_embeddings.weight
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(source.read(fqn))
        for fqn in list_expert_biases(args) if source.has_biases else ():
            model.get_buffer(fqn).copy_(source.read(fqn))
    return model
