"""Lines per room: a room fails above 1.1 times its budget, the trainer and the whole package above their sums."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

TRAINER = {
    "train.py": 235,
    "torchtitan_lite": 880,
    "torchtitan_lite/config": 2_000,
    "torchtitan_lite/model": 950,
    "torchtitan_lite/parallel": 2_170,
    "torchtitan_lite/data": 900,
    "torchtitan_lite/checkpoint": 1_300,
    "torchtitan_lite/components": 1_210,
    "torchtitan_lite/faults": 400,
}
TOOLS = {
    "torchtitan_lite/tools": 1_430,  # 83 of them draw the pictures of plan and report
    "torchtitan_lite/tools/corpora": 620,
    "torchtitan_lite/tools/verify": 2_000,
    "torchtitan_lite/tools/plan": 2_660,
    "torchtitan_lite/tools/report": 400,
    "torchtitan_lite/tools/bench": 400,
    "torchtitan_lite/tools/faults": 450,
}
TESTS = {"tests": 13_650}
BUDGETS = TRAINER | TOOLS | TESTS


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def measure(room: str) -> int:
    """Return the lines of a file, of a folder without its subfolders, or of all tests."""
    path = REPOSITORY / room
    files = [path] if path.is_file() else path.rglob("*.py") if room == "tests" else path.glob("*.py")
    return sum(map(count_lines, files))


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_to_its_budget(room):
    assert measure(room) <= 1.1 * BUDGETS[room]


@pytest.mark.parametrize("rooms", [TRAINER, TRAINER | TOOLS, TESTS], ids=["trainer", "package", "tests"])
def test_a_half_keeps_to_the_sum_of_its_budgets(rooms):
    assert sum(map(measure, rooms)) <= sum(rooms.values())


def test_every_file_of_the_package_belongs_to_a_room():
    files = {path for path in (REPOSITORY / "torchtitan_lite").rglob("*.py")}
    assert files == {
        path for room in (TRAINER | TOOLS) if room != "train.py" for path in (REPOSITORY / room).glob("*.py")
    }


LIST_FILES = (
    "import sys, train; print(*(getattr(module, '__file__', None) for module in sys.modules.values()), sep='\\n')"
)


def test_train_py_loads_the_trainer_and_none_of_the_tools():
    answer = subprocess.run([sys.executable, "-c", LIST_FILES], cwd=REPOSITORY, capture_output=True, text=True)
    package = REPOSITORY / "torchtitan_lite"
    files = [Path(file) for file in answer.stdout.split("\n")]
    loaded = [file for file in files if package in file.parents or file == REPOSITORY / "train.py"]
    assert package / "step.py" in loaded, answer.stderr
    assert not [file for file in loaded if package / "tools" in file.parents]
    assert sum(map(count_lines, loaded)) <= sum(TRAINER.values())
