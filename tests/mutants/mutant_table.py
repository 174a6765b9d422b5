"""Define a table of mutants: small patches that break the code on purpose. `verify` must find each bug and name its
place. Otherwise, a certificate would not mean much.

The patches are also examples for readers: each docstring describes a bug that most users would not notice. A
patch is active in one worker process, for one measurement. The parent process, which runs the plain loop, is not
patched.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from unittest.mock import patch

from layouts import LAYOUTS, Row, read_rows


@dataclass(frozen=True)
class Mutant:
    row: Row  # the layout on which `verify` must notice it
    trial: str  # the trial in which `verify` must notice it
    kind: str  # the measure that must be wrong, such as gradients or module output
    name: str
    dims: tuple[str, ...]  # mesh dims in which a correct rank is next to a wrong one
    patch: Callable[[], AbstractContextManager]


MUTANTS: dict[str, Mutant] = {}


def mutant(
    row: str,
    kind: str,
    name: str,
    *,
    at: tuple[object, str] | None = None,
    dims: tuple = (),
    trial: str = "wide",
):
    """Add a mutant to MUTANTS. `row` is the name of a layout, or ranks | keys, as in tables of layouts.

    `at` is a module or class and the name of one of its functions. The decorated function replaces that function, and
    gets the original as its first argument. Without `at`, the decorated function returns a context manager.
    """

    def add(function: Callable) -> Callable:
        applied = function if at is None else partial(put_in_place, function, *at)
        found = LAYOUTS.get(row) or read_rows(f"own | {row}", function.__globals__)["own"]
        MUTANTS[function.__name__] = Mutant(found, trial, kind, name, dims, applied)
        return applied

    return add


def put_in_place(function: Callable, owner: object, name: str) -> AbstractContextManager:
    original = getattr(owner, name)

    @wraps(original)
    def broken(*args, **options):
        return function(original, *args, **options)

    if isinstance(vars(owner).get(name), staticmethod):
        broken = staticmethod(broken)
    return patch.object(owner, name, broken)
