"""Find the Hugging Face architecture ("family") that computes the same outputs as a model. Needs no torch."""

from dataclasses import fields

from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.family_rows import Family
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.models.registry import MODELS

# fields of ModelArgs that every family has
WRITTEN = ("rope_theta", "rope_scaling", "tie_embeddings", "moe", "name")


def load_families(name: str) -> dict[str, Family]:
    """Return a dict mapping model_type to the family, for a model of models/registry.py; {} if the model has no Hugging
    Face format."""
    module = MODELS[name].families
    return load_module(module).FAMILIES if module else {}


def find_model_type(model_args: ModelArgs) -> str | None:
    """Return the model_type of the first Hugging Face family that computes this model, or None."""
    for kind, family in load_families(model_args.name).items():
        if not list_unwritten(model_args, family):
            return kind
    return None


def list_unwritten(model_args: ModelArgs, family: Family) -> dict[str, tuple[object, object]]:
    """Return the fields whose values the family does not support: field -> (value, supported value).

    Fields that the family does not name must have their default values.
    """
    different: dict[str, tuple[object, object]] = {}
    has_experts = model_args.moe is not None
    if has_experts != bool(family.experts):
        different["moe"] = model_args.moe, "experts" if family.experts else None
    for field in fields(model_args):
        if field.name in family.named or field.name in WRITTEN:
            continue
        value = getattr(model_args, field.name)
        only = True if field.name in family.switches else field.default
        if value != only:
            different[field.name] = value, only
    return different


def list_added_fields(model_args: ModelArgs, weights: ModelArgs) -> dict[str, object]:
    """Return a dict mapping fields to values, for the fields that a fork added. config.json cannot set these fields,
    because no family has a key for them."""
    families = [family for name in MODELS for family in load_families(name).values()]
    named = set(WRITTEN).union(*((*family.sizes, *family.switches) for family in families))
    for field in fields(weights):
        if getattr(weights, field.name) != field.default:
            named.add(field.name)
    return {name: value for name, value in vars(model_args).items() if name not in named}
