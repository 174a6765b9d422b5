"""Opens a corpus and reads stretches of it. Files are mapped, so all ranks of a host share their pages.

    corpus     one row of tokens, document after document: "a b c" "d e" "f g h i"
    read       any stretch [start, stop), with a mark on the first token of each document

                        start                   stop
    shard 0   a b c d e    | shard 1   f g h i   |
              ^     ^                  ^              begins

What may be opened and how it lies on disk is said in torchtitan_lite/corpora.py.
"""

import fcntl
import hashlib
import logging
import mmap
import platform
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.components.preparation import prepare_files
from torchtitan_lite.components.tokenizer import Tokenizer
from torchtitan_lite.corpora import MANIFEST, NAMED, CorpusError, Shard, choose_dtype, read_manifest

logger = logging.getLogger(__name__)

HELD_OUT_SHARE_OF_NAMED = 0.02
PAGES_AROUND_BYTES = 128 * 1024  # what the kernel maps around a page that is touched, before and behind
MOST_RESIDENT_BYTES = 64 * 2**20


class Mapped:
    """A file as a tensor (n,), whose pages can be given back."""

    def __init__(self, path: Path, dtype: torch.dtype):
        with open(path, "rb") as file:
            # copy-on-write: torch wants memory that it may write to, and the file must stay as it is
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.values = torch.frombuffer(self.memory, dtype=dtype)

    def release(self) -> None:
        """The pages leave this process; the system keeps them as long as it likes, and they come back when read."""
        self.memory.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class MappedShard:
    tokens: Mapped  # (n_tokens,) uint16 or uint32
    documents: Mapped | None  # (n_documents + 1,) int64: where each begins, and the end; None: nobody has written it
    separator_id: int | None = None  # without `documents`: the token that ends one

    def find_begins(self, start: int, stop: int) -> Tensor:
        """(stop - start,) bool: whether a token is the first of its document."""
        begins = torch.zeros(stop - start, dtype=torch.bool)
        if self.documents is not None:
            first, last = torch.searchsorted(self.documents.values, torch.tensor([start, stop])).tolist()
            begins[self.documents.values[first:last] - start] = True
        else:
            begins[0] = start == 0 or self.tokens.values[start - 1].item() == self.separator_id
            begins[1:] = self.tokens.values[start : stop - 1].to(torch.int64) == self.separator_id
        return begins

    def release(self) -> None:
        self.tokens.release()
        if self.documents is not None:
            self.documents.release()


class Corpus:
    """One row of tokens in mapped shards."""

    def __init__(self, name: str, identity: str, shards: list[MappedShard]):
        self.name = name  # as in training.dataset
        self.identity = identity  # equal for two corpora only if all their tokens and borders are
        self.shards = shards
        self.starts = [0, *accumulate(len(shard.tokens.values) for shard in shards)]
        self.n_tokens = self.starts.pop()
        self.touched: set[int] = set()
        self.resident_bytes = 0  # at most, since the last release

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tokens start .. stop-1, int64, and whether each is its document's first, bool; both (stop - start,)."""
        assert 0 <= start < stop <= self.n_tokens, f"{start} to {stop} of {self.n_tokens} tokens"
        tokens, begins = [], []
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            shard, offset = self.shards[index], self.starts[index]
            end = min(stop, offset + len(shard.tokens.values))
            tokens.append(shard.tokens.values[start - offset : end - offset].to(torch.int64))
            begins.append(shard.find_begins(start - offset, end - offset))
            self.touched.add(index)
            self.resident_bytes += 4 * (end - start) + 2 * PAGES_AROUND_BYTES
            start, index = end, index + 1
        if self.resident_bytes > MOST_RESIDENT_BYTES:
            self.release()
        return torch.cat(tokens), torch.cat(begins)

    def release(self) -> None:
        """Keeps the process small however much of a large corpus it has seen."""
        for index in self.touched:
            self.shards[index].release()
        self.touched.clear()
        self.resident_bytes = 0


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


def open_prepared(name: str, folder: Path, split: str) -> Corpus:
    manifest = read_manifest(folder)
    shards = manifest.splits[split]
    if not shards:
        raise CorpusError(f"{folder} has no {split} documents")

    def map_shard(shard: Shard) -> MappedShard:
        return MappedShard(
            tokens=Mapped(folder / f"{shard.name}.tokens", getattr(torch, manifest.dtype)),
            documents=Mapped(folder / f"{shard.name}.documents", torch.int64),
        )

    return Corpus(name, f"{manifest.identity} {split}", [map_shard(shard) for shard in shards])


def open_flat(name: str, tokenizer: Tokenizer) -> Corpus:
    """Token ids and nothing else. Documents end with the tokenizer's EOS; where there is none, it is one document."""
    path = Path(name)
    tokens = Mapped(path, getattr(torch, choose_dtype(tokenizer.n_words)))
    # All of a large file cannot be hashed at every start: its length, beginning and end must do.
    ends = bytes(tokens.memory[: 2**20]) + bytes(tokens.memory[-(2**20) :])
    identity = f"{len(tokens.memory)} bytes, {hashlib.sha256(ends).hexdigest()}"
    return Corpus(name, identity, [MappedShard(tokens, None, tokenizer.eos_id)])


def prepare_named(name: str, tokenizer: Tokenizer, cache_folder: Path) -> Path:
    """The folder of a corpus of NAMED inside the cache. Whoever comes first prepares it."""
    files = NAMED[name]()
    if not files:
        raise CorpusError(f"no files of {name} were found on this machine")
    sizes = [f"{path}:{path.stat().st_size}" for path in files]
    key = hashlib.sha256("\n".join([tokenizer.identity, platform.python_version(), *sizes]).encode()).hexdigest()
    folder = cache_folder / f"{name}-{key[:16]}"
    if not (folder / MANIFEST).exists():
        cache_folder.mkdir(parents=True, exist_ok=True)
        # Ranks of a host arrive together: one takes the lock and prepares, the others wait and then find the folder.
        # The system releases the lock of a process that dies, so nobody waits for one that was killed.
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / MANIFEST).exists():
                logger.info(f"Tokenising {name} once: {len(files)} files into {folder}")
                prepare_files(files, folder, tokenizer, held_out_share=HELD_OUT_SHARE_OF_NAMED)
    return folder
