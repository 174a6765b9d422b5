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
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_lite.config.files import import_extra
from torchtitan_lite.config.messages import UserError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
TABLE_SUFFIXES = frozenset({PARQUET, *DELIMITERS})
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
# Suffixes of files that are usually data (.xml, .svg) are not in the list; --suffix adds them.
TEXT_SUFFIXES = frozenset(
    """.txt .text .md .markdown .rst .tex .org .adoc .html .htm .css
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .zig .nim .d .f .f90 .f95 .s .asm
    .java .kt .scala .groovy .swift .dart .cs .fs .js .jsx .mjs .ts .tsx .vue .php .rb .pl .pm .lua .tcl .r .jl
    .hs .ml .mli .clj .ex .exs .erl .el .lisp .scm .rkt .v .sv .vhd .sql .proto .graphql
    .sh .bash .zsh .fish .ps1 .bat .cmake .mk .toml .yaml .yml .ini .cfg""".split()
)
ARCHIVE_SUFFIXES = frozenset({".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar"})
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED = {*OPENERS, ".zst"}
BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
BATCH_BYTES, BATCH_ROWS = 2**20, 256
csv.field_size_limit(2**31 - 1)

JSON = json.JSONDecoder()
BETWEEN_ROWS = re.compile(r"[\s,]*")


class PreparationError(UserError):
    """Raised if a corpus cannot be prepared. The message names the file, line or option, and a remedy."""


class MissingField(ValueError):
    """Raised for a row that lacks the field with the text."""

    def __init__(self, name: str, row: dict[str, Any]):
        found = ", ".join(map(repr, list(row)[:20])) or "nothing"
        super().__init__(f"it has no {name!r}, only {found}")
        self.remedy = "--text-column NAME selects another field or column; --chat reads conversations"
        if any(isinstance(value, list) and value and isinstance(value[0], dict) for value in row.values()):
            self.remedy = "It looks like a conversation: add --chat"


@dataclass(frozen=True)
class Batch:
    """Unparsed documents of a file: JSON values, values of a column, rows of a table, or the bytes of a text."""

    path: Path
    first: int  # number of the first line or row in the file, from 1
    rows: list[Any]
    encoding: str = "utf-8"  # of bytes in `rows`
    split: str = ""  # of all its documents; "": a hash decides

    @property
    def is_text(self) -> bool:
        return get_kind(self.path) not in LINES_SUFFIXES | TABLE_SUFFIXES

    def locate(self, number: int) -> str:
        """Name a document for a message."""
        return str(self.path) if self.is_text else f"{self.path}, row {number}"

    def parse(self, row: Any, field: str | None) -> Any:
        """Return the content of a document: a text, `field` of a JSON object, or the row itself. Raises ValueError.

        Without a field, it is the whole object.
        """
        if isinstance(row, ValueError):  # a row that could not be read
            raise row
        text = decode(row, self.encoding) if isinstance(row, bytes) else row
        if self.is_text and "\0" in text:
            why = f"it is not a text: character {text.index(chr(0))} is NUL"
            raise ValueError(f"{why} (a binary file, or UTF-16 without a byte order mark: --encoding utf-16-le)")
        if get_kind(self.path) not in LINES_SUFFIXES:
            return text
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("its JSON is nested too deeply") from None
        if field is not None:
            if not isinstance(content, dict):
                raise ValueError(f"it is not a JSON object: {text:.60}")
            if field not in content:
                raise MissingField(field, content)
            content = content[field]
        if "\\u" in text:
            refuse_surrogates(content)
        return content


def refuse_surrogates(content: Any) -> None:
    """Raise ValueError if a string has half of a surrogate pair, which no encoding of Unicode can represent."""
    text = json.dumps(content, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise ValueError(f"it has an unpaired surrogate, \\u{half:04x}, which is no character") from None


def decode(content: bytes, encoding: str) -> str:
    """Decode a text strictly. A byte order mark overrides `encoding`. Raises ValueError that locates a bad byte."""
    for mark, marked in BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            encoding = marked
    try:
        return content.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place = f"byte {error.start} (line {line}) is 0x{content[error.start]:02x}"
        raise ValueError(
            f"it is not {encoding}: {place}: {error.reason}. Name its encoding: --encoding cp1252"
        ) from None


def get_kind(path: Path) -> str:
    """Return the suffix without compression, in lower case: ".txt" for Notes.TXT.gz."""
    suffixes = path.suffixes[-2:] if path.suffix.lower() in COMPRESSED else path.suffixes[-1:]
    return suffixes[0].lower() if suffixes else ""


# ---------------------------------------------------------------- finding files


def find_files(
    inputs: Iterable[Path], more_suffixes: Iterable[str] = (), known: Iterable[Path] = ()
) -> tuple[list[Path], Counter[str]]:
    """Return the files of `inputs` in the order of the corpus, and the number of skipped files for each reason.

    A file that is reached twice is read once. Files in `known` are skipped. Raises UserError.
    """
    suffixes = {*LINES_SUFFIXES, *TEXT_SUFFIXES, *TABLE_SUFFIXES}
    for suffix in more_suffixes:
        suffixes.add(get_kind(Path("x." + suffix.lstrip("*."))) if suffix.strip("*.") else "")
    files: list[Path] = []
    skipped: Counter[str] = Counter()
    entered: set[Path] = set()
    seen = {path.resolve() for path in known}
    for given in inputs:
        if not given.exists():
            raise PreparationError(f"{given} does not exist")
        if given.is_dir():
            found = list_folder(given, entered, skipped)
        else:
            refuse_kind(given, suffixes)
            found = [given]
        for path in found:
            resolved = path.resolve()
            if get_kind(path) not in suffixes:
                skipped[f"unknown suffix {path.suffix.lower()}" if path.suffix else "no suffix"] += 1
            elif resolved in seen:
                skipped["reached twice"] += 1
            elif path.stat().st_size == 0:
                skipped["empty"] += 1
            else:
                seen.add(resolved)
                files.append(path)
    if any(path.suffix.lower() == ".zst" or get_kind(path) == PARQUET for path in files):
        import_extra("pyarrow", "data")  # fail now, not after an hour
    if not files:
        raise PreparationError(f"there are no files to read; skipped: {describe_skipped(skipped)}")
    return files, skipped


def list_folder(folder: Path, entered: set[Path], skipped: Counter[str]) -> list[Path]:
    """Return the files below a folder, sorted by path. Links are followed, but no folder is entered twice."""
    if folder.resolve() in entered:
        skipped["folders reached twice"] += 1
        return []
    entered.add(folder.resolve())
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise PreparationError(f"{folder} cannot be read: {error.strerror}") from None
    files = []
    for path in children:
        if path.name.startswith("."):
            skipped["hidden"] += 1
        elif path.is_dir():
            files += list_folder(path, entered, skipped)
        elif path.is_file():
            files.append(path)
        else:
            skipped["dead links and devices"] += 1
    return files


def refuse_kind(path: Path, suffixes: set[str]) -> None:
    """Raise PreparationError for a file that was named, but is of no known kind."""
    kind = get_kind(path)
    if kind in suffixes:
        return
    if kind in ARCHIVE_SUFFIXES:
        raise PreparationError(f"{path} is an archive. Unpack it, and name the folder with its files")
    remedy = f"If it is a text, add --suffix {kind or repr('')}, or rename it to {path.stem}.txt"
    raise PreparationError(f"{path} has {'the unknown suffix ' + kind if kind else 'no suffix'}. {remedy}")


def describe_skipped(skipped: Counter[str]) -> str:
    """Return the reasons why files were skipped, the most common first."""
    return ", ".join(f"{n:,} {reason}" for reason, n in skipped.most_common(8)) or "none"


# ---------------------------------------------------------------- reading rows


def read_batches(path: Path, column: str | None, encoding: str = "utf-8") -> Iterator[Batch]:
    """Yield the documents of a file, about one megabyte at a time. Raises PreparationError if it cannot be read.

    Without a column, a row of a table is a dictionary of all columns.
    """
    kind = get_kind(path)
    try:
        if kind == PARQUET:
            yield from read_parquet(path, column)
        elif kind in DELIMITERS:
            yield from read_csv(path, column, encoding)
        elif kind in LINES_SUFFIXES:
            yield from read_json_rows(path, encoding)
        else:
            with open_file(path) as file:
                yield Batch(path, 1, [file.read()], encoding)
    except MissingField as error:
        raise PreparationError(f"{path}: {error}. {error.remedy}") from None
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, csv.Error) as error:  # such as half a download
        raise PreparationError(f"{path} cannot be read: {error}") from None


def read_parquet(path: Path, column: str | None) -> Iterator[Batch]:
    with open_file(path) as file:
        table = import_extra("pyarrow.parquet", "data").ParquetFile(file)
        names = table.schema_arrow.names
        if column is not None and column not in names:
            raise MissingField(column, dict.fromkeys(names))
        first = 1
        for rows in table.iter_batches(BATCH_ROWS, columns=None if column is None else [column]):
            content = rows.to_pylist() if column is None else rows.column(0).to_pylist()
            yield Batch(path, first, content)
            first += len(rows)


def read_csv(path: Path, column: str | None, encoding: str) -> Iterator[Batch]:
    with open_file(path) as file:
        text = decode(file.read(), encoding)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=DELIMITERS[get_kind(path)], strict=True)
    names = next(lines, [])
    if column is not None and column not in names:
        raise MissingField(column, dict.fromkeys(names))
    if len(set(names)) < len(names):
        raise ValueError(f"two of its columns have the same name: {', '.join(names)}")
    rows: list[Any] = []
    first = 1
    for fields in filter(None, lines):  # a blank line is no row
        if len(fields) != len(names):
            why = f"it has {len(fields)} fields up to line {lines.line_num}, but the header has {len(names)}"
            rows.append(ValueError(why))
        else:
            row = dict(zip(names, fields, strict=True))
            rows.append(row if column is None else row[column])
        if len(rows) == BATCH_ROWS:
            yield Batch(path, first, rows)
            first += len(rows)
            rows = []
    yield Batch(path, first, rows)


def read_json_rows(path: Path, encoding: str) -> Iterator[Batch]:
    """Yield the lines of a file if its first line is a JSON object; otherwise the JSON values in it."""
    with open_file(path) as file:
        if encoding != "utf-8" or file.peek(2)[:2] in BYTE_ORDER_MARKS:
            file = io.BytesIO(decode(file.read(), encoding).encode())
        lines = [file.readline()]
        while lines[-1] and not lines[-1].strip():
            lines.append(file.readline())
        if is_line_of_json(lines[-1]):
            first = 1
            while lines:
                yield Batch(path, first, lines)
                first += len(lines)
                lines = file.readlines(BATCH_BYTES)
        else:
            yield from split_values(path, decode(b"".join([*lines, file.read()]), "utf-8"))


def is_line_of_json(line: bytes) -> bool:
    """Return False for the start of an object, an array, or several objects in a line. A bad row is a line."""
    try:
        text = decode(line, "utf-8").strip()
        value, end = JSON.raw_decode(text)
    except json.JSONDecodeError as error:
        return error.pos < len(text)
    except (RecursionError, ValueError):
        return True
    return not isinstance(value, list) and not text[end:].lstrip().startswith("{")


def split_values(path: Path, text: str) -> Iterator[Batch]:
    """Yield the text of each JSON value in a file: the elements of an array, or objects one after the other."""
    is_array = text.lstrip().startswith("[")
    position = text.index("[") + 1 if is_array else 0
    rows: list[str] = []
    number = 1
    while True:
        position = BETWEEN_ROWS.match(text, position).end()
        rest = text[position : position + 1]
        if not rest or (is_array and rest == "]"):
            break
        try:
            _, end = JSON.raw_decode(text, position)
        except (RecursionError, ValueError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(f"row {number + len(rows)}: {why}") from None
        rows.append(text[position:end])
        position = end
        if len(rows) == BATCH_ROWS:
            yield Batch(path, number, rows)
            number += len(rows)
            rows = []
    if is_array and text[position:].strip() != "]":
        raise ValueError(f"its array of {number + len(rows) - 1} rows does not end, or more text follows it")
    yield Batch(path, number, rows)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, and decompress it if necessary."""
    compression = path.suffix.lower()
    if compression == ".zst":
        return io.BufferedReader(import_extra("pyarrow", "data").input_stream(path, compression="zstd"))
    if compression in OPENERS:
        return OPENERS[compression](path)
    return open(path, "rb")
