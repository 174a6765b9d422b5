"""Test batches from corpora: every layout has the same global batch, every token except the first of a document is a
target once per epoch, and batches are read ahead."""

import itertools
import os
import random
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from folders import dump_json, load_json
from made_corpora import BYTES, write_corpus
from marks import each_row

from torchtitan_lite.data.corpus_folder import CorpusError
from torchtitan_lite.data.dataset import (
    Corpus,
    Sampler,
    SampleReader,
    SampleStream,
    prefetch,
    rows_of_rank,
)
from torchtitan_lite.data.weighted_sampler import CYCLE, WeightedSampler
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.loss import IGNORE_INDEX

CPU = torch.device("cpu")
FIELDS = ("tokens", "targets", "positions", "doc_ids")
X = IGNORE_INDEX
N_DRAWS = 10_000


def open_folders(folders: list[Path]) -> list:
    return [Corpus(str(folder), BYTES, Path("nowhere")) for folder in folders]


def make_sampler(n_samples: list[int], weights: list[float] | None, *, seed: int) -> Sampler:
    return WeightedSampler(n_samples, seed, weights) if weights else Sampler(n_samples, seed)


def list_rows(batch: Batch) -> list[tuple[list[int], ...]]:
    assert all(getattr(batch, name).dtype == torch.int64 for name in FIELDS)
    return list(zip(*(getattr(batch, name).tolist() for name in FIELDS), strict=True))


# ---------------------------------------------------------------- batches of random corpora equal a reference


@dataclass(frozen=True)
class Case:
    """Corpora on disk, with the documents that they contain. All tokens have different ids, so the id of a token
    determines its position."""

    folders: list[Path]
    documents: list[list[list[int]]]  # of each corpus
    seq_len: int

    def open_stream(
        self, n_rows: int, weights: list[float] | None = None, *, restart_positions: bool = False
    ) -> SampleStream:
        reader = SampleReader(open_folders(self.folders), self.seq_len, 2**16, restart_positions)
        sampler = make_sampler(reader.n_samples, weights, seed=5)
        return SampleStream(reader, sampler, n_rows, {}, reader)

    def cut_by_hand(self, *, restart: bool = False) -> list[tuple[list[int], ...]]:
        """Return the rows (tokens, targets, positions, doc_ids) of all samples in their order."""
        rows = []
        for documents in self.documents:
            rows += cut_corpus(documents, self.seq_len, restart=restart)
        return rows


def cut_corpus(documents: list[list[int]], n: int, *, restart: bool):
    """Return the rows of one corpus. The last row is padded with a document of zeros."""
    tokens = []
    targets = []
    places = []  # position of each token in its document
    numbers = []  # document number of each token
    for number, document in enumerate([*documents, [0] * n]):
        tokens += document
        targets += [X, *document[1:]]
        places += range(len(document))
        numbers += [number] * len(document)
    n_tokens = len(tokens) - n
    targets[n_tokens:] = [X] * (n + 1)
    rows = []
    for start in range(0, n_tokens - 1, n):
        end = start + n
        positions = list(range(n))
        if restart:
            positions = list(map(min, positions, places[start:end]))
        doc_ids = [number - numbers[start] for number in numbers[start:end]]
        rows.append((tokens[start:end], targets[start + 1 : end + 1], positions, doc_ids))
    return rows


def make_case(folder: Path, seed: int) -> Case:
    draw = random.Random(seed)
    next_id = itertools.count()
    folders = []
    documents = []
    for number in range(draw.randrange(1, 4)):
        longest = draw.choices([1, 3, 30], k=draw.randrange(1, 60))
        lengths = [draw.randint(1, most) for most in longest]
        lengths.append(2)  # a token to predict
        made = [list(itertools.islice(next_id, length)) for length in lengths]
        folders.append(write_corpus(folder / f"{seed} {number}", [made]))
        documents.append(made)
    return Case(folders, documents, draw.randrange(1, 18))


@each_row("restart", [False, True])
@each_row("seed", range(4))
def test_an_epoch_contains_every_sample_once_and_equals_samples_cut_by_hand(
    tmp_path, seed, restart
):
    case = make_case(tmp_path, seed)
    by_hand = case.cut_by_hand(restart=restart)
    stream = case.open_stream(7, restart_positions=restart)  # steps straddle epochs
    batches = (list_rows(stream.batch(step, range(7))) for step in itertools.count())
    drawn = itertools.chain.from_iterable(batches)
    for _ in range(3):
        assert sorted(itertools.islice(drawn, len(by_hand))) == sorted(by_hand)


@each_row("n_rows, weights", [(12, [0.3, 0.9, 0.5]), (16, None)])
def test_all_ranks_read_one_global_batch_whatever_their_number_and_where_they_resume(
    tmp_path, n_rows, weights
):
    case = make_case(tmp_path, seed=5)  # three corpora
    draw = random.Random(0)
    whole = case.open_stream(n_rows, weights)
    unbroken = [list_rows(whole.batch(step, range(n_rows))) for step in range(6)]
    for n_ranks in (n for n in range(1, 17) if n_rows % n == 0):
        resumed = draw.randrange(6)
        found = [[] for _ in range(resumed, 6)]
        for rank in range(n_ranks):
            rows = rows_of_rank(rank, n_ranks, n_rows)
            stream = case.open_stream(n_rows, weights)
            batches = prefetch(stream.batch, rows, steps=range(resumed, 6), device=CPU)
            for step_rows, batch in zip(found, batches, strict=True):
                step_rows += list_rows(batch)
        assert found == unbroken[resumed:], (n_ranks, resumed)
    assert not list_threads()


# ---------------------------------------------------------------- rows written out


def test_an_id_that_the_model_does_not_know_is_named_with_its_corpus(tmp_path):
    folder = write_corpus(tmp_path / "made", [[[5, 6, 7], [8, 299, 300, 9]]])
    reader = SampleReader(open_folders([folder]), 3, vocab_size=300)
    assert reader.read(torch.arange(1)).tokens.tolist() == [[5, 6, 7]]
    with pytest.raises(CorpusError, match=r"made: there is an id 300, .*model.vocab_size = 300"):
        reader.read(torch.arange(2))


def test_a_corpus_larger_than_memory_is_opened_and_read_at_any_step(tmp_path):
    """The corpus is a sparse file of 10 TB, with data in a single sample."""
    folder = write_corpus(tmp_path / "made", [[[5, 6, 7]]])
    seq_len = 8192
    n_rows = 2048
    step = 500_000
    n_tokens = 5 * 10**12
    manifest = folder / "manifest.json"
    content = load_json(manifest)
    content["splits"]["train"]["n_tokens"] = n_tokens
    dump_json(manifest, content)
    tokens = folder / "train.tokens"
    os.truncate(tokens, 2 * n_tokens)
    stream = Case([folder], [], seq_len).open_stream(n_rows)
    (sample,) = stream.sampler.choose(torch.tensor([step * n_rows + 3]))
    with tokens.open("r+b") as file:
        file.seek(2 * seq_len * sample.item())
        file.write(bytes([42, 0, 43, 0]))
    row = stream.batch(step, range(3, 4)).tokens[0]
    assert row[:3].tolist() == [42, 43, 0]


# ---------------------------------------------------------------- prefetching


@pytest.fixture
def stream(tmp_path) -> SampleStream:
    return make_case(tmp_path, 1).open_stream(4)


def list_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_only_the_next_batch_is_read_by_a_thread_while_the_caller_computes_and_closing_ends_it(
    stream,
):
    steps = []
    second = threading.Event()

    def read(step: int, rows: range) -> Batch:
        assert threading.current_thread().name in list_threads()
        steps.append(step)
        if len(steps) == 2:
            second.set()
        return stream.batch(step, rows)

    batches = prefetch(read, range(4), steps=itertools.count(5), device=CPU)
    next(batches)
    assert second.wait(timeout=60), "the second batch is not read before it is requested"
    assert list_threads()
    batches.close()
    assert steps == [5, 6] and not list_threads()


@each_row("fail_at", [0, 4])
def test_an_error_in_the_prefetch_thread_is_raised_when_its_batch_is_requested_and_ends_the_thread(
    stream, fail_at
):
    def read(step: int, rows: range) -> Batch:
        if step == fail_at:
            raise OSError(f"disk gone at step {step}")
        return stream.batch(step, rows)

    batches = prefetch(read, range(4), steps=range(5), device=CPU)
    for step in range(fail_at):
        assert list_rows(next(batches)) == list_rows(stream.batch(step, range(4)))
    with pytest.raises(OSError, match=f"disk gone at step {fail_at}"):
        next(batches)
    assert not list_threads()


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu(stream):
    batches = prefetch(stream.batch, range(4), steps=range(3), device=torch.device("cuda", 0))
    for step, batch in enumerate(batches):
        assert all(getattr(batch, name).device.type == "cuda" for name in FIELDS)
        assert list_rows(batch) == list_rows(stream.batch(step, range(4)))


# ---------------------------------------------------------------- the order of samples


@each_row("weights", [None, [1.0, 1.0, 1.0]])
def test_every_source_epoch_and_seed_has_an_order_of_its_own(weights):
    """Compare three sources of equal size. On average, two random permutations of 50 samples have one sample in the
    same place."""
    n = 50
    orders = []
    for seed in (0, 1):
        sampler = make_sampler([n] * 3, weights=weights, seed=seed)
        samples = sampler.choose(torch.arange(10 * n))
        for source in range(3):
            own = samples[samples // n == source] % n
            orders += own[: len(own) // n * n].split(n)
    assert len(orders) >= 2 * 3 * 3
    for one, another in itertools.combinations(orders, 2):
        assert (one == another).sum() < 10


@each_row("weights", [None, [1.0, 3.0]])
def test_an_epoch_that_is_longer_than_a_cycle_of_draws_repeats_nothing(weights):
    sampler = make_sampler([2**22, 2**22], weights=weights, seed=0)
    draws = torch.cat([cycle * CYCLE + torch.arange(1000) for cycle in range(4)])
    assert len(sampler.choose(draws).unique()) == len(draws)


SHARES = [0.00004, 0.9, 0.000001, 0.0003, 0.00074, 0.098919]


@each_row("start", [0, 70_000, 10**10])
def test_a_source_with_a_small_weight_gets_its_share_of_draws_from_any_start(start):
    sampler = make_sampler([5000] * len(SHARES), weights=[3 * share for share in SHARES], seed=4)
    counts = torch.zeros(len(SHARES))
    draws = start + torch.arange(N_DRAWS)
    for number in range(1, 61):
        sources = sampler.choose(draws) // 5000
        draws += N_DRAWS
        counts += torch.bincount(sources, minlength=len(SHARES))
        assert (counts - number * N_DRAWS * torch.tensor(SHARES)).abs().max() < 3


def test_each_epoch_of_a_rare_source_draws_every_sample_once():
    sampler = make_sampler([50_000, 7], weights=[1, 0.0003], seed=2)
    start = 10**9
    samples = sampler.choose(start + torch.arange(20 * N_DRAWS))
    own = samples[samples >= 50_000].tolist()
    assert len(own) > 50
    n_different = []
    for at in range(len(own) - 7):
        n_different.append(len(set(own[at : at + 7])))
    first = n_different.index(7)
    assert first < 7  # the first epoch boundary is at one of the first seven draws
    assert set(n_different[first::7]) == {7}
    # a draw gives the same sample, whichever other draws are requested
    for step in (0, 777, 19_999):
        draws = torch.arange(step, step + 3)
        assert sampler.choose(start + draws).equal(samples[draws])
