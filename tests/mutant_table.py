"""What a mutant is, and the table of all of them."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from unittest.mock import patch

from layouts import CP, LAYOUTS, Row

SHARD = "parallelism.data_parallel_shard_degree"
CP2 = {CP: 2}

# Culprits of several mutants: kind and name.
INNER, HEAD = ("module output", "layers.0.attention.inner"), ("module output", "output")
NORM, HEAD_GRADIENT = ("gradient norm", "measure_grad_norm"), ("gradient", "output.weight")


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
    at: tuple[object, str] | None = None,
    dims: tuple = (),
    cause: str = "unknown",
    trial: str = "wide",
):
    """Add a mutant to MUTANTS; the docstring of the decorated function is what a user would have seen.

    With `at`, a module or class and the name of one of its functions, the decorated function takes that one's place;
    its first argument is the original. Without, it returns a context manager.
    """

    def add(function: Callable) -> Callable:
        where = LAYOUTS[row] if isinstance(row, str) else row
        seen = " ".join(function.__doc__.split())
        applied = function if at is None else partial(put_in_place, function, *at)
        MUTANTS[function.__name__] = Mutant(where, noticed_by, culprit, dims, cause, trial, applied, seen)
        return applied

    return add


def put_in_place(function: Callable, owner: object, name: str) -> AbstractContextManager:
    original = getattr(owner, name)

    @wraps(original)  # verify reads the signature of a module's forward
    def broken(*args, **options):
        return function(original, *args, **options)

    is_static = isinstance(owner, type) and isinstance(inspect.getattr_static(owner, name), staticmethod)
    return patch.object(owner, name, staticmethod(broken) if is_static else broken)
