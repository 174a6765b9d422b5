"""The path for learners in parallel/README.md: its commands print the numbers that it tells, and its code exists."""

import re
import shlex

import pytest

from torchtitan_lite.__main__ import main
from torchtitan_lite.config.reader import REPOSITORY

CHAPTER = (REPOSITORY / "torchtitan_lite" / "parallel" / "README.md").read_text(encoding="utf-8")
PATH = CHAPTER.partition("## A path for learners")[2].partition("\n## ")[0]
ANSWERS = re.findall(r"^python3 -m torchtitan_lite (.*\S) +# prints (.*)$", PATH, re.MULTILINE)
TRAINED = re.findall(r"`NGPU=(\d) ./run_train.sh(.*?)`", PATH)


@pytest.fixture(autouse=True)
def no_earlier_run(tmp_path, monkeypatch):
    """Hide outputs/ of the checkout: `explain` and `check` look at the run that a config would resume."""
    monkeypatch.chdir(tmp_path)


def split_values(told: str) -> list[str]:
    """Split at commas outside of numbers and brackets."""
    return re.split(r", (?![^\[(]*[\])])", told)


@pytest.mark.parametrize(("command", "told"), ANSWERS)
def test_a_command_prints_the_numbers_that_the_chapter_tells(command, told, capsys):
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert [value for value in split_values(told) if value not in printed] == []


@pytest.mark.parametrize(("n_ranks", "args"), TRAINED)
def test_a_training_command_passes_check(n_ranks, args, monkeypatch):
    monkeypatch.setenv("NGPU", n_ranks)
    assert main(["check", *shlex.split(args)]) == 0


def test_the_path_has_seven_steps_whose_code_exists():
    places = re.findall(r"`([\w/]+\.py): (\w+)`", PATH)
    assert (
        len(re.findall(r"^### \d", PATH, re.MULTILINE)) == len(TRAINED) == 7
        and len(ANSWERS) == 10
        and len(places) >= 14
    )
    for file, name in places:
        text = (REPOSITORY / ("" if file == "train.py" else "torchtitan_lite") / file).read_text(
            encoding="utf-8"
        )
        assert re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), (file, name)
