"""Test that `pip install .` gives a package that works in any folder. The test builds a wheel, without a network.

Then it unpacks the wheel into a new folder, and starts Python without the checkout on sys.path.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from folders import copy_repository, list_files
from programs import run_python

from torchtitan_lite import REPOSITORY

OF_PACKAGE = [
    path for path in (REPOSITORY / "torchtitan_lite").rglob("*") if path.suffix in (".py", ".md")
]
SHIPPED = ["train.py", "run_train.sh", "pyproject.toml", "assets/tokenizer/tokenizer.model"]
SHIPPED += [f"configs/{path.name}" for path in (REPOSITORY / "configs").glob("*.toml")]


def pip(*args: object, **options: object) -> None:
    command = [sys.executable, "-m", "pip", *args, "--no-index", "--no-deps", "-q"]
    subprocess.run(command, check=True, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"  # a build writes files into its source folder
    copy_repository(source)
    pip("wheel", "--no-build-isolation", ".", "-w", folder, cwd=source)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel) -> Path:
    """Install the wheel into a folder, which then contains `bin`. The folder serves as PYTHONPATH."""
    folder = wheel.parent / "site"
    pip("install", "--target", folder, wheel)
    return folder


def run(site: Path, folder: Path, *args: object) -> subprocess.CompletedProcess:
    variables = {"NGPU": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return run_python(*args, folder=folder, PYTHONPATH=str(site), **variables)


@pytest.fixture
def tool(site, tmp_path):
    """Return a function that runs torchtitan-lite with arguments in the folder tmp_path, and returns what it prints."""

    def tool(command: str) -> str:
        answer = run(site, tmp_path, site / "bin" / "torchtitan-lite", *command.split())
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    return tool


def test_the_wheel_contains_the_package_its_readmes_and_the_files_that_commands_read(wheel):
    with zipfile.ZipFile(wheel) as files:
        held = {name for name in files.namelist() if "dist-info" not in name}
    needed = {str(path.relative_to(REPOSITORY)) for path in OF_PACKAGE}
    assert needed | {f"torchtitan_lite/shipped/{name}" for name in SHIPPED} <= held
    assert {name.partition("/")[0] for name in held} == {"torchtitan_lite"}


def test_tools_of_an_installed_package_work_in_any_folder(tool, tmp_path):
    for command in ("--help", "check --config debug", "lab 1"):
        said = tool(command)
    assert "torchtitan-lite " in said and "run_train.sh" not in said
    assert not list(tmp_path.iterdir()), "check writes nothing"


def test_without_packages_a_tool_prints_help_and_then_says_what_is_missing_and_makes_no_venv(
    site, tmp_path
):
    command = "-S -m torchtitan_lite generate nowhere".split()
    assert run(site, tmp_path, *command, "--help").returncode == 0
    answer = run(site, tmp_path, *command)
    assert answer.returncode == 1 and "torch>=" in answer.stderr
    assert not (site / "torchtitan_lite" / "shipped" / ".venv").exists()


@pytest.mark.slow
def test_an_installed_package_trains_in_any_folder_and_writes_there_only(site, tool, tmp_path):
    before = list_files(site)
    tool("train --config debug --training.steps 1 --validation.no_enable")
    assert (tmp_path / "outputs" / "debug" / "metrics.jsonl").is_file()
    assert list_files(site) == before
