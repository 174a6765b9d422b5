"""Hash files, flush folders, and import optional packages."""

import hashlib
import importlib
import os
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

LFS = b"version https://git-lfs.github.com/spec/v1"


def import_extra(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package. Raises ImportError that names the extra of pyproject.toml."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"{error}. It is in the extra `{extra}`: pip install {package}") from None


def refuse_pointer(path: Path) -> None:
    """Raise ValueError if a file is the pointer that Git LFS leaves in its place."""
    with open(path, "rb") as file:
        if file.read(len(LFS)) == LFS:
            command = shlex.join(["git", "-C", str(path.parent), "lfs", "pull"])
            raise ValueError(f"it is a Git LFS pointer. Run: {command}")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, while other threads continue. Raises OSError."""
    digest, block = hashlib.sha256(), bytearray(2**20)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(block):
            digest.update(memoryview(block)[:n])
    return digest.hexdigest()


def find_damage(hashes: Mapping[Path, str]) -> list[str]:
    """Hash all files. Return what is wrong with each file whose SHA-256 is not the expected one."""

    def describe_damage(path: Path) -> str | None:
        try:
            found = hash_file(path)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        return f"{path} has changed since it was written: its SHA-256 is {found}" if found != hashes[path] else None

    with ThreadPoolExecutor() as threads:
        return [damage for damage in threads.map(describe_damage, hashes) if damage]


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, so that a file created or renamed there survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
