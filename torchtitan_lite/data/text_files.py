"""Text files to documents: which files are read, in which order, and their texts, in little memory.

    notes.md  main.py  notes.md.gz         one document each
    posts.jsonl  posts.jsonl.gz  c4.json   one document a line: the text in one field of a JSON object
    posts.parquet                          one document a row: the text in one column
    src/                                   the files of known kinds below a folder, sorted by name, without hidden ones

file_kinds.py unpacks .gz and .zst and reads Parquet. A .json file whose first line is a JSON object holds lines. With
`prepare --chat` the field holds a conversation, which chat.py makes a document of.

A file that is named is read whatever its suffix, unless it looks binary. A corpus is a pure function of its files, so a
file that changes while it is read is an error.

A document comes in pieces of MAX_CHARACTERS, where Tokenizer.encode cuts too. A part of a .jsonl file has the lines
that begin in it, so that several processes can read one file and every line is in one part:

    {"text": "one"}\\n{"text": "two"}\\n{"text": "three"}\\n
    |---- one, two ------|----- three ---------------|
"""

import codecs
import json
import math
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_lite.config.messages import show_value
from torchtitan_lite.data.file_kinds import explain_missing_package, read_rows, split_suffix, unpack
from torchtitan_lite.data.tokenizer import MAX_CHARACTERS

TABLE_SUFFIX = ".parquet"
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
# Suffixes that are data more often than text (.json, .csv, .xml, .svg) are not here: --suffix adds them.
TEXT_SUFFIXES = frozenset(
    """.txt .text .md .markdown .rst .tex .org .adoc .html .htm .css
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .zig .nim .d .f .f90 .f95 .s .asm
    .java .kt .scala .groovy .swift .dart .cs .fs .js .jsx .mjs .ts .tsx .vue .php .rb .pl .pm .lua .tcl .r .jl
    .hs .ml .mli .clj .ex .exs .erl .el .lisp .scm .rkt .v .sv .vhd .sql .proto .graphql
    .sh .bash .zsh .fish .ps1 .bat .cmake .mk .toml .yaml .yml .ini .cfg""".split()
)

BLOCK_BYTES = 2**20
MAX_LINE_BYTES = 2**26  # a line of JSON is held whole; without a bound, one bad file could take all memory
REPLACEMENT = "\ufffd"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell them, UTF-8 cannot


class PreparationError(ValueError):
    """What was asked for cannot be prepared: a file, a line or an option, and what to do."""


@dataclass(frozen=True)
class Source:
    """A file as it was found. It must stay so until it has been read."""

    path: str  # as it was named, or as it was found below a folder that was named
    n_bytes: int
    modified_ns: int
    is_json_lines: bool = False  # found by its first line

    @property
    def is_packed(self) -> bool:
        return bool(split_suffix(self.path)[1])

    @property
    def is_table(self) -> bool:
        return get_kind(self.path) == TABLE_SUFFIX

    @property
    def holds_rows(self) -> bool:
        """Whether each line, or each row of a table, is a document."""
        return self.is_json_lines or self.is_table or get_kind(self.path) in LINES_SUFFIXES


@dataclass(frozen=True)
class Part:
    """Bytes start .. stop-1 of a file on disk. Only files that hold rows, and are not packed, have several parts."""

    source: Source
    start: int
    stop: int


@dataclass
class Tally:
    """What was met while reading; read_documents counts in it."""

    n_empty: int = 0  # documents without a character, which are left out
    n_replaced: int = 0  # U+FFFD instead of broken UTF-8
    n_bad_lines: int = 0
    n_targets: int = 0  # tokens of the assistant's turns, with --chat
    first_bad_line: str = ""  # where it is, and why


# ---------------------------------------------------------------- which files


def get_kind(path: str) -> str:
    """Return the suffix that says what a file holds, in lower case: ".txt" of Notes.TXT.gz."""
    kind, packed = split_suffix(path)
    return kind + packed if kind == TABLE_SUFFIX else kind  # a table is read by position, so it cannot be packed


def find_sources(inputs: Iterable[Path], *, more_suffixes: Iterable[str] = ()) -> tuple[list[Source], Counter[str]]:
    """Return the files that `inputs` mean, in the order of the corpus, and how many of each kind were left out.

    Links to files are followed, links to folders are not. Raises PreparationError.
    """
    known = LINES_SUFFIXES | TEXT_SUFFIXES | {TABLE_SUFFIX} | set(more_suffixes)
    sources: list[Source] = []
    left_out: Counter[str] = Counter()

    def refuse(error: OSError) -> None:
        raise PreparationError(f"{error.filename} cannot be read ({error.strerror})") from None

    for given in inputs:
        if not given.is_dir():
            sources.append(look_at(str(given)))
            if get_kind(str(given)) not in known and not sources[-1].is_json_lines:
                refuse_binary(sources[-1])
            continue
        for folder, folders, names in os.walk(given, onerror=refuse):
            left_out["hidden"] += sum(name.startswith(".") for name in folders + names)
            folders[:] = sorted(name for name in folders if not name.startswith("."))  # os.walk continues with these
            for path in (os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")):
                if get_kind(path) in known:
                    sources.append(look_at(path))
                else:
                    left_out[Path(path).suffix.lower() or "no suffix"] += 1
    n_times = Counter(os.path.abspath(source.path) for source in sources)
    if repeated := [path for path, n in n_times.items() if n > 1]:
        raise PreparationError(f"{repeated[0]} is named {n_times[repeated[0]]} times. Name every file once.")
    return sources, +left_out


def look_at(path: str) -> Source:
    """Return the file at `path` as it is now. Raises PreparationError where there is none to read."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise PreparationError(f"{path} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise PreparationError(f"{path} is no regular file. Write what it gives into one, and name that.")
    if not os.access(path, os.R_OK):
        raise PreparationError(f"{path} cannot be read (Permission denied)")
    if missing := explain_missing_package(path):
        raise PreparationError(f"{missing}.")
    source = Source(path, status.st_size, status.st_mtime_ns)
    return replace(source, is_json_lines=get_kind(path) == ".json" and starts_with_object(source))


def starts_with_object(source: Source) -> bool:
    """Whether the first line of a file is a JSON object."""
    with open_source(source) as file:
        try:
            return isinstance(json.loads(file.readline(MAX_LINE_BYTES)), dict)
        except (ValueError, RecursionError):
            return False


def refuse_binary(source: Source) -> None:
    with open_source(source) as file:
        if b"\0" in file.read(8192):
            raise PreparationError(f"{source.path} has NUL bytes, so it is no UTF-8 text. Unpack or convert it first.")


@contextmanager
def open_source(source: Source) -> Iterator[BinaryIO]:
    """Open a file, unpacked. Raises PreparationError where it cannot be read, or is no longer as it was found."""
    try:
        with open(source.path, "rb", buffering=BLOCK_BYTES) as plain:
            yield unpack(source.path, plain)
            status = os.fstat(plain.fileno())
            if (status.st_size, status.st_mtime_ns) != (source.n_bytes, source.modified_ns):
                why = "was changed while the corpus was prepared. Try again when it no longer changes."
                raise PreparationError(f"{source.path} {why}")
    except (OSError, EOFError, zlib.error) as error:
        raise PreparationError(f"{source.path} cannot be read ({getattr(error, 'strerror', None) or error})") from None


# ---------------------------------------------------------------- documents


def read_documents(
    part: Part, *, field: str, skip_bad: bool, tally: Tally, render: Callable[[Any], Any] | None = None
) -> Iterator[tuple[Any, bool]]:
    """Yield the pieces of all documents of `part`, and whether each is the first of its document.

    An empty document is one empty piece. `field` holds the text in a line of JSON, or is the column of a table. With
    `render` a document is one piece: what that returns of the value there. A row without text, or for which `render`
    raises ValueError, is counted if `skip_bad`, else it raises PreparationError.
    """
    source = part.source
    with open_source(source) as file:
        if not source.holds_rows:
            yield from read_text(file, tally)
            return
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
                if source.is_table:
                    fault = f"{source.path}, row {number}: {error}"
                else:
                    fault = f"{source.path}, line {count_lines_before(part) + number}: {error}"
                if not skip_bad:
                    raise PreparationError(f"{fault}. Repair it, or leave such lines out with --skip-bad.") from None
                tally.n_bad_lines += 1
                tally.first_bad_line = tally.first_bad_line or fault
                continue
            if render:
                yield document, True
                continue
            for start in range(0, max(len(document), 1), MAX_CHARACTERS):
                yield document[start : start + MAX_CHARACTERS], start == 0


def read_text(file: BinaryIO, tally: Tally) -> Iterator[tuple[str, bool]]:
    """Yield the text of a whole file as read_documents does. A byte order mark is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    text, seam, is_first, block = "", b"", True, None
    while block != b"":
        block = file.read(BLOCK_BYTES)
        decoded = decoder.decode(block, final=not block)
        # U+FFFD that is in the file itself is not counted, also where two blocks meet.
        tally.n_replaced += decoded.count(REPLACEMENT) - (seam + block).count(REPLACEMENT.encode())
        seam = (seam + block)[-2:]
        text += decoded
        while len(text) > MAX_CHARACTERS:
            yield text[:MAX_CHARACTERS], is_first
            text, is_first = text[MAX_CHARACTERS:], False
    if text or is_first:
        yield text, is_first


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
    content = line.decode("utf-8-sig", errors="replace")
    tally.n_replaced += content.count(REPLACEMENT) - line.count(REPLACEMENT.encode())
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


def check_text(value: object, field: str, tally: Tally) -> str:
    """Return the text of a field; bytes are UTF-8. Raises ValueError if it is none."""
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
        tally.n_replaced += text.count(REPLACEMENT) - value.count(REPLACEMENT.encode())
        return text
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} holds no text: {show_value(value):.60}")
    if value.isascii():  # known without looking
        return value
    text, n_surrogates = LONE_SURROGATE.subn(REPLACEMENT, value)
    tally.n_replaced += n_surrogates
    return text
