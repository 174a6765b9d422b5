"""Read a file that somebody else wrote, as bytes or as one JSON object, or say why not.

Such a file may be anything: a pipe that nobody fills, a device without an end, a million brackets, a key with two
values. Whatever reads a downloaded folder uses this file, so that each of these is refused, in the same words. The
reasons are predicates that follow the name of the file: "config.json" "is not JSON: ...".
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MOST_VALUES = 4_000_000  # the largest published tokenizer.json has half as many; these take about a second
MOST_DEPTH = 64  # of lists and objects in each other; published files have less than ten
MOST_DIGITS = 100  # of a number
MOST_SHOWN = 1000  # characters of a message that repeats what a file says
HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells a character above U+FFFF: in two halves


def read_json_object(path: Path, most_bytes: int, *, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError with the reason in one line, also if there is no file."""
    return parse_json_object(read_regular_file(path, most_bytes), most_values=most_values)


def read_regular_file(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a file or of a link to one. Raises ValueError with the reason, also if there is no file."""
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
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


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file, and do not wait for a writer if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_json_object(content: bytes, *, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """Return the JSON object in `content`. Raises ValueError with the reason in one line."""
    if sum(map(content.count, (b",", b"[", b"{"))) > most_values:  # a value follows each, but for those inside a text
        raise ValueError(f"holds more than {most_values:,} values")
    try:
        text = content.decode()
        parsed = json.loads(
            text,
            object_pairs_hook=make_object,
            parse_int=read_whole,
            parse_float=read_finite,
            parse_constant=refuse_constant,
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
        check_characters(parsed)
    return parsed


TOO_DEEP = f"has lists and objects more than {MOST_DEPTH} deep in each other"


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"has the key {twice!r:.100} twice in one object")
    return made


def read_whole(digits: str) -> int:
    check_length(digits)
    return int(digits)


def read_finite(digits: str) -> float:
    check_length(digits)
    number = float(digits)
    if not math.isfinite(number):
        refuse_constant(digits)
    return number


def check_length(digits: str) -> None:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"has a number of {len(digits):,} characters")


def refuse_constant(name: str) -> float:
    raise ValueError(f"has the number {name}, which is not finite")


def in_one_line(message: str) -> str:
    """Shorten a message and escape its control characters: it may repeat what a file holds."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message[: MOST_SHOWN + 1])
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]} ..."


def check_depth(parsed: Any) -> None:
    """Raise ValueError if lists and objects are nested so deeply that recursion might run out of stack."""
    level: Iterable[Any] = [parsed]
    for _ in range(MOST_DEPTH):
        inner = [value for value in level if isinstance(value, dict | list)]
        if not inner:
            return
        level = [part for value in inner for part in (value.values() if isinstance(value, dict) else value)]
    if any(isinstance(value, dict | list) for value in level):
        raise ValueError(TOO_DEEP)


def check_characters(parsed: Any) -> None:
    """Raise ValueError if a string has one half of a surrogate pair: no file and no terminal can take such a text."""
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has half of a character: {error.object[error.start]!r}") from None
