"""Find the Hugging Face architecture ("family") that computes the same as a model. Needs no torch."""

from dataclasses import fields

from torchtitan_lite.config.model_rows import Family, ModelArgs
from torchtitan_lite.models.registry import MODELS

# fields of ModelArgs that every family has
WRITTEN = ("rope_theta", "rope_scaling", "tie_embeddings", "moe", "name")


def find_model_type(model_args: ModelArgs) -> str | None:
    """Return the model_type of the first Hugging Face family that computes this model, or None."""
    for kind, family in MODELS[model_args.name].families.items():
        if not list_unwritten(model_args, family):
            return kind
    return None


def list_unwritten(model_args: ModelArgs, family: Family) -> dict[str, tuple[object, object]]:
    """Return the fields that the family does not support: field -> (value, the only supported value).

    A field that the family does not name must have its default.
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
    """Return field -> value for the fields that a fork has added to ModelArgs.

    These are the fields that no family names and that `weights` leaves at their defaults.
    """
    families = [family for table in MODELS.values() for family in table.families.values()]
    named = set(WRITTEN).union(*(family.sizes for family in families))
    named = named.union(*(family.switches for family in families))
    for field in fields(weights):
        if getattr(weights, field.name) != field.default:
            named.add(field.name)
    return {name: value for name, value in vars(model_args).items() if name not in named}
