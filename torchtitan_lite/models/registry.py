"""List the models: one name per line, each the name of a folder here. Needs no torch.

models/NAME/table.py      MODEL, a ModelTable: sizes, modules, Hugging Face names. Needs no torch
models/NAME/modules.py    Model, an nn.Module: the code (see model/README.md); build.py imports it
"""

from importlib import import_module
from itertools import chain

from torchtitan_lite.config.model_rows import AUTO, ModelTable

CONFIG = "config.json"  # describes the model of a Hugging Face folder
LENGTH = "max_position_embeddings"  # key of config.json for the context length

MODEL_NAMES = (  # model.name
    "llama3",
)
MODELS: dict[str, ModelTable] = {
    name: import_module(f"torchtitan_lite.models.{name}.table").MODEL for name in MODEL_NAMES
}
flavors = chain.from_iterable(table.flavors for table in MODELS.values())
FLAVOR_NAMES = (*dict.fromkeys(flavors), AUTO)  # allowed values of model.flavor, for all models
