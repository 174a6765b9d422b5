"""Files of tensors in the safetensors format: written by us as a stream, read by the safetensors library.

    8 bytes     length of the header, little-endian
    header      JSON: name -> dtype, shape, first and last byte after the header
    data        the tensors one after the other, row by row, little-endian

The library writes dictionaries of whole tensors only. Our writer takes one tensor at a time, and from a GPU one piece
of a tensor at a time, so that saving needs no second copy of the model. The library maps a file into memory and checks
its header (checkpoint/README.md lists what it refuses, and what we refuse).
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan_lite.checkpoint.manifest import (
    HASH_BYTES,
    MANIFEST,
    CheckpointError,
    Chunk,
    DamagedCheckpoint,
    FileRecord,
    TensorRecord,
    check_file,
    name_entry,
)
from torchtitan_lite.config.files import hash_file
from torchtitan_lite.config.messages import show_text

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

PIECE_BYTES = 2**20  # written and hashed at once, while it is in the processor's cache

Entries = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # name -> dtype and shape, in the order of the file


def make_header(entries: Entries) -> bytes:
    """Return the bytes of the file in front of the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    start = 0
    for name, (dtype, shape) in entries.items():
        stop = start + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    return len(text).to_bytes(8, "little") + text


class TensorFileWriter:
    """Write `entries`, in their order, to the new file `path`. A context manager that closes the file.

    Without `hashed` no hash is computed, and the FileRecord has an empty one. Every method raises CheckpointError where
    the file cannot be written.
    """

    def __init__(self, path: Path, entries: Entries, *, hashed: bool = True):
        self.path, self.missing = path, dict(entries)
        header = make_header(entries)
        self.n_bytes = len(header) + sum(prod(shape) * dtype.itemsize for dtype, shape in entries.values())
        self.n_written = 0
        self.digest = hashlib.blake2b(digest_size=HASH_BYTES) if hashed else None
        self.hasher = ThreadPoolExecutor(max_workers=1)
        try:
            self.file = open(path, "xb", buffering=0)
        except OSError as error:
            raise self.explain(error) from error
        self.append(memoryview(header))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next entry. `tensor` may be on any device and need not be contiguous."""
        due = next(iter(self.missing))
        dtype, shape = self.missing.pop(due)
        given = (name, tensor.dtype, tuple(tensor.shape))
        assert given == (due, dtype, tuple(shape)), f"{self.path}: {given} is not {due} of {dtype} and {tuple(shape)}"
        for piece in tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(PIECE_BYTES):
            piece = piece.cpu()  # copies from a GPU; the tensor itself on a CPU
            self.append(memoryview((ctypes.c_uint8 * len(piece)).from_address(piece.data_ptr())).cast("B"))

    def append(self, content: memoryview) -> None:
        """Write a piece, and hash it meanwhile: both take about as long, and neither needs the interpreter."""
        hashing = self.hasher.submit(self.digest.update, content) if self.digest else None
        try:
            while content:  # a disk that is nearly full takes a part
                n = self.file.write(content)
                content, self.n_written = content[n:], self.n_written + n
        except OSError as error:
            self.file.close()  # the traceback may keep this object alive
            raise self.explain(error) from error
        finally:
            if hashing:
                hashing.result()

    def finish(self) -> FileRecord:
        """Wait until the whole file is on the disk. Return its size and hash."""
        assert not self.missing, f"{self.path} ends before {next(iter(self.missing))}"
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            raise self.explain(error) from error
        return FileRecord(self.n_written, self.digest.hexdigest() if self.digest else "")

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.hasher.shutdown()
        self.file.close()

    def explain(self, error: OSError) -> CheckpointError:
        """Return an error that names the file, its size and the free space."""
        disk = os.statvfs(self.path.parent)
        return CheckpointError(
            f"{self.path} cannot be written ({error.strerror}): it takes {self.n_bytes:,} bytes, "
            f"{self.n_written:,} were written, and the disk has {disk.f_bavail * disk.f_frsize:,} free"
        )


def cut_into_files(n_bytes: Mapping[str, int], most_file_bytes: float) -> list[list[str]]:
    """Cut a list of tensors, name -> bytes, into files of at most that size. A larger tensor gets its own file."""
    files: list[list[str]] = []
    filled = 0  # bytes of the last file
    for name, size in n_bytes.items():
        if not files or filled + size > most_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def open_tensor_file(path: Path) -> safe_open:
    """Open a file with the safetensors library, which maps it and checks its header.

    Raises DamagedCheckpoint for a bad file, CheckpointError where it cannot be opened or mapped.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise DamagedCheckpoint(show_text(f"{path} is not a whole safetensors file: {error}")) from None
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be opened: {error}") from None


class TensorFileReader:
    """Read boxes of the entries of one file. Raises DamagedCheckpoint where the file is not as the manifest says."""

    def __init__(self, path: Path, record: FileRecord):
        self.path = path
        check_file(path, record)
        self.file = open_tensor_file(path)
        self.names = set(self.file.keys())

    def read(
        self, name: str, record: TensorRecord, chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        """Return a box of `sizes` that starts at `offsets` in this chunk of a tensor.

        The tensor is a view of the mapped file: its pages are read when it is copied, and it allocates nothing.
        """
        entry, shape = name_entry(name, record, chunk), list(chunk.sizes)
        found = self.file.get_slice(entry) if entry in self.names else None
        if found is None or (found.get_dtype(), found.get_shape()) != (record.dtype, shape):
            described = f"{entry} of {record.dtype} and {shape}"
            raise DamagedCheckpoint(f"{self.path} does not hold {described}, as {MANIFEST} says")
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        return found[box] if box else found[...]


def find_damage(path: Path, record: FileRecord) -> str | None:
    """Read and hash a whole file. Return what is wrong with it, if anything."""
    try:
        check_file(path, record)
        found = hash_file(path, hashlib.blake2b(digest_size=HASH_BYTES))
    except DamagedCheckpoint as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if found != record.blake2b:
        return f"{path} has changed since it was written: its hash is not the one in {MANIFEST}"
    return None


def convert_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor. Raises CheckpointError where a finite number becomes an infinity in float16."""
    converted = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise CheckpointError(f"{name} has numbers beyond 65,504, the largest of float16: choose bfloat16 or float32")
    return converted
