"""Test assets/notebooks: the commands exist, and every cell was executed."""

import json
import re

from folders import load_json
from test_commands import check_command

from torchtitan_lite import REPOSITORY

NOTEBOOK = REPOSITORY / "assets/notebooks/first_hour.ipynb"
CELLS = load_json(NOTEBOOK)["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_every_cell_was_executed_without_an_error():
    for number, cell in enumerate(CODE, 1):
        assert cell["execution_count"] == number
        assert not [each for each in cell["outputs"] if each["output_type"] == "error"]
    told = json.dumps([cell["outputs"] for cell in CODE])
    assert "certified: debug on tp2" in told
    assert "wrong: debug on tp2" in told
    difference = re.search(r"largest relative difference: ([\d.e-]+)", told)
    assert float(difference[1]) < 1e-6


def test_every_command_in_the_notebook_exists():
    source = "".join("".join(cell["source"]) for cell in CODE)
    commands = re.findall(r'(?:python3 -m torchtitan_lite|./run_train.sh) [^"{]*', source)
    assert len(commands) >= 8
    for command in commands:
        check_command(command)
