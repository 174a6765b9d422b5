"""Batches from corpora: every layout has the same global batch, each token is a target once per epoch, data is read
ahead."""

import itertools
import json
import os
import random
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from made_corpora import BYTES, write_corpus

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
from torchtitan_lite.validation import ValidationBatches

CPU = torch.device("cpu")
FIELDS = ("tokens", "targets", "positions", "doc_ids")
NO_CACHE = Path("nowhere")
X = IGNORE_INDEX
N_DRAWS = 10_000


def open_folders(folders: list[Path], *, split: str = "train") -> list:
    return [Corpus(str(folder), BYTES, NO_CACHE, split=split) for folder in folders]


def make_sampler(n_samples: list[int], *, weights: list[float], seed: int) -> Sampler:
    return WeightedSampler(n_samples, seed, weights) if weights else Sampler(n_samples, seed)


def list_rows(batch: Batch) -> list[tuple[list[int], ...]]:
    assert all(getattr(batch, name).dtype == torch.int64 for name in FIELDS)
    return list(zip(*(getattr(batch, name).tolist() for name in FIELDS), strict=True))


# ---------------------------------------------------------------- the promise, on random corpora


@dataclass(frozen=True)
class Case:
    """Some corpora on disk, and their documents. All tokens have different ids, so the id of a token determines its
    position."""

    folders: list[Path]
    documents: list[list[list[int]]]  # of each corpus
    seq_len: int
    weights: list[float]
    seed: int

    def open_stream(
        self, global_batch_size: int, *, restart_positions: bool = False
    ) -> SampleStream:
        reader = SampleReader(open_folders(self.folders), self.seq_len, 2**16, restart_positions)
        sampler = make_sampler(reader.n_samples, weights=self.weights, seed=self.seed)
        return SampleStream(reader, sampler, global_batch_size)


def make_case(folder: Path, seed: int) -> Case:
    draw = random.Random(seed)
    next_id = itertools.count()
    folders = []
    documents = []
    for number in range(draw.randrange(1, 4)):
        shards = []
        for _ in range(draw.randrange(1, 5)):
            longest = draw.choice([1, 3, 30])
            n_documents = draw.randrange(1, 20)
            shard = []
            for length in draw.choices(range(1, longest + 1), k=n_documents):
                document = [next(next_id) for _ in range(length)]
                shard.append(document)
            shards.append(shard)
        shards[0].append([next(next_id), next(next_id)])  # a token to predict
        folders.append(write_corpus(folder / f"{seed} {number}", shards))
        documents.append(sum(shards, []))
    weights = []
    if draw.random() < 0.5:
        weights = [draw.uniform(0.1, 1) for _ in folders]
    seq_len = draw.randrange(1, 18)
    return Case(folders, documents, seq_len, weights, draw.randrange(1000))


def cut_by_hand(
    documents: list[list[int]], seq_len: int, *, restart: bool
) -> list[tuple[list[int], ...]]:
    """Return the rows (tokens, targets, positions, doc_ids) of all samples in their order, cut token by token."""
    placed = [(token, place) for document in documents for place, token in enumerate(document)]
    rows = []
    for start in range(0, len(placed) - 1, seq_len):
        tokens = []
        targets = []
        positions = []
        doc_ids = []
        for column in range(seq_len):
            here = start + column
            following = here + 1
            is_first = column > 0 and (
                here == len(placed) or (here < len(placed) and placed[here][1] == 0)
            )
            position = positions[-1] + 1 if column else 0
            tokens.append(placed[here][0] if here < len(placed) else 0)
            predicted = following < len(placed) and placed[following][1] > 0
            targets.append(placed[following][0] if predicted else X)
            positions.append(0 if is_first and restart else position)
            doc_ids.append((doc_ids[-1] if column else 0) + is_first)
        rows.append((tokens, targets, positions, doc_ids))
    return rows


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_an_epoch_is_every_sample_once_as_cut_by_hand_so_every_token_but_a_documents_first_is_a_target(
    tmp_path, seed, restart
):
    case = replace(make_case(tmp_path, seed), weights=[])
    by_hand = [
        row
        for of_one in case.documents
        for row in cut_by_hand(of_one, case.seq_len, restart=restart)
    ]
    stream = case.open_stream(7, restart_positions=restart)  # steps straddle epochs
    batches = (list_rows(stream.batch(step, range(7))) for step in itertools.count())
    drawn = itertools.chain.from_iterable(batches)
    for _ in range(3):
        assert sorted(itertools.islice(drawn, len(by_hand))) == sorted(by_hand)
    targets = sorted(target for _, targets, *_ in by_hand for target in targets if target != X)
    assert targets == sorted(
        token for of_one in case.documents for document in of_one for token in document[1:]
    )


@pytest.mark.parametrize("global_batch_size", [12, 16])
def test_all_ranks_read_one_global_batch_whatever_their_number_and_where_they_resume(
    tmp_path, global_batch_size
):
    case = make_case(tmp_path, 100 * global_batch_size)
    draw = random.Random(0)
    whole = case.open_stream(global_batch_size)
    unbroken = [list_rows(whole.batch(step, range(global_batch_size))) for step in range(6)]
    for n_ranks in (n for n in range(1, 17) if global_batch_size % n == 0):
        resumed = draw.randrange(6)
        found = [[] for _ in range(resumed, 6)]
        for rank in range(n_ranks):
            rows = rows_of_rank(rank, n_ranks, global_batch_size)
            stream = case.open_stream(global_batch_size)
            batches = prefetch(stream.batch, rows, steps=range(resumed, 6), device=CPU)
            for step_rows, batch in zip(found, batches, strict=True):
                step_rows += list_rows(batch)
        assert found == unbroken[resumed:], (n_ranks, resumed)
    assert not list_threads()


# ---------------------------------------------------------------- rows written out


def test_an_id_that_the_model_does_not_know_is_named_with_its_corpus(tmp_path):
    folder = write_corpus(tmp_path / "made", [[[5, 6, 7]], [[8, 299, 300, 9]]])
    reader = SampleReader(open_folders([folder]), 3, vocab_size=300)
    assert reader.read(torch.arange(1)).tokens.tolist() == [[5, 6, 7]]
    with pytest.raises(CorpusError, match=r"made: there is an id 300, .*model.vocab_size = 300"):
        reader.read(torch.arange(2))


def test_a_corpus_larger_than_memory_is_opened_and_read_at_any_step(tmp_path):
    """The corpus is a sparse file of 10 TB, with data in a single sample."""
    folder = write_corpus(tmp_path / "made", [[[5, 6, 7]]])
    path = folder / "train.tokens"
    manifest_path = folder / "manifest.json"
    seq_len = 8192
    batch_size = 2048
    step = 500_000
    n_tokens = 5 * 10**12
    manifest = json.loads(manifest_path.read_text())
    manifest["splits"]["train"]["n_tokens"] = n_tokens
    manifest_path.write_text(json.dumps(manifest))
    os.truncate(path, 2 * n_tokens)
    corpora = open_folders([folder])
    reader = SampleReader(corpora, seq_len, vocab_size=300)
    sampler = Sampler(reader.n_samples, 1)
    stream = SampleStream(reader, sampler, batch_size)
    index = torch.tensor([step * batch_size + 3])
    (sample,) = sampler.choose(index)
    with open(path, "r+b") as file:
        file.seek(2 * seq_len * sample.item())
        file.write(bytes([42, 0, 43, 0]))
    batch = stream.batch(step, range(3, 4))
    row = batch.tokens[0]
    assert row[:3].tolist() == [42, 43, 0]


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize("seed", range(3))
def test_validation_batches_are_all_samples_once_in_order_on_any_number_of_ranks(tmp_path, seed):
    case = make_case(tmp_path, seed)
    by_hand = []
    for documents in case.documents:
        by_hand += cut_by_hand(documents, case.seq_len, restart=False)
    zeros = [0] * case.seq_len
    padding = (zeros, [X] * case.seq_len, [*range(case.seq_len)], zeros)
    for global_batch_size, n_ranks in ((1, 1), (4, 2), (12, 3), (12, 12)):
        found = {}
        for rank in range(n_ranks):
            reader = SampleReader(open_folders(case.folders), case.seq_len, 2**16)
            batches = ValidationBatches(reader, BYTES, global_batch_size)
            rows = rows_of_rank(rank, n_ranks, global_batch_size)
            for step in range(batches.n_batches):
                numbers = [step * global_batch_size + row for row in rows]
                found |= dict(zip(numbers, list_rows(batches.batch(step, rows)), strict=True))
        in_order = [found[number] for number in sorted(found)]
        n_padded = len(in_order) - len(by_hand)
        assert 0 <= n_padded < global_batch_size
        assert in_order == by_hand + [padding] * n_padded


# ---------------------------------------------------------------- prefetching


class SpyStream:
    """A stub of SampleStream: records which steps were read, and by which thread, and can fail at one step."""

    def __init__(self, stream: SampleStream, fail_at: int | None = None):
        self.stream, self.fail_at = stream, fail_at
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.read_second = threading.Event()

    def batch(self, step: int, rows: range) -> Batch:
        self.threads.add(threading.current_thread().name)
        if step == self.fail_at:
            raise OSError(f"disk gone at step {step}")
        self.steps.append(step)
        if len(self.steps) == 2:
            self.read_second.set()
        return self.stream.batch(step, rows)


@pytest.fixture
def stream(tmp_path) -> SampleStream:
    return make_case(tmp_path, 1).open_stream(4)


def list_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_only_the_next_batch_is_read_by_a_thread_while_the_caller_computes_and_closing_ends_it(
    stream,
):
    spy = SpyStream(stream)
    batches = prefetch(spy.batch, range(4), steps=itertools.count(5), device=CPU)
    next(batches)
    assert spy.read_second.wait(timeout=60), (
        "the second batch is not read before the first is requested"
    )
    assert list_threads()
    batches.close()
    assert spy.steps == [5, 6] and not list_threads()
    assert all(name.startswith("prefetch") for name in spy.threads)


@pytest.mark.parametrize("fail_at", [0, 4])
def test_failure_in_the_thread_is_raised_at_its_batch_and_ends_the_thread(stream, fail_at):
    batches = prefetch(SpyStream(stream, fail_at).batch, range(4), steps=range(5), device=CPU)
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


@pytest.mark.parametrize("weights", [[], [1.0, 1.0, 1.0]])
def test_every_source_epoch_and_seed_has_an_order_of_its_own(weights):
    """Compare three sources of equal size. Two random permutations of 50 samples agree in one place on average."""
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


@pytest.mark.parametrize("weights", [[], [1.0, 3.0]])
def test_an_epoch_that_is_longer_than_a_cycle_of_draws_repeats_nothing(weights):
    sampler = make_sampler([2**22, 2**22], weights=weights, seed=0)
    draws = torch.cat([cycle * CYCLE + torch.arange(1000) for cycle in range(4)])
    assert len(sampler.choose(draws).unique()) == len(draws)


SHARES = [0.00004, 0.9, 0.000001, 0.0003, 0.00074, 0.098919]


@pytest.mark.parametrize("start", [0, 70_000, 10**10])
def test_a_small_weight_is_exact_on_average_from_any_draw_on(start):
    sampler = make_sampler([5000] * len(SHARES), weights=[3 * share for share in SHARES], seed=4)
    counts = torch.zeros(len(SHARES))
    draws = start + torch.arange(N_DRAWS)
    for number in range(1, 61):
        sources = sampler.choose(draws) // 5000
        draws += N_DRAWS
        counts += torch.bincount(sources, minlength=len(SHARES))
        assert (counts - number * N_DRAWS * torch.tensor(SHARES)).abs().max() < 3


def test_draws_of_a_rare_source_go_through_its_epochs():
    sampler = make_sampler([50_000, 7], weights=[1, 0.0003], seed=2)
    start = 10**9
    samples = sampler.choose(start + torch.arange(20 * N_DRAWS))
    own = samples[samples >= 50_000].tolist()
    assert len(own) > 50
    n_different = [len(set(own[at : at + 7])) for at in range(len(own) - 7)]
    first = n_different.index(7)
    assert first < 7  # an epoch begins at one of seven places
    assert set(n_different[first::7]) == {7}
    for step in (0, 777, 19_999):  # a draw does not depend on the other requested draws
        draws = torch.arange(step, step + 3)
        assert sampler.choose(start + draws).equal(samples[draws])
