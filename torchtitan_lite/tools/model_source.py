"""Open a model for `generate`, `eval` and `convert`, and load all its weights in one process.

step-200/                       a checkpoint: its manifest describes the model and names the tokenizer
checkpoint/, outputs/debug/     a folder of checkpoints, or a run: its newest checkpoint is used
config.json, *.safetensors      a Hugging Face folder; it also has the tokenizer
"""

from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan_lite.build import find_model_class
from torchtitan_lite.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    find_steps,
)
from torchtitan_lite.checkpoint.load import OpenCheckpoint
from torchtitan_lite.checkpoint.starting_weights import describe_checkpoint, describe_folder
from torchtitan_lite.config.block import list_expert_biases
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.experts import explain_strides
from torchtitan_lite.config.messages import ConfigError, UserError, tell
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.extensions.hub_names import explain_hub_name
from torchtitan_lite.extensions.hugging_face import load_weights
from torchtitan_lite.extensions.hugging_face_config import GENERATION_CONFIG, read_published
from torchtitan_lite.from_weights import find_fingerprint
from torchtitan_lite.model.head import share_embedding
from torchtitan_lite.model.moe import list_moes
from torchtitan_lite.models.registry import CONFIG, LENGTH
from torchtitan_lite.parallel.process_groups import choose_device
from torchtitan_lite.tools.detect import detect_machine


class SourceError(UserError):
    """Raised if a source or a prompt cannot be used."""


@dataclass(frozen=True)
class ModelSource:
    """Description of a model whose weights are not loaded yet."""

    path: Path
    model_args: ModelArgs
    attention: str  # a key of ATTENTIONS in config/choices.py
    tokenizer: Tokenizer
    end_ids: frozenset[int]  # a generated text ends at any of these tokens
    context: int | None  # context length in tokens; None if unknown
    published: dict[str, dict[str, Any]]  # JSON files that came with the weights: name -> content
    checkpoint: OpenCheckpoint | None  # None for a Hugging Face folder


def open_source(options: Namespace) -> ModelSource:
    """Open options.source. Raises UserError if the source has no model, and other errors if the checkpoint or folder
    cannot be read."""
    path = options.source
    checkpoint = None
    attention = "causal"
    n_trained = 0
    if (path / CONFIG).is_file():
        weights = describe_folder(path)
        for notice in weights.notices:
            tell(notice)
    else:
        path = find_checkpoint(path)
        try:
            checkpoint = OpenCheckpoint(path)
            weights = describe_checkpoint(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} cannot be used: {error}. Restore it from a copy, or name a different checkpoint."
            ) from None
        config = checkpoint.manifest.run["config"]
        attention = config["model"]["attention"]
        if attention not in ATTENTIONS:
            raise SourceError(
                f"{path}: model.attention = {attention!r} has no row in config/choices.py. Use the code that saved it."
            )
        n_trained = config["training"]["seq_len"]
    try:
        found = load_tokenizer(options.tokenizer or weights.assets)
    except ConfigError as error:
        raise SourceError(
            f"{path}: its tokenizer cannot be loaded: {error.problems[0].why}. Name it with --tokenizer FOLDER."
        ) from None
    model_args = weights.model_args
    published = weights.published
    expected = None  # fingerprint of the model's tokenizer
    if checkpoint or options.tokenizer:
        with suppress(ConfigError):  # --tokenizer may replace a damaged tokenizer
            expected = find_fingerprint(weights)
    why = ""
    if found.eos_id >= model_args.vocab_size:
        why = f"its model has {model_args.vocab_size} tokens, but the end token of {found.path} is id {found.eos_id}"
    elif expected not in (None, found.fingerprint):
        other = f"{found.path} is not the tokenizer that the model was trained with"
        if options.tokenizer:
            tell(other)
        else:
            why = other
    if why:
        raise SourceError(
            f"{path}: {why}. Name the right tokenizer with --tokenizer FOLDER, which skips this check."
        )
    beside = published
    if not published and found.path.is_file():  # the tokenizer's folder may list more end tokens
        beside = read_published(found.path.parent)
    end_ids = read_end_ids(beside)
    for end_id in sorted(end_ids):
        if end_id >= model_args.vocab_size:
            tell(
                f"eos_token_id = {end_id} has no effect: the model has {model_args.vocab_size} tokens, "
                "so no text ends there"
            )
    # After fine-tuning on shorter sequences, the original context length still applies.
    n_published = published.get(CONFIG, {}).get(LENGTH) or 0
    return ModelSource(
        path=path,
        model_args=model_args,
        attention=attention,
        tokenizer=found,
        end_ids=end_ids | {found.eos_id},
        context=max(n_trained, n_published) or None,
        published=published,
        checkpoint=checkpoint,
    )


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, otherwise the newest checkpoint in `path` or in `path`/checkpoint."""
    if (path / MANIFEST).is_file():
        return path
    for folder in (path, path / "checkpoint"):
        if steps := find_steps(folder):
            return folder / f"step-{steps[-1]}"
    if why := explain_hub_name(path):
        raise SourceError(f"{why}. Name that folder.")
    raise SourceError(
        f"{path} is not a folder with a checkpoint. Name a checkpoint, a run with a checkpoint (--checkpoint.enable), "
        f"or a folder with {CONFIG}."
    )


def read_end_ids(published: dict[str, dict[str, Any]]) -> frozenset[int]:
    """Return eos_token_id of generation_config.json, or of config.json if the first file has none. Both files can be
    missing."""
    for name in (GENERATION_CONFIG, CONFIG):
        value = published.get(name, {}).get("eos_token_id")
        if value not in (None, []):
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


@torch.no_grad()
def build_model(source: ModelSource) -> nn.Module:
    """Build the model and load its weights: on a GPU if there is one, otherwise on the CPU."""
    device = choose_device(0, detect_machine().device_type)
    model_args = source.model_args
    dtype = torch.float32  # on a CPU, bfloat16 is slower
    if device.type == "cuda":
        dtype = torch.bfloat16
        tell("weights are rounded to bfloat16, the dtype in which the GPU computes")
    if why := explain_strides(model_args, str(dtype).removeprefix("torch.")):
        raise SourceError(
            f"{source.path}: {why}. Pad the experts with zeros to a supported size; this does not change results."
        )
    with torch.device("meta"):
        model = find_model_class(model_args.name)(model_args, attention=source.attention)
    model.to(dtype).to_empty(device=device).eval()
    for _, moe in list_moes(model):
        # fp32, whatever the dtype of the weights
        moe.router.expert_bias = torch.zeros(model_args.moe.n_experts, device=device)
    share_embedding(model)
    tensors = dict(model.named_parameters())
    for fqn in list_expert_biases(model_args):
        tensors[fqn] = model.get_buffer(fqn)
    if source.checkpoint is None:
        load_weights(source.path, tensors)
        return model
    for fqn, tensor in tensors.items():
        tensor.copy_(source.checkpoint.read(f"model.{fqn}"))
    return model
