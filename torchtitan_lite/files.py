"""Read what a run needs from its host: JSON files of other programs, hashes, optional packages, the git commit."""

import hashlib
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.messages import UserError

REQUIRED = object()  # default of JsonObject.take: the key must be present


class JsonObject(dict):
    """An object of a JSON file from outside. `take` checks each value where it is used."""

    def __init__(self, path: Path, values: dict[str, Any], place: str = ""):
        super().__init__(values)
        self.path = path
        self.place = place  # keys that lead to this object: "rope_scaling."

    def take(self, key: str, kind: Any, default: Any = REQUIRED) -> Any:
        """Return the value of `key`, which must have the type `kind`, such as `int`, `list` or `str | dict`.

        Returns the default if the key is missing or null. An object becomes a JsonObject. Raises UserError.
        """
        value = self.get(key)
        name = self.place + key
        if value is None and default is not REQUIRED:
            return default
        if not has_kind(value, kind):
            found = "is missing" if value is None else f"= {shorten(value)}"
            expected = kind.__name__ if type(kind) is type else kind
            raise UserError(f"{self.path}: {name} {found}; it must be {expected}")
        return JsonObject(self.path, value, f"{name}.") if isinstance(value, dict) else value


def read_json(path: Path, *, may_be_missing: bool = False) -> JsonObject:
    """Return the object in a JSON file from outside. A missing file gives {} if it `may_be_missing`.

    Raises UserError.
    """
    if may_be_missing and not path.exists():
        return JsonObject(path, {})
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=make_object)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold an object {{...}}, but it is {shorten(value)}")
    return JsonObject(path, value)


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from its pairs, for a JSON parser that calls this. Raises ValueError for a repeated key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {key!r} more than once: {shorten(content)}")
    return content


def has_kind(value: Any, kind: Any) -> bool:
    """Return whether a JSON value has this type. An int is also a float; a bool is neither."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, float | int if kind is float else kind)


def shorten(value: Any) -> str:
    """Return the first characters of a JSON value."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def import_extra(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package. If it is missing, the UserError names the extra in pyproject.toml."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{error}. Run `pip install {package}` (the extra `{extra}`)") from None


def explain_hub_cache(folder: str | Path) -> str:
    """Explain where a cache folder of the Hugging Face Hub has its files. Return "" for any other folder."""
    root = Path(folder).absolute()
    if root.name == "snapshots":
        root = root.parent
    if not root.name.startswith(("models--", "datasets--")):
        return ""
    snapshots = sorted(map(str, root.glob("snapshots/*")))
    where = f"{folder} is a cache folder of the Hugging Face Hub. Its files are in"
    return f"{where} {' or '.join(snapshots)}" if snapshots else ""


def explain_hub_name(text: str | Path) -> str:
    """Explain why a name or cache folder of the Hugging Face Hub cannot be read, and how to fix it.

    Returns "" for any other text.
    """
    if why := explain_hub_cache(text):
        return why
    prefix = r"hf:/+|https?:/+huggingface\.co/"
    match = re.fullmatch(rf"(?:{prefix})?(?!outputs/)(\w[\w.-]*)/(\w[\w.-]*)", str(text))
    if not match or os.path.exists(text) or os.path.exists(match[1]):
        return ""
    name = f"{match[1]}/{match[2]}"
    return f"{text} is no folder here; nothing is downloaded. Run: hf download {name} --local-dir {name}"


def refuse_pointer(path: Path) -> None:
    """Raise ValueError if a file is only a Git LFS pointer."""
    with open(path, "rb") as file:
        if file.read(42) == b"version https://git-lfs.github.com/spec/v1":
            command = shlex.join(["git", "-C", str(path.parent), "lfs", "pull"])
            raise ValueError(f"it is a Git LFS pointer. Run: {command}")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Hashing releases the GIL. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.sha256()
        block = bytearray(2**20)
        while n := file.readinto(block):
            digest.update(memoryview(block)[:n])
    return digest.hexdigest()


def find_damage(hashes: Mapping[Path, str]) -> list[str]:
    """Hash all files. Return one message for each file whose SHA-256 differs from the expected value."""

    def describe_damage(path: Path) -> str:
        try:
            found = hash_file(path)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if found == hashes[path]:
            return ""
        return f"{path} has changed since it was written: its SHA-256 is {found}"

    with ThreadPoolExecutor() as threads:
        return list(filter(None, threads.map(describe_damage, hashes)))


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of `folder` to disk. Files created or renamed there survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def describe_launch() -> dict[str, str | None]:
    """Return the git commit of this repository, the command, and the host.

    The commit ends in "-dirty" if files differ from it. It is None if this is not a git repository.
    """
    commit = ""
    if (REPOSITORY / ".git").exists() and shutil.which("git"):
        git = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
        answer = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True)
        commit = answer.stdout.strip()
    command = shlex.join(sys.argv)
    return {"commit": commit or None, "command": command, "host": platform.node()}
