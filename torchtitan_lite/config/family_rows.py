"""Define the types of the rows that describe a model in Hugging Face folders. The rows are in
`models/NAME/hugging_face.py`.

    Family        an architecture of transformers: names of its modules, and keys of its config.json
    ConfigKey     one key of config.json: how its value is read, checked or ignored

extensions/families.py loads the rows, for weights and exports.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan_lite.config.schema import LARGEST, LARGEST_SIZE, MOST_LAYERS, Range

# ranges for ConfigKey.limits, whose default is the range of a size
COUNT = Range(1, MOST_LAYERS)  # number of layers or of experts
ABOVE_ZERO = Range(1e-30, LARGEST)
NOT_NEGATIVE = Range(0, LARGEST)
ANY_NUMBER = Range(-LARGEST, LARGEST)


@dataclass(frozen=True)
class ConfigKey:
    """One key of config.json. A value is not supported if its type is not `kind`, if it exceeds `limits`, or if it is
    not in `only`.

    An ignored key has no effect on our model, so any value is accepted. If the value of an ignored key is not in
    `only`, a notice says that the key is ignored.
    """

    kind: Any = object  # type of the JSON value, such as `int`, or `list | None` if null is allowed
    # the value that transformers uses if the key is missing; `...` if the key is required
    default: Any = None
    limits: Range = Range(1, LARGEST_SIZE)  # bounds of a number, or of each number in a list
    only: tuple = ()  # values that our model supports (exports write the first); empty: all values
    items: type = object  # type of the items of a list
    same_as: str = ""  # the older key with the same meaning, which this key replaces
    is_ignored: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture of transformers that computes the same outputs as some flavors of a model.

    The fields of ModelArgs that `switches` lists must be true. All other fields for which the family has no key must
    have their default values.
    """

    architecture: str
    # keys of config.json, in addition to the keys that all families have
    keys: dict[str, ConfigKey]
    sizes: dict[str, str]  # field of ModelArgs -> key
    # FQN of our module (relative to its block, if it is in a block) -> Hugging Face's name; {} is the index of an
    # expert
    names: dict[str, str]
    switches: tuple[str, ...] = ()
    # field of MoEArgs -> key; all other fields of MoEArgs must have their default values
    experts: dict[str, str] = field(default_factory=dict)
    divides_dim: bool = False  # the number of heads must divide the hidden size
    # "all": every layer has the window; "some": layer_types or max_window_layers selects the layers with a window
    windows: Literal["none", "all", "some"] = "none"

    @property
    def named(self) -> set[str]:
        """The fields of ModelArgs that this family reads from config.json, except the fields that every family
        reads."""
        windows = {
            "none": (),
            "all": ("sliding_window",),
            "some": ("sliding_window", "layer_types"),
        }
        return {*self.sizes, *windows[self.windows]}

    @property
    def title(self) -> str:
        return self.architecture.removesuffix("ForCausalLM")
