"""The models: one name per line, each a folder beside this file. Needs no torch.

models/NAME/table.py      MODEL, a ModelTable: sizes, modules, Hugging Face names. Needs no torch
models/NAME/modules.py    Model, an nn.Module: the code (see model/README.md); build.py imports it
"""

from importlib import import_module
from itertools import chain

from torchtitan_lite.config.model_rows import AUTO, SWITCHES, ModelArgs, ModelTable

CONFIG = "config.json"  # describes the model of a Hugging Face folder
LENGTH = "max_position_embeddings"  # its key for the context length

MODEL_NAMES = (  # model.name
    "llama3",
)
MODELS: dict[str, ModelTable] = {
    name: import_module(f"torchtitan_lite.models.{name}.table").MODEL for name in MODEL_NAMES
}
flavors = chain.from_iterable(table.flavors for table in MODELS.values())
FLAVOR_NAMES = (*dict.fromkeys(flavors), AUTO)  # model.flavor, of all models


def find_model_type(model_args: ModelArgs) -> str | None:
    """Return the model_type of the first family that computes the same; None: the model has no Hugging Face format."""
    wanted = {switch for switch in SWITCHES if getattr(model_args, switch)}
    has_experts = model_args.moe is not None
    for kind, family in MODELS[model_args.name].families.items():
        if set(family.switches) == wanted and bool(family.experts) == has_experts:
            return kind
    return None
