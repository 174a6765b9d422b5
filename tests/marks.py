"""Turn the rows of a table into marked pytest parameters. Slow rows run only with `tests/run.sh --all`."""

from collections.abc import Collection, Iterable
from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)


def read_lines(text: str) -> list[list[str]]:
    """Read a table with one row per line and bars between the columns. A comment begins with two spaces and #."""
    rows = []
    for line in text.strip("\n").splitlines():
        columns = line.partition("  #")[0].split("|")
        rows.append([column.strip() for column in columns])
    return rows


def each_row(
    names: str,
    rows: str | Iterable,
    *,
    fast: Collection | None = None,
    slow: Collection = (),
) -> pytest.MarkDecorator:
    """Parametrize a test. `rows` is a table in a text (see read_lines), or a collection with one element per row.

    If `fast` is given, all rows outside `fast` are marked slow. Otherwise, the rows in `slow` are marked slow.
    """
    if isinstance(rows, str):
        rows = read_lines(rows)
    marked = []
    for row in rows:
        is_slow = row in slow if fast is None else row not in fast
        values = row if "," in names else [row]
        marked.append(pytest.param(*values, marks=pytest.mark.slow) if is_slow else row)
    return pytest.mark.parametrize(names, marked)
