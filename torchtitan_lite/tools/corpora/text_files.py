"""Find the files of a text corpus, and read the rows in them. No torch.

    notes.md  main.py           one document each, in UTF-8, or in UTF-16 with a byte order mark
    posts.jsonl  c4-train.json  one document per JSON object: the text is a field of the object. An object takes one or
                                several lines, or is an element of an array
    posts.parquet  .csv  .tsv   one document per row: the text is a column
    x.md.gz  x.jsonl.zst        the same, compressed; also .zstd, .bz2, .xz and .lzma
    src/                        all files of known kinds in a folder, sorted by name; links are followed

A file of any other kind is an error if you name the file; in a folder, such files are skipped and counted. `.zst` and
`.parquet` need the package pyarrow, from the extra `data`.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_lite.config.messages import UserError, is_unicode
from torchtitan_lite.extensions.foreign_json import make_object
from torchtitan_lite.extensions.hub_names import explain_hub_cache
from torchtitan_lite.files import import_extra

PARQUET = ".parquet"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
ROW_SUFFIXES = JSON_SUFFIXES | {PARQUET, *DELIMITERS}
# Files with suffixes such as .xml and .svg usually contain data, so the list omits these suffixes. --suffix adds them.
TEXT_SUFFIXES = frozenset(
    """.txt .text .md .markdown .rst .tex .org .adoc .html .htm .css
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm .rs .go .zig .nim .d .f .f90 .f95 .s .asm
    .java .kt .scala .groovy .swift .dart .cs .fs .js .jsx .mjs .ts .tsx .vue .php .rb .pl .pm .lua .tcl .r .jl
    .hs .ml .mli .clj .ex .exs .erl .el .lisp .scm .rkt .v .sv .vhd .sql .proto .graphql
    .sh .bash .zsh .fish .ps1 .bat .cmake .mk .toml .yaml .yml .ini .cfg""".split()
)
UTF32_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
PARQUET_ROWS = 256  # rows in memory at once
SPACE = re.compile(r"\s*")

csv.field_size_limit(2**31 - 1)


class PreparationError(UserError):
    """Raised if a corpus cannot be prepared. The message names the file, line or option, and a remedy."""


@dataclass(frozen=True)
class Row:
    """A row of a file, or a whole text."""

    path: Path
    number: int  # number of the row in the file; the first row is 1
    content: Any  # undecoded bytes of a JSON line or a text file, or the decoded value of the row
    name: str  # for a text file, its path relative to the common folder of all files; otherwise ""

    def parse(self, encoding: str) -> Any:
        """Return the text of a text file, or the value of a JSON or table row. Raises ValueError, RecursionError,
        LookupError."""
        if not isinstance(self.content, bytes):
            return self.content
        text = decode(self.content, encoding)
        return text if self.name else json.loads(text, object_pairs_hook=make_object)


def decode(content: bytes, encoding: str) -> str:
    """Decode a text strictly. A byte order mark overrides `encoding`.

    Raises ValueError with the position of an invalid byte, and LookupError for an unknown encoding.
    """
    if content.startswith(codecs.BOM_UTF8):
        encoding = "utf-8-sig"
    # check UTF-32 first, because one of its marks begins with a mark of UTF-16
    if content.startswith(UTF32_MARKS):
        encoding = "utf-32"
    elif content.startswith(UTF16_MARKS):
        encoding = "utf-16"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{error}, so it is not {encoding}. Name its encoding to `prepare` with --encoding"
        ) from None
    if "\0" in text:
        raise ValueError(
            f"character {text.index(chr(0))} is NUL: a binary file, or UTF-16 without a mark (--encoding utf-16-le)"
        )
    return text


class PackedFile(io.FileIO):
    """A file that records whether its end has been read."""

    is_at_end = False

    def read(self, size: int = -1) -> bytes:
        block = super().read(size)
        if not block:
            self.is_at_end = True
        return block


@contextmanager
def open_streams(open_packed: Callable, path: Path, mode: str) -> Iterator[BinaryIO]:
    """Open a file with bz2.open or lzma.open. Raises ValueError if these functions stop before the end of the file.

    If the first bytes of a stream are damaged, bz2 and lzma ignore this stream and all later streams.
    """
    with PackedFile(path) as packed, open_packed(packed, mode) as file:
        yield file
        if not packed.is_at_end:
            raise ValueError("after the compressed data, it has bytes that are not compressed")


OPENERS = {
    ".gz": gzip.open,
    ".bz2": partial(open_streams, bz2.open),
    ".xz": partial(open_streams, lzma.open),
    ".zst": lambda path, _: io.BufferedReader(
        import_extra("pyarrow", "data").input_stream(path, compression="zstd")
    ),
}
OPENERS |= {".lzma": OPENERS[".xz"], ".zstd": OPENERS[".zst"]}


def get_kind(path: Path) -> str:
    """Return the suffix before the compression suffix, in lower case: ".txt" for Notes.TXT.gz."""
    if path.suffix.lower() in OPENERS:
        path = path.with_suffix("")
    return path.suffix.lower()


def is_text(path: Path) -> bool:
    """Return whether the whole file is one document."""
    return get_kind(path) not in ROW_SUFFIXES


# ---------------------------------------------------------------- finding files


def find_files(
    inputs: list[Path], more_suffixes: Iterable[str] = ()
) -> tuple[list[Path], Counter[str]]:
    """Return the files of `inputs` in the order of the corpus, and the number of skipped files for each reason.

    Links to files and folders are followed. A file that is found twice is read once. Raises PreparationError.
    """
    for path in inputs:
        if why := explain_hub_cache(path):  # a cache folder can contain several versions of a file
            raise PreparationError(f"{why}. Name that folder")
    asked = {f".{suffix.lstrip('*.').lower()}".rstrip(".") for suffix in more_suffixes}
    suffixes = ROW_SUFFIXES | TEXT_SUFFIXES | asked
    files = []
    skipped = Counter()
    seen = set()
    pending = inputs[::-1]  # reversed, because paths are popped from the end
    while pending:
        path = pending.pop()
        is_named = path in inputs
        resolved = path.resolve()
        reason = ""
        if resolved in seen:
            reason = "files or folders reached twice"
        elif path.name.startswith(".") and not is_named:
            reason = "hidden files or folders left out"
        elif path.is_dir():
            pending += sorted(path.iterdir(), reverse=True)
        elif not path.exists():
            raise PreparationError(
                f"{path} does not exist, or is a broken link. Name an existing file or folder"
            )
        elif get_kind(path) in suffixes:
            if not is_unicode(str(path)):  # the split depends on the hash of the name
                raise PreparationError(f"the name {str(path)!a} is not UTF-8. Rename the file")
            files.append(path)
        elif is_named:
            raise PreparationError(
                f"{path} has an unknown suffix. Unpack an archive or a packed file. "
                f"If it is a text file, give `prepare` the option --suffix {get_kind(path)!r}"
            )
        else:
            reason = f"files of unknown suffix {get_kind(path)!r} left out"
        if reason:
            skipped[reason] += 1
        else:
            seen.add(resolved)
    if not files:
        raise PreparationError(
            f"there are no files to read; skipped: {dict(skipped) or 'none'}. "
            "Name text files, or give `prepare` the option --suffix"
        )
    if unused := asked - set(map(get_kind, files)):
        raise PreparationError(f"--suffix: no file has {' or '.join(unused)}. Leave it out")
    return files, skipped


# ---------------------------------------------------------------- reading rows


def read_file(path: Path, encoding: str, tail: float) -> Iterator[Any]:
    """Yield Row.content of each row of a file. The libraries for reading files may raise any error.

    A text file is one row. If `tail` is not 0, a text file is split into two rows, and the second row contains the last
    fraction `tail` of the text. An empty second row is omitted.
    """
    kind = get_kind(path)
    # without this check, gzip and zstd would read a file of 0 bytes as a file without rows
    if path.suffix.lower() in OPENERS and path.stat().st_size == 0:
        raise ValueError("it has 0 bytes, as an incomplete download may have")
    with OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
        if kind == PARQUET:
            table = import_extra("pyarrow.parquet", "data").ParquetFile(file)
            schema = table.schema_arrow
            refuse_double(schema.names)
            for number, field in enumerate(schema):
                # Python's datetime has no nanoseconds
                if "[ns" in str(field.type).partition("<")[0]:
                    text = import_extra("pyarrow", "data").string()
                    schema = schema.set(number, field.with_type(text))
            for batch in table.iter_batches(PARQUET_ROWS):
                yield from batch.cast(schema).to_pylist()
        elif kind in DELIMITERS:
            yield from read_table(decode(file.read(), encoding), DELIMITERS[kind])
        elif kind in JSON_SUFFIXES:
            lines = filter(bytes.strip, file)  # a blank line is not a row
            first = next(lines, b"")
            is_line_byte = "a\n".encode(encoding).endswith(b"a\n")  # False for UTF-16 and UTF-32
            if is_line_byte and is_row(first):
                yield first
                yield from lines
            else:
                yield from read_values(decode(first + file.read(), encoding).strip())
        elif tail:
            text = decode(file.read(), encoding)
            n_train = len(text) - int(len(text) * tail)
            yield text[:n_train]
            if n_train < len(text):
                yield text[n_train:]
        else:
            yield file.read()


def is_row(line: bytes) -> bool:
    """Return whether the first line of a JSON file is one row. If True, every line of the file is one row.

    A line with invalid JSON is treated as a row. A line is not a row if it starts an array, if it starts an object that
    spans several lines, if it contains several objects, or if it is encoded in UTF-16 or UTF-32.
    """
    if line.startswith((*UTF32_MARKS, *UTF16_MARKS)):
        return False
    text = line.decode("utf-8-sig", errors="replace").strip()
    if text.startswith("["):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        is_second_object = error.msg == "Extra data" and rest.startswith("{")
        return rest != "" and not is_second_object
    return True


def refuse_double(names: Sequence[str]) -> None:
    """Raise ValueError if two columns have the same name, because the first column would be lost."""
    for name, number in Counter(names).items():
        if number > 1:
            raise ValueError(f"it has {number} columns {name!r}")


def read_table(text: str, delimiter: str) -> Iterator[dict]:
    """Yield the rows of a table. Raises ValueError for a row with more or fewer fields than the header."""
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    refuse_double(rows.fieldnames or [])
    for row in rows:
        if len(row) != len(rows.fieldnames) or None in row.values():
            raise ValueError(
                f"line {rows.line_num} does not have the fields of the header, {rows.fieldnames}"
            )
        yield row


def read_values(text: str) -> Iterator[Any]:
    """Yield successive JSON values, and for an array, its elements. Raises ValueError."""
    decoder = json.JSONDecoder(object_pairs_hook=make_object)
    position = 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        yield from value if isinstance(value, list) else [value]
        position = SPACE.match(text, position).end()
