"""Files that are not plain text: packed ones (.gz, .zst), and Parquet, whose rows are documents. No torch.

`.zst` needs the package zstandard and `.parquet` pyarrow: the extra `data`. They are imported where such a file is
read, since training reads none, and pyarrow takes a second. Without its package a file is refused by name.

A Parquet file is cut into row groups. A part of the file has the row groups that begin in it, as a part of a .jsonl
file has the lines that begin in it.
"""

import gzip
import importlib
import io
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import BinaryIO

PACKAGES = {".zst": "zstandard", ".parquet": "pyarrow"}  # suffix -> the package that reads such files
PACKED = (".gz", ".zst")
BLOCK_BYTES = 2**13  # of a .zst file at a time: it can become 30,000 times as many
LONGEST_WINDOW = 2**31  # of zstd --long=31
ROWS_AT_A_TIME = 256


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
        while not self.unpacked and (block := self.ahead or self.file.read(BLOCK_BYTES)):
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
