"""Files of tensors in the safetensors format: written in one pass that hashes them, read a box at a time.

    8 bytes     length of the header
    header      JSON: name -> dtype, shape, first and last byte behind the header
    tensors     one behind the other, row by row, little-endian

Any tool that knows safetensors reads them. Its own package writes from a dictionary of whole tensors and reads through
a memory map; here a tensor leaves its device in pieces while the piece before is written and hashed, and a file may
be larger than the address space. Nothing in a header is believed: the manifest says what must be there, and the tensors
must fill the file without a gap or an overlap (checkpoint/safetensors_header.py).
"""

import ctypes
import hashlib
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.manifest import (
    HASH_BYTES,
    MANIFEST,
    CheckpointError,
    DamagedCheckpoint,
    FileRecord,
    check_file,
)
from torchtitan_lite.checkpoint.safetensors_header import DTYPE_BYTES, TensorFileError, make_header, read_header

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
NAMES = {dtype: name for name, dtype in DTYPES.items()}

PIECE_BYTES = 2**20  # small enough that hashing and writing begin at once, large enough to hide handing it over
MOST_PIECES = 8  # so that a thread which has to wait for a processor does not stop the others
BYTES_UNTIL_SYNC = 16 * 2**20  # the disk is at work while the rest is hashed, and has little left to do at the end
BLOCK_BYTES = 8 * 2**20  # read at once

Entries = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # name -> dtype and shape, in the order of the file


class TensorFileWriter:
    """Writes `entries` to the new file `path`, in their order.

    Pieces are hashed by one thread, written by another, and a third has the disk take what is written. So a file takes
    hardly longer than the slowest of the three. What lies on the host in one run is not copied for that: a tensor that
    was given must stay as it is until `finish`.
    """

    def __init__(self, path: Path, entries: Entries):
        self.path = path
        self.missing = dict(entries)
        header = make_header({name: (NAMES[dtype], tuple(shape)) for name, (dtype, shape) in entries.items()})
        self.n_bytes = len(header) + sum(prod(shape) * dtype.itemsize for dtype, shape in entries.values())
        self.digest = hashlib.blake2b(digest_size=HASH_BYTES)
        self.queue: deque[tuple[Tensor, Future, Future]] = deque()  # pieces that are at work, or done by now
        self.n_written = self.n_syncing = 0
        try:
            self.file = open(path, "xb", buffering=0)
        except OSError as error:
            raise self.explain(error) from error
        self.hasher = ThreadPoolExecutor(1, thread_name_prefix="hash")  # one thread each, so in the order of the queue
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self.syncer = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self.syncing = self.syncer.submit(int)
        self.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def write(self, name: str, tensor: Tensor) -> None:
        """The next entry. `tensor` may be on any device and need not be contiguous."""
        assert self.missing, f"{name} comes after the last entry of {self.path}"
        due = next(iter(self.missing))
        dtype, shape = self.missing.pop(due)
        given = (name, tensor.dtype, tuple(tensor.shape))
        assert given == (due, dtype, tuple(shape)), f"{self.path}: {given} is not {due} of {dtype} and {tuple(shape)}"
        self.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8))

    def append(self, content: Tensor) -> None:
        """Begins to hash and to write bytes, on any device: a device's come to the host a piece at a time."""
        for piece in content.split(PIECE_BYTES):
            if len(self.queue) == MOST_PIECES:
                self.wait()
            piece = piece.cpu()
            view = view_bytes(piece)
            hashing = self.hasher.submit(self.digest.update, view)
            self.queue.append((piece, hashing, self.writer.submit(self.write_piece, view)))

    def write_piece(self, piece: memoryview) -> None:
        while piece:  # a disk that is nearly full takes a part
            n = self.file.write(piece)
            piece, self.n_written = piece[n:], self.n_written + n
        if self.n_written - self.n_syncing >= BYTES_UNTIL_SYNC and self.syncing.done():
            self.syncing.result()  # a disk tells of a failure once
            self.n_syncing = self.n_written
            self.syncing = self.syncer.submit(os.fdatasync, self.file.fileno())

    def wait(self) -> None:
        """For the oldest piece of the queue. Raises CheckpointError where it could not be written."""
        _piece, hashing, writing = self.queue.popleft()
        hashing.result()
        try:
            writing.result()
        except OSError as error:
            raise self.explain(error) from error

    def finish(self) -> FileRecord:
        """Everything is on the disk. Its size and hash."""
        assert not self.missing, f"{self.path} ends before {next(iter(self.missing))}"
        while self.queue:
            self.wait()
        try:
            self.syncing.result()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise self.explain(error) from error
        self.close()
        return FileRecord(self.n_written, self.digest.hexdigest())

    def close(self) -> None:
        self.hasher.shutdown()
        self.writer.shutdown()
        self.syncer.shutdown()
        self.file.close()

    def explain(self, error: OSError) -> CheckpointError:
        place = os.statvfs(self.path.parent)
        return CheckpointError(
            f"{self.path} cannot be written ({error.strerror}): it takes {self.n_bytes:,} bytes, "
            f"{self.n_written:,} were written, and the disk has {place.f_bavail * place.f_frsize:,} free"
        )


def view_bytes(content: Tensor) -> memoryview:
    """The memory of a uint8 tensor on the host, in one run. The tensor must outlive it."""
    return memoryview((ctypes.c_uint8 * len(content)).from_address(content.data_ptr())).cast("B")


class TensorFileReader:
    """Reads boxes of the entries of one file. Raises DamagedCheckpoint where it is not as the manifest says."""

    def __init__(self, path: Path, record: FileRecord):
        self.path = path
        check_file(path, record)
        try:
            self.entries = read_header(path, dtypes=DTYPE_BYTES)
        except TensorFileError as error:
            raise DamagedCheckpoint(str(error)) from None
        self.file = open(path, "rb", buffering=0)
        self.buffer = bytearray()

    def read_into(
        self, destination: Tensor, entry: str, sizes: Sequence[int], dtype: str, begin: Sequence[int]
    ) -> None:
        """Fills `destination` with the box of its shape that begins at `begin` in the entry of `sizes`.

        Rows are read in blocks, so this needs BLOCK_BYTES or one row, whichever is more.
        """
        start = self.find(entry, tuple(sizes), dtype)
        if not sizes:
            destination, sizes, begin = destination.unsqueeze(0), (1,), (0,)
        row_bytes = prod(sizes[1:]) * DTYPE_BYTES[dtype]
        block = max(1, BLOCK_BYTES // max(1, row_bytes))
        for done in range(0, len(destination), block):
            n_rows = min(block, len(destination) - done)
            rows = self.read_bytes(start + (begin[0] + done) * row_bytes, n_rows * row_bytes)
            box = rows.view(DTYPES[dtype]).view(n_rows, *sizes[1:])
            for dim in range(1, len(sizes)):
                box = box.narrow(dim, begin[dim], destination.shape[dim])
            destination[done : done + n_rows].copy_(box)

    def find(self, entry: str, sizes: tuple[int, ...], dtype: str) -> int:
        """The first byte of an entry, which must be of this shape and dtype."""
        found = self.entries.get(entry)
        if found is None or (found.shape, found.dtype) != (sizes, dtype):
            described = f"{entry} of {dtype} and {list(sizes)}"
            raise DamagedCheckpoint(f"{self.path} does not hold {described}, as {MANIFEST} says")
        return found.start

    def read_bytes(self, start: int, n_bytes: int) -> Tensor:
        """uint8, valid until the next call."""
        if len(self.buffer) < n_bytes:
            self.buffer = bytearray(n_bytes)
        rest = memoryview(self.buffer)[:n_bytes]
        while rest:
            n = os.preadv(self.file.fileno(), [rest], start)
            if n == 0:
                raise DamagedCheckpoint(f"{self.path} was cut while it was read")
            rest, start = rest[n:], start + n
        return torch.frombuffer(self.buffer, dtype=torch.uint8, count=n_bytes) if n_bytes else torch.empty(0).byte()

    def close(self) -> None:
        self.file.close()


def find_damage(path: Path, record: FileRecord) -> str | None:
    """Reads the whole file; what is wrong with it, if anything."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    piece = bytearray(PIECE_BYTES)
    try:
        check_file(path, record)
        with open(path, "rb", buffering=0) as file:
            while n := file.readinto(piece):
                digest.update(memoryview(piece)[:n])
    except DamagedCheckpoint as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if digest.hexdigest() != record.blake2b:
        return f"{path} has changed since it was written: its hash is not the one in {MANIFEST}"
    return None
