"""Text to batches. The promise: the samples of global step s are a pure function of (seed, s), whoever reads them.

A corpus is one long row of tokens, `BOS text EOS BOS text EOS ...`, cut into samples of seq_len tokens. Each epoch puts
the samples in another order, and step s takes the next global_batch_size of that order. Ranks share a step by rows:

    global batch of step s     4 ranks    2 ranks    1 rank
    row 0   sample 5121        rank 0     rank 0     rank 0
    row 1   sample  907        rank 1     rank 0     rank 0
    row 2   sample   33        rank 2     rank 1     rank 0
    row 3   sample 2460        rank 3     rank 1     rank 0

Nothing else is remembered from step to step, so a resume needs the number of the step and no state of a loader. Ranks
here are data-parallel ranks: all tp and pp ranks of one replica read the same rows. Traffic between ranks: none.

Legend: B sequences, S tokens per sequence.
"""

import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import platform
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from torchtitan_lite.components.tokenizer import Tokenizer
from torchtitan_lite.config import ConfigError, Problem
from torchtitan_lite.model.head import IGNORE_INDEX

logger = logging.getLogger("torchtitan_lite")


@dataclass(frozen=True)
class Batch:
    """Rows of a global batch, each field (B, S) int64."""

    tokens: Tensor
    targets: Tensor  # the token after each one; IGNORE_INDEX where it is not to be predicted
    positions: Tensor  # of a token in its row, or in its document
    doc_ids: Tensor  # number of a token's document in its row, from 0

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Batch":
        return Batch(*(field.to(device, non_blocking=non_blocking) for field in self._fields()))

    def pin_memory(self) -> "Batch":
        return Batch(*(field.pin_memory() for field in self._fields()))

    def split(self, n: int) -> "list[Batch]":
        """n microbatches of equally many rows, in order."""
        assert self.tokens.shape[0] % n == 0, f"{self.tokens.shape[0]} rows do not split into {n} equal parts"
        return [Batch(*fields) for fields in zip(*(field.chunk(n) for field in self._fields()), strict=True)]

    def _fields(self) -> tuple[Tensor, ...]:
        return self.tokens, self.targets, self.positions, self.doc_ids


# ---------------------------------------------------------------- text


def list_python_stdlib() -> list[Path]:
    """Sources of the running Python's standard library: real text that every machine has. About 11 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
    # _sysconfigdata* is written when Python is built: it differs between machines with the same Python
    return sorted(
        path
        for path in root.rglob("*.py")
        if left_out.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )


# training.dataset -> the files of that corpus, one document each, in the order of the corpus
DATASETS: dict[str, Callable[[], list[Path]]] = {"python_stdlib": list_python_stdlib}


def read_document(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


# ---------------------------------------------------------------- text -> one file of tokens


@dataclass(frozen=True)
class Corpus:
    name: str
    tokens: (
        Tensor  # (number of tokens,) uint16 or int32, mapped from the cache file: all ranks of a host share its pages
    )
    bos_id: int
    identity: str  # hash of the tokens: equal on two machines exactly if the tokens are


def open_corpus(name: str, tokenizer: Tokenizer, cache_folder: str) -> Corpus:
    """The tokens of DATASETS[name], from the cache; tokenises them first if no process has done so yet."""
    files = DATASETS[name]()
    if not files:
        why, remedy = "no files of it were found on this machine", "Choose another dataset"
        raise ConfigError([Problem("training.dataset", name, why, remedy)])
    sizes = [f"{path}:{path.stat().st_size}" for path in files]
    key = hashlib.sha256("\n".join([tokenizer.identity, platform.python_version(), *sizes]).encode()).hexdigest()
    tokens_path = Path(cache_folder) / f"{name}-{key[:16]}.tokens"
    header = read_header(tokens_path)
    if header is None:
        tokens_path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks of a host arrive together: one takes the lock and builds, the others wait and then find the file.
        # The system releases the lock of a process that dies, so nobody waits for a builder that was killed.
        with open(tokens_path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            header = read_header(tokens_path) or build_cache(name, files, tokenizer, tokens_path)
    with open(tokens_path, "rb") as file:
        # copy-on-write: torch wants memory that it may write to, and the file must stay as it is
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tokens = torch.frombuffer(memory, dtype=getattr(torch, header["dtype"]))
    return Corpus(name=name, tokens=tokens, bos_id=tokenizer.bos_id, identity=header["sha256"])


def read_header(tokens_path: Path) -> dict | None:
    """The JSON beside a file of tokens, or None if the file is not whole: absent, unfinished, or truncated."""
    try:
        header = json.loads(tokens_path.with_suffix(".json").read_bytes())
        return header if tokens_path.stat().st_size == header["n_bytes"] else None
    except (FileNotFoundError, ValueError, KeyError):
        return None


def build_cache(name: str, files: list[Path], tokenizer: Tokenizer, tokens_path: Path) -> dict:
    """Tokenises `files` into `tokens_path` and returns its header. Whoever calls this holds the lock."""
    header_path = tokens_path.with_suffix(".json")
    header_path.unlink(missing_ok=True)  # from here on the old file does not count, until the new one is whole
    logger.info(f"Tokenising {name} once: {len(files)} files into {tokens_path}")
    typecode, dtype = ("H", "uint16") if tokenizer.n_words <= 2**16 else ("i", "int32")
    digest, n_bytes, n_text_bytes = hashlib.sha256(), 0, 0
    with replace_file(tokens_path) as file:
        for number, path in enumerate(files, 1):
            text = read_document(path)
            packed = array(typecode, tokenizer.encode(text, bos=True, eos=True)).tobytes()
            file.write(packed)
            digest.update(packed)
            n_bytes, n_text_bytes = n_bytes + len(packed), n_text_bytes + len(text.encode())
            if number * 4 // len(files) > (number - 1) * 4 // len(files):
                logger.info(
                    f"Tokenising {name}: {number} of {len(files)} files, {n_text_bytes / 2**20:.1f} MiB of text"
                )
    header = {"dtype": dtype, "n_bytes": n_bytes, "n_text_bytes": n_text_bytes, "sha256": digest.hexdigest()}
    with replace_file(header_path) as file:  # last: a file of tokens without its header was never finished
        file.write(json.dumps(header).encode())
    return header


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears at `path` when it is whole and on the disk; before that, `path` is untouched."""
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


# ---------------------------------------------------------------- tokens -> batches


def shuffle(index: Tensor, n: int, *, seed: int, epoch: int) -> Tensor:
    """Where a permutation of 0 .. n-1, chosen by (seed, epoch), sends each `index` (any shape, int64).

    A Feistel network on the cells of the smallest square that holds n: each round adds a hash of the column to the row,
    modulo the side, and swaps the two. Who knows the column could subtract that hash again, so a round is one-to-one
    whatever the hash is, and no table of n entries is needed. A cell outside 0 .. n-1 goes through again until it is
    inside ("cycle walking"), which stays one-to-one. Luby & Rackoff 1988; Black & Rogaway 2002.
    """
    side = math.isqrt(n - 1) + 1
    row, column = index // side, index % side
    for round_number in range(6):
        key = hashlib.blake2b(f"{seed} {epoch} {round_number}".encode(), digest_size=4).digest()
        hashed = hash_32_bits(column ^ int.from_bytes(key, "big"))
        row, column = column, (row + hashed) % side
    shuffled = row * side + column
    outside = shuffled >= n
    if outside.any():
        shuffled[outside] = shuffle(shuffled[outside], n, seed=seed, epoch=epoch)
    return shuffled


def hash_32_bits(x: Tensor) -> Tensor:
    """Mixes the bits of numbers below 2**32. The factor is below 2**27, so no product overflows int64."""
    x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return x ^ (x >> 16)


class SampleStream:
    """The global batches of a run. `batch` keeps no state: any step, any rows, in any order, from any thread."""

    def __init__(
        self, corpus: Corpus, *, seq_len: int, global_batch_size: int, seed: int, restart_positions: bool = False
    ):
        """With `restart_positions` they count from the start of a token's document, else from that of its row."""
        self.restart_positions = restart_positions
        self.corpus, self.seq_len, self.global_batch_size, self.seed = corpus, seq_len, global_batch_size, seed
        self.n_samples = (len(corpus.tokens) - 1) // seq_len  # the last token of a sample needs a target
        if self.n_samples < 1:
            why = f"dataset {corpus.name} has {len(corpus.tokens)} tokens, and one sample takes {seq_len + 1}"
            remedy = "Lower training.seq_len, or choose a larger training.dataset"
            raise ConfigError([Problem("training.seq_len", seq_len, why, remedy)])

    @property
    def identity(self) -> str:
        """Two streams with equal identities have the same samples in the same order. Checkpoints keep it."""
        return f"corpus={self.corpus.identity} seq_len={self.seq_len} seed={self.seed}"

    def batch(self, step: int, rows: range) -> Batch:
        """Rows `rows` of the global batch of `step`, counted from 0."""
        samples = self._choose_samples(step * self.global_batch_size + torch.tensor(rows))
        windows = torch.stack([self._read_window(sample) for sample in samples.tolist()])  # (B, S + 1)
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:]
        # What the next document is about cannot be known from this one: its BOS is not to be predicted.
        targets = targets.masked_fill(targets == self.corpus.bos_id, IGNORE_INDEX)
        begins = tokens == self.corpus.bos_id
        documents_begun = begins.cumsum(dim=1)
        positions = torch.arange(self.seq_len).repeat(len(rows), 1)
        if self.restart_positions:  # a document that began before the row counts from the row's start
            positions -= torch.where(begins, positions, 0).cummax(dim=1).values
        return Batch(tokens, targets, positions, doc_ids=documents_begun - documents_begun[:, :1])

    def _choose_samples(self, drawn: Tensor) -> Tensor:
        """The samples that are drawn as numbers `drawn` of the whole run; every n_samples of them are an epoch."""
        samples = torch.empty_like(drawn)
        for epoch in (drawn // self.n_samples).unique().tolist():
            in_epoch = drawn // self.n_samples == epoch
            samples[in_epoch] = shuffle(drawn[in_epoch] % self.n_samples, self.n_samples, seed=self.seed, epoch=epoch)
        return samples

    def _read_window(self, sample: int) -> Tensor:
        start = sample * self.seq_len
        return self.corpus.tokens[start : start + self.seq_len + 1].to(torch.int64)


def rows_of_rank(rank: int, n_ranks: int, global_batch_size: int) -> range:
    """Rows of each global batch that data-parallel rank `rank` of `n_ranks` reads."""
    assert global_batch_size % n_ranks == 0, f"{global_batch_size} rows cannot be shared by {n_ranks} ranks"
    n_rows = global_batch_size // n_ranks
    return range(rank * n_rows, (rank + 1) * n_rows)


def prefetch(stream: SampleStream, rows: range, *, first_step: int, device: torch.device) -> Iterator[Batch]:
    """Rows `rows` of the batches of first_step, first_step + 1, ... on `device`, without end.

    A thread reads the next batch while the caller computes with this one. What fails in the thread is raised here, at
    the batch that it was reading; `close()` of the iterator ends the thread. A CUDA `device` carries its index.
    """
    on_cuda = device.type == "cuda"

    def load(step: int) -> Batch:
        batch = stream.batch(step, rows)
        return batch.pin_memory() if on_cuda else batch  # only a copy from pinned memory does not block

    # A new thread's current GPU is number 0, where pinning memory would make every rank of the host hold a context.
    set_device = {"initializer": torch.cuda.set_device, "initargs": (device,)} if on_cuda else {}
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch", **set_device) as thread:
        ahead = thread.submit(load, first_step)
        for next_step in count(first_step + 1):
            batch = ahead.result()
            ahead = thread.submit(load, next_step)
            yield batch.to(device, non_blocking=True)
