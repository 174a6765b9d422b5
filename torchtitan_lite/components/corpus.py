"""Opens a corpus and reads stretches of it. Files are mapped, so all ranks of a host share their pages.

    corpus     one row of tokens, document after document: "a b c" "d e" "f g h i"
    read       any stretch [start, stop), with a mark on the first token of each document

                        start                   stop
    shard 0   a b c d e    | shard 1   f g h i   |
              ^     ^                  ^              begins

A shard is mapped when it is first read, and its pages leave the process as soon as the stretch is copied: neither the
start nor the memory of a process grows with the corpus. What may be opened, and how it lies on disk, corpora.py says.
"""

import fcntl
import hashlib
import logging
import mmap
import platform
import shutil
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.components.preparation import prepare_files
from torchtitan_lite.components.tokenizer import Tokenizer
from torchtitan_lite.corpora import NAMED, CorpusError, Shard, measure_flat, read_manifest

logger = logging.getLogger(__name__)

HELD_OUT_SHARE_OF_NAMED = 0.02
MOST_MAPPED_SHARDS = 64  # each keeps two files open, and a process may often have no more than 1,024


@dataclass(frozen=True)
class ShardFiles:
    """Where a shard lies, and how to tell its documents apart."""

    tokens: Path
    n_tokens: int
    dtype: torch.dtype  # uint16 or uint32
    documents: Path | None  # uint64: where each begins, and the end; None: nobody has written it down
    n_documents: int = 0
    separator_id: int | None = None  # without `documents`: the token that ends one


class MappedFile:
    """A file, mapped for as long as this object lives. Raises CorpusError where it is not there, or of another size.

    Read-only: memory that may be written is promised to the process, and no system promises more than it has. So no
    tensor can lie directly on it.
    """

    def __init__(self, path: Path, n_bytes: int):
        try:
            with open(path, "rb") as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CorpusError(f"{path} cannot be read ({error.strerror})") from None
        except ValueError:
            raise CorpusError(f"{path} is empty") from None
        if len(self.memory) != n_bytes:
            raise CorpusError(f"{path} has {len(self.memory)} bytes, and had {n_bytes} before")
        self.memory.madvise(mmap.MADV_RANDOM)  # else megabytes around each page may be read from the disk

    def copy(self, start: int, stop: int) -> bytearray:
        first_page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.memory.madvise(mmap.MADV_WILLNEED, first_page, stop - first_page)  # from the disk in one go
        copied = bytearray(self.memory[start:stop])
        self.release()
        return copied

    def release(self) -> None:
        """Pages leave this process. The system keeps them as long as it likes, and they come back when read."""
        self.memory.madvise(mmap.MADV_DONTNEED)


class MappedShard:
    def __init__(self, files: ShardFiles):
        self.files = files
        self.tokens = MappedFile(files.tokens, files.n_tokens * files.dtype.itemsize)
        self.documents = MappedFile(files.documents, (files.n_documents + 1) * 8) if files.documents else None

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As Corpus.read."""
        tokens = self._read_tokens(start, stop)
        begins = torch.zeros(stop - start, dtype=torch.bool)
        if self.documents is not None:
            begins[self._find_documents(start, stop) - start] = True
        else:
            begins[0] = start == 0 or self._read_tokens(start - 1, start).item() == self.files.separator_id
            begins[1:] = tokens[:-1] == self.files.separator_id
        return tokens, begins

    def _read_tokens(self, start: int, stop: int) -> Tensor:
        width = self.files.dtype.itemsize
        return torch.frombuffer(self.tokens.copy(start * width, stop * width), dtype=self.files.dtype).long()

    def _find_documents(self, start: int, stop: int) -> Tensor:
        """Where documents begin in this stretch."""
        places = memoryview(self.documents.memory).cast("Q")
        first = bisect_left(places, start)
        last = bisect_left(places, stop, first, min(first + stop - start, len(places)))  # none of them is empty
        found = torch.tensor(places[first:last].tolist(), dtype=torch.int64)
        self.documents.release()  # bisect may have touched as many megabytes as it took steps
        return found


class Corpus:
    """One row of tokens in shards."""

    def __init__(self, name: str, identity: str, shards: list[ShardFiles]):
        self.name = name  # as in training.dataset
        self.identity = identity  # equal for two corpora only if all their tokens and borders are
        self.shards = shards
        self.starts = [0, *accumulate(shard.n_tokens for shard in shards)]
        self.n_tokens = self.starts.pop()
        self.mapped: dict[int, MappedShard] = {}

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tokens start .. stop-1, int64, and whether each is its document's first, bool; both (stop - start,)."""
        assert 0 <= start < stop <= self.n_tokens, f"{start} to {stop} of {self.n_tokens} tokens"
        stretches = []
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            shard, offset = self._map(index), self.starts[index]
            end = min(stop, offset + shard.files.n_tokens)
            stretches.append(shard.read(start - offset, end - offset))
            start, index = end, index + 1
        tokens, begins = zip(*stretches, strict=True)
        return torch.cat(tokens), torch.cat(begins)

    def _map(self, index: int) -> MappedShard:
        mapped = self.mapped
        if len(mapped) >= MOST_MAPPED_SHARDS:
            mapped = self.mapped = {}  # another thread keeps the shard that it reads just now
        if index not in mapped:
            mapped[index] = MappedShard(self.shards[index])
        return mapped[index]


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

    def locate(shard: Shard) -> ShardFiles:
        return ShardFiles(
            tokens=folder / f"{shard.name}.tokens",
            n_tokens=shard.n_tokens,
            dtype=getattr(torch, manifest.dtype),
            documents=folder / f"{shard.name}.documents",
            n_documents=shard.n_documents,
        )

    return Corpus(name, f"{manifest.identity} {split}", [locate(shard) for shard in shards])


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
    dtype, n_tokens = measure_flat(path, tokenizer.n_words)
    identity = f"{n_tokens} tokens of {dtype}, documents end with {tokenizer.eos_id}, SHA-256 {hash_pieces(path)}"
    files = ShardFiles(path, n_tokens, getattr(torch, dtype), documents=None, separator_id=tokenizer.eos_id)
    return Corpus(name, identity, [files])


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
