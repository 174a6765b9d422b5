"""What a mutant is, and the table of all of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest.mock import patch

from layouts import LAYOUTS, Row

CP = "parallelism.context_parallel_degree"
SHARD = "parallelism.data_parallel_shard_degree"
CP2 = {CP: 2}
RING = {"parallelism.context_parallel_rotate_method": "ring"}
DOCUMENTS = {"model.attention": "document"}


@dataclass(frozen=True)
class Mutant:
    row: Row  # the layout that must notice
    noticed_by: str  # the measure that must fail
    culprit: tuple[str, str]  # kind and name that must be found
    mesh_dims: tuple[str, ...]  # along which ranks must be said to disagree
    cause: str  # that must be named, or its beginning
    trial: str  # of TRIALS, which sees it
    patch: Callable[[], AbstractContextManager]
    seen: str  # by a user without `verify`


MUTANTS: dict[str, Mutant] = {}


def mutant(
    row: str | Row,
    noticed_by: str,
    culprit: tuple[str, str],
    *,
    dims: tuple = (),
    cause: str = "unknown",
    trial: str = "wide",
):
    """Adds a patch to MUTANTS; its docstring is what a user would have seen."""

    def add(function: Callable) -> Callable:
        where = LAYOUTS[row] if isinstance(row, str) else row
        seen = " ".join(function.__doc__.split())
        MUTANTS[function.__name__] = Mutant(where, noticed_by, culprit, dims, cause, trial, function, seen)
        return function

    return add


def replaced(owner: object, name: str, function: Callable) -> AbstractContextManager:
    """Context manager: `function`, with the original as its first argument, in the place of `owner.name`."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **options: function(original, *args, **options))
