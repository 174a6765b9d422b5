"""Open corpora, cut them into samples, and draw the batches of a run. The samples of step s depend only on (seed, s).

A corpus is one long sequence of tokens, cut into samples of S tokens. Targets also need the token after a sample:

    tokens     a b c d e | f g h i j k l | m n      documents a-e, f-l and m-n; S = 4
    sample 0   a b c d      targets b c d e
    sample 1   e f g h      targets - g h i         f starts a document, so nothing can predict it: no target
    sample 2   i j k l      targets j k l -
    sample 3   m n . .      targets n - - -         the end is padded

Each token except the first of a document is a target once per epoch; in conversations, only the assistant's tokens are
targets. Step s uses the samples that `Sampler` chooses for draws s*B .. s*B + B-1. Samples are shuffled without storing
a permutation. Data-parallel rank r of n reads rows r*B/n .. (r+1)*B/n - 1 of the global batch; all pp, cp and tp ranks
with the same r read the same rows. Resuming needs only the step number. Ranks do not communicate. Legend: B sequences,
S tokens each.

The files are memory-mapped, so the start-up time and memory of a process do not grow with the corpus, and the ranks of
a host share the page cache.
"""

import hashlib
import math
import mmap
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus_folder import (
    CorpusError,
    choose_split,
    find_prepared,
    list_corpora,
    open_split,
)
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.model.batch import Batch, Fields, find_fields
from torchtitan_lite.model.loss import IGNORE_INDEX

# ---------------------------------------------------------------- corpora


def map_file(path: str, dtype: torch.dtype) -> Tensor:
    """Map a file read-only. Do not write to the tensor.

    torch.from_file would create a private, writable mapping. On Linux, a private, writable mapping fails if the file is
    larger than memory and swap.
    """
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the tensor is not writable
        return torch.frombuffer(mapped, dtype=dtype)


class Corpus:
    """One split of a prepared corpus. Safe to read from any thread."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        cache_folder: Path,
        *,
        split: str = "train",
        dataset_path: str = "",
    ):
        """Open the split "train" or "validation" of a corpus named as in training.dataset. Raises CorpusError."""
        self.name = name
        folder = find_prepared(name, tokenizer, cache_folder, dataset_path)
        split = choose_split(name, split)
        manifest = open_split(folder, split, tokenizer)
        self.sizes = manifest.splits[split]
        self.n_tokens = self.sizes.n_tokens
        path = folder / split
        self.tokens = map_file(f"{path}.tokens", getattr(torch, manifest.dtype))
        self.documents = map_file(f"{path}.documents", torch.int64)
        self.targets = None
        if "targets" in self.sizes.sha256:
            self.targets = map_file(f"{path}.targets", torch.bool)

    def read(self, starts: Tensor, length: int) -> Tensor:
        """Read the slices at `starts`. Returns (3, len(starts), length) int64.

        Along the first dim, the result has the tokens, the target of each token, and the number of the token's
        document. Beyond the end of the corpus, the result is padded with a document of zeros.
        """
        last = self.n_tokens - 1
        index = starts[:, None] + torch.arange(length + 1)
        is_target = index <= last
        documents = torch.searchsorted(self.documents, index, right=True)
        documents += ~is_target
        index.clamp_(max=last)
        tokens = self.tokens[index].long()
        tokens *= is_target
        if self.targets is not None:  # the corpus has conversations
            is_target &= self.targets[index]
        is_same_document = documents.diff() == 0
        is_target[:, 1:] &= is_same_document  # nothing predicts the first token of a document
        targets = tokens.where(is_target, IGNORE_INDEX)
        inputs = tokens[:, :-1]
        next_tokens = targets[:, 1:]
        return torch.stack([inputs, next_tokens, documents[:, :-1]])


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class SampleReader:
    """Reads samples from several corpora into the rows of a batch."""

    corpora: list[Corpus]
    seq_len: int
    vocab_size: int  # rows of the model's embedding
    # if true, positions restart at 0 with each document; otherwise, with each row
    restart_positions: bool = False
    fields: Fields = field(default_factory=dict)  # extra fields of the batches

    @property
    def n_samples(self) -> list[int]:
        """Number of samples in each corpus. Every token of a corpus except the first is a target in one of its
        samples."""
        return [-(-(corpus.n_tokens - 1) // self.seq_len) for corpus in self.corpora]

    def read(self, samples: Tensor) -> Batch:
        """Return a batch with a row for each sample number, (B,) int64. Samples of all corpora are numbered
        consecutively.

        A sample number beyond the last sample gives a row of padding. Raises CorpusError.
        """
        rows = torch.zeros(3, len(samples), self.seq_len, dtype=torch.int64)
        tokens, targets, documents = rows
        targets.fill_(IGNORE_INDEX)
        for corpus, n_samples in zip(self.corpora, self.n_samples, strict=True):
            own = (samples >= 0) & (samples < n_samples)
            rows[:, own] = corpus.read(samples[own] * self.seq_len, self.seq_len)
            # renumber the samples of later corpora, so that the first sample of the next corpus has the number 0
            samples = samples - n_samples
        largest = rows[:2].max().item()
        if largest >= self.vocab_size:
            names = ", ".join(corpus.name for corpus in self.corpora)
            why = f"{names}: there is an id {largest}, but model.vocab_size = {self.vocab_size}"
            remedy = "Leave out documents with this id, or use the tokenizer that the model was trained with"
            raise CorpusError(why, remedy)
        positions = torch.arange(self.seq_len).repeat(len(samples), 1)
        if self.restart_positions:
            # if a document began in an earlier row, its positions count from the start of this row
            begins = documents.diff(dim=1, prepend=documents[:, :1])  # 1 if a document starts here
            positions -= (begins * positions).cummax(dim=1).values
        batch = Batch(tokens, targets, positions, doc_ids=documents - documents[:, :1])
        return batch.with_fields(self.fields) if self.fields else batch


# ---------------------------------------------------------------- order


@dataclass(eq=False)
class Sampler:
    """Chooses the order in which a run draws samples. The order depends only on the seed.

    An epoch contains every sample once. With training.dataset_weights, weighted_sampler.py replaces this class.
    """

    n_samples: Sequence[int]  # number of samples in each corpus
    seed: int

    def count_epochs(self, n_draws: int) -> list[float]:
        """Return the number of epochs of each corpus in the first `n_draws` draws."""
        return [n_draws / sum(self.n_samples)] * len(self.n_samples)

    def choose(self, draws: Tensor) -> Tensor:
        """Return the sample number of each draw. `draws` and the result are (n,) int64; draws are consecutive."""
        return self.permute(draws, sum(self.n_samples), name="all")

    def permute(self, draws: Tensor, n: int, *, name: str) -> Tensor:
        """Permute the n samples differently in each epoch: apply permutation number d // n to d % n, for each draw
        d."""
        permuted = torch.empty_like(draws)
        epochs = draws // n
        for epoch in epochs.unique().tolist():
            own = epochs == epoch
            key = f"{self.seed} {name} {epoch}"
            permuted[own] = feistel_permute(draws[own] % n, n, key=key)
        return permuted


def feistel_permute(index: Tensor, n: int, *, key: str) -> Tensor:
    """Map `index` (any shape, int64) by a pseudo-random permutation of 0 .. n-1, selected by `key`.

    The permutation is a Feistel network on the cells of the smallest square with at least n cells. Each round adds a
    hash of the column to the row, modulo the side, and swaps row and column. Subtracting the hash undoes a round, so
    each round is one-to-one for any hash. No table of n entries is needed. A result outside 0 .. n-1 is permuted again
    until it is inside ("cycle walking"). Cycle walking is one-to-one too. Luby & Rackoff 1988; Black & Rogaway 2002.
    """
    side = math.isqrt(n - 1) + 1
    row, column = index // side, index % side
    for round_number in range(6):
        round_key = hashlib.blake2b(f"{key} {round_number}".encode(), digest_size=4).digest()
        hashed = hash_32_bits(column ^ int.from_bytes(round_key, "big"))
        row, column = column, (row + hashed) % side
    permuted = row * side + column
    outside = permuted >= n
    if outside.any():
        permuted[outside] = feistel_permute(permuted[outside], n, key=key)
    return permuted


def hash_32_bits(x: Tensor) -> Tensor:
    """Mix the bits of integers below 2**32. The multiplier is below 2**27, so no product overflows int64."""
    x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return x ^ (x >> 16)


# ---------------------------------------------------------------- batches of a run


@dataclass(frozen=True)
class SampleStream:
    """Reads the global batches of a run: any step, any rows, in any order, from any thread."""

    reader: SampleReader
    sampler: Sampler
    global_batch_size: int
    # a resumed checkpoint must have the same fingerprint; validation documents may differ
    fingerprint: dict[str, object]
    validation: SampleReader  # has no corpora if validation is off

    def describe(self, n_steps: int) -> str:
        """Describe the corpora that a run of `n_steps` reads, and the number of epochs of each."""
        epochs = self.sampler.count_epochs(n_steps * self.global_batch_size)
        corpora = []
        for corpus, n_epochs in zip(self.reader.corpora, epochs, strict=True):
            corpora.append(f"{corpus.name} ({corpus.n_tokens:,} tokens, {n_epochs:.3g} epochs)")
        tokens_per_step = self.global_batch_size * self.reader.seq_len
        plural = "s" if n_steps > 1 else ""
        n_tokens = f"{tokens_per_step:,} tokens are {n_steps * tokens_per_step:,}"
        steps = f"{n_steps:,} step{plural} of {n_tokens}"
        return f"{steps}, from {', '.join(corpora)}"

    def batch(self, step: int, rows: range) -> Batch:
        """Return the rows `rows` of the global batch of step `step` (the first step is 0). Raises CorpusError."""
        draws = step * self.global_batch_size + torch.tensor(rows)
        return self.reader.read(self.sampler.choose(draws))


def rows_of_rank(rank: int, n_ranks: int, global_batch_size: int) -> range:
    """Return the rows of each global batch that data-parallel rank `rank` of `n_ranks` reads."""
    n_rows = global_batch_size // n_ranks
    return range(rank * n_rows, (rank + 1) * n_rows)


def prefetch(
    read_batch: Callable[[int, range], Batch],
    rows: range,
    *,
    steps: Iterator[int] | range,
    device: torch.device,
) -> Iterator[Batch]:
    """Yield `read_batch(step, rows)` for each of these steps, on `device`. A CUDA `device` must have an index.

    A thread reads the next batch while the caller uses the current one. If the thread fails on a batch, its error is
    raised when the caller requests this batch. Closing the iterator ends the thread.
    """

    def load(step: int) -> Batch:
        batch = read_batch(step, rows)
        if device.type == "cuda":
            # In a new thread, the current device is GPU 0, so pinning memory would create a context on GPU 0 for each
            # rank.
            torch.cuda.set_device(device)
            batch = batch.pin_memory()  # only copies from pinned memory are asynchronous
        return batch

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as thread:
        batches = chain((thread.submit(load, step) for step in steps), [None])
        for batch, _ in pairwise(batches):  # meanwhile, the thread already reads the next batch
            yield batch.result().to(device)


# ---------------------------------------------------------------- data of a run


def open_data(config: Config, model_args: ModelArgs, tokenizer: Tokenizer) -> SampleStream:
    """Open the prepared corpora of a run. `config` is resolved. No communication. Raises CorpusError."""
    training = config.training
    cache = Path(training.cache_folder)
    corpora = [
        Corpus(name, tokenizer, cache, split=split, dataset_path=path)
        for _, name, split, path in list_corpora(config)
    ]
    n_training = len(training.dataset)  # the corpora after these are for validation
    reader = SampleReader(
        corpora[:n_training],
        training.seq_len,
        model_args.vocab_size,
        restart_positions=ATTENTIONS[config.model.attention].uses_documents,
        fields=find_fields(training.loss, model_args.name),
    )
    sampler = Sampler(reader.n_samples, training.data_seed)
    if training.dataset_weights:
        sampler = load_module("data.weighted_sampler").WeightedSampler(
            reader.n_samples, training.data_seed, training.dataset_weights
        )
    # Checkpoints store the fingerprint. Runs with equal fingerprints and configs have the same samples in the same
    # order.
    fingerprint = {
        "documents": [corpus.sizes.fingerprint for corpus in corpora],
        "tokenizer": tokenizer.fingerprint,
        "shape": asdict(model_args),
    }
    validation = replace(reader, corpora=corpora[n_training:])
    return SampleStream(reader, sampler, training.global_batch_size, fingerprint, validation)
