"""Open a model for `generate`, `eval` and `convert`, and load all its weights in one process.

step-200/                       a checkpoint: its manifest describes the model and names the tokenizer
checkpoint/, outputs/debug/     the newest checkpoint in this folder
config.json, *.safetensors      a Hugging Face folder with config.json and a tokenizer
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.build import find_model_class
from torchtitan_lite.checkpoint.format import MANIFEST, find_steps, parse_model_args
from torchtitan_lite.checkpoint.hugging_face import load_weights
from torchtitan_lite.checkpoint.hugging_face_config import (
    CONFIG,
    GENERATION_CONFIG,
    IN_MANIFEST,
    LENGTH,
    read_published,
)
from torchtitan_lite.checkpoint.hugging_face_folder import open_folder
from torchtitan_lite.checkpoint.load import OpenCheckpoint, open_checkpoint
from torchtitan_lite.config.arguments import explain_hub_name
from torchtitan_lite.config.block import list_expert_biases
from torchtitan_lite.config.messages import ConfigError, UserError
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.model.moe import list_moes

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}  # bfloat16 is slower on a CPU


class SourceError(UserError):
    """Raised if a source or a prompt cannot be used."""


@dataclass(frozen=True)
class ModelSource:
    """Description of a model whose weights are not loaded yet."""

    path: Path
    model_args: ModelArgs
    attention: str  # a key of config/choices.py: ATTENTIONS
    tokenizer: Tokenizer
    end_ids: frozenset[int]  # end tokens: a text ends at any of them
    context: int | None  # length of the training sequences in tokens, if known
    published: dict[
        str, dict[str, Any]
    ]  # config.json and generation_config.json that came with the weights, if any
    fill: Callable[
        [dict[str, Tensor]], None
    ]  # reads weights and expert biases into these tensors (FQN -> tensor)
    checkpoint: OpenCheckpoint | None  # None: a Hugging Face folder


def open_source(path: Path, *, tokenizer: str | None, verify: bool) -> ModelSource:
    """Open `path`. Raises SourceError if there is no model, CheckpointError or HuggingFaceError if it is bad."""
    if (path / CONFIG).is_file():
        source = describe_hugging_face(path, tokenizer)
    else:
        source = describe_checkpoint(
            open_checkpoint(find_checkpoint(path), verify=verify), tokenizer
        )
    n_rows, n_ids = source.model_args.vocab_size, source.tokenizer.vocab_size
    if source.tokenizer.eos_id >= n_rows:
        why = f"the end token of {source.tokenizer.path} has the id {source.tokenizer.eos_id}"
        raise SourceError(
            f"{path}: its model has {n_rows} rows, but {why}. Name the right one with --tokenizer."
        )
    if n_ids > n_rows:
        print(
            f"{source.tokenizer.path} has {n_ids} ids, but the model has {n_rows} rows",
            file=sys.stderr,
        )
    return source


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint; otherwise the newest checkpoint in it or in its folder checkpoint/."""
    if (path / MANIFEST).is_file():
        return path
    for folder in (path, path / "checkpoint"):
        if steps := find_steps(folder):
            return folder / f"step-{steps[-1]}"
    if why := explain_hub_name(path):
        raise SourceError(f"{why}. Then name that folder.")
    why = (
        "has neither a checkpoint nor a Hugging Face model" if path.is_dir() else "is not a folder"
    )
    runs = sorted(
        str(folder.parent) for folder in Path("outputs").glob("*/checkpoint") if find_steps(folder)
    )
    remedy = (
        f"Existing runs: {', '.join(runs[:5])}"
        if runs
        else "A run with --checkpoint.enable saves checkpoints"
    )
    raise SourceError(f"{path} {why}. {remedy}. Or name a folder with {CONFIG}.")


def describe_checkpoint(checkpoint: OpenCheckpoint, tokenizer: str | None) -> ModelSource:
    path, manifest = checkpoint.folder, checkpoint.manifest
    config, published = manifest.run.get("config", {}), manifest.run.get(IN_MANIFEST, {})
    section, model_args = config.get("model", {}), parse_model_args(manifest)
    found = load_named_tokenizer(tokenizer or section["hf_assets_path"], path)
    if not tokenizer and manifest.fingerprint["tokenizer"] != found.fingerprint:
        why = f"{section['hf_assets_path']} is not the tokenizer that it was trained with"
        raise SourceError(
            f"{path}: {why}. Name the right one with --tokenizer, which is not checked."
        )
    # The tokenizer's folder may name more end tokens.
    beside = published or (read_published(found.path.parent) if found.path.is_file() else {})
    trained, length = (
        config.get("training", {}).get("seq_len", 0),
        published.get(CONFIG, {}).get(LENGTH) or 0,
    )

    def fill(tensors: dict[str, Tensor]) -> None:
        for fqn, tensor in tensors.items():
            tensor.copy_(checkpoint.read(f"model.{fqn}"))

    return ModelSource(
        path=path,
        model_args=model_args,
        attention=section.get("attention", "causal"),
        tokenizer=found,
        end_ids=read_end_ids(beside) | {found.eos_id},
        context=max(trained, length)
        or None,  # fine-tuning on short sequences keeps the original context length
        published=published,
        fill=fill,
        checkpoint=checkpoint,
    )


def describe_hugging_face(path: Path, tokenizer: str | None) -> ModelSource:
    folder, published = open_folder(path), read_published(path)
    found = load_named_tokenizer(tokenizer or str(path.absolute()), path)
    return ModelSource(
        path=path,
        model_args=folder.model_args,
        attention="causal",
        tokenizer=found,
        end_ids=read_end_ids(published) | {found.eos_id},
        context=published[CONFIG].get(LENGTH),
        published=published,
        fill=partial(load_weights, folder),
        checkpoint=None,
    )


def read_end_ids(published: dict[str, dict[str, Any]]) -> frozenset[int]:
    """Return the end tokens: eos_token_id in generation_config.json, else in config.json, else none."""
    values = [published.get(name, {}).get("eos_token_id") for name in (GENERATION_CONFIG, CONFIG)]
    value = next((value for value in values if value not in (None, [])), [])
    return frozenset(value if isinstance(value, list) else [value])


def load_named_tokenizer(assets: str, path: Path) -> Tokenizer:
    """Load the tokenizer `assets` for the model in `path`. Raises SourceError if there is none."""
    try:
        return load_tokenizer(assets)
    except ConfigError as error:
        why = error.problems[0].why
        raise SourceError(
            f"{path}: its tokenizer cannot be loaded: {why}. Name it with --tokenizer FOLDER."
        ) from None


@torch.no_grad()
def build_model(source: ModelSource, device: torch.device) -> nn.Module:
    """Build the model on `device` and load its weights."""
    model_args = source.model_args
    with torch.device("meta"):
        model = find_model_class(model_args.name)(model_args, attention=source.attention)
    model.to(DTYPES[device.type]).to_empty(device=device).eval()
    for _, moe in list_moes(model):
        moe.router.reset(device)
    if model_args.tie_embeddings:  # to_empty made two tensors out of the shared one
        model.output.weight = model.tok_embeddings.weight
    biases = {fqn: model.get_buffer(fqn) for fqn in list_expert_biases(model_args)}
    source.fill(dict(model.named_parameters()) | biases)
    return model
