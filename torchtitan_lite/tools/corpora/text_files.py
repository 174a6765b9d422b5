"""Find the files of a text corpus, and read the documents in them. No torch.

    notes.md  main.py           one document each, in UTF-8, or in UTF-16 with a byte order mark
    posts.jsonl  c4-train.json  one document per row: the text is a field of a JSON object. A row is a line, an object
                                over several lines, or an element of an array
    posts.parquet  .csv  .tsv   one document per row: the text is a column
    x.md.gz  x.jsonl.zst        the same, compressed; also .bz2 and .xz
    src/                        all files of known kinds in a folder and behind its links, sorted by name

Files of other kinds are refused if they are named, and counted if they are in a folder. `.zst` and `.parquet` need the
package pyarrow, from the extra `data`.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_lite.config.files import import_extra
from torchtitan_lite.config.messages import UserError

PARQUET = ".parquet"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
ROW_SUFFIXES = LINES_SUFFIXES | {PARQUET, *DELIMITERS}
# Suffixes of files that are usually data (.xml, .svg) are not in the list; --suffix adds them.
TEXT_SUFFIXES = frozenset(
    """.txt .text .md .markdown .rst .tex .org .adoc .html .htm .css
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .zig .nim .d .f .f90 .f95 .s .asm
    .java .kt .scala .groovy .swift .dart .cs .fs .js .jsx .mjs .ts .tsx .vue .php .rb .pl .pm .lua .tcl .r .jl
    .hs .ml .mli .clj .ex .exs .erl .el .lisp .scm .rkt .v .sv .vhd .sql .proto .graphql
    .sh .bash .zsh .fish .ps1 .bat .cmake .mk .toml .yaml .yml .ini .cfg""".split()
)
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED = {*OPENERS, ".zst"}
BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
BATCH_BYTES, BATCH_ROWS = 2**20, 256

BETWEEN_ROWS = re.compile(r"[\s,]*")
csv.field_size_limit(2**31 - 1)


class PreparationError(UserError):
    """Raised if a corpus cannot be prepared. The message names the file, line or option, and a remedy."""


class MissingField(ValueError):
    """Raised for a row that lacks the field or column with the text."""


@dataclass(frozen=True)
class Batch:
    """Unparsed documents of a file: lines of JSON, rows as dictionaries, or the bytes of a text."""

    path: Path
    first: int  # number of the first line or row in the file, from 1
    rows: list[Any]
    encoding: str = "utf-8"  # of bytes in `rows`

    @property
    def is_text(self) -> bool:
        return get_kind(self.path) not in ROW_SUFFIXES

    def parse(self, row: Any, field: str | None) -> Any:
        """Return the content of a document: a text, or `field` of a row; None: the whole row. Raises ValueError."""
        if isinstance(row, bytes):
            text = decode(row, self.encoding)
            if self.is_text:
                return text
            try:
                row = json.loads(text)
            except RecursionError as error:
                raise ValueError(error) from None
        if field is None:
            return row
        if not isinstance(row, dict):
            raise ValueError(f"it is not a JSON object: {row!r:.60}")
        if field not in row:
            raise MissingField(f"it has no {field!r}, only {', '.join(map(repr, row))}")
        return row[field]


def decode(content: bytes, encoding: str) -> str:
    """Decode a text strictly. A byte order mark overrides `encoding`. Raises ValueError that locates a bad byte."""
    for mark, marked in BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            encoding = marked
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place = f"byte {error.start} (line {line}) is 0x{content[error.start]:02x}"
        raise ValueError(
            f"it is not {encoding}: {place}: {error.reason}. Name its encoding: --encoding cp1252"
        ) from None
    if "\0" in text:
        why = "a binary file, or UTF-16 without a byte order mark: --encoding utf-16-le"
        raise ValueError(f"it is not a text: character {text.index(chr(0))} is NUL ({why})")
    return text.removeprefix("\ufeff")


def get_kind(path: Path) -> str:
    """Return the suffix without compression, in lower case: ".txt" for Notes.TXT.gz."""
    suffixes = path.suffixes[-2:] if path.suffix.lower() in COMPRESSED else path.suffixes[-1:]
    return suffixes[0].lower() if suffixes else ""


# ---------------------------------------------------------------- finding files


def find_files(
    inputs: Iterable[Path], more_suffixes: Iterable[str] = (), known: Iterable[Path] = ()
) -> tuple[list[Path], Counter[str]]:
    """Return the files of `inputs` in the order of the corpus, and the number of skipped ones for each reason.

    A file or folder that is reached twice is read once. Files in `known` are skipped. Raises UserError.
    """
    suffixes = ROW_SUFFIXES | TEXT_SUFFIXES
    suffixes |= {get_kind(Path("x." + suffix.lstrip("*."))) for suffix in more_suffixes}
    files: list[Path] = []
    skipped: Counter[str] = Counter()
    seen = {path.resolve() for path in known}
    for given in inputs:
        if not given.exists():
            raise PreparationError(f"{given} does not exist")
        kind = get_kind(given)
        if not given.is_dir() and kind not in suffixes:
            remedy = (
                f"Unpack an archive. Rename a text to .txt, or give prepare the option --suffix {kind or repr(kind)}"
            )
            raise PreparationError(f"{given} has the unknown suffix {kind!r}. {remedy}")
        files += list_files(given, suffixes, seen, skipped)
    if any(path.suffix.lower() == ".zst" or get_kind(path) == PARQUET for path in files):
        import_extra("pyarrow", "data")  # fail now, not after an hour
    if not files:
        raise PreparationError(f"there are no files to read; skipped: {dict(skipped) or 'none'}")
    return files, skipped


def list_files(path: Path, suffixes: frozenset[str], seen: set[Path], skipped: Counter[str]) -> Iterator[Path]:
    """Yield `path`, or the files below it, sorted by path. Links are followed, also to folders. Raises OSError."""
    resolved = path.resolve()
    if resolved in seen:
        skipped["reached twice"] += 1
        return
    seen.add(resolved)
    if path.is_dir():
        for child in sorted(path.iterdir()):
            if child.name.startswith("."):
                skipped["hidden"] += 1
            else:
                yield from list_files(child, suffixes, seen, skipped)
    elif not path.is_file():
        skipped["dead links"] += 1
    elif get_kind(path) not in suffixes:
        skipped[f"unknown suffix {path.suffix.lower()!r}"] += 1
    elif path.stat().st_size == 0:
        skipped["empty files"] += 1
    else:
        yield path


# ---------------------------------------------------------------- reading rows


def read_batches(path: Path, column: str | None, encoding: str = "utf-8") -> Iterator[Batch]:
    """Yield the documents of a file, about one megabyte at a time. Raises PreparationError if it cannot be read.

    Only `column` of a Parquet file is read; None: all columns.
    """
    kind = get_kind(path)
    try:
        with open_file(path) as file:
            if kind == PARQUET:
                yield from group_rows(path, read_parquet(file, column))
            elif kind in DELIMITERS:
                yield from group_rows(path, read_csv(decode(file.read(), encoding), DELIMITERS[kind]))
            elif kind in LINES_SUFFIXES:
                yield from read_json_rows(path, file, encoding)
            else:
                yield Batch(path, 1, [file.read()], encoding)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, csv.Error) as error:  # such as half a download
        raise PreparationError(f"{path} cannot be read: {error}") from None


def group_rows(path: Path, rows: Iterator[Any]) -> Iterator[Batch]:
    first = 1
    while group := list(islice(rows, BATCH_ROWS)):
        yield Batch(path, first, group)
        first += len(group)


def read_parquet(file: BinaryIO, column: str | None) -> Iterator[dict]:
    table = import_extra("pyarrow.parquet", "data").ParquetFile(file)
    columns = [column] if column in table.schema_arrow.names else None
    for rows in table.iter_batches(BATCH_ROWS, columns=columns):
        yield from rows.to_pylist()


def read_csv(text: str, delimiter: str) -> Iterator[dict]:
    """Yield the rows of a table. Raises ValueError for a row with more or fewer fields than the header."""
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names = next(rows, [])
    for fields in filter(None, rows):  # a blank line is no row
        if len(fields) != len(set(names)):
            raise ValueError(f"line {rows.line_num} has {len(fields)} fields, but the header has {names}")
        yield dict(zip(names, fields, strict=True))


def read_json_rows(path: Path, file: BinaryIO, encoding: str) -> Iterator[Batch]:
    """Yield the lines of a file if its first line is a JSON object or bad; otherwise the JSON values in it."""
    if encoding != "utf-8" or file.peek(2)[:2] in BYTE_ORDER_MARKS:
        file = io.BytesIO(decode(file.read(), encoding).encode())
    lines = [file.readline()]
    if not is_row(lines[0]):
        yield from group_rows(path, split_values(decode(lines[0] + file.read(), "utf-8")))
        return
    first = 1
    while lines:
        yield Batch(path, first, lines)
        first += len(lines)
        lines = file.readlines(BATCH_BYTES)


def is_row(line: bytes) -> bool:
    """Return False for the start of an object, an array, or several objects in a line."""
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError as error:
        return error.msg != "Extra data" and error.pos < len(error.doc.rstrip())
    except (RecursionError, ValueError):
        return True


def split_values(text: str) -> Iterator[Any]:
    """Yield the elements of a JSON array, or JSON values that follow each other. Raises ValueError."""
    text = text.rstrip()
    position = BETWEEN_ROWS.match(text).end()
    end = len(text)
    if text.startswith("[", position) and text.endswith("]"):
        position = BETWEEN_ROWS.match(text, position + 1).end()
        end -= 1
    number = 1
    while position < end:
        try:
            row, position = json.JSONDecoder().raw_decode(text, position)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"row {number}: {error}") from None
        yield row
        position = BETWEEN_ROWS.match(text, position).end()
        number += 1


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, and decompress it if necessary."""
    compression = path.suffix.lower()
    if compression == ".zst":
        return io.BufferedReader(import_extra("pyarrow", "data").input_stream(path, compression="zstd"))
    if compression in OPENERS:
        return OPENERS[compression](path)
    return open(path, "rb")
