"""Small patches that break the code on purpose. `verify` must catch and name each of them, or it proves nothing.

They are teaching material too: each says what is wrong, and mostly no user would have seen anything. A patch is in
force inside one worker process, for one measurement. The parent, which runs the plain loop, is not patched.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from unittest.mock import patch

from layouts import CP, LAYOUTS, Row

CP2 = {CP: 2}


@dataclass(frozen=True)
class Mutant:
    row: Row  # the layout that must notice
    trial: str  # of `verify`, in which it does
    kind: str  # of the culprit that must be found
    name: str
    dims: tuple[str, ...]  # along which a correct and a wrong rank are neighbors
    patch: Callable[[], AbstractContextManager]


MUTANTS: dict[str, Mutant] = {}


def mutant(
    row: str | Row,
    kind: str,
    name: str,
    *,
    at: tuple[object, str] | None = None,
    dims: tuple = (),
    trial: str = "wide",
):
    """Add a mutant to MUTANTS.

    With `at`, a module or class and the name of one of its functions, the decorated function takes that one's place;
    its first argument is the original. Without, it returns a context manager.
    """

    def add(function: Callable) -> Callable:
        applied = function if at is None else partial(put_in_place, function, *at)
        MUTANTS[function.__name__] = Mutant(
            LAYOUTS[row] if isinstance(row, str) else row, trial, kind, name, dims, applied
        )
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
