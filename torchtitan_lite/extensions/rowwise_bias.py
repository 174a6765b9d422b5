"""Let a rowwise module compute without its bias: under tp, RowwiseParallel adds the bias after summing partial results.

Works with any class of module, such as float8 layers and layers of forks. FQNs do not change.
"""

from functools import cache

from torch import Tensor, nn


@cache  # create one subclass per class: only modules of the same class share compiled code
def hide_bias(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `cls` in which `self.bias` is None during forward, and the bias at all other times."""

    def forward(self: nn.Module, *inputs, **options):
        # nn.Module.__setattr__ would take ten times as much host time as object.__setattr__
        object.__setattr__(self, "is_in_forward", True)
        try:
            return cls.forward(self, *inputs, **options)
        finally:
            object.__setattr__(self, "is_in_forward", False)

    def read(self: nn.Module) -> Tensor | None:
        return None if self.is_in_forward else self._parameters["bias"]

    fields = {"is_in_forward": False, "forward": forward, "bias": property(read)}
    return type(f"{cls.__name__}WithoutBias", (cls,), fields)
