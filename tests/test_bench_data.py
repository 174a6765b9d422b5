"""bench data: contenders of a kind do the work that is counted, and what is measured is what its name says."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.bench import data as bench_data
from torchtitan_lite.bench import large_corpora
from torchtitan_lite.bench.data import Amounts, build_debug, build_reading, build_tokenising
from torchtitan_lite.bench.fabricated import DOCUMENT_TOKENS, fabricate_corpus
from torchtitan_lite.bench.rounds import report_for_programs
from torchtitan_lite.bench.step import one_rank_group
from torchtitan_lite.config.schema import Training
from torchtitan_lite.data.corpus import Corpus, open_corpus
from torchtitan_lite.data.corpus_folder import DATASETS, read_manifest
from torchtitan_lite.data.dataset import SampleStream
from torchtitan_lite.data.tokenizer import load_tokenizer

TINY = Amounts(
    n_texts=3,
    n_copies=2,
    shard_tokens=5 * DOCUMENT_TOKENS,
    n_shards=3,
    n_sparse_shards=2,
    n_batches=2,
    n_large_batches=3,
    n_debug_steps=1,
    n_debug_batches=3,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(bench_data.TOKENIZER)


@pytest.fixture
def corpus(tmp_path, tokenizer) -> Corpus:
    fabricate_corpus(tmp_path / "random", tokenizer, n_shards=TINY.n_shards, shard_tokens=TINY.shard_tokens)
    return open_corpus(str(tmp_path / "random"), tokenizer, cache_folder=tmp_path)


@pytest.fixture
def batches_read(monkeypatch) -> list[range]:
    """The rows of every batch that a stream gives from here on."""
    rows_read = []
    read = SampleStream.batch
    monkeypatch.setattr(
        SampleStream, "batch", lambda self, step, rows: rows_read.append(rows) or read(self, step, rows)
    )
    return rows_read


# ---------------------------------------------------------------- tokenising


class PoolOfThis:
    """A pool that works in this process, and remembers what it was told."""

    def __init__(self):
        self.told = []

    def starmap(self, function, arguments, *, chunksize):
        self.told.append((chunksize, arguments))
        return [function(*each) for each in arguments]


def test_prepare_makes_the_tokens_that_are_counted_for_each_core(tmp_path, tokenizer):
    files = DATASETS["python_stdlib"]()[: TINY.n_texts]
    n_expected = sum(len(tokenizer.encode(file.read_text("utf-8"))) for file in files)
    contenders = build_tokenising(tmp_path, files, PoolOfThis(), 2, TINY)
    counted = {name: contender.n_tokens for name, contender in contenders.items()}
    names = ("tiktoken", "tiktoken_per_core", "prepare", "prepare_per_core")
    assert counted == dict.fromkeys(names, 2 * n_expected)
    for number, (name, n_copies) in enumerate([("prepare", 2), ("prepare_per_core", 4), ("prepare", 2)]):
        contenders[name].work()
        manifest = read_manifest(tmp_path / f"corpus-{number}")
        shards = manifest.splits["train"] + manifest.splits["held_out"]
        n_documents = sum(shard.n_documents for shard in shards)
        assert n_documents == n_copies * len(files)
        n_borders = 2 * n_documents  # BOS and EOS
        assert sum(shard.n_tokens for shard in shards) - n_borders == n_copies * n_expected


def test_tiktoken_encodes_each_copy_of_each_text_once_for_each_core(tmp_path, monkeypatch):
    files = DATASETS["python_stdlib"]()[: TINY.n_texts]
    texts = [file.read_text("utf-8") for file in files]
    encoded = []
    monkeypatch.setattr(bench_data, "load_encode", lambda: lambda text: encoded.append(text) or [0])
    pool = PoolOfThis()
    contenders = build_tokenising(tmp_path, files, pool, 3, TINY)
    for name, n_cores in (("tiktoken", 1), ("tiktoken_per_core", 3)):
        encoded.clear()
        contenders[name].work()
        assert encoded == texts * TINY.n_copies * n_cores
    assert pool.told == [(1, [(files, TINY.n_copies)] * 3)], "each process is given one part"


def test_what_is_called_published_is_the_pattern_of_the_vocabulary(tokenizer, monkeypatch):
    monkeypatch.setattr(bench_data, "load_tokenizer", lambda path: tokenizer)
    assert bench_data.load_encode.__wrapped__().__self__._pat_str == tokenizer.vocabulary.pattern


# ---------------------------------------------------------------- reading


def test_plain_files_and_corpus_are_read_in_the_same_windows(tmp_path, corpus, tokenizer, monkeypatch):
    windows = {"raw_mmap": [], "corpus_read": []}
    numbers = torch.arange(TINY.shard_tokens)

    class Shard:
        def __init__(self, path, dtype):
            self.first = int(path.stem.removeprefix("train-")) * TINY.shard_tokens

        def __getitem__(self, window):
            window = numbers[window] + self.first
            windows["raw_mmap"].append((window[0].item(), window[-1].item() + 1))
            return window

    monkeypatch.setattr(bench_data, "map_tensor", Shard)
    monkeypatch.setattr(Corpus, "read", lambda self, start, stop: windows["corpus_read"].append((start, stop)))
    contenders = build_reading(tmp_path / "random", corpus, tokenizer, TINY)
    for name in windows:
        contenders[name].work()
    assert windows["raw_mmap"] == windows["corpus_read"]
    n_windows = TINY.n_batches * Training.local_batch_size
    assert len(set(windows["raw_mmap"])) == n_windows
    assert {stop - start for start, stop in windows["raw_mmap"]} == {Training.seq_len + 1}
    assert contenders["raw_mmap"].n_tokens == contenders["corpus_read"].n_tokens == n_windows * Training.seq_len


def test_a_plain_file_is_read_as_its_tokens(tmp_path, corpus, tokenizer):
    (tmp_path / "x.tokens").write_bytes(bytes([1, 0, 2, 1, 255, 255]))
    assert bench_data.map_tensor(tmp_path / "x.tokens", torch.uint16).tolist() == [1, 258, 65535]


def test_batches_go_on_from_step_to_step_and_all_are_counted(tmp_path, corpus, tokenizer, batches_read):
    contender = build_reading(tmp_path / "random", corpus, tokenizer, TINY)["batches"]
    contender.work()
    assert contender.n_tokens == sum(len(rows) for rows in batches_read) * Training.seq_len
    assert len(batches_read) == TINY.n_batches


def test_a_debug_step_and_its_batch_have_the_rows_of_one_of_two_ranks(corpus, batches_read):
    with one_rank_group(torch.device("cpu")):
        contenders = build_debug(corpus, TINY)
    batches_read.clear()
    contenders["debug_batch"].work()
    assert batches_read == [range(4)] * TINY.n_debug_batches
    counted = {name: contender.n_tokens for name, contender in contenders.items()}
    assert counted == {"debug_step": 4 * 128, "debug_batch": TINY.n_debug_batches * 4 * 128}


# ---------------------------------------------------------------- fabricated and large corpora


@pytest.mark.parametrize("sparse", [False, True])
def test_a_fabricated_corpus_opens_like_any_other(tmp_path, tokenizer, sparse):
    folder = tmp_path / "made"
    fabricate_corpus(folder, tokenizer, n_shards=2, shard_tokens=10 * DOCUMENT_TOKENS, sparse=sparse)
    tokens, begins = open_corpus(str(folder), tokenizer, cache_folder=tmp_path).read(0, 20 * DOCUMENT_TOKENS)
    assert torch.equal(begins.nonzero().flatten(), torch.arange(0, 20 * DOCUMENT_TOKENS, DOCUMENT_TOKENS))
    assert 0 <= tokens.min() and tokens.max() < tokenizer.vocab_size
    assert len(tokens.unique()) == 1 if sparse else len(tokens.unique()) > 2000


def test_a_sparse_corpus_takes_no_room(tmp_path, tokenizer):
    fabricate_corpus(tmp_path / "made", tokenizer, n_shards=1, shard_tokens=10**8, sparse=True)
    (tokens,) = (tmp_path / "made").glob("*.tokens")
    assert tokens.stat().st_size == 2 * 10**8
    assert tokens.stat().st_blocks * 512 < 10**6


def test_memory_is_the_most_that_is_added_after_opening(tmp_path, corpus, monkeypatch):
    resident = iter([1000, 1500, 2**20 + 1000, 900])
    monkeypatch.setattr(large_corpora, "read_resident_bytes", lambda: next(resident))
    measured = large_corpora.measure_corpus(str(tmp_path / "random"), bench_data.TOKENIZER, n_batches=4)
    assert measured["memory_mib"] == 1.0


def test_time_to_the_first_batch_is_from_opening_until_it_is_there(tmp_path, corpus, batches_read, monkeypatch):
    events = []

    def read_clock_s() -> float:
        events.append("clock")
        return 10.0 + 2.5 * events.count("clock")

    def wait_for_batches(stream, rows, *, steps, device):
        for _ in steps:
            events.append("batch")
            yield None

    opening = large_corpora.open_corpus
    monkeypatch.setattr(
        large_corpora, "open_corpus", lambda *args, **options: events.append("open") or opening(*args, **options)
    )
    monkeypatch.setattr(large_corpora, "prefetch", wait_for_batches)
    monkeypatch.setattr(large_corpora, "time", SimpleNamespace(perf_counter=read_clock_s))
    measured = large_corpora.measure_corpus(str(tmp_path / "random"), bench_data.TOKENIZER, n_batches=2)
    assert measured["first_batch_s"] == 2.5
    assert events == ["clock", "open", "batch", "clock", "batch"]


def test_resident_memory_is_what_the_system_says():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells it there")
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]  # kB
    assert large_corpora.read_resident_bytes() == pytest.approx(int(line.split()[1]) * 1024, rel=0.02)


def test_without_a_system_that_tells_memory_time_is_measured_alone(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(large_corpora, "PROCESS_MEMORY", tmp_path / "absent")
    measured = large_corpora.measure_corpus(str(tmp_path / "random"), bench_data.TOKENIZER, n_batches=4)
    assert measured.keys() == {"first_batch_s"}


# ---------------------------------------------------------------- all of it


def test_data_measures_all_contenders_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = bench_data.bench_data(n_rounds=1, amounts=TINY)
    assert list(tmp_path.iterdir()) == []
    assert not dist.is_initialized()
    told = json.loads(json.dumps(report_for_programs(report)))
    assert told["ratios"].keys() == bench_data.RATIO_OF.keys()
    assert all(ratio > 0 for ratio in told["ratios"].values())
    assert told["figures"].keys() == {
        f"{kind}_{figure}" for kind in ("prepared", "flat") for figure in ("first_batch_s", "memory_mib")
    }
    assert told["corpus"] == {"tokens": 15_000, "shards": 3}
    assert {"bench", "device", "cores", "load", "versions", "date", "text", "batch", "rounds"} <= told.keys()
