"""Read and write files and folders for tests."""

import json
import shutil
from pathlib import Path
from typing import Any

from torchtitan_lite import REPOSITORY

LEFT_OUT = (".*", "__pycache__", "outputs", "tests", "build", "*.egg-info")


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def dump_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def list_names(folder: Path) -> set[str]:
    """Return the names of the files and folders in a folder."""
    return {path.name for path in folder.iterdir()}


def list_files(folder: Path) -> set[str]:
    """Return the paths of all files in a folder and its subfolders, relative to the folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def copy_repository(folder: Path) -> None:
    """Copy the files of the repository, without the tests and without files that earlier runs or builds have
    created."""
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(REPOSITORY, folder, ignore=ignore, dirs_exist_ok=True)
