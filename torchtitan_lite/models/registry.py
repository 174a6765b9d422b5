"""The models: one name per line, each a folder beside this file. Needs no torch.

models/NAME/table.py      MODEL, a ModelTable: sizes, modules, Hugging Face names. Needs no torch
models/NAME/modules.py    Model, an nn.Module: the code (see model/README.md); build.py imports it
"""

from importlib import import_module

from torchtitan_lite.config.model_rows import ModelTable

NAMES = (  # model.name
    "llama3",
)
MODELS: dict[str, ModelTable] = {
    name: import_module(f"torchtitan_lite.models.{name}.table").MODEL for name in NAMES
}
flavors: dict[str, None] = {}
for table in MODELS.values():
    flavors |= dict.fromkeys(table.flavors)
FLAVORS = tuple(flavors)
