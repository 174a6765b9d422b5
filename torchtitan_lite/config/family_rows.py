"""Row types that describe a model in Hugging Face folders. The rows are in `models/NAME/hugging_face.py`.

    Family        an architecture of transformers: names of its modules, and keys of its config.json
    ConfigKey     one key of config.json: read, refused or ignored

extensions/families.py loads the rows, for weights and exports.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

ABOVE_ZERO = 1e-30  # `least` of a number that must be above zero


@dataclass(frozen=True)
class ConfigKey:
    """One key of config.json. A value of a different type or size, or outside `only`, is refused.

    An ignored key has no effect on our model, and its value is not checked. If the value is outside `only`, a notice
    says so.
    """

    kind: Any = object  # type of the JSON value, such as int, or list | None if null is allowed
    default: Any = None  # transformers' value if the key is missing; ...: it must not be missing
    least: float = -inf  # smallest number
    only: tuple = ()  # the values that our model supports; exports have the first
    items: type = object  # type of the items of a list
    same_as: str = ""  # the key that this one replaces
    is_ignored: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture of transformers that computes the same outputs as some flavors of a model.

    `switches`: fields of ModelArgs that must be true. If no family has a key for a field, the field must have its
    default.
    """

    architecture: str
    keys: dict[str, ConfigKey]  # the keys that only some architectures have
    sizes: dict[str, str]  # field of ModelArgs -> key
    # FQN of our module (in the block, if any) -> Hugging Face's name; {}: the index of an expert
    names: dict[str, str]
    switches: tuple[str, ...] = ()
    # field of MoEArgs -> key; other fields must be the default
    experts: dict[str, str] = field(default_factory=dict)
    divides_dim: bool = False  # the number of heads must divide the hidden size
    # "all": every layer has the window; "some": layer_types or max_window_layers choose layers
    windows: Literal["none", "all", "some"] = "none"

    @property
    def named(self) -> set[str]:
        """The fields of ModelArgs that this family has keys for, besides the fields of every family."""
        windows = {
            "none": (),
            "all": ("sliding_window",),
            "some": ("sliding_window", "layer_types"),
        }
        return {*self.sizes, *windows[self.windows]}

    @property
    def title(self) -> str:
        return self.architecture.removesuffix("ForCausalLM")
