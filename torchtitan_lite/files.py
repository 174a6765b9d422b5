"""Import optional packages, hash files, and read the git commit."""

import hashlib
import importlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.messages import UserError


def import_extra(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package. If the package is missing, the UserError names the extra in
    pyproject.toml."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(
            f"{error}. Run `{sys.executable} -m pip install {package}` (the extra `{extra}`)"
        ) from None


def refuse_pointer(path: Path) -> None:
    """Raise ValueError if a file is only a Git LFS pointer."""
    with open(path, "rb") as file:
        if file.read(42) == b"version https://git-lfs.github.com/spec/v1":
            command = shlex.join(["git", "-C", str(path.parent), "lfs", "pull"])
            raise ValueError(f"it is a Git LFS pointer. Run: {command}")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Hashing releases the GIL. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
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


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: after a failure the old file is unchanged. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of `folder` to disk, so that files created or renamed in it survive a power
    failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def describe_launch() -> dict[str, str | None]:
    """Return the git commit of this repository, the command, and the host.

    The commit ends in "-dirty" if tracked files differ from the commit. The commit is None outside of a git repository.
    """
    commit = ""
    # --git-dir: otherwise git would also find a repository in a parent folder
    git = [
        "git",
        f"--git-dir={REPOSITORY / '.git'}",
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
    ]
    with suppress(FileNotFoundError):  # a host without git
        answer = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True)
        commit = answer.stdout.strip()
    return {
        "commit": commit or None,
        "command": shlex.join(sys.argv),
        "host": platform.node(),
    }
