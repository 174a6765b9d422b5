"""Open a corpus, read any stretch of it, and hash a large one beside the steps.

    corpus     one row of tokens, document after document: "a b c" "d e" "f g h i"
    read       any stretch [start, stop), with a mark on the first token of each document

                        start                   stop
    shard 0   a b c d e    | shard 1   f g h i   |
              ^     ^                  ^              begins

Neither the start nor the memory of a process grows with the corpus: a shard is opened when it is first read. All
borders of its documents are checked then, and later looked up by binary search in the file.

Files are read by position (pread), never mapped: a file that is cut while it is mapped kills the process (SIGBUS), or
reads as zeros. All ranks of a host share the system's cache either way.

A token with a flipped bit is a token; only the SHA-256 in the corpus' manifest shows the damage. Hashing a large corpus
takes minutes, so the first step does not wait for it:

    rank 0 of the host     steps      |--1--|--2--|--3--| ...  `check` raises what the thread has found
                           thread      #    #    #    #        hash 1 MiB, then sleep 19 times as long
    rank 1 of the host     ...                                 another part of the files

The thread takes at most 5 % of a core, 80 MiB/s where a core hashes 1.6 GiB/s: 100 GB take three minutes on a host of
eight ranks. Every host reads all files, since it may have copies of its own. Traffic between ranks: none; the rank that
finds the damage names the file and fails, and torchrun ends the others.
"""

import hashlib
import logging
import os
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from torchtitan_lite.config.files import describe_damage
from torchtitan_lite.data.corpus_folder import (
    AGAIN,
    DATASETS,
    DOWNLOADS,
    SPLITS,
    CorpusError,
    list_dataset,
    measure_flat,
    read_split,
)
from torchtitan_lite.data.prepare import prepare_dataset
from torchtitan_lite.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

VALIDATION_SHARE_OF_DATASETS = 0.02
MAX_OPEN_SHARDS = 32  # two files each, and a process may often have no more than 1,024
CHECKED_BORDERS = 2**17  # read at once: 1 MiB
PIECE_BYTES, N_PIECES = 2**18, 64  # of a flat file that are hashed
REST = 19  # times as long as the work before it


class NumberFile:
    """`n` numbers of `width` bytes in a file, which is open for as long as this object lives. Raises CorpusError."""

    def __init__(self, path: Path, n: int, width: int):
        self.path, self.n, self.width = path, n, width
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CorpusError(f"{path} cannot be read ({error.strerror})") from None
        weakref.finalize(self, os.close, self.descriptor)
        self._check_size()

    def read(self, start: int, stop: int) -> bytes:
        """Return numbers start .. stop-1."""
        n_bytes = (stop - start) * self.width
        try:
            content = os.pread(self.descriptor, n_bytes, start * self.width)
        except OSError as error:
            raise CorpusError(f"{self.path} cannot be read ({error.strerror})") from None
        if len(content) != n_bytes:
            self._check_size()
            raise CorpusError(f"{self.path} could not be read at {start * self.width}")
        return content

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        """Return one number; `bisect` searches with it."""
        return int.from_bytes(self.read(index, index + 1), "little")

    def _check_size(self) -> None:
        n_bytes = os.fstat(self.descriptor).st_size
        if n_bytes != self.n * self.width:
            raise CorpusError(f"{self.path} has {n_bytes} bytes, and had {self.n * self.width} before")


@dataclass(frozen=True)
class ShardFiles:
    """Where a shard is. Without `documents` it is a flat file, whose documents end with `separator_id`."""

    tokens: Path
    n_tokens: int
    documents: Path | None = None
    n_documents: int = 0
    targets: Path | None = None  # a byte for each token: 1 where it is a target
    separator_id: int = -1


class OpenShard:
    """The files of one shard, opened. Raises CorpusError."""

    def __init__(self, files: ShardFiles, dtype: torch.dtype):
        self.dtype, self.separator_id = dtype, files.separator_id
        self.tokens = NumberFile(files.tokens, files.n_tokens, dtype.itemsize)
        self.borders = NumberFile(files.documents, files.n_documents + 1, 8) if files.documents else None
        self.targets = NumberFile(files.targets, files.n_tokens, 1) if files.targets else None

    def check_borders(self) -> None:
        """Raises CorpusError unless the borders of documents rise from 0 to the number of tokens."""
        n, n_tokens, before = len(self.borders), len(self.tokens), torch.tensor([-1])
        for first in range(0, n, CHECKED_BORDERS):
            content = self.borders.read(first, min(first + CHECKED_BORDERS, n))
            borders = torch.frombuffer(bytearray(content), dtype=torch.int64)  # a number above 2**63 is negative
            sound = borders > torch.cat([before, borders[:-1]])
            if first == 0:
                sound[0] = borders[0] == 0
            if first + len(borders) == n:
                sound[-1] &= borders[-1] == n_tokens
            if not sound.all():
                wrong = sound.byte().argmin().item()
                seen = f"number {first + wrong} of 0 to {n - 1} is {borders[wrong].item() % 2**64}"
                raise CorpusError(f"{self.borders.path}: {seen}, and they must rise from 0 to {n_tokens}", AGAIN)
            before = borders[-1:]

    def find_documents(self, start: int, stop: int) -> list[int]:
        """Return the positions in start .. stop-1 where a document begins."""
        if self.borders is not None:
            first = bisect_left(self.borders, start)
            last = bisect_left(self.borders, stop, first, min(len(self.borders), first + stop - start))
            return memoryview(self.borders.read(first, last)).cast("Q").tolist()
        first = max(start - 1, 0)
        ids = torch.frombuffer(bytearray(self.tokens.read(first, stop)), dtype=self.dtype).long()
        behind = (ids[: stop - first - 1] == self.separator_id).nonzero().flatten() + first + 1
        return [0] * (start == 0) + behind.tolist()


class Corpus:
    """One row of tokens in shards. Any thread may read it."""

    def __init__(self, name: str, identity: str, dtype: str, shards: list[ShardFiles], unhashed: Mapping[Path, str]):
        self.name = name  # as in training.dataset
        self.identity = identity  # two corpora share it only if all their tokens and documents are equal
        self.dtype = id_dtype = getattr(torch, dtype)  # uint16 or uint32
        self.unhashed = unhashed  # files that were not hashed when it was opened, with their SHA-256
        self.starts = [0, *accumulate(shard.n_tokens for shard in shards)]
        self.n_tokens = self.starts.pop()
        checked: set[int] = set()  # shards whose borders were checked

        @lru_cache(maxsize=MAX_OPEN_SHARDS)
        def open_shard(index: int) -> OpenShard:  # holds no reference to this corpus, so both end at once
            shard = OpenShard(shards[index], id_dtype)
            if shard.borders and index not in checked:
                shard.check_borders()
                checked.add(index)
            return shard

        self.open_shard = open_shard

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return tokens start .. stop-1, int64, and whether each is its document's first, bool; both (stop - start,).

        Raises CorpusError.
        """
        ids, begins = bytearray(), bytearray(stop - start)
        for shard, offset, first, end in self._find_shards(start, stop):
            ids += shard.tokens.read(first, end)
            for document in shard.find_documents(first, end):
                begins[offset + document - start] = True
        return torch.frombuffer(ids, dtype=self.dtype).long(), torch.frombuffer(begins, dtype=torch.bool)

    def read_targets(self, start: int, stop: int) -> Tensor:
        """Return whether each of tokens start .. stop-1 may be a target: all but those of a conversation's other turns.

        bool, (stop - start,). Raises CorpusError.
        """
        marks = bytearray()
        for shard, _, first, end in self._find_shards(start, stop):
            marks += shard.targets.read(first, end) if shard.targets else b"\1" * (end - first)
        return torch.frombuffer(marks, dtype=torch.uint8) == 1

    def _find_shards(self, start: int, stop: int) -> Iterator[tuple[OpenShard, int, int, int]]:
        """Yield the shards of tokens start .. stop-1: each with its first token's position, and the stretch inside."""
        assert 0 <= start < stop <= self.n_tokens, f"{start} to {stop} of {self.n_tokens} tokens"
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            shard, offset = self.open_shard(index), self.starts[index]
            end = min(stop, offset + len(shard.tokens))
            yield shard, offset, start - offset, end - offset
            start, index = end, index + 1


def open_corpus(
    name: str, tokenizer: Tokenizer, cache_folder: Path, *, split: str = "train", dataset_path: str = ""
) -> Corpus:
    """Open the corpus that training.dataset or validation.dataset calls `name`. Raises CorpusError.

    `split` is "train" or "validation"; a flat file is the same in both. One of DATASETS, or of DOWNLOADS with its files
    in `dataset_path`, is prepared first, if no process has done so yet. Files that are small together are hashed.
    """
    folder = Path(name)
    if name in DATASETS or name in DOWNLOADS:
        is_held_out = name in DOWNLOADS and DOWNLOADS[name].split == "validation"  # then it has no training documents
        share = 0.0 if is_held_out else VALIDATION_SHARE_OF_DATASETS
        folder = prepare_dataset(name, list_dataset(name, dataset_path), tokenizer, cache_folder, share)
        split = "train" if is_held_out else split
    elif not folder.is_dir():
        return open_flat(name, tokenizer)
    manifest, unhashed = read_split(folder, split, vocabulary=None)
    files = [
        ShardFiles(
            folder / f"{s.name}.tokens",
            s.n_tokens,
            folder / f"{s.name}.documents",
            s.n_documents,
            folder / f"{s.name}.targets" if s.targets_sha256 else None,
        )
        for s in manifest.splits[SPLITS[split]]
    ]
    corpus = Corpus(name, f"{manifest.identity} {SPLITS[split]}", manifest.dtype, files, unhashed)
    for index in range(len(files)) if not unhashed else ():  # a small corpus is checked as a whole
        corpus.open_shard(index)
    return corpus


def open_flat(name: str, tokenizer: Tokenizer) -> Corpus:
    """Open a file of token ids and nothing else. Documents end with the tokenizer's EOS."""
    path = Path(name)
    dtype, n_tokens = measure_flat(path, tokenizer.vocab_size)
    # Of a large file only pieces all over it are hashed: all of it would take too long.
    digest, n_bytes = hashlib.sha256(), path.stat().st_size
    stride = max(PIECE_BYTES, n_bytes // N_PIECES)
    with open(path, "rb", buffering=0) as file:
        for start in [*range(0, n_bytes, stride), max(0, n_bytes - PIECE_BYTES)]:
            file.seek(start)
            digest.update(file.read(PIECE_BYTES))
    identity = f"{n_tokens} tokens of {dtype}, documents end with {tokenizer.eos_id}, SHA-256 {digest.hexdigest()}"
    return Corpus(name, identity, dtype, [ShardFiles(path, n_tokens, separator_id=tokenizer.eos_id)], unhashed={})


# ---------------------------------------------------------------- hashes of large corpora, beside the steps


class BackgroundHash:
    """Context manager: inside, a thread compares the files that `corpora` left unhashed with their SHA-256."""

    def __init__(self, corpora: Iterable[Corpus], *, part: int, n_parts: int):
        """Of the files of `corpora`, this process hashes part `part` of `n_parts`."""
        files = {file for corpus in corpora for file in corpus.unhashed.items()}
        by_kind = sorted(files, key=lambda file: (file[0].suffix, file))  # each part gets large files and small ones
        self.hashes = dict(by_kind[part::n_parts])
        self.leaving = Event()
        self.n_hashed = 0
        self.result: Future[None] | None = None

    def __enter__(self) -> "BackgroundHash":
        if self.hashes:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="hash")
            self.result = self.thread.submit(self._hash_all)
        return self

    def check(self) -> None:
        """Raise CorpusError if the thread has found a damaged file."""
        if self.result is not None and self.result.done():
            self.result.result()

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self.result is None:
            return
        self.leaving.set()
        self.thread.shutdown()
        error = self.result.exception()
        if isinstance(error, CancelledError):
            logger.info(f"hashed {self.n_hashed} of {len(self.hashes)} files of corpora; `prepare --check` reads all")
        elif error and kind is None:  # found beside the last step
            raise error

    def _hash_all(self) -> None:
        start_s = self.resumed_s = time.perf_counter()
        for path, sha256 in self.hashes.items():
            if damage := describe_damage(path, sha256, self._rest):
                raise CorpusError(f"{damage}. {AGAIN}")
            self.n_hashed += 1
        took_s = time.perf_counter() - start_s
        logger.info(f"hashed {self.n_hashed} files of corpora beside the steps in {took_s:.0f} s: none has changed")

    def _rest(self) -> None:
        """Raises CancelledError when the run is over."""
        if self.leaving.wait(REST * (time.perf_counter() - self.resumed_s)):
            raise CancelledError
        self.resumed_s = time.perf_counter()
