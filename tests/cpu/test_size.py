"""Limit the code tokens of each part: names, operators, numbers and strings, without docstrings and comments.

If a part exceeds its guide, remove a feature or simplify. Longer lines do not help, because the limits are on tokens
and on tokens per line. Only `.ci/run` runs these tests, so a fork of this repository is allowed to exceed the limits.
The tests need Python 3.11, because 3.12 splits f-strings into tokens.
"""

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections import Counter

import pytest
from marks import each_row

from torchtitan_lite import REPOSITORY

COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Guides for each part: code tokens, and tokens per code line. A test fails only above guide * MARGIN, because nobody
# should shorten names to pass.
GUIDES = {
    "tests": (106_000, 10.0),
    "tools": (82_700, 9.0),
    "extensions": (22_900, 9.0),
    "core": (60_300, 8.5),
}
MARGIN = 1.05
MOST_PER_LINE = 13.0  # in a function of MANY_LINES or more
MANY_LINES = 10

pytestmark = [
    pytest.mark.skipif("HOLD_SIZE" not in os.environ, reason="only .ci/run sets HOLD_SIZE"),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11), reason="limits hold for the tokens of Python 3.11"
    ),
]


def count_tokens(source: str) -> dict[int, int]:
    """Return a dict mapping line numbers to the number of code tokens that start on the line. Lines without tokens are
    left out."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            docstrings.update(range(docstring.lineno, docstring.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [token.start[0] for token in tokens if token.type in COUNTED]
    return Counter(line for line in lines if line not in docstrings)


def read_files() -> dict[str, str]:
    """Return the Python files that git tracks. Other files, such as scratch files, do not count."""
    command = ["git", "ls-files", "train.py", "torchtitan_lite/*.py", "tests/*.py"]
    listing = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    names = listing.stdout.splitlines()
    return {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in names}


@each_row("part", GUIDES)
def test_a_part_stays_within_its_limits_of_tokens_and_density(part):
    most_tokens, most_per_line = GUIDES[part]
    counts = []
    for file, source in read_files().items():
        folders = file.split("/")[:2]
        if part == next((name for name in GUIDES if name in folders), "core"):
            counts += count_tokens(source).values()
    assert 0 < sum(counts) <= most_tokens * MARGIN
    assert sum(counts) / len(counts) <= most_per_line * MARGIN


def test_no_function_has_too_many_tokens_per_line():
    dense = []
    for file, source in read_files().items():
        counts = count_tokens(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lines = range(node.body[0].lineno, node.body[-1].end_lineno + 1)
                of_body = [counts[line] for line in lines if line in counts]
                n_lines = len(of_body)
                if n_lines >= MANY_LINES and sum(of_body) / n_lines > MOST_PER_LINE * MARGIN:
                    dense.append(f"{file}: {node.name} has {sum(of_body) / n_lines:.1f} a line")
    assert dense == []
