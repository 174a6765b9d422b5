"""Read a file that somebody else wrote, or say why not; write files whole or not at all; compare them with a manifest.

A file of a downloaded folder may be anything: a pipe that nobody fills, a device without an end, a million brackets, a
key with two values. Whatever reads such a folder does it here, so that each of these is refused, in the same words. The
reasons are predicates that follow the name of the file: "config.json" "is not JSON: ...".
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MOST_VALUES = 4_000_000  # the largest published tokenizer.json has half as many; these take about a second
MOST_DEPTH = 64  # of lists and objects in each other; published files have less than ten
MOST_DIGITS = 100  # of a number
TOO_DEEP = f"has lists and objects more than {MOST_DEPTH} deep in each other"
HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells a character above U+FFFF: in two halves
BLOCK_BYTES = 2**20  # of a file that is hashed


def read_regular_file(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a file or of a link to one. Raises ValueError with the reason, also if there is no file."""
    try:
        # O_NONBLOCK: do not wait for a writer if it is a pipe
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("is not a regular file")
            n_bytes, content = found.st_size, b""
            if n_bytes <= most_bytes:
                content = file.read(most_bytes + 1)  # it may have grown since, or not say its size, as in /proc
                n_bytes = len(content)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    if n_bytes > most_bytes:
        raise ValueError(f"has {n_bytes:,} bytes, and at most {most_bytes:,} are read")
    return content


# ---------------------------------------------------------------- JSON


def read_json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError with the reason in one line, also if there is no file."""
    return parse_json_object(read_regular_file(path, most_bytes))


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`. Raises ValueError with the reason in one line."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:  # a value follows each, but for those inside a text
        raise ValueError(f"holds more than {MOST_VALUES:,} values")
    try:
        text = content.decode()
        parsed = json.loads(
            text,
            object_pairs_hook=make_object,
            parse_int=parse_number,
            parse_float=parse_number,
            parse_constant=parse_number,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"is not JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if not isinstance(parsed, dict):
        raise ValueError(f"is not a JSON object: {text[:40]!r}")
    check_depth(parsed)
    if HALF_OF_A_PAIR.search(text):
        try:  # no file and no terminal can take half of a surrogate pair
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"has half of a character: {error.object[error.start]!r}") from None
    return parsed


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"has the key {twice!r:.100} twice in one object")
    return made


def parse_number(text: str) -> int | float:
    """Return a number of JSON, which may also be spelled NaN or Infinity. Raises ValueError if it is not finite."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"has a number of {len(text):,} characters")
    number = int(text) if text.removeprefix("-").isdecimal() else float(text)
    if not math.isfinite(number):
        raise ValueError(f"has the number {text}, which is not finite")
    return number


def check_depth(parsed: Any) -> None:
    """Raise ValueError if lists and objects are nested so deeply that recursion might run out of stack."""
    level: Iterable[Any] = [parsed]
    for _ in range(MOST_DEPTH + 1):
        inner = [value for value in level if isinstance(value, dict | list)]
        if not inner:
            return
        level = [part for value in inner for part in (value.values() if isinstance(value, dict) else value)]
    raise ValueError(TOO_DEEP)


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
