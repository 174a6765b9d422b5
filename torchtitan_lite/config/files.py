"""Read a file that somebody else wrote, or say why not; write files whole or not at all; compare them with a manifest.

The reasons are predicates that follow the name of the file: "config.json" "is not JSON: ...".
"""

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

BLOCK_BYTES = 2**20  # of a file that is hashed


def import_extra(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package. Raises ImportError that names the extra of pyproject.toml."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"{error}. It is in the extra `{extra}`: pip install {package}") from None


def read_regular_file(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a file. Raises ValueError with the reason, also if there is no file."""
    try:
        if (n_bytes := path.stat().st_size) > most_bytes:
            raise ValueError(f"has {n_bytes:,} bytes, and at most {most_bytes:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None


def read_json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError with the reason in one line, also if there is no file."""
    return parse_json_object(read_regular_file(path, most_bytes))


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`. Raises ValueError with the reason in one line."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("is not a JSON object")
    return parsed


# ---------------------------------------------------------------- hashes, and writing


def describe_damage(path: Path, sha256: str, rest: Callable[[], object] = lambda: None) -> str | None:
    """Hash a file; return what is wrong with it, if anything. `rest` is called after each block.

    Hashing leaves the interpreter free for other threads.
    """
    try:
        found = hash_file(path, hashlib.sha256(), rest)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return f"{path} has SHA-256 {found}, and its manifest says {sha256}" if found != sha256 else None


def hash_file(path: Path, digest: Any, rest: Callable[[], object] = lambda: None) -> str:
    """Return what a `digest` of hashlib makes of a file, in hexadecimal. Raises OSError."""
    block = bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(block):
            digest.update(memoryview(block)[:n])
            rest()
    return digest.hexdigest()


def find_damage(hashes: Mapping[Path, str]) -> list[str]:
    """Read all files; return what is wrong with each whose SHA-256 is another than the one given."""
    with ThreadPoolExecutor() as threads:
        return [damage for damage in threads.map(describe_damage, hashes, hashes.values()) if damage]


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Context manager: a file to write that replaces `path` at the end, when it is whole and on the disk."""
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Write the names in `folder` to the disk: a file that was made or renamed there survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
