"""Opening corpora and reading any stretch of them, however large, with little memory; damage is named."""

import itertools
import json
import logging
import os
import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import flip_bit
from made_corpora import BYTES, write_corpus, write_flat, write_manifest

from torchtitan_lite.data import corpus as corpus_module
from torchtitan_lite.data import corpus_folder
from torchtitan_lite.data.corpus import BackgroundHash, Corpus, NumberFile, OpenShard, ShardFiles, open_corpus
from torchtitan_lite.data.corpus_folder import CorpusError, read_manifest

NO_CACHE = Path("nowhere")
EOS = BYTES.eos_id
FILES = ["train-00000.documents", "train-00001.documents", "train-00000.tokens", "train-00001.tokens"]


def make_documents(draw: random.Random, n_documents: int) -> list[list[int]]:
    return [[draw.randrange(1000) for _ in range(draw.randrange(1, 9))] for _ in range(n_documents)]


def spell(documents: list[list[int]]) -> tuple[list[int], list[bool]]:
    """All tokens in a row, and which are their document's first."""
    tokens = [token for document in documents for token in document]
    return tokens, [place == 0 for document in documents for place in range(len(document))]


def read(corpus: Corpus, start: int, stop: int) -> tuple[list[int], list[bool]]:
    tokens, begins = corpus.read(start, stop)
    assert tokens.dtype == torch.int64 and begins.dtype == torch.bool
    return tokens.tolist(), begins.tolist()


def change(**attributes: object) -> SimpleNamespace:
    """The tokenizer of bytes, with other attributes."""
    return SimpleNamespace(**vars(BYTES) | attributes)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards of three documents, which begin at 0, 2 and 3."""
    return write_corpus(tmp_path / "made", [[[1, 2], [3], [4, 5, 6, 7]]] * 2, validation=[[[8, 9]]])


@pytest.fixture
def all_are_large(monkeypatch, caplog) -> None:
    """No corpus is hashed when it is opened."""
    monkeypatch.setattr(corpus_folder, "SMALL_BYTES", 0)
    caplog.set_level(logging.INFO, "torchtitan_lite")


# ---------------------------------------------------------------- any stretch


@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 2**16 - 1), ("uint32", 2**32 - 1)])
def test_every_stretch_of_a_prepared_corpus_is_as_its_documents_say(tmp_path, dtype, largest):
    draw = random.Random(0)
    shards = [make_documents(draw, n) for n in (3, 1, 6, 2)]
    shards[1].append([largest, largest // 2 + 1, 65535])  # above the signed range
    tokens, begins = spell([document for shard in shards for document in shard])
    corpus = open_corpus(str(write_corpus(tmp_path / "made", shards, dtype=dtype)), BYTES, NO_CACHE)
    assert corpus.n_tokens == len(tokens)
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            assert read(corpus, start, stop) == (tokens[start:stop], begins[start:stop]), (start, stop)


def test_the_splits_of_a_corpus_are_read_apart(folder):
    train, validation = (open_corpus(str(folder), BYTES, NO_CACHE, split=split) for split in ("train", "validation"))
    assert (train.n_tokens, train.identity) != (validation.n_tokens, validation.identity)
    assert read(validation, 0, 2) == ([8, 9], [True, False])


@pytest.mark.parametrize(("dtype", "vocab_size"), [("uint16", 2**16), ("uint32", 2**16 + 1)])
def test_every_stretch_of_a_flat_file_is_read_in_place_and_documents_end_with_eos(tmp_path, dtype, vocab_size):
    tokens = [7, 8, EOS, 9, EOS, EOS, 3, 65535, 4]
    begins = [True, False, False, True, False, True, True, False, False]
    path = write_flat(tmp_path / "train.bin", tokens, dtype)
    corpus = open_corpus(str(path), change(vocab_size=vocab_size), NO_CACHE)
    assert corpus.n_tokens == len(tokens)
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            assert read(corpus, start, stop) == (tokens[start:stop], begins[start:stop]), (start, stop)
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.bin"]


# ---------------------------------------------------------------- identity


def test_a_corpus_keeps_its_identity_where_it_is_moved_and_one_token_or_border_changes_it(tmp_path):
    variants = [[[[1, 2], [3]]], [[[1, 2], [4]]], [[[1], [2, 3]]], [[[1, 2, 3]]], [[[1, 2], [3], [3]]]]
    folders = [write_corpus(tmp_path / str(n), shards) for n, shards in enumerate(variants)]
    identities = [open_corpus(str(folder), BYTES, NO_CACHE).identity for folder in folders]
    assert len(set(identities)) == len(variants)
    folders[0].rename(tmp_path / "elsewhere")
    assert open_corpus(str(tmp_path / "elsewhere"), BYTES, NO_CACHE).identity == identities[0]


def test_the_identity_of_a_flat_file_tells_contents_also_of_a_large_one_and_borders_apart(tmp_path):
    path = write_flat(tmp_path / "a.bin", [1])
    identities = []
    for n_bytes, changed in ((1000, 0), (1000, 998), (1002, 0), (10**9, 0), (10**9, 10**9 // 2), (10**9, 10**9 - 2)):
        os.truncate(path, n_bytes)
        with open(path, "r+b") as file:
            file.seek(changed // 2 * 2)
            file.write(b"\x07\x00")
        identities.append(open_corpus(str(path), BYTES, NO_CACHE).identity)
    for other in (change(eos_id=256), change(vocab_size=2**17)):
        identities.append(open_corpus(str(path), other, NO_CACHE).identity)
    assert len(set(identities)) == 8
    assert open_corpus(str(path), change(identity="other"), NO_CACHE).identity == identities[-3]


# ---------------------------------------------------------------- large ones


def test_a_corpus_of_more_shards_than_may_be_open_is_read_all_over(tmp_path, all_are_large):
    shards = [make_documents(random.Random(n), 2) for n in range(100)]
    folder = str(write_corpus(tmp_path / "made", shards))
    tokens, begins = spell([document for shard in shards for document in shard])
    n_open = len(os.listdir("/proc/self/fd"))
    corpus = open_corpus(folder, BYTES, NO_CACHE)
    assert len(os.listdir("/proc/self/fd")) == n_open, "a start must not open every file"
    assert read(corpus, 0, len(tokens)) == (tokens, begins)
    assert n_open < len(os.listdir("/proc/self/fd")) <= n_open + 2 * corpus_module.MAX_OPEN_SHARDS
    del corpus
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_threads_that_read_one_corpus_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "MAX_OPEN_SHARDS", 2)
    shards = [make_documents(random.Random(n), 20) for n in range(9)]
    tokens, begins = spell([document for shard in shards for document in shard])
    corpus = open_corpus(str(write_corpus(tmp_path / "made", shards)), BYTES, NO_CACHE)

    def read_all_over(seed: int) -> int:
        draw, n_right = random.Random(seed), 0
        for _ in range(300):
            start, stop = sorted(draw.sample(range(len(tokens) + 1), 2))
            n_right += read(corpus, start, stop) == (tokens[start:stop], begins[start:stop])
        return n_right

    with ThreadPoolExecutor(max_workers=4) as threads:
        assert list(threads.map(read_all_over, range(4))) == [300] * 4


def test_a_corpus_of_100_gb_is_opened_and_read_with_few_bytes(tmp_path, monkeypatch):
    """100 shards of 1 GB, each with a million documents, whose borders are searched for in 8 MB of them."""
    n_shards, n_tokens, n_documents = 100, 5 * 10**8, 2**20
    folder = write_corpus(tmp_path / "large", [[[1]]] * n_shards)
    borders = array("Q", range(0, n_documents * 476, 476)) + array("Q", [n_tokens])
    (folder / "train-00000.documents").write_bytes(borders.tobytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    for number, shard in enumerate(manifest["splits"]["train"]):
        shard |= {"n_tokens": n_tokens, "n_documents": n_documents}
        os.truncate(folder / f"train-{number:05}.tokens", 2 * n_tokens)
        if number:
            (folder / f"train-{number:05}.documents").unlink()
            os.link(folder / "train-00000.documents", folder / f"train-{number:05}.documents")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    read_numbers, n_bytes = NumberFile.read, []

    def count(file: NumberFile, start: int, stop: int) -> bytes:
        n_bytes.append((stop - start) * file.width)
        return read_numbers(file, start, stop)

    monkeypatch.setattr(NumberFile, "read", count)
    corpus = open_corpus(str(folder), BYTES, NO_CACHE)
    assert corpus.n_tokens == n_shards * n_tokens and not n_bytes, "a start must not read the shards"
    corpus.read(7 * n_tokens + 10**8, 7 * n_tokens + 10**8 + 2048)
    assert 8 * n_documents < sum(n_bytes) < 8 * n_documents + 10_000, "all borders of one shard are checked"
    n_bytes.clear()
    for place in range(7 * n_tokens, 8 * n_tokens - 2048, n_tokens // 10):
        corpus.read(place, place + 2048)
    assert sum(n_bytes) < 10 * 10_000


# ---------------------------------------------------------------- what cannot be read


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize(("name", "is_open"), [*zip(FILES, [False, True, True, False], strict=True)])
def test_a_shard_that_is_cut_lost_or_written_to_during_the_run_is_named(folder, name, is_open):
    corpus = open_corpus(str(folder), BYTES, NO_CACHE)
    first = 7 * ("00001" in name)
    if is_open:
        corpus.read(first, first + 7)
    for n_bytes in (2,) if is_open else (1000, 2):
        os.truncate(folder / name, n_bytes)
        with pytest.raises(CorpusError, match=f"{name} has {n_bytes} bytes, and had"):
            corpus.read(first, first + 7)
    assert corpus.read(7 - first, 8 - first)[0].numel() == 1, "the other shard is sound"
    if not is_open:
        (folder / name).unlink()
        with pytest.raises(CorpusError, match=rf"{name} cannot be read \(No such file"):
            corpus.read(first, first + 7)


def write_borders(folder: Path, name: str, borders: list[int]) -> None:
    """As another program may have made them: the manifest has the SHA-256 of this index."""
    content = array("Q", borders).tobytes()
    (folder / f"{name}.documents").write_bytes(content)
    splits = read_manifest(folder).splits
    hashed = {"documents_sha256": sha256(content).hexdigest()}
    splits["train"] = [replace(shard, **hashed) if shard.name == name else shard for shard in splits["train"]]
    write_manifest(folder, splits, "uint16")


@pytest.mark.parametrize("name", FILES[1:3])
def test_a_flipped_bit_in_a_small_corpus_is_refused_when_it_is_opened(folder, name):
    flip_bit(folder / name, 0)
    with pytest.raises(CorpusError, match=f"{folder / name} has SHA-256 .* its manifest says"):
        open_corpus(str(folder), BYTES, NO_CACHE)
    assert open_corpus(str(folder), BYTES, NO_CACHE, split="validation").n_tokens == 2, "its files are sound"


WRONG_BORDERS = {  # what is wrong | borders | number that is named
    "not from the first token": ([1, 2, 3, 7], "number 0 of 0 to 3 is 1,"),
    "a document begins before the one before it": ([0, 3, 2, 7], "number 2 of 0 to 3 is 2,"),
    "a document is empty": ([0, 2, 2, 7], "number 2 of 0 to 3 is 2,"),
    "a document ends beyond the end": ([0, 2, 3, 8], "number 3 of 0 to 3 is 8,"),
    "a number that no signed one can hold": ([0, 2, 2**64 - 1, 7], f"number 2 of 0 to 3 is {2**64 - 1},"),
}


@pytest.mark.parametrize("what", WRONG_BORDERS)
@pytest.mark.parametrize("is_large", [False, True])
def test_wrong_borders_are_refused_before_a_token_of_their_shard_is_read(folder, monkeypatch, what, is_large):
    borders, named = WRONG_BORDERS[what]
    write_borders(folder, "train-00001", borders)
    if is_large:
        monkeypatch.setattr(corpus_folder, "SMALL_BYTES", 0)
        corpus = open_corpus(str(folder), BYTES, NO_CACHE)
        assert corpus.read(0, 7)[1].tolist() == [True, False, True, True, False, False, False]
    with pytest.raises(CorpusError) as refused:
        corpus.read(8, 10) if is_large else open_corpus(str(folder), BYTES, NO_CACHE)
    assert str(refused.value).startswith(f"{folder / 'train-00001.documents'}: {named}")


@pytest.mark.parametrize("wrong", [0, 2**17 - 1, 2**17, 2**17 + 500])
def test_one_wrong_border_of_many_is_found_wherever_it_is(tmp_path, wrong):
    n = 2**17 + 500
    borders = [3 * number for number in range(n + 1)]
    borders[wrong] += 3
    (tmp_path / "a.tokens").touch()
    os.truncate(tmp_path / "a.tokens", 2 * 3 * n)
    (tmp_path / "a.documents").write_bytes(array("Q", borders).tobytes())
    shard = OpenShard(ShardFiles(tmp_path / "a.tokens", 3 * n, tmp_path / "a.documents", n), torch.uint16)
    named = wrong if wrong in (0, n) else wrong + 1  # it is as large as the one behind it
    with pytest.raises(CorpusError, match=f"a.documents: number {named} of 0 to {n} is"):
        shard.check_borders()


def test_borders_are_checked_once_however_often_a_shard_is_opened(folder, monkeypatch):
    corpus, checked = open_corpus(str(folder), BYTES, NO_CACHE), []
    monkeypatch.setattr(OpenShard, "check_borders", lambda shard: checked.append(shard))
    for _ in range(3):
        corpus.open_shard.cache_clear()
        assert corpus.read(7, 14)[1].tolist() == [True, False, True, True, False, False, False]
    assert checked == []


# ---------------------------------------------------------------- beside the steps


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("number", [0, 2])
def test_the_rank_of_a_host_that_hashes_a_damaged_file_stops_and_names_it(folder, number):
    flip_bit(folder / FILES[number], 0)
    errors = {}
    for rank in range(3):
        try:
            with BackgroundHash([open_corpus(str(folder), BYTES, NO_CACHE)], part=rank, n_parts=3) as hashing:
                hashing.result.exception(timeout=60)
                if number == 0:  # else it is found beside the last step
                    hashing.check()
        except CorpusError as error:
            errors[rank] = str(error)
    assert errors.keys() == {number % 3}
    hashing = BackgroundHash([open_corpus(str(folder), BYTES, NO_CACHE)], part=number % 3, n_parts=3)
    with pytest.raises(KeyError), hashing:  # the run's own error comes first
        hashing.result.exception(timeout=60)
        raise KeyError
    assert f"{folder / FILES[number]} has SHA-256" in errors[number % 3] and "prepare it again" in errors[number % 3]


@pytest.mark.usefixtures("all_are_large")
def test_what_is_sound_is_logged_and_a_run_that_ends_first_does_not_wait(folder, caplog, monkeypatch):
    hashing = BackgroundHash([open_corpus(str(folder), BYTES, NO_CACHE)] * 2, part=0, n_parts=1)
    rests_s, clock_s = [], itertools.count()
    hashing.leaving = SimpleNamespace(wait=rests_s.append, set=lambda: None)
    with monkeypatch.context() as patches:
        patches.setattr(corpus_module, "time", SimpleNamespace(perf_counter=lambda: next(clock_s)))
        with hashing:
            hashing.result.result(timeout=60)
            hashing.check()
    assert set(rests_s) == {19}, "19 times as long as the work since the last rest: 5 % of a core"
    assert "hashed 4 files of corpora" in caplog.messages[-1] and "none has changed" in caplog.messages[-1]
    monkeypatch.setattr(corpus_module, "REST", 1e9)
    flip_bit(folder / FILES[3])
    with BackgroundHash([open_corpus(str(folder), BYTES, NO_CACHE)], part=0, n_parts=1) as hashing:
        hashing.check()
    assert "hashed 0 of 4 files of corpora" in caplog.messages[-1]


def test_a_small_corpus_leaves_nothing_to_hash_beside_the_steps(folder):
    with BackgroundHash([open_corpus(str(folder), BYTES, NO_CACHE)], part=0, n_parts=1) as hashing:
        assert hashing.hashes == {} and hashing.result is None
