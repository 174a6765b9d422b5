"""Files to documents. The longest is read in little memory, and a large file of lines by several processes.

    notes.md, main.py    one document each
    posts.jsonl          one document a line: the text in one field of a JSON object

A document comes as pieces of MAX_CHARACTERS, where Tokenizer.encode cuts too: their ids, put together, are the ids of
the whole. A part of a .jsonl file has the lines that begin in it, so that every line is in one part:

    {"text": "one"}\\n{"text": "two"}\\n{"text": "three"}\\n
    |---- one, two ------|----- three ---------------|
"""

import codecs
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from torchtitan_lite.data.sources import BLOCK_BYTES, PreparationError, Source, errors_named, open_source, read_small
from torchtitan_lite.data.tokenizer import MAX_CHARACTERS

MAX_LINE_BYTES = 2**26  # a line of JSON is held whole; without a bound, one bad file could take all memory
REPLACEMENT = "\ufffd"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell them, UTF-8 cannot
BYTE_ORDER_MARK = "\ufeff"


class BadLine(ValueError):
    """Why a line of JSON is no document."""


@dataclass(frozen=True)
class Part:
    """Bytes start .. stop-1 of a file as it lies on disk. Only plain .jsonl files are read in several parts."""

    source: Source
    start: int
    stop: int


@dataclass
class Tally:
    """What was met while reading; it grows while documents are drawn."""

    n_empty: int = 0  # documents without a character, which are left out
    n_replaced: int = 0  # U+FFFD in the place of broken UTF-8
    n_bad_lines: int = 0
    first_bad_line: str = ""  # where it is, and why


def read_documents(
    part: Part, *, field: str, skip_bad: bool, tally: Tally, report: Callable[[int], None]
) -> Iterator[Iterator[str]]:
    """The documents of `part`, each as its pieces, which must be drawn before the next document is.

    `field` holds the text in a line of JSON. A line without text raises PreparationError, or is counted if `skip_bad`.
    `report` is told how many more bytes of the file, as it lies on disk, were read.
    """
    source, position = part.source, part.start
    if source.n_bytes <= BLOCK_BYTES and not source.is_packed and not source.holds_lines:
        yield cut(decode(read_small(source), tally).removeprefix(BYTE_ORDER_MARK))
        report(source.n_bytes)
        return
    with open_source(source) as (file, raw):

        def count_bytes() -> None:
            nonlocal position
            now = min(max(raw.tell(), part.start), part.stop)  # a line may begin in this part and end in the next
            report(now - position)
            position = now

        if source.holds_lines:
            for text in read_texts(file, part, field=field, skip_bad=skip_bad, tally=tally):
                count_bytes()
                yield cut(text)
        else:
            yield read_pieces(file, source, tally, count_bytes)
    report(part.stop - position)


def cut(text: str) -> Iterator[str]:
    return (text[start : start + MAX_CHARACTERS] for start in range(0, len(text), MAX_CHARACTERS))


def decode(content: bytes, tally: Tally) -> str:
    text = content.decode(errors="replace")
    if not text.isascii():  # U+FFFD that stands in the file itself is not counted
        tally.n_replaced += text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())
    return text


def read_pieces(file: BinaryIO, source: Source, tally: Tally, count_bytes: Callable[[], None]) -> Iterator[str]:
    """The text of a whole file in pieces of MAX_CHARACTERS; the last may be shorter. A byte order mark is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    encoded = REPLACEMENT.encode()
    text, seam, at_start = "", b"", True
    block = None
    while block != b"":
        with errors_named(source):  # here too: this runs in the place that draws the pieces
            block = file.read(BLOCK_BYTES)
        count_bytes()
        decoded = decoder.decode(block, final=not block)
        if not decoded.isascii():  # as in `decode`, also where two blocks meet
            tally.n_replaced += decoded.count(REPLACEMENT) - (seam + block).count(encoded)
        seam = (seam + block[1 - len(encoded) :])[1 - len(encoded) :]
        text += decoded.removeprefix(BYTE_ORDER_MARK) if at_start else decoded
        at_start = at_start and not decoded
        whole = len(text) - len(text) % MAX_CHARACTERS if block else len(text)
        yield from cut(text[:whole])
        text = text[whole:]


# ---------------------------------------------------------------- JSON lines


def read_texts(file: BinaryIO, part: Part, *, field: str, skip_bad: bool, tally: Tally) -> Iterator[str]:
    """The texts in the lines of `part`. Empty lines mean nothing."""
    stop = math.inf if part.source.is_packed else part.stop
    for number, line in enumerate(read_lines(file, part.start, stop), 1):
        try:
            text = parse_line(line, field, tally)
        except BadLine as error:
            where = f"{part.source.path}, line "
            if not skip_bad:
                remedy = "Repair it, or leave such lines out with --skip-bad."
                raise PreparationError(f"{where}{count_lines_before(part) + number}: {error}. {remedy}") from None
            tally.n_bad_lines += 1
            tally.first_bad_line = tally.first_bad_line or f"{where}{count_lines_before(part) + number}: {error}"
        else:
            if text is not None:
                yield text


def read_lines(file: BinaryIO, start: int, stop: float) -> Iterator[bytes]:
    """The lines that begin at bytes start .. stop-1. Of a line that is too long, a little more than is allowed."""
    position = start
    if start > 0:  # a line begins at `start` exactly if the byte before ends one
        file.seek(start - 1)
        position += skip_line(file) - 1
    while position < stop and (line := file.readline(MAX_LINE_BYTES + 1)):
        position += len(line)
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            position += skip_line(file)
        yield line


def skip_line(file: BinaryIO) -> int:
    """Reads to the end of a line and returns the number of bytes."""
    n_bytes = 0
    while block := file.readline(BLOCK_BYTES):
        n_bytes += len(block)
        if block.endswith(b"\n"):
            break
    return n_bytes


def count_lines_before(part: Part) -> int:
    """How many lines of the file begin before `part`. Only a message needs it, so only a message pays for it."""
    if part.start == 0:
        return 0
    n_lines, remaining = 1, part.start - 1  # a line end in the last byte before the part begins one in the part
    with open_source(part.source) as (file, _):
        while block := file.read(min(remaining, BLOCK_BYTES)):
            n_lines, remaining = n_lines + block.count(b"\n"), remaining - len(block)
    return n_lines


def parse_line(line: bytes, field: str, tally: Tally) -> str | None:
    """The text in `field`; None for an empty line. Raises BadLine."""
    if len(line) > MAX_LINE_BYTES:
        raise BadLine(f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
    content = decode(line, tally).removeprefix(BYTE_ORDER_MARK)
    if not content or content.isspace():
        return None
    shown = repr(content[:60])
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON ({error}): {shown}") from None
    if not isinstance(value, dict):
        raise BadLine(f"not a JSON object: {shown}")
    if field not in value:
        raise BadLine(f"no field {field!r} in it (--field names another): {shown}")
    text = value[field]
    if not isinstance(text, str):
        raise BadLine(f"field {field!r} holds no text: {shown}")
    try:
        text.encode()
    except UnicodeEncodeError:
        text, n_surrogates = LONE_SURROGATE.subn(REPLACEMENT, text)
        tally.n_replaced += n_surrogates
    return text
