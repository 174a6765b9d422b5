"""Text files to documents, in little memory.

A document comes in pieces of MAX_CHARACTERS, where Tokenizer.encode cuts too. With `prepare --chat` the field of a row
holds a conversation, which chat.py makes a document of.
"""

import codecs
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from torchtitan_lite.config.messages import show_value
from torchtitan_lite.data.text_files import (
    BLOCK_BYTES,
    MAX_LINE_BYTES,
    Part,
    PreparationError,
    Source,
    open_source,
    read_rows,
)
from torchtitan_lite.data.tokenizer import MAX_CHARACTERS

REPLACEMENT = "\ufffd"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell them, UTF-8 cannot


@dataclass
class Tally:
    """What was met while reading; read_documents counts in it."""

    n_empty: int = 0  # documents without a character, which are left out
    n_replaced: int = 0  # U+FFFD instead of broken UTF-8
    n_bad_lines: int = 0
    n_targets: int = 0  # tokens of the assistant's turns, with --chat
    first_bad_line: str = ""  # where it is, and why


def read_documents(
    part: Part, *, field: str, skip_bad: bool, tally: Tally, render: Callable[[Any], Any] | None = None
) -> Iterator[Iterator[Any]]:
    """Yield each document of `part` as an iterator of its pieces, which must be read before the next document.

    An empty document has no piece. `field` holds the text in a line of JSON, or is the column of a table. With `render`
    a document is one piece: what that returns of the value there. A row without text, or for which `render` raises
    ValueError, is counted if `skip_bad`, else it raises PreparationError.
    """
    source = part.source
    if not source.holds_rows:
        yield read_text(source, tally)
        return
    with open_source(source) as file:
        if source.is_table:
            rows: Iterable[tuple[int, Any]] = read_rows(file, part.start, part.stop, field)
        else:
            rows = enumerate(read_lines(file, part.start, math.inf if source.is_packed else part.stop), 1)
        for number, row in rows:
            try:
                values = {field: row} if source.is_table else parse_line(row, tally)
                if values is None:
                    continue
                if field not in values:
                    raise ValueError(
                        f"no field {field!r} in it (--text-column names another): {show_value(values):.60}"
                    )
                document = render(values[field]) if render else check_text(values[field], field, tally)
            except ValueError as error:
                place = f"row {number}" if source.is_table else f"line {count_lines_before(part) + number}"
                fault = f"{source.path}, {place}: {error}"
                if not skip_bad:
                    raise PreparationError(f"{fault}. Repair it, or leave such lines out with --skip-bad.") from None
                tally.n_bad_lines += 1
                tally.first_bad_line = tally.first_bad_line or fault
                continue
            if render:
                yield iter([document])
            else:
                starts = range(0, len(document), MAX_CHARACTERS)
                yield iter([document[start : start + MAX_CHARACTERS] for start in starts])


def read_text(source: Source, tally: Tally) -> Iterator[str]:
    """Yield the pieces of a whole file. A byte order mark is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    text, seam, block = "", b"", None
    with open_source(source) as file:
        while block != b"":
            block = file.read(BLOCK_BYTES)
            decoded = decoder.decode(block, final=not block)
            # U+FFFD that is in the file itself is not counted, also where two blocks meet.
            tally.n_replaced += decoded.count(REPLACEMENT) - (seam + block).count(REPLACEMENT.encode())
            seam = block[-2:]
            text += decoded
            while len(text) > MAX_CHARACTERS:
                yield text[:MAX_CHARACTERS]
                text = text[MAX_CHARACTERS:]
        if text:
            yield text


def read_lines(file: BinaryIO, start: int, stop: float) -> Iterator[bytes]:
    """Yield the lines that begin at bytes start .. stop-1; of a line that is too long, its first part."""
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
    """Read to the end of a line and return the number of bytes."""
    n_bytes = 0
    while block := file.readline(BLOCK_BYTES):
        n_bytes += len(block)
        if block.endswith(b"\n"):
            break
    return n_bytes


def count_lines_before(part: Part) -> int:
    """Return how many lines of the file begin before `part`; only a message needs it."""
    if part.start == 0:
        return 0
    n_lines, remaining = 1, part.start - 1  # a line end in the last byte before the part begins one in the part
    with open_source(part.source) as file:
        while block := file.read(min(remaining, BLOCK_BYTES)):
            n_lines, remaining = n_lines + block.count(b"\n"), remaining - len(block)
    return n_lines


def parse_line(line: bytes, tally: Tally) -> dict[str, Any] | None:
    """Return a line's JSON object, None for an empty line. Raises ValueError that says why it is none."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
    content = decode(line, "utf-8-sig", tally)
    if not content or content.isspace():
        return None
    shown = repr(content[:60])
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): {shown}") from None
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {shown}")
    return value


def decode(content: bytes, encoding: str, tally: Tally) -> str:
    text = content.decode(encoding, errors="replace")
    tally.n_replaced += text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())
    return text


def check_text(value: object, field: str, tally: Tally) -> str:
    """Return the text of a field; bytes are UTF-8. Raises ValueError if it is none."""
    if isinstance(value, bytes):
        return decode(value, "utf-8", tally)
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} holds no text: {show_value(value):.60}")
    if value.isascii():  # known without looking
        return value
    text, n_surrogates = LONE_SURROGATE.subn(REPLACEMENT, value)
    tally.n_replaced += n_surrogates
    return text
