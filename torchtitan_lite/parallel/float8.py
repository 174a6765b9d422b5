"""Float8 on many ranks: which linear layers multiply in float8.

Under TP each rank multiplies its local slices of x and w, and rounds each with its own scale, so no traffic is added.
(torch's DTensor does not support rowwise scales over gloo, and would all-reduce every maximum.) FSDP gathers the
weights as in any run; extensions/float8_all_gather.py lets it gather them in float8.

Effect: linear layers of the plan become Float8Linear; FQNs, parameters and checkpoints do not change.
"""

from torch import nn

from torchtitan_lite.config.block import list_linears, plan_float8
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.schema import Float8
from torchtitan_lite.model.float8_linear import RECIPES, convert_to_float8


def apply_float8(part: nn.Module, section: Float8, tp: int) -> None:
    """Make the linear layers that plan_float8 selects multiply in float8."""
    recipes = RECIPES
    if section.recipe_name not in recipes:
        recipes = load_extension("float8_rowwise").RECIPES
    recipe = recipes[section.recipe_name]
    modules = dict(part.named_modules())
    sizes = list_linears(part.model_args)
    for fqn in plan_float8(sizes, section.filter_fqns, tp, section.recipe_name):
        linear = modules.get(fqn)
        if type(linear) is nn.Linear:  # None: it is on another stage
            convert_to_float8(linear, recipe, emulate=section.emulate)
