"""Opens a corpus and reads stretches of it, in place.

    corpus     one row of tokens, document after document: "a b c" "d e" "f g h i"
    read       any stretch [start, stop), with a mark on the first token of each document

                        start                   stop
    shard 0   a b c d e    | shard 1   f g h i   |
              ^     ^                  ^              begins

Neither the start nor the memory of a process grows with the corpus. A shard is opened when it is first read. Its index
of documents is mapped, for searching; its tokens are read by position (pread), a new stretch each time. Mapped, they
would fill the memory of the process, for Linux maps what lies around a page too (half a megabyte measured on 6.18), and
giving that back took longer: 11 to 16 microseconds for 2,049 tokens, against 9. Either way all ranks of a host share
what the system has read. What may be opened, and how it lies on disk, corpora.py says.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import platform
import shutil
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.components.preparation.prepare import prepare_files
from torchtitan_lite.components.tokenizer import Tokenizer
from torchtitan_lite.corpora import NAMED, CorpusError, Shard, measure_flat, read_manifest

logger = logging.getLogger(__name__)

HELD_OUT_SHARE_OF_NAMED = 0.02
MOST_OPEN_SHARDS = 32  # two files each, and a process may often have no more than 1,024
SMALL_INDEX_BYTES = 2**20  # an open shard may keep so much in memory; to give it back takes as long as a read


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
    """Token ids, and an index of where documents begin, which ends with the number of tokens."""

    def __init__(self, tokens: Path, n_tokens: int, dtype: torch.dtype, index: Path, n_documents: int):
        self.tokens = NumberFile(tokens, n_tokens, dtype.itemsize)
        file = NumberFile(index, n_documents + 1, 8)
        self.index = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ)
        self.index.madvise(mmap.MADV_RANDOM)  # else megabytes around each page may be read from the disk
        self.begins = memoryview(self.index).cast("Q")

    def find_documents(self, start: int, stop: int) -> list[int]:
        """Where documents begin in this stretch."""
        first = bisect_left(self.begins, start)
        most = min(first + stop - start, len(self.begins))  # no document is empty
        found = self.begins[first : bisect_left(self.begins, stop, first, most)].tolist()
        if len(self.index) > SMALL_INDEX_BYTES:  # the two searches have touched it all over
            self.index.madvise(mmap.MADV_DONTNEED)
        return found


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
        content = os.pread(self.descriptor, n_bytes, start * self.width)
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

    def __init__(self, name: str, identity: str, dtype: torch.dtype, shards: list[ShardPlace]):
        self.name = name  # as in training.dataset
        self.identity = identity  # equal for two corpora only if all their tokens and borders are
        self.dtype, self.shards = dtype, shards  # uint16 or uint32
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

    One of NAMED is prepared first, if no process has done so yet. A flat file has one split, which is both. Raises
    CorpusError.
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
    dtype = getattr(torch, manifest.dtype)

    def place(shard: Shard) -> ShardPlace:
        tokens, index = folder / f"{shard.name}.tokens", folder / f"{shard.name}.documents"
        return ShardPlace(
            shard.n_tokens, partial(IndexedShard, tokens, shard.n_tokens, dtype, index, shard.n_documents)
        )

    return Corpus(name, f"{manifest.identity} {split}", dtype, [place(shard) for shard in shards])


def prepare_named(name: str, tokenizer: Tokenizer, cache_folder: Path) -> Path:
    """The folder of a corpus of NAMED inside the cache. Whoever comes first prepares it."""
    files = NAMED[name]()
    if not files:
        raise CorpusError(f"no files of {name} were found on this machine")
    stats = [f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    key = hashlib.sha256("\n".join([tokenizer.identity, platform.python_version(), *stats]).encode()).hexdigest()
    folder = cache_folder / f"{name}-{key[:16]}"
    if not is_whole(folder):
        cache_folder.mkdir(parents=True, exist_ok=True)
        # Ranks of a host arrive together: one takes the lock and prepares, the others wait and then find the folder.
        # The system releases the lock of a process that dies, so nobody waits for one that was killed.
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_whole(folder):
                logger.info(f"Tokenising {name} once: {len(files)} files into {folder}")
                shutil.rmtree(folder, ignore_errors=True)  # damaged
                prepare_files(files, folder, tokenizer, held_out_share=HELD_OUT_SHARE_OF_NAMED)
    return folder


def is_whole(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CorpusError:
        return False
    return True


# ---------------------------------------------------------------- flat

PIECE_BYTES, N_PIECES = 2**18, 64


def open_flat(name: str, tokenizer: Tokenizer) -> Corpus:
    """Token ids and nothing else. Documents end with the tokenizer's EOS."""
    path = Path(name)
    type_name, n_tokens = measure_flat(path, tokenizer.n_words)
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
