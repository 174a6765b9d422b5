"""How soon a corpus of any size gives its first batch, and how much memory it takes to read.

    first_batch_s     from opening the corpus to the first batch of the prefetching thread
    memory_mib        by how much the resident memory of the process had grown at most, in all the batches that followed

Each comes from a fresh process that has made its imports and loaded the tokenizer. The corpora are sparse files, of
which the system reads pages of zeros: the disk's part is left out.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from torchtitan_lite.bench.fabricated import fabricate_corpus, write_repeated
from torchtitan_lite.config.schema import Training
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.corpus_folder import BYTES_OF, choose_dtype
from torchtitan_lite.data.dataset import SampleReader, SampleStream, prefetch
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.processes import end_with_parent

MIB = 2**20
PROCESS_MEMORY = Path("/proc/self/statm")  # of Linux: all, resident, ... in pages


def measure_large_corpora(
    folder: Path, tokenizer_folder: str, *, n_rounds: int, n_shards: int, shard_tokens: int, n_batches: int
) -> dict[str, list[float]]:
    """Figure -> its value in each round, for a prepared corpus and a flat file of equally many tokens."""
    tokenizer = load_tokenizer(tokenizer_folder)
    fabricate_corpus(folder / "large", tokenizer, n_shards=n_shards, shard_tokens=shard_tokens, sparse=True)
    n_bytes = n_shards * shard_tokens * BYTES_OF[choose_dtype(tokenizer.vocab_size)]
    write_repeated(folder / "large.bin", b"", n_bytes)
    figures: dict[str, list[float]] = {}
    for _ in range(n_rounds):
        for kind, name in (("prepared", "large"), ("flat", "large.bin")):
            with ProcessPoolExecutor(1, get_context("spawn"), initializer=end_with_parent) as process:
                measured = process.submit(measure_corpus, str(folder / name), tokenizer_folder, n_batches).result()
            for figure, value in measured.items():
                figures.setdefault(f"{kind}_{figure}", []).append(value)
    return figures


def measure_corpus(name: str, tokenizer_folder: str, n_batches: int) -> dict[str, float]:
    """Opens a corpus and reads batches of it as train.py does."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(tokenizer_folder)
    n_rows = Training.local_batch_size
    before = read_resident_bytes()
    start_s = time.perf_counter()
    corpus = open_corpus(name, tokenizer, cache_folder=Path(name).parent)
    reader = SampleReader([corpus], seq_len=Training.seq_len, vocab_size=tokenizer.vocab_size)
    stream = SampleStream(reader, global_batch_size=n_rows, seed=0)
    batches = prefetch(stream, range(n_rows), steps=range(n_batches), device=torch.device("cpu"))
    next(batches)
    measured = {"first_batch_s": time.perf_counter() - start_s}
    if before is not None:
        measured["memory_mib"] = max(read_resident_bytes() - before for _ in batches) / MIB
    return measured


def read_resident_bytes() -> int | None:
    """What this process has in memory now. The system's own peak would count what imports had, so it is not used."""
    if not PROCESS_MEMORY.exists():
        return None
    return int(PROCESS_MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
