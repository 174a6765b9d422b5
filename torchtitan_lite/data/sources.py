"""The files of a corpus: which ones a command line means, in which order, and how they are opened.

    notes.md  main.py  posts.jsonl  posts.jsonl.gz     a file that is named is read, unless it looks binary
    src/                                               of a folder, the files of known kinds below it, sorted by name;
                                                       hidden ones are left out

A corpus is a pure function of these files, so one that changes while it is being read is an error.
"""

import gzip
import io
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
# What is data more often than text (.json, .csv, .xml, .svg) is not here: --suffix adds it.
TEXT_SUFFIXES = frozenset(
    """.txt .text .md .markdown .rst .tex .org .adoc .html .htm .css
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .zig .nim .d .f .f90 .f95 .s .asm
    .java .kt .scala .groovy .swift .dart .cs .fs .js .jsx .mjs .ts .tsx .vue .php .rb .pl .pm .lua .tcl .r .jl
    .hs .ml .mli .clj .ex .exs .erl .el .lisp .scm .rkt .v .sv .vhd .sql .proto .graphql
    .sh .bash .zsh .fish .ps1 .bat .cmake .mk .toml .yaml .yml .ini .cfg""".split()
)

BLOCK_BYTES = 2**20


class PreparationError(ValueError):
    """What was asked for cannot be prepared: a file, a line or an option, and what to do."""


@dataclass(frozen=True)
class Source:
    """A file as it was found. It must stay so until it has been read."""

    path: str  # as it was named, or as it was found below a folder that was named
    n_bytes: int
    modified_ns: int

    @property
    def is_packed(self) -> bool:
        return self.path.lower().endswith(".gz")

    @property
    def holds_lines(self) -> bool:
        """Whether each line is a document."""
        return get_kind(self.path) in LINES_SUFFIXES


def get_kind(path: str) -> str:
    """The suffix that tells what is in a file, in small letters: ".txt" of Notes.TXT.gz."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def find_sources(inputs: Iterable[Path], *, more_suffixes: Iterable[str] = ()) -> tuple[list[Source], Counter[str]]:
    """The files that `inputs` mean, in the order of the corpus, and how many were left out of folders, by suffix.

    Raises PreparationError.
    """
    known = LINES_SUFFIXES | TEXT_SUFFIXES | set(more_suffixes)
    sources: list[Source] = []
    left_out: Counter[str] = Counter()
    for given in inputs:
        if not given.is_dir():
            sources.append(look_at(str(given)))
            if get_kind(str(given)) not in known:
                refuse_binary(sources[-1])
            continue
        for path in walk(given):
            if get_kind(path) in known:
                sources.append(look_at(path))
            else:
                left_out[Path(path).suffix.lower() or "no suffix"] += 1
    n_times = Counter(os.path.abspath(source.path) for source in sources)
    if repeated := [path for path, n in n_times.items() if n > 1]:
        raise PreparationError(f"{repeated[0]} is named {n_times[repeated[0]]} times. Name every file once.")
    return sources, left_out


def walk(folder: Path) -> Iterator[str]:
    """Files below `folder`, sorted, without hidden ones. Links to files are followed, links to folders are not."""

    def refuse(error: OSError) -> None:
        raise PreparationError(f"{error.filename} cannot be read ({error.strerror})") from None

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # os.walk goes on with these
        yield from (os.path.join(place, name) for name in sorted(names) if not name.startswith("."))


def look_at(path: str) -> Source:
    """Raises PreparationError where there is no file to read."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise PreparationError(f"{path} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise PreparationError(f"{path} is no regular file. Write what it gives into one, and name that.")
    if not os.access(path, os.R_OK):
        raise PreparationError(f"{path} cannot be read (Permission denied)")
    return Source(path, status.st_size, status.st_mtime_ns)


def refuse_binary(source: Source) -> None:
    with open_source(source) as (file, _):
        if b"\0" in file.read(8192):
            raise PreparationError(
                f"{source.path} holds NUL bytes, so it is no UTF-8 text. Unpack or convert it first."
            )


@contextmanager
def open_source(source: Source) -> Iterator[tuple[BinaryIO, io.FileIO]]:
    """The bytes of a file, unpacked, and the file on disk, whose position tells how far it was read.

    Raises PreparationError where it cannot be read, or is no longer as it was found.
    """
    with errors_named(source):
        with open(source.path, "rb", buffering=0) as raw, io.BufferedReader(raw, BLOCK_BYTES) as plain:
            yield gzip.GzipFile(fileobj=plain) if source.is_packed else plain, raw
            refuse_change(source, raw)


def read_small(source: Source) -> bytes:
    """The bytes of a plain file, in one read: of many files of some KB each, open_source takes twice the time.

    Raises as open_source does.
    """
    with errors_named(source), open(source.path, "rb", buffering=0) as raw:
        content = raw.read(source.n_bytes + 1)
        refuse_change(source, raw, n_bytes_read=len(content))
    return content


def refuse_change(source: Source, raw: io.FileIO, n_bytes_read: int | None = None) -> None:
    status = os.fstat(raw.fileno())
    is_same = (status.st_size, status.st_mtime_ns) == (source.n_bytes, source.modified_ns)
    if not is_same or n_bytes_read not in (None, source.n_bytes):
        raise PreparationError(f"{source.path} was changed while the corpus was prepared. Try again when it stays.")


@contextmanager
def errors_named(source: Source) -> Iterator[None]:
    """Errors of reading, as PreparationError with the name of the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise PreparationError(f"{source.path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
