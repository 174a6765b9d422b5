"""Derive parameters, windows and FLOPs from the tables of a model. No model is named in this file.

Legend: D model dim, L layers, H query heads, E head dim, F ffn dim, S sequence.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.model_rows import ModelArgs, ModuleRow
from torchtitan_lite.models.registry import MODELS


class Parameter(NamedTuple):
    """One parameter of a model."""

    row: ModuleRow  # the module that has this parameter
    shape: tuple[int, ...]
    is_bias: bool


def list_block_modules(model_args: ModelArgs, *, moe: bool = False) -> list[ModuleRow]:
    """List the modules of one block. With `moe`, the feed-forward has experts."""
    experts = model_args.moe if moe else None
    return MODELS[model_args.name].list_block(model_args, experts)


def list_end_modules(model_args: ModelArgs) -> list[ModuleRow]:
    """List the modules outside the blocks: tok_embeddings, norm, output, and modules that only some models have."""
    return MODELS[model_args.name].list_ends(model_args)


def list_added_ends(model_args: ModelArgs) -> list[ModuleRow]:
    """List the modules outside the blocks that only some models have: all except tok_embeddings, norm and output."""
    return [
        row
        for row in list_end_modules(model_args)
        if row.name not in ("tok_embeddings", "norm", "output")
    ]


def list_gathered(rows: list[ModuleRow]) -> set[str]:
    """List the modules whose linear layers need all tokens: tp all-gathers their input.

    A module inside a listed module gets an input that is already all-gathered.
    """
    names = {
        row.name.rpartition(".")[0]
        for row in rows
        if row.kind == "linear" and row.tp_style in ("colwise", "whole")
    }
    return {name for name in names if not any(name.startswith(f"{outer}.") for outer in names)}


def list_modules(model_args: ModelArgs) -> list[tuple[str, ModuleRow]]:
    """List (prefix, row) of all modules in order. The prefix, such as "layers.3.", and the name in the row form the
    FQN."""
    ends = list_end_modules(model_args)
    modules = [("", row) for row in ends if row.end == "first"]
    for layer in range(model_args.n_layers):
        for row in list_block_modules(model_args, moe=model_args.is_moe(layer)):
            modules.append((f"layers.{layer}.", row))
    return modules + [("", row) for row in ends if row.end != "first"]


@lru_cache
def list_parameters(model_args: ModelArgs) -> dict[str, Parameter]:
    """Return a dict mapping FQNs to parameters for the whole model, in the order of the model. A tied head is
    omitted."""
    parameters = {}
    for prefix, row in list_modules(model_args):
        for name, shape in row.tensors.items():
            parameters[prefix + name] = Parameter(row, shape, name.endswith(".bias"))
    if model_args.tie_embeddings:
        del parameters["output.weight"]
    return parameters


def list_shapes(model_args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Return a dict mapping FQNs to the global shapes of all parameters, in the order of the model. A tied head is
    omitted."""
    return {fqn: entry.shape for fqn, entry in list_parameters(model_args).items()}


def list_expert_biases(model_args: ModelArgs) -> list[str]:
    """List the FQNs of the fp32 expert biases (moe.py), which checkpoints store along with the parameters."""
    layers = filter(model_args.is_moe, range(model_args.n_layers))
    return [f"layers.{layer}.feed_forward.router.expert_bias" for layer in layers]


def count_parameters(
    model_args: ModelArgs, *, active: bool = False, in_matmuls: bool = False
) -> int:
    """Count the parameters. A tied embedding is counted once, as in the model cards.

    With `active`, count only the parameters that one token uses, with top_k experts per layer. With `in_matmuls`, count
    only the weights of matmuls inside blocks; an embedding inside a block is a lookup, not a matmul.
    """
    n_parameters = 0
    for fqn, parameter in list_parameters(model_args).items():
        shape = parameter.shape
        if active and parameter.row.kind == "experts":
            shape = (model_args.moe.top_k, *shape[1:])
        if not in_matmuls or (
            fqn.startswith("layers.") and len(shape) > 1 and parameter.row.kind != "embedding"
        ):
            n_parameters += prod(shape)
    return n_parameters


@lru_cache  # cached, because `plan --search` asks for these windows once per layout
def list_windows(attention: str, model_args: ModelArgs) -> tuple[int | None, ...]:
    """Return, for each layer, the number of tokens that a token attends to, itself included.

    The number is None if the token attends to all earlier tokens, or if the attention's row in ATTENTIONS has no
    `window`.
    """
    window = ATTENTIONS[attention].window
    return tuple(
        window(model_args, layer) if window else None for layer in range(model_args.n_layers)
    )


def has_masks(attention: str, model_args: ModelArgs) -> bool:
    """Return whether any layer has a window or sinks. If so, extensions/windowed_attention.py computes attention."""
    return model_args.attention_sinks or any(list_windows(attention, model_args))


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs per token, forward and backward, without recompute."""

    full: int  # counts the full attention matrix
    causal: int  # counts only the causal half


def count_keys(model_args: ModelArgs, seq_len: int, attention: str) -> tuple[int, float]:
    """Return two sums over layers: the number of keys per token in the full attention matrix, and the mean number of
    keys per token in the causal part of this matrix.

    A layer with a window of W keys adds W keys to the sum for the full matrix. It adds W*(1 - W/2S) keys to the sum for
    the causal part, because early tokens see fewer keys.
    """
    full = 0
    causal = 0  # the sum for the causal part, multiplied by 2*S to get an integer
    for window in list_windows(attention, model_args):
        n_keys = min(window or seq_len, seq_len)
        full += n_keys
        causal += n_keys * (2 * seq_len - n_keys)
    return full, causal / (2 * seq_len)


def count_flops_per_token(
    model_args: ModelArgs, seq_len: int, attention: str = "causal"
) -> FlopsPerToken:
    """Count 6 FLOPs per matmul weight and token, plus 12*L*H*E*S of attention (PaLM, app. B, arXiv:2204.02311).

    In a layer with a window, S is the number of keys. The embedding is a lookup and costs nothing. The head is included
    even if it is tied. In a layer with experts, only top_k experts are included.

    Some publications count the full attention matrix, and others only its causal part. For Llama 3 8B and 8,192 tokens,
    the full matrix gives 57.9 GFLOP per token, and the causal part gives 51.5.
    """
    weights = count_parameters(model_args, active=True, in_matmuls=True)
    calls = {"output": MODELS[model_args.name].head_calls}
    for row in list_end_modules(model_args):
        if row.kind == "linear":
            weights += calls.get(row.name, 1) * prod(row.weight)
    matmuls = 6 * weights
    of_key = 12 * model_args.n_heads * model_args.head_dim
    full, causal = count_keys(model_args, seq_len, attention)
    return FlopsPerToken(full=matmuls + of_key * full, causal=matmuls + int(of_key * causal))
