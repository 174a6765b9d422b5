"""Opens a corpus and reads stretches of it, in place.

    corpus     one row of tokens, document after document: "a b c" "d e" "f g h i"
    read       any stretch [start, stop), with a mark on the first token of each document

                        start                   stop
    shard 0   a b c d e    | shard 1   f g h i   |
              ^     ^                  ^              begins

Neither the start nor the memory of a process grows with the corpus. A shard is opened when it is first read. All its
borders are checked then, and every 128th stays in memory, so that a search reads 1 KiB of them. Files are read by
position (pread), never mapped: a file that is cut while it is mapped kills the process (SIGBUS), or reads as zeros. A
mapping would also fill the memory of the process, for Linux maps what is around a page too (half a megabyte measured on
6.18). Either way all ranks of a host share what the system has read. What may be opened, and how it is laid out on
disk, corpora.py says.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.data.corpora import (
    AGAIN,
    NAMED,
    SPLITS,
    CorpusError,
    Shard,
    check_small,
    measure_flat,
    read_manifest,
)
from torchtitan_lite.data.prepare import prepare_files
from torchtitan_lite.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HELD_OUT_SHARE_OF_NAMED = 0.02
MOST_OPEN_SHARDS = 32  # two files each, and a process may often have no more than 1,024
MARK_EVERY = 128  # borders: 1 KiB of the file
CHECKED_BORDERS = 2**17  # at once: 1 MiB


class FlatShard:
    """Token ids and nothing else. `separator_id` ends a document."""

    def __init__(self, tokens: Path, n_tokens: int, dtype: torch.dtype, separator_id: int):
        self.tokens = NumberFile(tokens, n_tokens, dtype.itemsize)
        self.dtype, self.separator_id = dtype, separator_id

    def find_documents(self, start: int, stop: int) -> list[int]:
        """Where documents begin in this stretch."""
        first = max(start - 1, 0)
        ids = torch.frombuffer(bytearray(self.tokens.read(first, stop)), dtype=self.dtype).long()
        behind = (ids[: stop - first - 1] == self.separator_id).nonzero().flatten() + first + 1
        return [0] * (start == 0) + behind.tolist()


class IndexedShard:
    """Token ids, and an index of where documents begin, which ends with the number of tokens.

    `marks` is every 128th number of the index: filled when the shard is first opened, kept for when it is opened again.
    """

    def __init__(
        self, tokens: Path, index: Path, dtype: torch.dtype, *, n_tokens: int, n_documents: int, marks: "array[int]"
    ):
        self.tokens = NumberFile(tokens, n_tokens, dtype.itemsize)
        self.index = NumberFile(index, n_documents + 1, 8)
        if not marks:
            marks[:] = self.check_borders(n_tokens)  # at once: another thread may open it too
        self.marks = marks

    def check_borders(self, n_tokens: int) -> "array[int]":
        """Read the whole index; return the marks. Raises CorpusError unless it rises from 0 to `n_tokens`."""
        marks, before, n = array("Q"), torch.tensor([-1]), self.index.n
        for first in range(0, n, CHECKED_BORDERS):
            content = self.index.read(first, min(first + CHECKED_BORDERS, n))
            borders = torch.frombuffer(bytearray(content), dtype=torch.int64)  # a number above 2**63 is negative
            sound = borders > torch.cat([before, borders[:-1]])
            if first == 0:
                sound[0] = borders[0] == 0
            if first + len(borders) == n:
                sound[-1] &= borders[-1] == n_tokens
            if not sound.all():
                wrong = sound.byte().argmin().item()
                said = f"number {first + wrong} of 0 to {n - 1} is {borders[wrong].item() % 2**64}"
                raise CorpusError(f"{self.index.path}: {said}, and they must rise from 0 to {n_tokens}", AGAIN)
            marks.extend(borders[::MARK_EVERY].tolist())
            before = borders[-1:]
        return marks

    def find_documents(self, start: int, stop: int) -> list[int]:
        """Where documents begin in this stretch."""
        first = max(bisect_left(self.marks, start) - 1, 0) * MARK_EVERY
        last = min(bisect_left(self.marks, stop) * MARK_EVERY, self.index.n)
        begins = memoryview(self.index.read(first, last)).cast("Q")
        return begins[bisect_left(begins, start) : bisect_left(begins, stop)].tolist()


class NumberFile:
    """`n` numbers of `width` bytes, in a file that is open for as long as this object lives. Raises CorpusError."""

    def __init__(self, path: Path, n: int, width: int):
        self.path, self.n, self.width = path, n, width
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CorpusError(f"{path} cannot be read ({error.strerror})") from None
        weakref.finalize(self, os.close, self.descriptor)
        self._check_size(os.fstat(self.descriptor).st_size)

    def read(self, start: int, stop: int) -> bytes:
        """Numbers start .. stop-1."""
        n_bytes = (stop - start) * self.width
        try:
            content = os.pread(self.descriptor, n_bytes, start * self.width)
        except OSError as error:
            raise CorpusError(f"{self.path} cannot be read ({error.strerror})") from None
        if len(content) != n_bytes:
            self._check_size(os.fstat(self.descriptor).st_size)
            raise CorpusError(f"{self.path} could not be read at {start * self.width}")
        return content

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes != self.n * self.width:
            raise CorpusError(f"{self.path} has {n_bytes} bytes, and had {self.n * self.width} before")


@dataclass(frozen=True)
class ShardPlace:
    n_tokens: int
    open: Callable[[], IndexedShard | FlatShard]


class Corpus:
    """One row of tokens in shards."""

    def __init__(
        self,
        name: str,
        identity: str,
        dtype: torch.dtype,
        shards: list[ShardPlace],
        unhashed: Mapping[Path, str] | None = None,
    ):
        self.name = name  # as in training.dataset
        self.identity = identity  # equal for two corpora only if all their tokens and borders are
        self.dtype, self.shards = dtype, shards  # uint16 or uint32
        self.unhashed = unhashed or {}  # files that were not hashed when it was opened, with their SHA-256
        self.starts = [0, *accumulate(shard.n_tokens for shard in shards)]
        self.n_tokens = self.starts.pop()
        self.opened: dict[int, IndexedShard | FlatShard] = {}

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tokens start .. stop-1, int64, and whether each is its document's first, bool; both (stop - start,)."""
        assert 0 <= start < stop <= self.n_tokens, f"{start} to {stop} of {self.n_tokens} tokens"
        ids, begins = bytearray(), bytearray(stop - start)
        index = bisect_right(self.starts, start) - 1
        place = start
        while place < stop:
            shard, offset = self._open(index), self.starts[index]
            end = min(stop, offset + self.shards[index].n_tokens)
            ids += shard.tokens.read(place - offset, end - offset)
            for document in shard.find_documents(place - offset, end - offset):
                begins[offset + document - start] = True
            place, index = end, index + 1
        return torch.frombuffer(ids, dtype=self.dtype).long(), torch.frombuffer(begins, dtype=torch.bool)

    def _open(self, index: int) -> IndexedShard | FlatShard:
        opened = self.opened
        if index not in opened:
            if len(opened) >= MOST_OPEN_SHARDS:
                opened = self.opened = {}  # another thread keeps the shard that it reads just now
            opened[index] = self.shards[index].open()
        return opened[index]


def open_corpus(name: str, tokenizer: Tokenizer, cache_folder: Path, *, split: str = "train") -> Corpus:
    """The corpus that training.dataset or validation.dataset calls `name`. `split`: "train" or "held_out".

    One of NAMED is prepared first, if no process has done so yet. A flat file has one split, which is both. Files that
    are small together are hashed. Raises CorpusError.
    """
    if name in NAMED:
        return open_prepared(name, prepare_named(name, tokenizer, cache_folder), split)
    if Path(name).is_dir():
        return open_prepared(name, Path(name), split)
    return open_flat(name, tokenizer)


# ---------------------------------------------------------------- prepared


def open_prepared(name: str, folder: Path, split: str) -> Corpus:
    manifest = read_manifest(folder)
    shards = manifest.splits[split]
    if not shards:
        raise CorpusError(f"{folder} has no {split} documents")
    unhashed = check_small(folder, manifest, split)
    dtype = getattr(torch, manifest.dtype)

    def place(shard: Shard) -> ShardPlace:
        tokens, index = folder / f"{shard.name}.tokens", folder / f"{shard.name}.documents"
        counts = {"n_tokens": shard.n_tokens, "n_documents": shard.n_documents}
        return ShardPlace(shard.n_tokens, partial(IndexedShard, tokens, index, dtype, **counts, marks=array("Q")))

    places = [place(shard) for shard in shards]
    if not unhashed:
        for shard_place in places:
            shard_place.open()  # a small corpus is checked as a whole
    return Corpus(name, f"{manifest.identity} {split}", dtype, places, unhashed)


def prepare_named(name: str, tokenizer: Tokenizer, cache_folder: Path) -> Path:
    """The folder of a corpus of NAMED inside the cache. Whoever comes first prepares it."""
    files = NAMED[name]()
    if not files:
        raise CorpusError(f"no files of {name} were found on this machine")
    stats = [f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    key = hashlib.sha256("\n".join([tokenizer.identity, platform.python_version(), *stats]).encode()).hexdigest()
    folder = cache_folder / f"{name}-{key[:16]}"
    if find_fault(folder):
        cache_folder.mkdir(parents=True, exist_ok=True)
        # Ranks of a host arrive together: one takes the lock and prepares, the others wait and then find the folder.
        # The system releases the lock of a process that dies, so nobody waits for one that was killed.
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if fault := find_fault(folder):
                if folder.exists():
                    logger.warning(f"{fault}. The corpus {name} is prepared again")
                logger.info(f"Tokenising {name} once: {len(files)} files into {folder}")
                shutil.rmtree(folder, ignore_errors=True)  # damaged
                prepare_files(files, folder, tokenizer, held_out_share=HELD_OUT_SHARE_OF_NAMED)
    return folder


def find_fault(folder: Path) -> CorpusError | None:
    """Why a corpus is not as it was made, if that shows in its manifest, in sizes, or in files that are small."""
    try:
        check_small(folder, read_manifest(folder), *SPLITS)
    except CorpusError as error:
        return error
    return None


# ---------------------------------------------------------------- flat

PIECE_BYTES, N_PIECES = 2**18, 64


def open_flat(name: str, tokenizer: Tokenizer) -> Corpus:
    """Token ids and nothing else. Documents end with the tokenizer's EOS."""
    path = Path(name)
    type_name, n_tokens = measure_flat(path, tokenizer.vocab_size)
    dtype = getattr(torch, type_name)
    identity = f"{n_tokens} tokens of {type_name}, documents end with {tokenizer.eos_id}, SHA-256 {hash_pieces(path)}"
    shard = ShardPlace(n_tokens, partial(FlatShard, path, n_tokens, dtype, tokenizer.eos_id))
    return Corpus(name, identity, dtype, [shard])


def hash_pieces(path: Path) -> str:
    """SHA-256 of pieces all over a file; of a small one, of all of it. All of a large one would take too long."""
    digest = hashlib.sha256()
    n_bytes = path.stat().st_size
    stride = max(PIECE_BYTES, n_bytes // N_PIECES)
    with open(path, "rb", buffering=0) as file:
        for start in [*range(0, n_bytes, stride), max(0, n_bytes - PIECE_BYTES)]:
            file.seek(start)
            digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()
