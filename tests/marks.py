"""Marks of the rows of a table: slow ones run with `tests/run.sh --all` only."""

from collections.abc import Collection, Iterable
from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)


def choose_fast(names: Iterable, fast: Collection) -> list:
    """Return all names; those that are not in `fast` are slow."""
    return [name if name in fast else slow(name) for name in names]
