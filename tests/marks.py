"""Marks for the rows of a table. Rows marked slow run only with `tests/run.sh --all`."""

from collections.abc import Collection, Iterable
from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)


def choose_fast(names: Iterable, fast: Collection) -> list:
    """Return all names. A name that is not in `fast` is marked slow."""
    return [name if name in fast else slow(name) for name in names]


def read_lines(text: str) -> list[list[str]]:
    """Read a table: a row in each line, with bars between its columns. A comment begins with two spaces and #."""
    rows = []
    for line in text.strip("\n").splitlines():
        columns = line.partition("  #")[0].split("|")
        rows.append([column.strip() for column in columns])
    return rows


def each_row(names: str, text: str) -> pytest.MarkDecorator:
    """Parametrize a test with the rows of a table: see read_lines."""
    return pytest.mark.parametrize(names, read_lines(text))
