"""The files of a text corpus: which are read, and the documents in them. No torch.

    notes.md  main.py           one document each
    posts.jsonl  c4-train.json  one document a line: the text in one field of a JSON object
    posts.parquet               one document a row: the text in one column
    x.md.gz  x.jsonl.zst        the same, packed
    src/                        the files of known kinds below a folder, sorted by name, without hidden ones

`.zst` and `.parquet` need the package pyarrow: the extra `data`. It is imported where such a file is read, since
training reads none.
"""

import gzip
import importlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

TABLE_SUFFIX = ".parquet"
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
# Suffixes that are data more often than text (.csv, .xml, .svg) are not here: --suffix adds them.
TEXT_SUFFIXES = frozenset(
    """.txt .text .md .markdown .rst .tex .org .adoc .html .htm .css
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .zig .nim .d .f .f90 .f95 .s .asm
    .java .kt .scala .groovy .swift .dart .cs .fs .js .jsx .mjs .ts .tsx .vue .php .rb .pl .pm .lua .tcl .r .jl
    .hs .ml .mli .clj .ex .exs .erl .el .lisp .scm .rkt .v .sv .vhd .sql .proto .graphql
    .sh .bash .zsh .fish .ps1 .bat .cmake .mk .toml .yaml .yml .ini .cfg""".split()
)
PACKAGES = {".zst": "pyarrow", TABLE_SUFFIX: "pyarrow"}  # suffix -> the package that reads such files
PACKED = {".gz", ".zst"}
BATCH_BYTES, BATCH_ROWS = 2**20, 256


class PreparationError(ValueError):
    """What was asked for cannot be prepared: a file, a line or an option, and what to do."""


@dataclass(frozen=True)
class Batch:
    """Documents of one file, as they are there: lines of JSON, values of a column, or one whole text."""

    path: Path
    first: int  # number of the first line or row in its file, from 1
    rows: list[Any]

    @property
    def is_text(self) -> bool:
        return get_kind(self.path) not in LINES_SUFFIXES | {TABLE_SUFFIX}

    def parse(self, row: Any, field: str) -> Any:
        """Return the content of a document: `field` of a line, else the row itself. Raises ValueError."""
        if get_kind(self.path) not in LINES_SUFFIXES:
            return row
        if not row.strip():
            return ""
        parsed = json.loads(row)
        if not isinstance(parsed, dict) or field not in parsed:
            raise ValueError(f"no field {field!r} in it (--text-column names another)")
        return parsed[field]


def get_kind(path: Path) -> str:
    """Return the suffix that says what a file holds: ".txt" of Notes.TXT.gz."""
    suffixes = path.suffixes[-2:] if path.suffix.lower() in PACKED else path.suffixes[-1:]
    return suffixes[0].lower() if suffixes else ""


def explain_missing_package(path: Path) -> str:
    """Say which package is missing to read this file; nothing if none is."""
    for suffix in {get_kind(path), path.suffix.lower()}:
        if (package := PACKAGES.get(suffix)) and find_spec(package) is None:
            return f"{path} needs the package {package}: it is in the extra `data` (pip install {package})"
    return ""


def find_files(inputs: Iterable[Path], more_suffixes: Iterable[str] = ()) -> tuple[list[Path], Counter[str]]:
    """Return the files that `inputs` mean, in the order of the corpus, and how many of each kind were left out.

    Raises PreparationError.
    """
    known = LINES_SUFFIXES | TEXT_SUFFIXES | {TABLE_SUFFIX} | set(more_suffixes)
    files: list[Path] = []
    left_out: Counter[str] = Counter()
    for given in inputs:
        if not given.exists():
            raise PreparationError(f"there is no {given}")
        if not given.is_dir():
            files.append(given)
            continue
        for path in sorted(given.rglob("*")):
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(given).parts):
                if get_kind(path) in known:
                    files.append(path)
                else:
                    left_out[path.suffix.lower() or "no suffix"] += 1
    if missing := next(filter(None, map(explain_missing_package, files)), ""):
        raise PreparationError(missing)
    if not files:
        raise PreparationError(f"no file was found to read; left out: {dict(left_out) or 'none'}")
    return files, left_out


def read_batches(path: Path, column: str) -> Iterator[Batch]:
    """Yield the documents of a file, about a megabyte at a time."""
    if get_kind(path) == TABLE_SUFFIX:
        parquet = importlib.import_module("pyarrow.parquet")
        first = 1
        for rows in parquet.ParquetFile(path).iter_batches(BATCH_ROWS, columns=[column]):
            yield Batch(path, first, rows.column(0).to_pylist())
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
    """Open a file, unpacked."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(importlib.import_module("pyarrow").input_stream(path, compression="zstd"))
    return open(path, "rb")
