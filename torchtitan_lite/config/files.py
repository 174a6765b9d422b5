"""Write files whole or not at all, and compare them with the SHA-256 in a manifest.

Hashing leaves the interpreter free for other threads.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 2**20


def hash_file(path: Path, rest: Callable[[], object] = lambda: None) -> str:
    """Return the SHA-256 of a file. `rest` is called after each block."""
    digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(block):
            digest.update(memoryview(block)[:n])
            rest()
    return digest.hexdigest()


def describe_damage(path: Path, sha256: str, rest: Callable[[], object] = lambda: None) -> str | None:
    """Read a file; return what is wrong with it, if anything."""
    try:
        found = hash_file(path, rest)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return f"{path} has SHA-256 {found}, and its manifest says {sha256}" if found != sha256 else None


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
