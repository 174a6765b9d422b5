"""The contenders of `bench data`: text to shards, shards to batches, and a debug step beside its batch.

    tokenising, of the sources of Python's standard library
      tiktoken              encode_ordinary in one thread, over documents that are in memory, Llama 3's own pattern
      tiktoken_per_core     `tiktoken` in a process a core: what the machine gives when all its cores are at work
      prepare               `prepare --processes 1`: from files to a corpus that is whole
      prepare_per_core      `prepare` with a process a core; their start is inside the clock
    reading, in windows of seq_len + 1 tokens from all over a corpus
      raw_mmap              slices of freshly mapped files, as int64 tensors, and nothing else
      corpus_read           Corpus.read: and where documents begin
      batches               SampleStream.batch: and the order of samples, targets, positions, document ids, checks
    a step of configs/debug.toml, one rank on one core
      debug_step            train_step
      debug_batch           SampleStream.batch for it; all its time counts, though a thread spends it ahead

"Per core" is speed divided by cores: cores times the speed of one thread is a ratio of 1.

Beside the rounds, fresh processes open corpora of 100 GB, which are sparse files: see large_corpora.py.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, partial
from io import StringIO
from itertools import count
from mmap import ACCESS_COPY, mmap
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from random import Random

import tiktoken
import torch
from torch import Tensor

from torchtitan_lite.bench.fabricated import fabricate_corpus
from torchtitan_lite.bench.large_corpora import measure_large_corpora
from torchtitan_lite.bench.rounds import Report, measure_rounds
from torchtitan_lite.bench.step import build_trainer, one_rank_group
from torchtitan_lite.config.command_lines import count_cores, make_prepare_parser
from torchtitan_lite.config.hardware import detect_machine
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Training
from torchtitan_lite.data.corpus import Corpus, open_corpus
from torchtitan_lite.data.corpus_folder import DATASETS, choose_dtype
from torchtitan_lite.data.dataset import SampleReader, SampleStream, rows_of_rank
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.tools.prepare import prepare

RATIO_OF = {  # ratio -> (contender, the one it is divided by)
    "tokenising": ("prepare_per_core", "tiktoken"),
    "tokenising_alone": ("prepare", "tiktoken"),
    "all_cores": ("tiktoken_per_core", "tiktoken"),
    "reading": ("corpus_read", "raw_mmap"),
    "batches": ("batches", "raw_mmap"),
    "loader_share": ("debug_step", "debug_batch"),
}

TOKENIZER = "assets/tokenizer"
N_DEBUG_RANKS = 2  # of ./run_train.sh on a CPU


@dataclass(frozen=True)
class Amounts:
    """How much there is to read, and to do in one step of a contender."""

    n_texts: int | None = None  # documents, of the standard library's; None: all of them, about 11 MB
    n_copies: int = 12  # of them, for each process: the start of `prepare` takes a while, and a real one runs for long
    shard_tokens: int = 50_000_000  # about as in large corpora
    n_shards: int = 4  # 400 MB
    n_sparse_shards: int = 1000  # 100 GB
    n_batches: int = 256
    n_large_batches: int = 1000
    n_debug_steps: int = 10
    n_debug_batches: int = 200


AMOUNTS = Amounts()


@dataclass(frozen=True)
class Contender:
    work: Callable[[], object]
    n_tokens: int  # that it gets through; "per core": of each core


def bench_data(*, n_rounds: int = 5, n_steps: int = 1, amounts: Amounts = AMOUNTS) -> Report:
    """Measures all contenders on the CPU."""
    torch.set_num_threads(1)
    n_cores, load = count_cores(), os.getloadavg()[0]
    tokenizer = load_tokenizer(TOKENIZER)
    files = DATASETS["python_stdlib"]()[: amounts.n_texts]
    times_s: dict[str, list[float]] = {}
    n_tokens: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-data-") as name,
        one_rank_group(torch.device("cpu")),
        get_context("spawn").Pool(n_cores) as pool,
    ):
        folder = Path(name)
        fabricate_corpus(folder / "random", tokenizer, n_shards=amounts.n_shards, shard_tokens=amounts.shard_tokens)
        corpus = open_corpus(str(folder / "random"), tokenizer, cache_folder=folder)
        kinds = [
            build_tokenising(folder, files, pool, n_cores, amounts),
            build_reading(folder / "random", corpus, tokenizer, amounts),
            build_debug(corpus, amounts),
        ]
        for contenders in kinds:  # each kind has rounds of its own, so that those that are compared are neighbours
            works = {name: contender.work for name, contender in contenders.items()}
            for work in works.values():
                work()  # the first time allocates, and brings files into memory
            times_s |= measure_rounds(works, n_rounds=n_rounds, n_steps=n_steps, wait_for_device=lambda: None)
            n_tokens |= {name: contender.n_tokens for name, contender in contenders.items()}
        figures = measure_large_corpora(
            folder,
            TOKENIZER,
            n_rounds=n_rounds,
            n_shards=amounts.n_sparse_shards,
            shard_tokens=amounts.shard_tokens,
            n_batches=amounts.n_large_batches,
        )
    setting = {
        "bench": "data",
        "device": detect_machine().name,
        "cores": n_cores,
        "load": f"{load:.1f} before it began",
        "versions": {
            "torch": torch.__version__,
            "tiktoken": tiktoken.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "text": {
            "files": len(files),
            "megabytes": round(sum(file.stat().st_size for file in files) / 1e6, 1),
            "copies for each process (the start of prepare's is included)": amounts.n_copies,
        },
        "corpus": {"tokens": corpus.n_tokens, "shards": amounts.n_shards},
        "batch": {"sequences": Training.local_batch_size, "seq_len": Training.seq_len},
        "rounds": {"n_rounds": n_rounds, "n_steps": n_steps},
    }
    return Report(setting, "tokens", n_tokens, times_s, {}, RATIO_OF, figures)


# ---------------------------------------------------------------- tokenising


def build_tokenising(
    folder: Path, files: list[Path], pool: Pool, n_cores: int, amounts: Amounts
) -> dict[str, Contender]:
    """`pool` has `n_cores` processes."""
    n_tokens = sum(map(len, map(load_encode(), read_texts(tuple(files))))) * amounts.n_copies
    copies = {n: copy_files(folder / f"texts-{n}", files, n * amounts.n_copies) for n in sorted({1, n_cores})}
    corpora = (folder / f"corpus-{number}" for number in count())  # a new one each time: deleting takes time too

    def encode_in_processes() -> None:
        pool.starmap(encode_texts, [(files, amounts.n_copies)] * n_cores, chunksize=1)

    def prepare_in_processes(n: int) -> None:
        prepare_corpus(copies[n], next(corpora), n_processes=n)

    return {
        "tiktoken": Contender(partial(encode_texts, files, amounts.n_copies), n_tokens),
        "tiktoken_per_core": Contender(encode_in_processes, n_tokens),
        "prepare": Contender(partial(prepare_in_processes, 1), n_tokens),
        "prepare_per_core": Contender(partial(prepare_in_processes, n_cores), n_tokens),
    }


def encode_texts(files: list[Path], n_copies: int) -> None:
    encode, texts = load_encode(), read_texts(tuple(files))
    for _ in range(n_copies):
        for text in texts:
            encode(text)


@cache
def load_encode() -> Callable[[str], list[int]]:
    vocabulary = load_tokenizer(TOKENIZER).vocabulary
    pattern, ranks = vocabulary.pattern, vocabulary.ranks
    return tiktoken.Encoding("published", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode_ordinary


@cache  # in each process of the pool, the first turn reads them, and nobody measures that one
def read_texts(files: tuple[Path, ...]) -> list[str]:
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def copy_files(folder: Path, files: list[Path], n: int) -> Path:
    """A folder with each file n times."""
    for copy in range(n):
        (folder / f"{copy:04}").mkdir(parents=True)
        for number, file in enumerate(files):
            shutil.copyfile(file, folder / f"{copy:04}" / f"{number:05}.py")
    return folder


def prepare_corpus(texts: Path, out: Path, *, n_processes: int) -> None:
    """What the command does after its imports."""
    args = [str(texts), "--out", str(out), "--processes", str(n_processes), "--tokenizer", TOKENIZER]
    with redirect_stderr(StringIO()):  # its progress
        prepare(make_prepare_parser().parse_args(args))


# ---------------------------------------------------------------- reading


def build_reading(folder: Path, corpus: Corpus, tokenizer: Tokenizer, amounts: Amounts) -> dict[str, Contender]:
    n_rows, seq_len = Training.local_batch_size, Training.seq_len
    reader = SampleReader([corpus], seq_len=seq_len, vocab_size=tokenizer.vocab_size)
    stream = SampleStream(reader, global_batch_size=n_rows, seed=0)
    steps = count()
    dtype = getattr(torch, choose_dtype(tokenizer.vocab_size))
    n_windows = amounts.n_batches * n_rows
    draw = Random(0)
    windows = [
        (draw.randrange(amounts.n_shards), draw.randrange(amounts.shard_tokens - seq_len)) for _ in range(n_windows)
    ]  # shard, and first token in it

    def read_raw() -> None:
        shards = [map_tensor(path, dtype) for path in sorted(folder.glob("*.tokens"))]
        for shard, start in windows:
            shards[shard][start : start + seq_len + 1].to(torch.int64)

    def read_corpus() -> None:
        for shard, start in windows:
            first = shard * amounts.shard_tokens + start
            corpus.read(first, first + seq_len + 1)

    def read_batches() -> None:
        for _ in range(amounts.n_batches):
            stream.batch(next(steps), range(n_rows))

    works = {"raw_mmap": read_raw, "corpus_read": read_corpus, "batches": read_batches}
    return {name: Contender(work, n_windows * seq_len) for name, work in works.items()}


def map_tensor(path: Path, dtype: torch.dtype) -> Tensor:
    """A file as it lies on the disk. Mapped anew, none of its pages is in the process: so it is with a large corpus."""
    with open(path, "rb") as file:
        return torch.frombuffer(mmap(file.fileno(), 0, access=ACCESS_COPY), dtype=dtype)


# ---------------------------------------------------------------- a debug step


def build_debug(corpus: Corpus, amounts: Amounts) -> dict[str, Contender]:
    config = read_config(["--config", "debug"]).config
    shape, section = resolve_model(config.model), config.training
    reader = SampleReader([corpus], seq_len=section.seq_len, vocab_size=shape.vocab_size)
    global_batch_size = section.local_batch_size * N_DEBUG_RANKS
    stream = SampleStream(reader, global_batch_size=global_batch_size, seed=0)
    rows = rows_of_rank(0, N_DEBUG_RANKS, global_batch_size)
    step = build_trainer(config, shape, stream.batch(0, rows), torch.device("cpu"))
    numbers = count()

    def make_steps() -> None:
        for _ in range(amounts.n_debug_steps):
            step()

    def make_batches() -> None:
        for _ in range(amounts.n_debug_batches):
            stream.batch(next(numbers), rows)

    n_tokens = len(rows) * section.seq_len
    return {
        "debug_step": Contender(make_steps, amounts.n_debug_steps * n_tokens),
        "debug_batch": Contender(make_batches, amounts.n_debug_batches * n_tokens),
    }
