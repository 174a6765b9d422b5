"""Marks for the rows of a table. Rows marked slow run only with `tests/run.sh --all`."""

from collections.abc import Collection, Iterable
from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)


def choose_fast(names: Iterable, fast: Collection) -> list:
    """Return all names. A name that is not in `fast` is marked slow."""
    return [name if name in fast else slow(name) for name in names]
