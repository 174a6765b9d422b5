"""The files of a text corpus: which are read, in which order, and how each kind is opened. No torch.

    notes.md  main.py  notes.md.gz         one document each
    posts.jsonl  posts.jsonl.gz  c4.json   one document a line: the text in one field of a JSON object
    posts.parquet                          one document a row: the text in one column
    src/                                   the files of known kinds below a folder, sorted by name, without hidden ones

A .json file whose first line is a JSON object holds lines. A file that is named is read whatever its suffix, unless it
looks binary. A corpus is a pure function of its files, so a file that changes while it is read is an error.

`.zst` needs the package zstandard and `.parquet` pyarrow: the extra `data`. They are imported where such a file is
read, since training reads none, and pyarrow takes a second. Without its package a file is refused by name.

Several processes can read one file that is not packed. A part of a .jsonl file has the lines that begin in it, a part
of a Parquet file the row groups, so every one is in one part:

    {"text": "one"}\\n{"text": "two"}\\n{"text": "three"}\\n
    |---- one, two ------|----- three ---------------|
"""

import gzip
import importlib
import io
import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

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

PACKAGES = {".zst": "zstandard", ".parquet": "pyarrow"}  # suffix -> the package that reads such files
PACKED = (".gz", ".zst")
BLOCK_BYTES = 2**20
ZST_BLOCK_BYTES = 2**13  # of a .zst file at a time: it can become 30,000 times as many
LONGEST_WINDOW = 2**31  # of zstd --long=31
ROWS_AT_A_TIME = 256
MAX_LINE_BYTES = 2**26  # a line of JSON is held whole; without a bound, one bad file could take all memory


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


# ---------------------------------------------------------------- which files


def split_suffix(path: str) -> tuple[str, str]:
    """Return what a file holds and how it is packed, in lower case: ".txt" and ".gz" of Notes.TXT.gz."""
    path, packed = path.lower(), next((suffix for suffix in PACKED if path.lower().endswith(suffix)), "")
    return os.path.splitext(path.removesuffix(packed))[1], packed


def explain_missing_package(path: str) -> str:
    """Say which package is missing to read this file; nothing if none is."""
    for suffix in split_suffix(path):
        if (package := PACKAGES.get(suffix)) and find_spec(package) is None:
            return f"{path} needs the package {package}: it is in the extra `data` (pip install {package})"
    return ""


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
                with open_source(sources[-1]) as file:
                    if b"\0" in file.read(8192):
                        why = "has NUL bytes, so it is no UTF-8 text. Unpack or convert it first."
                        raise PreparationError(f"{given} {why}")
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
    if get_kind(path) == ".json":
        with open_source(source) as file:
            try:
                is_object = isinstance(json.loads(file.readline(MAX_LINE_BYTES)), dict)
            except (ValueError, RecursionError):
                is_object = False
        source = replace(source, is_json_lines=is_object)
    return source


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


# ---------------------------------------------------------------- packed files


def unpack(path: str, file: BinaryIO) -> BinaryIO:
    """Return a reader of what `file` holds. It raises OSError, EOFError or zlib.error for a damaged file."""
    packed = split_suffix(path)[1]
    if packed == ".gz":
        return gzip.GzipFile(fileobj=file)
    return io.BufferedReader(ZstdFile(file), buffer_size=2**20) if packed == ".zst" else file


class ZstdFile(io.RawIOBase):
    """Reads the frames of a .zst file. zstandard's own reader takes a file that was cut for a whole one."""

    def __init__(self, file: BinaryIO):
        self.file, self.zstandard = file, importlib.import_module("zstandard")
        self.frame, self.unpacked, self.ahead = None, memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self.unpacked and (block := self.ahead or self.file.read(ZST_BLOCK_BYTES)):
            self.frame = self.frame or self.zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW).decompressobj()
            try:
                self.unpacked = memoryview(self.frame.decompress(block))
            except self.zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            self.ahead = self.frame.unused_data
            if self.frame.eof:
                self.frame = None
        if self.frame and not self.unpacked:
            raise EOFError("it ends inside a frame")
        n = min(len(buffer), len(self.unpacked))
        buffer[:n], self.unpacked = self.unpacked[:n], self.unpacked[n:]
        return n


# ---------------------------------------------------------------- Parquet


def read_rows(file: BinaryIO, start: int, stop: int, column: str) -> Iterator[tuple[int, object]]:
    """Yield number, from 1, and value of each row of the row groups that begin at bytes start .. stop-1.

    A text comes as bytes, which may be no UTF-8. Raises OSError where this is no Parquet file with that column.
    """
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    try:
        table = parquet.ParquetFile(file)
        if column not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise OSError(f"it has no column {column!r} (--text-column names another): {names:.200}")
        is_text = table.schema_arrow.field(column).type in (pyarrow.string(), pyarrow.large_string())
        first = 1
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            chunk = group.column(0)
            offsets = [chunk.data_page_offset, chunk.dictionary_page_offset]  # the second may be None
            if start <= min(filter(None, offsets)) < stop:
                row = first
                rows = {"row_groups": [number], "columns": [column], "use_threads": False}
                for batch in table.iter_batches(ROWS_AT_A_TIME, **rows):
                    values = batch.column(0).cast(pyarrow.large_binary()) if is_text else batch.column(0)
                    yield from enumerate(values.to_pylist(), row)
                    row += batch.num_rows
            first += group.num_rows
    except pyarrow.ArrowException as error:
        raise OSError(f"it is no sound Parquet file: {error}") from None
