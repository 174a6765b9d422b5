"""Code tokens of each half: names, operators, numbers and strings, without docstrings and comments.

A half above its limit has an idea too many. Take one out; do not write denser lines, because lines are free.
Only `.ci/run` runs these tests, so a fork that grows does not fail. Python 3.11 counts: 3.12 splits f-strings.
"""

import ast
import io
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# About 1 % above the size of 2026-11-27. The plan wants less: 62,500, 58,000, 117,000 and 5,500.
TRAINER = 73_200
TOOLS = 77_300
TESTS = 127_600
CORPORA = 7_400  # a part of TOOLS

pytestmark = [
    pytest.mark.skipif("HOLD_SIZE" not in os.environ, reason="only .ci/run sets HOLD_SIZE"),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11), reason="limits hold for the tokens of Python 3.11"
    ),
]


def find_docstrings(source: str) -> set[int]:
    """Return the numbers of all lines that belong to a docstring."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def count_tokens(source: str) -> int:
    """Return the number of code tokens of a file."""
    docstrings = find_docstrings(source)
    n_tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in COUNTED and token.start[0] not in docstrings:
            n_tokens += 1
    return n_tokens


def list_files() -> list[str]:
    """Return the Python files that git has, so that scratch files do not count."""
    listing = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return listing.stdout.splitlines()


def measure(is_of_half) -> int:
    """Return the code tokens of all files for which `is_of_half` is true."""
    n_tokens = 0
    for name in list_files():
        if is_of_half(name):
            n_tokens += count_tokens((REPOSITORY / name).read_text(encoding="utf-8"))
    return n_tokens


def is_tool(name: str) -> bool:
    return name.startswith("torchtitan_lite/tools/")


def is_test(name: str) -> bool:
    return name.startswith("tests/")


def is_trainer(name: str) -> bool:
    return not is_tool(name) and not is_test(name)


def is_corpora(name: str) -> bool:
    return name.startswith("torchtitan_lite/tools/corpora/")


@pytest.mark.parametrize(
    "is_of_half, limit",
    [(is_trainer, TRAINER), (is_tool, TOOLS), (is_test, TESTS), (is_corpora, CORPORA)],
    ids=["trainer", "tools", "tests", "corpora"],
)
def test_a_half_keeps_to_its_tokens(is_of_half, limit):
    assert 0 < measure(is_of_half) <= limit


def test_docstrings_and_comments_do_not_count():
    source = '"""A file."""\n# a comment\ndef f(x):\n    """One."""\n    return x + 1  # more\n'
    assert count_tokens(source) == len("def f ( x ) : return x + 1".split())
