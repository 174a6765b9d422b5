"""Read a lab: a Markdown file in assets/labs/ whose comments say how each answer is computed.

    # Lab 3: tensor parallel (30 minutes)
    <!-- answer gather_bytes: explain --config debug --gpus 2 | all-gather over tp .* (\\S+ KiB) -->
    <!-- slip gather_bytes 2: a rank already holds one half -->
    <!-- judge: verify --config debug --ranks 2 -->

An answer is the part of the tool's output that matches the pattern, so no file contains the answers. A slip describes a
common mistake: the ratio of the wrong answer to the right answer, and a hint. A judge is a tool, or a Python file of
the lab, that exits with status 0 if the work is right.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.messages import UserError

LABS = REPOSITORY / "assets" / "labs"
TITLE = re.compile(r"# Lab (\d+): (.+)")
COMMENT = re.compile(r"<!-- .*? -->\n", re.DOTALL)
ANSWER = re.compile(r"<!-- answer (\w+): (.+?) \| (.+?) -->")
SLIP = re.compile(r"<!-- slip (\w+) (\S+): (.+?) -->")
JUDGED_BY = re.compile(r"<!-- judge: (.+?) -->")
QUANTITY = re.compile(r"([-+]?[\d,]*\.?\d+(?:[eE][-+]?\d+)?)\s*([A-Za-z%]*)")
UNITS = {
    "": 1.0,
    "%": 0.01,
    "B": 1.0,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "GFLOP": 1e9,
    "TFLOP": 1e12,
    "s": 1.0,
    "days": 86_400.0,
}


@dataclass(frozen=True)
class Lab:
    """A lab of assets/labs/."""

    number: int
    title: str  # name and duration
    text: str  # the Markdown text without the comments
    questions: dict[str, tuple[str, str]]  # name -> command of a tool, pattern of the answer
    slips: list[tuple[str, str, str]]  # name, ratio of the wrong answer to the right one, hint
    judge: str  # command that judges the code; "" if the lab has no code to write

    @property
    def folder(self) -> Path:
        """The folder with the lab's holes, solution and judge, if the lab has code to write."""
        return LABS / f"lab{self.number}"


def list_labs() -> list[Lab]:
    """Read all labs, in order."""
    labs = []
    for path in LABS.glob("lab*.md"):
        source = path.read_text(encoding="utf-8")
        number, title = TITLE.match(source).groups()
        questions = {name: (command, pattern) for name, command, pattern in ANSWER.findall(source)}
        command = "".join(JUDGED_BY.findall(source))
        text = COMMENT.sub("", source)
        labs.append(Lab(int(number), title, text, questions, SLIP.findall(source), command))
    return sorted(labs, key=lambda lab: lab.number)


def find_lab(number: int) -> Lab:
    """Return a lab. Raises UserError."""
    labs = list_labs()
    if number > len(labs):
        raise UserError(f"there is no lab {number}. Use 1 to {len(labs)}.")
    return labs[number - 1]


def read_quantity(text: str) -> float:
    """Convert a number with a unit to the base unit: `1.5 KiB` is 1536, `27%` is 0.27. Raises UserError."""
    found = QUANTITY.fullmatch(text.strip())
    if not found or found[2] not in UNITS:
        units = ", ".join(unit for unit in UNITS if unit)
        raise UserError(
            f"{text!r} is not a number. Write 1.13e12 or 1.13TB; the units are {units}."
        )
    return float(found[1].replace(",", "")) * UNITS[found[2]]


def compute_answer(lab: Lab, name: str) -> str:
    """Run the tool that prints the answer, in an empty folder. Return the answer as the tool prints it.

    Raises UserError for an unknown question.
    """
    if name not in lab.questions:
        known = ", ".join(lab.questions)
        raise UserError(f"lab {lab.number} has no question {name}. Its questions are: {known}.")
    command, pattern = lab.questions[name]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    tool = [sys.executable, "-m", "torchtitan_lite", *shlex.split(command)]
    with tempfile.TemporaryDirectory() as empty:  # a folder without earlier runs
        done = subprocess.run(tool, cwd=empty, env=environment, capture_output=True, text=True)
    printed = re.search(pattern, done.stdout, re.MULTILINE)
    if not printed:
        raise UserError(f"`{command}` does not print the answer to {name}. Report this lab.")
    return printed[1]
