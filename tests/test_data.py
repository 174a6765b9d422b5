"""Corpora to batches: the same global batch on every layout, each token a target once per epoch, read ahead."""

import itertools
import random
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from made_corpora import BYTES, write_corpus, write_flat

from torchtitan_lite.data import dataset as data
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.corpus_folder import DRAWS_PER_ROUND, CorpusError, split_round
from torchtitan_lite.data.dataset import Batch, SampleReader, SampleStream, ValidationBatches, prefetch, rows_of_rank
from torchtitan_lite.model.head import IGNORE_INDEX

CPU = torch.device("cpu")
FIELDS = ("tokens", "targets", "positions", "doc_ids")
NO_CACHE = Path("nowhere")
X = IGNORE_INDEX


def open_folders(folders: list[Path], *, split: str = "train") -> list:
    return [open_corpus(str(folder), BYTES, NO_CACHE, split=split) for folder in folders]


def list_rows(batch: Batch) -> list[tuple[list[int], ...]]:
    assert all(getattr(batch, name).dtype == torch.int64 for name in FIELDS)
    return list(zip(*(getattr(batch, name).tolist() for name in FIELDS), strict=True))


# ---------------------------------------------------------------- the promise, on random corpora


@dataclass(frozen=True)
class Case:
    """Some corpora on disk, and their documents. No two tokens of them have the same id, so an id tells its place."""

    folders: list[Path]
    documents: list[list[list[int]]]  # of each corpus
    seq_len: int
    weights: list[float]
    seed: int

    def open_stream(self, global_batch_size: int, *, restart_positions: bool = False) -> SampleStream:
        reader = SampleReader(open_folders(self.folders), self.seq_len, 2**16, restart_positions)
        return SampleStream(reader, global_batch_size=global_batch_size, weights=self.weights, seed=self.seed)


def make_case(folder: Path, seed: int) -> Case:
    draw, next_id = random.Random(seed), itertools.count()
    folders, documents = [], []
    for number in range(draw.randrange(1, 4)):
        shards = []
        for _ in range(draw.randrange(1, 5)):
            longest = draw.choice([1, 3, 30])
            lengths = [draw.randrange(1, longest + 1) for _ in range(draw.randrange(1, 20))]
            shards.append([[next(next_id) for _ in range(length)] for length in lengths])
        shards[0].append([next(next_id), next(next_id)])  # a token to predict
        folders.append(write_corpus(folder / f"{seed} {number}", shards))
        documents.append([document for shard in shards for document in shard])
    weights = [draw.uniform(0.1, 1) for _ in folders] if draw.random() < 0.5 else []
    return Case(folders, documents, draw.randrange(1, 18), weights, draw.randrange(1000))


def cut_by_hand(documents: list[list[int]], seq_len: int, *, restart: bool) -> list[tuple[list[int], ...]]:
    """Rows (tokens, targets, positions, doc_ids) of all samples in their order, token by token."""
    placed = [(token, place) for document in documents for place, token in enumerate(document)]
    rows = []
    for start in range(0, len(placed) - 1, seq_len):
        tokens, targets, positions, doc_ids = [], [], [], []
        for column in range(seq_len):
            here, following = start + column, start + column + 1
            is_first = column > 0 and (here == len(placed) or (here < len(placed) and placed[here][1] == 0))
            position = positions[-1] + 1 if column else 0
            tokens.append(placed[here][0] if here < len(placed) else 0)
            predicted = following < len(placed) and placed[following][1] > 0
            targets.append(placed[following][0] if predicted else X)
            positions.append(0 if is_first and restart else position)
            doc_ids.append((doc_ids[-1] if column else 0) + is_first)
        rows.append((tokens, targets, positions, doc_ids))
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_a_sample_as_cut_by_hand(tmp_path, seed):
    case = make_case(tmp_path, seed)
    for restart in (False, True):
        by_hand = [row for of_one in case.documents for row in cut_by_hand(of_one, case.seq_len, restart=restart)]
        stream = case.open_stream(9, restart_positions=restart)
        for step in range(20):
            for row in list_rows(stream.batch(step, range(9))):
                assert row in by_hand


# Sizes that are divided by every number of ranks from 1 to 16.
@pytest.mark.parametrize("global_batch_size", [16, 60, 72, 84, 22, 26])
def test_all_ranks_together_read_one_global_batch_whatever_their_number_and_where_they_resume(
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
            for step_rows, batch in zip(
                found, prefetch(stream, rows, steps=range(resumed, 6), device=CPU), strict=True
            ):
                step_rows += list_rows(batch)
        assert found == unbroken[resumed:], (n_ranks, resumed)


def test_a_batch_does_not_depend_on_what_was_read_before_and_microbatches_are_its_rows_in_order(tmp_path):
    case = make_case(tmp_path, 7)
    stream = case.open_stream(12)
    for step in random.Random(0).sample(range(100_000), 20):
        rows = list_rows(stream.batch(step, range(12)))
        assert list_rows(case.open_stream(12).batch(step, range(3, 9))) == rows[3:9]
        microbatches = stream.batch(step, range(12)).split(4)
        assert [row for microbatch in microbatches for row in list_rows(microbatch)] == rows
        assert [len(microbatch.tokens) for microbatch in microbatches] == [3, 3, 3, 3]


def list_targets_to_be(documents: list[list[int]]) -> list[int]:
    return sorted(token for document in documents for token in document[1:])


def list_targets(rows: list[tuple[list[int], ...]]) -> list[int]:
    return sorted(target for _, targets, *_ in rows for target in targets if target != X)


def draw_rows(stream: SampleStream, n: int) -> list[tuple[list[int], ...]]:
    """The first n rows of a run, whatever the size of its batches."""
    batches = (stream.batch(step, range(stream.global_batch_size)) for step in itertools.count())
    return list(itertools.islice(itertools.chain.from_iterable(map(list_rows, batches)), n))


@pytest.mark.parametrize("seed", range(6))
def test_every_token_but_a_documents_first_is_a_target_once_per_epoch(tmp_path, seed):
    case = make_case(tmp_path, seed)
    stream = SampleStream(SampleReader(open_folders(case.folders), case.seq_len, 2**16), global_batch_size=7, seed=seed)
    n = sum(stream.reader.n_samples)  # steps straddle epochs
    rows = draw_rows(stream, 3 * n)
    expected = list_targets_to_be([document for of_one in case.documents for document in of_one])
    for epoch in range(3):
        assert list_targets(rows[epoch * n : (epoch + 1) * n]) == expected


def test_with_weights_every_source_has_its_share_and_every_token_is_a_target_once_in_its_own_epochs(tmp_path):
    sizes, weights = [150, 4001, 900], [1, 3, 2]
    next_id = itertools.count()
    documents = [[[next(next_id) for _ in range(3)] for _ in range(size)] for size in sizes]
    folders = [write_corpus(tmp_path / str(n), [own]) for n, own in enumerate(documents)]
    stream = Case(folders, documents, 8, weights, seed=5).open_stream(500)
    rows = draw_rows(stream, DRAWS_PER_ROUND)
    source_of = {token: n for n, own in enumerate(documents) for document in own for token in document}
    assert [Counter(source_of[tokens[0]] for tokens, *_ in rows)[n] for n in range(3)] == split_round(weights)
    for source, (own, n) in enumerate(zip(documents, stream.reader.n_samples, strict=True)):
        own_rows = [row for row in rows if source_of[row[0][0]] == source]
        assert len(own_rows) >= n
        for start in range(0, len(own_rows) - n + 1, n):
            assert list_targets(own_rows[start : start + n]) == list_targets_to_be(own)


# ---------------------------------------------------------------- rows written out


def read_samples(folder: Path, seq_len: int, n: int, **options) -> Batch:
    return SampleReader(open_folders([folder]), seq_len, 2**16, **options).read([(0, sample) for sample in range(n)])


def test_the_picture_at_the_top_of_the_file_is_what_is_read(tmp_path):
    a, b, c, d, e, f, g, h, i, j, k, l, m, n = range(1, 15)  # noqa: E741
    folder = write_corpus(tmp_path / "letters", [[[a, b, c, d, e], [f, g, h, i, j, k, l]], [[m, n]]])
    batch = read_samples(folder, 4, 4)
    assert batch.tokens.tolist() == [[a, b, c, d], [e, f, g, h], [i, j, k, l], [m, n, 0, 0]]
    assert batch.targets.tolist() == [[b, c, d, e], [X, g, h, i], [j, k, l, X], [n, X, X, X]]
    assert batch.doc_ids.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 4


def test_documents_of_a_flat_file_end_with_eos_which_is_a_target_itself(tmp_path):
    eos = BYTES.eos_id
    batch = read_samples(write_flat(tmp_path / "train.bin", [1, 2, eos, 3, eos, 4, 5, 6]), 4, 2)
    assert batch.targets.tolist() == [[2, eos, X, eos], [X, 5, 6, X]]
    assert batch.doc_ids.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1]]


def test_an_id_that_the_model_does_not_know_is_named_with_its_place(tmp_path):
    folder = write_corpus(tmp_path / "made", [[[5, 6, 7]], [[8, 299, 300, 9]]])
    reader = SampleReader(open_folders([folder]), 3, vocab_size=300)
    assert reader.read([(0, 0)]).tokens.tolist() == [[5, 6, 7]]
    with pytest.raises(CorpusError, match=r"token 5 of .*made is 300, .*300.*model.vocab_size"):
        reader.read([(0, 0), (0, 1)])


# ---------------------------------------------------------------- what must not have changed when a run is resumed


def read_facts(names: list[Path], *, seq_len: int = 4, weights: tuple = (), seed: int = 0) -> dict[str, object]:
    reader = SampleReader(open_folders(names), seq_len, 2**16)
    return SampleStream(reader, global_batch_size=2, weights=weights, seed=seed).facts


def test_facts_tell_apart_whatever_changes_the_samples_and_name_the_corpus_that_changed(tmp_path):
    one, two, other = (write_corpus(tmp_path / name / "wiki", [[[1, 2, n], [3]]]) for n, name in enumerate("abc"))
    variants = [
        read_facts([one]),
        read_facts([two]),
        read_facts([one, two]),
        read_facts([two, one]),
        read_facts([one, two], weights=(1.0, 2.0)),
        read_facts([one, two], weights=(2.0, 1.0)),
        read_facts([one], seq_len=5),
        read_facts([one], seed=1),
    ]
    assert all(a != b for a, b in itertools.combinations(variants, 2))
    changed = read_facts([other, two])
    assert [name for name in variants[2] if variants[2][name] != changed[name]] == ["data of corpus 1 (wiki)"]
    moved = write_corpus(tmp_path / "elsewhere" / "wiki", [[[1, 2, 0], [3]]])
    assert read_facts([moved]) == read_facts([Path(f"{one}/")]) == variants[0]


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize("seed", range(3))
def test_validation_batches_are_all_samples_once_in_order_on_any_number_of_ranks(tmp_path, seed):
    case = make_case(tmp_path, seed)
    by_hand = [row for of_one in case.documents for row in cut_by_hand(of_one, case.seq_len, restart=False)]
    padding = ([0] * case.seq_len, [X] * case.seq_len, [*range(case.seq_len)], [0] * case.seq_len)
    for global_batch_size, n_ranks in ((1, 1), (4, 2), (12, 3), (12, 12)):
        found = {}
        for rank in range(n_ranks):
            reader = SampleReader(open_folders(case.folders), case.seq_len, 2**16)
            batches = ValidationBatches(reader, global_batch_size=global_batch_size)
            rows = rows_of_rank(rank, n_ranks, global_batch_size)
            for step in range(batches.n_batches):
                numbers = [step * global_batch_size + row for row in rows]
                found |= dict(zip(numbers, list_rows(batches.batch(step, rows)), strict=True))
        in_order = [found[number] for number in sorted(found)]
        n_padded = len(in_order) - len(by_hand)
        assert 0 <= n_padded < global_batch_size
        assert in_order == by_hand + [padding] * n_padded


def test_a_tail_of_one_token_makes_no_sample_and_at_most_so_many_validation_batches_are_read(tmp_path):
    reader = SampleReader(open_folders([write_corpus(tmp_path / "made", [[[*range(41)]]])]), 4, 2**16)
    assert reader.n_samples == [10]
    counts = [ValidationBatches(reader, global_batch_size=4, most_batches=most).n_batches for most in (-1, 1, 3, 4)]
    assert counts == [3, 1, 3, 3]


# ---------------------------------------------------------------- prefetching


class SpyStream:
    """Stands in for a SampleStream: notes which steps were read, and by whom, and may fail at one."""

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


@pytest.mark.parametrize("n_steps", [0, 1, 2, 5])
def test_prefetched_batches_are_those_of_the_stream_and_end_with_the_steps(stream, n_steps):
    spy = SpyStream(stream)
    batches = list(prefetch(spy, range(1, 3), steps=range(3, 3 + n_steps), device=CPU))
    expected = [list_rows(stream.batch(step, range(1, 3))) for step in range(3, 3 + n_steps)]
    assert [list_rows(batch) for batch in batches] == expected and spy.steps == [*range(3, 3 + n_steps)]
    assert not list_threads()


def test_only_the_next_batch_is_read_by_a_thread_while_the_caller_computes_and_closing_ends_it(stream):
    spy = SpyStream(stream)
    batches = prefetch(spy, range(4), steps=itertools.count(5), device=CPU)
    next(batches)
    assert spy.read_second.wait(timeout=60), "the second batch is not read before it is asked for"
    assert list_threads()
    batches.close()
    assert spy.steps == [5, 6] and not list_threads()
    assert all(name.startswith("prefetch") for name in spy.threads)


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_failure_in_the_thread_is_raised_at_its_batch_and_ends_the_thread(stream, fail_at):
    batches = prefetch(SpyStream(stream, fail_at), range(4), steps=range(5), device=CPU)
    for step in range(fail_at):
        assert list_rows(next(batches)) == list_rows(stream.batch(step, range(4)))
    with pytest.raises(OSError, match=f"disk gone at step {fail_at}"):
        next(batches)
    assert not list_threads()


def test_on_cuda_the_thread_pins_batches_after_choosing_its_device(stream, monkeypatch):
    events, main = [], threading.current_thread().name[:8]

    class NotedBatch(Batch):
        def pin_memory(self):
            events.append(("pin", threading.current_thread().name[:8]))
            return self

        def to(self, device, *, non_blocking=False):
            events.append(("copy", threading.current_thread().name[:8], device, non_blocking))
            return self

    cuda = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: events.append(("set", "prefetch", device)))
    monkeypatch.setattr(data, "Batch", NotedBatch)
    list(prefetch(stream, range(4), steps=range(2), device=cuda))
    assert events[0] == ("set", "prefetch", cuda)
    assert Counter(events[1:]) == {("pin", "prefetch"): 2, ("copy", main, cuda, True): 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU need a GPU")
def test_batches_arrive_on_the_gpu(stream):
    batches = prefetch(stream, range(4), steps=range(3), device=torch.device("cuda", 0))
    for step, batch in enumerate(batches):
        assert all(getattr(batch, name).device.type == "cuda" for name in FIELDS)
        assert list_rows(batch) == list_rows(stream.batch(step, range(4)))
