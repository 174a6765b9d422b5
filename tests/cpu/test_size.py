"""Code tokens of each part: names, operators, numbers and strings, without docstrings and comments.

If a part exceeds its guide, remove a feature or simplify. Denser lines do not help: tokens count, and lines do not.
Only `.ci/run` runs these tests, so a fork may grow. The tests need Python 3.11, because 3.12 splits f-strings into
tokens.
"""

import ast
import io
import os
import subprocess
import sys
import tokenize

import pytest

from torchtitan_lite import REPOSITORY

COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Guides for each part: code tokens, and tokens per code line. A test fails only above guide * MARGIN, because nobody
# should shorten names to pass.
CORE = (60_000, 8.5)
EXTENSIONS = (22_900, 9.0)
TOOLS = (82_300, 9.0)
TESTS = (132_100, 10.0)
MARGIN = 1.05
MOST_PER_LINE = 13.0  # in a function of MANY_LINES or more
MANY_LINES = 10

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


def count_tokens(source: str) -> dict[int, int]:
    """Return line number -> number of code tokens that start on it. Lines without tokens are left out."""
    docstrings = find_docstrings(source)
    counts: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type in COUNTED and line not in docstrings:
            counts[line] = counts.get(line, 0) + 1
    return counts


def list_files(is_of_part) -> list[str]:
    """Return a part's Python files that git tracks. Other files, such as scratch files, do not count."""
    command = ["git", "ls-files", "*.py"]
    listing = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in listing.stdout.splitlines() if is_of_part(name)]


def measure(is_of_part) -> tuple[int, int]:
    """Return the code tokens and the code lines of all files for which `is_of_part` is true."""
    n_tokens = 0
    n_lines = 0
    for name in list_files(is_of_part):
        counts = count_tokens((REPOSITORY / name).read_text(encoding="utf-8"))
        n_tokens += sum(counts.values())
        n_lines += len(counts)
    return n_tokens, n_lines


def is_tool(name: str) -> bool:
    return name.startswith("torchtitan_lite/tools/")


def is_test(name: str) -> bool:
    return name.startswith("tests/")


def is_extension(name: str) -> bool:
    return name.startswith("torchtitan_lite/extensions/")


def is_core(name: str) -> bool:
    is_of_package = name.startswith("torchtitan_lite/")
    return name == "train.py" or is_of_package and not is_tool(name) and not is_extension(name)


@pytest.mark.parametrize(
    "is_of_part, limits",
    [
        (is_core, CORE),
        (is_extension, EXTENSIONS),
        (is_tool, TOOLS),
        (is_test, TESTS),
    ],
    ids=["core", "extensions", "tools", "tests"],
)
def test_a_part_keeps_to_its_tokens_and_density(is_of_part, limits):
    most_tokens, most_per_line = limits
    n_tokens, n_lines = measure(is_of_part)
    assert 0 < n_tokens <= most_tokens * MARGIN
    assert n_tokens / n_lines <= most_per_line * MARGIN


def test_no_function_is_dense():
    dense = []
    for name in list_files(
        lambda name: is_core(name) or is_extension(name) or is_tool(name) or is_test(name)
    ):
        source = (REPOSITORY / name).read_text(encoding="utf-8")
        counts = count_tokens(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lines = range(node.body[0].lineno, node.body[-1].end_lineno + 1)
                of_body = [counts[line] for line in lines if line in counts]
                n_lines = len(of_body)
                if n_lines >= MANY_LINES and sum(of_body) / n_lines > MOST_PER_LINE * MARGIN:
                    dense.append(f"{name}: {node.name} has {sum(of_body) / n_lines:.1f} a line")
    assert dense == []
