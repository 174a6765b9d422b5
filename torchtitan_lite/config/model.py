"""Find the model that a config names, and check its sizes. Needs no torch."""

import json
from dataclasses import asdict, replace

from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.messages import ConfigError, Problem, Problems, Refused
from torchtitan_lite.config.model_rows import AUTO, ModelArgs
from torchtitan_lite.config.schema import Config, Model
from torchtitan_lite.models.registry import MODELS

# keys of [model]
MODEL_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")


def resolve_model(model: Model) -> ModelArgs:
    """Return the model of the flavor, or of the loaded weights, with the sizes in [model].

    Raises ConfigError if the sizes are inconsistent.
    """
    row = find_model_row(model)
    sizes = {name: getattr(model, name) or getattr(row, name) for name in MODEL_SIZES}
    is_derived = model.head_dim is None and bool(model.dim or model.n_heads)
    if is_derived:
        sizes["head_dim"] = sizes["dim"] // sizes["n_heads"]
    model_args = replace(row, **sizes, name=model.name)
    rules = check_model(model_args, model.attention, has_derived_heads=is_derived)
    problems = Problems(Config(model=model), model_args, rules)
    if problems:
        raise ConfigError(*problems)
    return model_args


def check_model(model_args: ModelArgs, attention: str, *, has_derived_heads: bool) -> Refused:
    """Check that the sizes of a model are consistent. `has_derived_heads`: whether head_dim is computed as dim /
    n_heads."""
    if has_derived_heads and model_args.dim % model_args.n_heads:
        why = f"it does not divide model.dim = {model_args.dim}, and head_dim is dim / n_heads"
        yield "model.n_heads", why, "Use a divisor of model.dim, or set model.head_dim"
    elif model_args.head_dim % 2:
        why = "rotary embedding rotates pairs of features"
        yield "model.head_dim", why, "Use an even number"
    if model_args.n_heads % model_args.n_kv_heads:
        why = f"it does not divide model.n_heads = {model_args.n_heads}"
        yield "model.n_kv_heads", why, "Use a divisor of n_heads"
    if (
        model_args.layer_types
        or model_args.attention_sinks
        or model_args.sliding_window is not None
        or attention != "causal"
    ):
        yield from load_module("config.settings").check_windows(attention, model_args)
    try:
        json.dumps([asdict(model_args), hash(model_args)])
    except TypeError as error:
        remedy = "Use only numbers, strings, tuples of these, and frozen dataclasses in ModelArgs"
        yield "model.name", f"{error}, in its ModelArgs", remedy


def find_model_row(model: Model) -> ModelArgs:
    """Return the model of the loaded weights, or of the flavor. Raises ConfigError."""
    flavors = MODELS[model.name].flavors
    flavor = "debug" if model.flavor == AUTO else model.flavor
    row = model.row or flavors.get(flavor)
    if row is None:
        why = f"model.name = {model.name!r} has no such flavor"
        remedy = f"Use one of {', '.join([*flavors, AUTO])}"
        raise ConfigError(Problem("model.flavor", model.flavor, why, remedy))
    return row
