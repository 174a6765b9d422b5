"""Text to batches: the order of samples, who reads which rows, and the cache of tokens that ranks share."""

import base64
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tiktoken
import torch

from torchtitan_lite.components import data
from torchtitan_lite.components.data import (
    DATASETS,
    Corpus,
    SampleStream,
    open_corpus,
    prefetch,
    read_header,
    rows_of_rank,
    shuffle,
)
from torchtitan_lite.components.tokenizer import SPLIT_PATTERN, load_tokenizer
from torchtitan_lite.config import ConfigError
from torchtitan_lite.config_reader import REPOSITORY
from torchtitan_lite.model.head import IGNORE_INDEX

CPU = torch.device("cpu")
FIELDS = ("tokens", "targets", "positions", "doc_ids")
NO_BOS = 10**6


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(REPOSITORY / "assets" / "tokenizer"))


def write_files(folder: Path, n_files: int) -> list[Path]:
    folder.mkdir()
    files = [folder / f"{n:04}.py" for n in range(n_files)]
    for n, path in enumerate(files):
        lines = [f"def function_{n}_{line}(x):\n    return x * {line} + {n}  # é\n" for line in range(n % 7)]
        path.write_text("".join(lines), encoding="utf-8")
    return files


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A small data set "tiny" of 30 files, some of them empty."""
    files = write_files(tmp_path / "texts", 30)
    monkeypatch.setitem(DATASETS, "tiny", lambda: files)
    return files


def encode_by_hand(files: list[Path]) -> list[int]:
    """The corpus as it should be, made with tiktoken and nothing of components/."""
    lines = (REPOSITORY / "assets" / "tokenizer" / "tokenizer.model").read_bytes().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    encoding = tiktoken.Encoding("oracle", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    bos, eos = 2048, 2049
    return [id for path in files for id in [bos, *encoding.encode_ordinary(path.read_text("utf-8")), eos]]


def make_stream(n_samples: int, *, seq_len: int = 4, global_batch_size: int = 4, seed: int = 0) -> SampleStream:
    """Token i of the corpus is i, so the first token of a row tells which sample it is."""
    tokens = torch.arange(n_samples * seq_len + 1, dtype=torch.int32)
    corpus = Corpus(name="numbers", tokens=tokens, bos_id=NO_BOS, identity="numbers")
    return SampleStream(corpus, seq_len=seq_len, global_batch_size=global_batch_size, seed=seed)


def list_samples(stream: SampleStream, steps: range) -> list[int]:
    rows = range(stream.global_batch_size)
    return [int(first) // stream.seq_len for step in steps for first in stream.batch(step, rows).tokens[:, 0]]


# ---------------------------------------------------------------- the order of samples


@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_shuffle_is_one_to_one(seed):
    for n in [*range(1, 130), 1023, 1024, 1025, 99_991]:
        shuffled = shuffle(torch.arange(n), n, seed=seed, epoch=3)
        assert torch.equal(shuffled.sort().values, torch.arange(n)), n


def test_shuffle_of_one_index_does_not_depend_on_the_others():
    n = 1000
    whole = shuffle(torch.arange(n), n, seed=5, epoch=0)
    for index in (0, 17, 999):
        assert shuffle(torch.tensor([index]), n, seed=5, epoch=0).item() == whole[index]


def test_shuffle_sends_an_index_everywhere_equally_often():
    n, n_seeds = 20, 2000
    places = torch.cat([shuffle(torch.tensor([7]), n, seed=seed, epoch=0) for seed in range(n_seeds)])
    chi_square = ((places.bincount(minlength=n) - n_seeds / n) ** 2 / (n_seeds / n)).sum()
    assert (
        chi_square < 43.8
    )  # of 19 degrees of freedom: one in a thousand fair shuffles exceeds it; the seeds are fixed


def test_shuffle_separates_neighbours():
    n = 10_000
    shuffled = shuffle(torch.arange(n), n, seed=1, epoch=0)
    distances = (shuffled[1:] - shuffled[:-1]).abs()
    assert (distances == 1).sum() < 20  # about 2 in a fair shuffle, 9,999 without
    assert 0.3 < distances.double().mean() / n < 0.37  # 1/3 in a fair shuffle


@pytest.mark.parametrize("global_batch_size", [1, 4, 7, 50])
def test_every_sample_is_read_once_per_epoch(global_batch_size):
    n_samples = 21  # steps straddle epochs, and 50 rows hold more than two of them
    stream = make_stream(n_samples, global_batch_size=global_batch_size)
    samples = list_samples(stream, range(3 * n_samples))
    for epoch in range(3):
        assert sorted(samples[epoch * n_samples : (epoch + 1) * n_samples]) == list(range(n_samples))


def test_epochs_and_seeds_have_different_orders():
    n_samples = 40
    both = list_samples(make_stream(n_samples), range(2 * n_samples // 4))
    first, second = both[:n_samples], both[n_samples:]
    other_seed = list_samples(make_stream(n_samples, seed=1), range(n_samples // 4))
    assert first != second and first != other_seed and second != other_seed
    assert first == list_samples(make_stream(n_samples), range(n_samples // 4))


def test_order_of_samples_is_that_of_earlier_versions():
    """A resumed run must read on where it stopped, also after an update of this code."""
    stream = make_stream(1000, seed=42)
    assert list_samples(stream, range(2)) == [690, 221, 164, 382, 150, 137, 605, 190]
    assert list_samples(stream, range(250, 251)) == [339, 847, 557, 850]  # the second epoch


# ---------------------------------------------------------------- who reads which rows


@pytest.mark.parametrize("n_ranks", [1, 2, 4, 6, 8, 16])
def test_ranks_together_read_the_same_global_batch_whatever_their_number(n_ranks):
    stream = make_stream(100, global_batch_size=48)
    for step in (0, 1, 7):
        whole = stream.batch(step, range(48))
        shares = [stream.batch(step, rows_of_rank(rank, n_ranks, 48)) for rank in range(n_ranks)]
        for name in FIELDS:
            assert torch.equal(torch.cat([getattr(share, name) for share in shares]), getattr(whole, name)), name


def test_microbatches_are_the_rows_in_order():
    batch = make_stream(100, global_batch_size=12).batch(3, range(12))
    microbatches = batch.split(4)
    assert [len(microbatch.tokens) for microbatch in microbatches] == [3, 3, 3, 3]
    for name in FIELDS:
        assert torch.equal(torch.cat([getattr(m, name) for m in microbatches]), getattr(batch, name)), name


# ---------------------------------------------------------------- what a batch says


def test_batches_hold_the_text_as_tiktoken_encodes_it(files, tokenizer, tmp_path):
    raw = encode_by_hand(files)
    seq_len = 32
    corpus = open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    assert corpus.tokens.to(torch.int64).tolist() == raw
    stream = SampleStream(corpus, seq_len=seq_len, global_batch_size=(len(raw) - 1) // seq_len, seed=0)
    batch = stream.batch(0, range(stream.global_batch_size))  # one epoch
    slices = {tuple(raw[i : i + seq_len + 1]) for i in range(0, len(raw) - seq_len, seq_len)}
    assert len(slices) == stream.n_samples > 20
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        last = tokenizer.bos_id if targets[-1] == IGNORE_INDEX else targets[-1]
        slices.remove((*tokens, last))  # KeyError: not a slice of the text, or read twice
        following = [*tokens[1:], last]
        assert targets == [IGNORE_INDEX if token == tokenizer.bos_id else token for token in following]


def test_targets_documents_and_positions_of_a_row_written_out():
    bos, eos = 1, 2
    tokens = torch.tensor([7, 8, eos, bos, 9, eos, bos, eos, bos, 6, 5], dtype=torch.int32)
    corpus = Corpus(name="written out", tokens=tokens, bos_id=bos, identity="")
    batch = SampleStream(corpus, seq_len=10, global_batch_size=1, seed=0).batch(0, range(1))
    x = IGNORE_INDEX
    assert batch.tokens.tolist() == [[7, 8, eos, bos, 9, eos, bos, eos, bos, 6]]
    assert batch.targets.tolist() == [[8, eos, x, 9, eos, x, eos, x, 6, 5]]
    assert batch.doc_ids.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 3, 3]]
    assert batch.positions.tolist() == [list(range(10))]
    assert all(getattr(batch, name).dtype == torch.int64 for name in FIELDS)


def test_documents_are_counted_from_0_where_a_row_begins_with_one():
    bos = 1
    corpus = Corpus(name="", tokens=torch.tensor([bos, 5, bos, 6, 7], dtype=torch.int32), bos_id=bos, identity="")
    batch = SampleStream(corpus, seq_len=4, global_batch_size=1, seed=0).batch(0, range(1))
    assert batch.doc_ids.tolist() == [[0, 0, 1, 1]]


def test_corpus_of_exactly_one_sample_suffices_and_one_token_less_is_refused():
    tokens = torch.arange(9, dtype=torch.int32)
    enough = Corpus(name="short", tokens=tokens, bos_id=NO_BOS, identity="")
    stream = SampleStream(enough, seq_len=8, global_batch_size=2, seed=0)
    assert stream.batch(5, range(2)).targets.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] * 2
    with pytest.raises(ConfigError) as error:
        SampleStream(dataclasses.replace(enough, tokens=tokens[:8]), seq_len=8, global_batch_size=2, seed=0)
    for part in ("training.seq_len = 8", "dataset short has 8 tokens", "Lower training.seq_len", "training.dataset"):
        assert part in str(error.value)


def test_stream_identity_tells_corpus_length_and_seed_apart():
    streams = [make_stream(10), make_stream(10, seed=1), make_stream(10, seq_len=5)]
    other = Corpus(name="numbers", tokens=streams[0].corpus.tokens, bos_id=NO_BOS, identity="other")
    streams.append(SampleStream(other, seq_len=4, global_batch_size=4, seed=0))
    assert len({stream.identity for stream in streams}) == 4
    assert make_stream(10).identity == streams[0].identity


# ---------------------------------------------------------------- the cache


def test_second_start_finds_the_cache_and_does_not_tokenise(files, tokenizer, tmp_path, monkeypatch):
    first = open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    monkeypatch.setattr(data, "build_cache", lambda *_: pytest.fail("tokenised again"))
    second = open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    assert torch.equal(first.tokens, second.tokens) and first.identity == second.identity


def test_changed_text_and_changed_tokenizer_are_tokenised_anew(files, tokenizer, tmp_path):
    cache = str(tmp_path / "cache")
    before = open_corpus("tiny", tokenizer, cache)
    files[3].write_text("changed = True\n")
    after = open_corpus("tiny", tokenizer, cache)
    assert after.tokens.to(torch.int64).tolist() == encode_by_hand(files)
    assert after.identity != before.identity
    other = dataclasses.replace(tokenizer, identity="other", eos_id=2050)
    assert (open_corpus("tiny", other, cache).tokens.to(torch.int64) == 2050).sum() == len(files)


def test_identity_of_equal_tokens_is_equal_wherever_they_are(files, tokenizer, tmp_path, monkeypatch):
    here = open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    moved = write_files(tmp_path / "elsewhere", 30)
    monkeypatch.setitem(DATASETS, "tiny", lambda: moved)
    assert open_corpus("tiny", tokenizer, str(tmp_path / "other_cache")).identity == here.identity


def test_large_vocabulary_is_stored_in_32_bits(files, tokenizer, tmp_path):
    large = dataclasses.replace(tokenizer, n_words=128_256, bos_id=128_000, identity="large")
    corpus = open_corpus("tiny", large, str(tmp_path / "cache"))
    assert corpus.tokens.dtype == torch.int32 and corpus.tokens[0] == 128_000
    assert open_corpus("tiny", tokenizer, str(tmp_path / "cache")).tokens.dtype == torch.uint16


def damage_by_truncation(tokens_path: Path) -> None:
    os.truncate(tokens_path, tokens_path.stat().st_size - 2)


def damage_by_empty_file(tokens_path: Path) -> None:
    tokens_path.write_bytes(b"")


def damage_by_missing_tokens(tokens_path: Path) -> None:
    tokens_path.unlink()


def damage_by_missing_header(tokens_path: Path) -> None:
    tokens_path.with_suffix(".json").unlink()


def damage_by_torn_header(tokens_path: Path) -> None:
    header = tokens_path.with_suffix(".json")
    header.write_bytes(header.read_bytes()[:-20])


@pytest.mark.parametrize(
    "damage",
    [
        damage_by_truncation,
        damage_by_empty_file,
        damage_by_missing_tokens,
        damage_by_missing_header,
        damage_by_torn_header,
    ],
)
def test_damaged_cache_is_built_again(files, tokenizer, tmp_path, damage):
    open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    (tokens_path,) = (tmp_path / "cache").glob("*.tokens")
    damage(tokens_path)
    again = open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    assert again.tokens.to(torch.int64).tolist() == encode_by_hand(files)
    assert read_header(tokens_path)["n_bytes"] == 2 * len(again.tokens)


def test_cache_whose_second_build_fails_at_the_header_is_not_taken_for_finished(
    files, tokenizer, tmp_path, monkeypatch
):
    open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    (tokens_path,) = (tmp_path / "cache").glob("*.tokens")
    n_bytes = tokens_path.stat().st_size
    damage_by_truncation(tokens_path)
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    # the header of the first build would fit these tokens, and its hash need not
    assert tokens_path.stat().st_size == n_bytes and read_header(tokens_path) is None
    assert len(open_corpus("tiny", tokenizer, str(tmp_path / "cache")).tokens) == n_bytes // 2


def test_writing_to_the_tokens_leaves_the_cache_file_alone(files, tokenizer, tmp_path):
    corpus = open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    (tokens_path,) = (tmp_path / "cache").glob("*.tokens")
    before = tokens_path.read_bytes()
    corpus.tokens[0] = 9
    assert tokens_path.read_bytes() == before


def test_data_set_without_files_is_refused(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "tiny", lambda: [])
    with pytest.raises(ConfigError, match="training.dataset = 'tiny'"):
        open_corpus("tiny", tokenizer, str(tmp_path))


def test_tokenising_tells_its_progress(files, tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="torchtitan_lite"):
        open_corpus("tiny", tokenizer, str(tmp_path / "cache"))
    assert "30 of 30 files" in caplog.messages[-1]


# A process that opens the data set of a folder. It says "ready", waits for a line, and tells whether it tokenised.
# With `die_after` above 0 it is killed while it tokenises, after so many documents.
OPEN_IN_PROCESS = """
import os, signal, sys
from pathlib import Path
from torchtitan_lite.components import data
from torchtitan_lite.components.tokenizer import load_tokenizer

texts, cache, tokenizer_folder, die_after = sys.argv[1:]
data.DATASETS["tiny"] = lambda: sorted(Path(texts).iterdir())
read_document, documents = data.read_document, []

def count_and_read(path):
    documents.append(path)
    if len(documents) == int(die_after) + 1 > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return read_document(path)

data.read_document = count_and_read
tokenizer = load_tokenizer(tokenizer_folder)
print("ready", flush=True)
sys.stdin.readline()
corpus = data.open_corpus("tiny", tokenizer, cache)
print(len(documents), corpus.identity, flush=True)
"""


def start_process(texts: Path, cache: Path, *, die_after: int = 0) -> subprocess.Popen:
    arguments = [str(texts), str(cache), str(REPOSITORY / "assets" / "tokenizer"), str(die_after)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", OPEN_IN_PROCESS, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_four_processes_that_arrive_together_tokenise_once(tokenizer, tmp_path, monkeypatch):
    texts = tmp_path / "texts"
    files = write_files(texts, 2000)
    processes = [start_process(texts, tmp_path / "cache") for _ in range(4)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sorted(int(n_documents) for n_documents, _ in answers) == [0, 0, 0, len(files)]
    monkeypatch.setitem(DATASETS, "tiny", lambda: files)
    assert {identity for _, identity in answers} == {open_corpus("tiny", tokenizer, str(tmp_path / "cache")).identity}


def test_process_killed_while_tokenising_leaves_nothing_that_counts(files, tokenizer, tmp_path):
    process = start_process(files[0].parent, tmp_path / "cache", die_after=20)
    process.communicate("go\n", timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert list((tmp_path / "cache").glob("*.tokens")) == list((tmp_path / "cache").glob("*.json")) == []
    corpus = open_corpus("tiny", tokenizer, str(tmp_path / "cache"))  # does not wait for the dead one's lock either
    assert corpus.tokens.to(torch.int64).tolist() == encode_by_hand(files)
    assert not list((tmp_path / "cache").glob("*.unfinished"))


# ---------------------------------------------------------------- the standard library


def test_python_stdlib_is_sources_without_tests_or_installed_packages():
    files = DATASETS["python_stdlib"]()
    assert files == sorted(files) and len(files) > 300
    assert sum(path.stat().st_size for path in files) > 5e6
    names = {f"{path.parent.name}/{path.name}" for path in files}
    assert {"json/decoder.py", "asyncio/events.py"} <= names
    folders = {part for path in files for part in path.parts}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


# ---------------------------------------------------------------- prefetching


class SpyStream:
    """Stands in for a SampleStream: notes which steps were read, and may fail at one."""

    def __init__(self, fail_at: int | None = None):
        self.stream = make_stream(10)
        self.fail_at = fail_at
        self.steps: list[int] = []
        self.read_second = threading.Event()

    def batch(self, step: int, rows: range) -> data.Batch:
        if step == self.fail_at:
            raise OSError(f"disk gone at step {step}")
        batch = self.stream.batch(step, rows)
        self.steps.append(step)
        if len(self.steps) == 2:
            self.read_second.set()
        return batch


def test_prefetched_batches_are_those_of_the_stream():
    stream = make_stream(10)
    batches = prefetch(stream, range(1, 3), first_step=5, device=CPU)
    for step in range(5, 12):
        batch, expected = next(batches), stream.batch(step, range(1, 3))
        for name in FIELDS:
            assert torch.equal(getattr(batch, name), getattr(expected, name)), (step, name)
    batches.close()


def test_next_batch_is_read_while_the_caller_computes_and_only_that_one():
    spy = SpyStream()
    batches = prefetch(spy, range(4), first_step=5, device=CPU)
    next(batches)
    assert spy.read_second.wait(timeout=60), "the second batch is not read before it is asked for"
    batches.close()
    assert spy.steps == [5, 6]


def test_failure_in_the_thread_is_raised_at_its_batch():
    batches = prefetch(SpyStream(fail_at=2), range(4), first_step=0, device=CPU)
    next(batches), next(batches)
    with pytest.raises(OSError, match="disk gone at step 2"):
        next(batches)


def test_closing_ends_the_thread():
    batches = prefetch(make_stream(10), range(4), first_step=0, device=CPU)
    next(batches)
    assert any(thread.name.startswith("prefetch") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU need a GPU")
def test_batches_arrive_on_the_gpu():
    stream = make_stream(10)
    batches = prefetch(stream, range(4), first_step=0, device=torch.device("cuda", 0))
    for step in range(3):
        batch, expected = next(batches), stream.batch(step, range(4))
        for name in FIELDS:
            assert getattr(batch, name).device.type == "cuda"
            assert torch.equal(getattr(batch, name).cpu(), getattr(expected, name)), (step, name)
    batches.close()
