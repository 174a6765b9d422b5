"""Find the files of a text corpus, and read the documents in them. No torch.

    notes.md  main.py           one document each
    posts.jsonl  c4-train.json  one document per line: the text is a field of a JSON object
    posts.parquet               one document per row: the text is a column
    x.md.gz  x.jsonl.zst        the same, compressed
    src/                        all files of known kinds in a folder, sorted by name, except hidden files

`.zst` and `.parquet` need the package pyarrow, from the extra `data`.
"""

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_lite.config.files import import_extra
from torchtitan_lite.config.messages import UserError

TABLE_SUFFIX = ".parquet"
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
# Suffixes of files that are usually data (.csv, .xml, .svg) are not in the list; --suffix adds them.
TEXT_SUFFIXES = frozenset(
    """.txt .text .md .markdown .rst .tex .org .adoc .html .htm .css
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .zig .nim .d .f .f90 .f95 .s .asm
    .java .kt .scala .groovy .swift .dart .cs .fs .js .jsx .mjs .ts .tsx .vue .php .rb .pl .pm .lua .tcl .r .jl
    .hs .ml .mli .clj .ex .exs .erl .el .lisp .scm .rkt .v .sv .vhd .sql .proto .graphql
    .sh .bash .zsh .fish .ps1 .bat .cmake .mk .toml .yaml .yml .ini .cfg""".split()
)
CONVERSATION = re.compile(rb'"(\w+)"\s*:\s*\[\s*\{[^{}\[\]]*"role"')  # a JSON field with messages
COMPRESSED = {".gz", ".zst"}
BATCH_BYTES, BATCH_ROWS = 2**20, 256


class PreparationError(UserError):
    """Raised if a corpus cannot be prepared. The message names the file, line or option, and a remedy."""


@dataclass(frozen=True)
class Batch:
    """Unparsed documents of a file: lines of JSON, values of a column, rows of a table, or a single text."""

    path: Path
    first: int  # number of the first line or row in the file, from 1
    rows: list[Any]

    @property
    def is_text(self) -> bool:
        return get_kind(self.path) not in LINES_SUFFIXES | {TABLE_SUFFIX}

    def parse(self, row: Any, field: str | None) -> Any:
        """Return the content of a document: `field` of a JSON line, or the row itself. Raises ValueError.

        Without a field, it is the whole object of a JSON line. A blank line is "".
        """
        if get_kind(self.path) not in LINES_SUFFIXES:
            return row
        if not row.strip():
            return ""
        parsed = json.loads(row)
        if field is None:
            return parsed
        if not isinstance(parsed, dict) or field not in parsed:
            raise ValueError(f"it has no field {field!r} (--text-column selects another field)")
        return parsed[field]


def get_kind(path: Path) -> str:
    """Return the suffix without compression, in lower case: ".txt" for Notes.TXT.gz."""
    suffixes = path.suffixes[-2:] if path.suffix.lower() in COMPRESSED else path.suffixes[-1:]
    return suffixes[0].lower() if suffixes else ""


def find_files(inputs: Iterable[Path], more_suffixes: Iterable[str] = ()) -> tuple[list[Path], Counter[str]]:
    """Return the files of `inputs` in the order of the corpus, and the number of skipped files of each kind.

    Raises UserError.
    """
    known = LINES_SUFFIXES | TEXT_SUFFIXES | {TABLE_SUFFIX} | set(more_suffixes)
    files: list[Path] = []
    left_out: Counter[str] = Counter()
    for given in inputs:
        if not given.exists():
            raise PreparationError(f"{given} does not exist")
        if not given.is_dir():
            files.append(given)
            continue
        for path in sorted(given.rglob("*")):
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(given).parts):
                if get_kind(path) in known:
                    files.append(path)
                else:
                    left_out[path.suffix.lower() or "no suffix"] += 1
    if any(path.suffix.lower() == ".zst" or get_kind(path) == TABLE_SUFFIX for path in files):
        import_extra("pyarrow", "data")  # fail now, not after an hour
    if not files:
        raise PreparationError(f"there are no files to read; skipped: {dict(left_out) or 'none'}")
    return files, left_out


def read_batches(path: Path, column: str | None) -> Iterator[Batch]:
    """Yield the documents of a file, about one megabyte at a time. Raises PreparationError if it cannot be read.

    Without a column, a row of a table is a dictionary of all columns.
    """
    try:
        yield from read_rows(path, column)
    except (OSError, EOFError, ValueError, zlib.error) as error:  # for example an interrupted download
        raise PreparationError(f"{path} cannot be read: {error}") from None


def read_rows(path: Path, column: str | None) -> Iterator[Batch]:
    if get_kind(path) == TABLE_SUFFIX:
        table = import_extra("pyarrow.parquet", "data").ParquetFile(path)
        first = 1
        if column is not None and column not in table.schema_arrow.names:
            raise ValueError(f"it has no column {column!r} (set --text-column; for conversations use --chat)")
        columns = None if column is None else [column]
        for rows in table.iter_batches(BATCH_ROWS, columns=columns):
            content = rows.to_pylist() if column is None else rows.column(0).to_pylist()
            yield Batch(path, first, content)
            first += len(rows)
        return
    with open_file(path) as file:
        if get_kind(path) not in LINES_SUFFIXES:
            yield Batch(path, 1, [file.read().decode("utf-8-sig", errors="replace")])
            return
        first = 1
        while lines := file.readlines(BATCH_BYTES):
            yield Batch(path, first, lines)
            first += len(lines)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, and decompress it if necessary."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(import_extra("pyarrow", "data").input_stream(path, compression="zstd"))
    return open(path, "rb")
