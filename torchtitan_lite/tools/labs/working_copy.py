"""Create a copy of the package in which code is missing or has a planted bug. The checkout does not change.

A lab's hole.py contains the incomplete or faulty functions. A comment above each function names the function that it
replaces:

    # torchtitan_lite/parallel/tensor_parallel.py: RowwiseParallel.forward
    def forward(self, x): ...
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from torchtitan_lite import PACKAGE, REPOSITORY
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.labs.lab import Lab

COPIED_FOLDERS = ("configs", "assets/tokenizer")  # copied beside the package
COPIED_FILES = ("train.py", "pyproject.toml", "run_train.sh")
PLACE = re.compile(r"^# (\S+\.py): ([\w.]+)\n", re.MULTILINE)
HOLE = "hole.py"
JUDGE = "judge.py"
OURS = {HOLE, JUDGE, "solution.py", "solution.toml", "__pycache__"}  # these files are not copied


def start(lab: Lab, folder: Path) -> None:
    """Write the working copy of a lab. Raises UserError if the copy exists, or if the lab has no code to write."""
    if not lab.judge:
        raise UserError(
            f"lab {lab.number} has nothing to write. Answer its questions: lab {lab.number} answer NAME VALUE."
        )
    if folder.exists():
        raise UserError(f"{folder} exists. Continue in this folder, or delete it to start again.")
    # the folder "shipped" exists only in an installed package
    left_out = shutil.ignore_patterns("__pycache__", "shipped")
    shutil.copytree(PACKAGE, folder / "torchtitan_lite", ignore=left_out)
    for name in COPIED_FOLDERS:
        shutil.copytree(REPOSITORY / name, folder / name)
    for name in COPIED_FILES:
        shutil.copy(REPOSITORY / name, folder)
    for path in lab.folder.iterdir():
        if path.name not in OURS:
            shutil.copy(path, folder / path.name)
    if (lab.folder / HOLE).exists():
        replace_functions(folder, lab.folder / HOLE)


def judge_work(lab: Lab, folder: Path) -> int:
    """Run the lab's judge.py in the lab's working copy. Return its exit status, which is 0 if the solution is
    correct."""
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist. Start with: lab {lab.number} start.")
    command = [sys.executable]
    if lab.judge == JUDGE:
        # Python imports from the folder of the script, so judge.py imports the working copy if judge.py is in this
        # folder.
        shutil.copy(lab.folder / JUDGE, folder)
        command.append(JUDGE)
    else:
        command += ["-m", "torchtitan_lite", *lab.judge.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
    return subprocess.run(command, cwd=folder, env=environment).returncode


def replace_functions(folder: Path, source: Path) -> None:
    """Replace functions in `folder` with the functions in `source`. A comment above each function names the function
    that it replaces."""
    pieces = PLACE.split(source.read_text(encoding="utf-8"))[1:]
    for file, name, function in zip(pieces[0::3], pieces[1::3], pieces[2::3], strict=True):
        replace_function(folder / file, name, function.strip())


def replace_function(path: Path, name: str, function: str) -> None:
    """Replace a function or a method, such as `Class.forward`, in a file. Raises UserError if the file has no such
    function."""
    text = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        named = {getattr(child, "name", ""): child for child in ast.iter_child_nodes(node)}
        if part not in named:
            raise UserError(f"{path} has no {name}")
        node = named[part]
    lines = text.splitlines()
    indented = textwrap.indent(function, " " * node.col_offset)
    lines[node.lineno - 1 : node.end_lineno] = indented.splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
