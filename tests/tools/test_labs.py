"""Test the labs: every answer is computed, an unsolved exercise fails the lab's judge.py, and the solution passes."""

import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
from marks import each_row

from torchtitan_lite import REPOSITORY
from torchtitan_lite.__main__ import main
from torchtitan_lite.tools.labs import command, working_copy
from torchtitan_lite.tools.labs.lab import Lab, compute_answer, find_lab, list_labs, read_quantity

BY_DEFAULT = (1, 4)  # The default tests run the judges of these labs.
QUESTIONS = []
DRY_RUNS = []  # questions whose answers take several seconds
for lab in list_labs():
    for name, (tool, _) in lab.questions.items():
        questions = DRY_RUNS if tool.startswith("explain") else QUESTIONS
        questions.append((lab.number, name))
JUDGED = [lab.number for lab in list_labs() if lab.judge]


def test_each_lab_shows_the_names_of_its_questions_and_no_comments():
    assert [lab.number for lab in list_labs()] == list(range(1, 11))
    assert JUDGED == [2, 3, 4, 6, 8]
    for lab in list_labs():
        assert len(lab.questions) == 3
        assert all(f"`{name}`" in lab.text for name in lab.questions)
        assert "<!--" not in lab.text


@pytest.mark.parametrize("lab", list_labs(), ids=lambda lab: str(lab.number))
def test_the_files_of_a_lab_exist_and_its_training_would_start(lab, tmp_path, monkeypatch):
    for file in re.findall(r"`(torchtitan_lite/\S+?\.(?:py|md)|train\.py)`", lab.text):
        assert (REPOSITORY / file).exists(), file
    monkeypatch.chdir(tmp_path)
    for n_ranks, keys in re.findall(r"NGPU=(\d) ./run_train.sh ([^`\n]*)", lab.text):
        assert main(["check", "--gpus", n_ranks, *shlex.split(keys)]) == 0


@each_row("number, name", QUESTIONS + DRY_RUNS, slow=DRY_RUNS)
def test_the_right_answer_is_accepted_and_a_wrong_answer_is_refused(
    number, name, run_tool, monkeypatch
):
    answer = compute_answer(find_lab(number), name)
    monkeypatch.setattr(command, "compute_answer", lambda *_: answer)  # computed only once
    give = partial(run_tool, "lab", number, "answer", name)
    assert "right" in give(answer)
    assert "3 times the right answer" in give(3 * read_quantity(answer), status=1)


QUANTITIES = """
1.5 KiB | 1536
27% | 0.27
1,024 | 1024
1.13TB | 1.13e12
1e3 | 1000
"""


@each_row("text, value", QUANTITIES)
def test_an_answer_of_a_lab_is_a_number_with_or_without_a_unit(text, value):
    assert read_quantity(text) == pytest.approx(float(value))


def solve(lab: Lab, folder: Path) -> None:
    """Put the solution of a lab into a working copy."""
    functions = lab.folder / "solution.py"
    if functions.exists():
        working_copy.replace_functions(folder, functions)
    else:
        shutil.copy(lab.folder / "solution.toml", folder / "my_70b.toml")


@each_row("number", JUDGED, fast=BY_DEFAULT)
def test_an_unsolved_exercise_is_refused_and_its_solution_is_accepted(
    number, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["lab", str(number), "start"]) == 0
    assert main(["lab", str(number), "check"]) == 1
    solve(find_lab(number), tmp_path / "outputs" / "labs" / str(number))
    assert main(["lab", str(number), "check"]) == 0


def test_a_common_mistake_in_an_answer_gets_a_hint(run_tool):
    assert "the 64 ranks" in run_tool(*"lab 1 answer state_70b 1051GiB".split(), status=1)
