"""Hash files, flush folders, and import optional packages."""

import hashlib
import importlib
import os
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from torchtitan_lite.config.messages import UserError

LFS = b"version https://git-lfs.github.com/spec/v1"


def import_extra(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package. If it is missing, the UserError names the extra in pyproject.toml."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{error}. Run `pip install {package}` (the extra `{extra}`)") from None


def refuse_pointer(path: Path) -> None:
    """Raise ValueError if a file is only a Git LFS pointer."""
    with open(path, "rb") as file:
        if file.read(len(LFS)) == LFS:
            command = shlex.join(["git", "-C", str(path.parent), "lfs", "pull"])
            raise ValueError(f"it is a Git LFS pointer. Run: {command}")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Hashing releases the GIL. Raises OSError."""
    digest, block = hashlib.sha256(), bytearray(2**20)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(block):
            digest.update(memoryview(block)[:n])
    return digest.hexdigest()


def find_damage(hashes: Mapping[Path, str]) -> list[str]:
    """Hash all files. Return one message for each file whose SHA-256 differs from the expected value."""

    def describe_damage(path: Path) -> str | None:
        try:
            found = hash_file(path)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        return f"{path} has changed since it was written: its SHA-256 is {found}" if found != hashes[path] else None

    with ThreadPoolExecutor() as threads:
        return [damage for damage in threads.map(describe_damage, hashes) if damage]


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of `folder` to disk. Files created or renamed there survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
