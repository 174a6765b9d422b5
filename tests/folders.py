"""Files and folders that tests read and write."""

import json
from pathlib import Path
from typing import Any


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def dump_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def list_names(folder: Path) -> set[str]:
    """Return the names of the files and folders in a folder."""
    return {path.name for path in folder.iterdir()}
