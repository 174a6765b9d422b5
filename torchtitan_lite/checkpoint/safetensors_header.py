"""The head of a safetensors file: which tensors it holds, and where. Read with nothing but json, and not believed.

    8 bytes      length of the header, little endian
    header       {"model.norm.weight": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]}, ...} as JSON
    data         the tensors one after the other; data_offsets count from here

Every number is checked against the size of the file before anyone allocates or maps by it: names, shapes and offsets
of a file come from whoever made it.
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from torchtitan_lite.config.json_file import parse_json_object

DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
PUBLISHED = ("F32", "BF16", "F16")  # the types in which weights are published, and nothing else
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_DIMS = 8


class TensorFileError(ValueError):
    """A file that is not whole, or no safetensors file, and why."""


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies."""

    path: Path
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    start: int  # byte of the file at which it begins

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def read_header(path: Path, *, dtypes: Collection[str] = PUBLISHED) -> dict[str, Entry]:
    """Return every tensor of the file by name. Raises TensorFileError, and OSError where it cannot be read."""
    n_file_bytes = path.stat().st_size
    with open(path, "rb") as file:
        n_header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        data_start = LENGTH_BYTES + n_header_bytes
        if n_file_bytes < LENGTH_BYTES or n_header_bytes > MOST_HEADER_BYTES or data_start > n_file_bytes:
            raise TensorFileError(f"{path} is no whole safetensors file: its {n_file_bytes} bytes cannot hold a header")
        header = parse_header(path, file.read(n_header_bytes))
    entries = {name: parse_entry(path, name, value, data_start, dtypes) for name, value in header.items()}
    check_cover(path, entries, data_start, n_file_bytes)
    return entries


def parse_header(path: Path, text: bytes) -> dict[str, object]:
    try:
        header = parse_json_object(text)
    except ValueError as error:
        raise TensorFileError(f"{path} is no safetensors file: its header {error}") from None
    header.pop("__metadata__", None)  # remarks of whoever wrote it
    return header


def parse_entry(path: Path, name: str, value: object, data_start: int, dtypes: Collection[str]) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise TensorFileError(f"{path}: the header's entry of {name!r} is not as the format has it")
    if dtype not in dtypes:
        raise TensorFileError(f"{path}: {name} is of type {dtype}, and only {', '.join(dtypes)} are read")
    if len(shape) > MOST_DIMS or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise TensorFileError(f"{path}: {name} has no possible shape")
    entry = Entry(path, dtype, tuple(shape), data_start + start)
    if stop - start != entry.n_bytes:
        raise TensorFileError(f"{path}: {name} of shape {shape} needs {entry.n_bytes} bytes and has {stop - start}")
    return entry


def check_cover(path: Path, entries: dict[str, Entry], data_start: int, n_file_bytes: int) -> None:
    """The tensors fill the file from the header to its end, without a gap, an overlap or a cut."""
    in_order = sorted((entry.start, entry.start + entry.n_bytes, name) for name, entry in entries.items())
    borders = [(data_start, data_start, "the header"), *in_order]
    _, last, name = borders[-1]
    if last != n_file_bytes:
        raise TensorFileError(f"{path} has {n_file_bytes} bytes, and its header speaks of {last} ({name} ends there)")
    for (_, stop, before), (start, _, name) in pairwise(borders):
        if start != stop:
            raise TensorFileError(f"{path}: {name} begins at byte {start}, and {before} ends at {stop}")


def make_header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """What stands before the data of these tensors, name -> (dtype, shape), which follow in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers wants to know for whom it was written
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight bytes
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
