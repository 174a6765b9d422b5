"""Corpora that are not what was prepared: each is refused by the file that is wrong, at once or beside the steps."""

import logging
import os
from array import array
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from made_corpora import BYTES, write_corpus, write_manifest

from torchtitan_lite.data import background_hash, corpora
from torchtitan_lite.data.background_hash import BackgroundHash
from torchtitan_lite.data.corpora import CorpusError, read_manifest
from torchtitan_lite.data.corpus import Corpus, IndexedShard, NumberFile, open_corpus

FILES = ["train-00000.documents", "train-00001.documents", "train-00000.tokens", "train-00001.tokens"]
BORDERS = [0, 2, 3, 7]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards of three documents with BORDERS."""
    return write_corpus(tmp_path / "made", [[[1, 2], [3], [4, 5, 6, 7]]] * 2, held_out=[[[8, 9]]])


@pytest.fixture
def all_are_large(monkeypatch, caplog) -> None:
    """No corpus is hashed when it is opened."""
    monkeypatch.setattr(corpora, "SMALL_BYTES", 0)
    caplog.set_level(logging.INFO, "torchtitan_lite")


def open_made(folder: Path) -> Corpus:
    return open_corpus(str(folder), BYTES, folder.parent)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def write_borders(folder: Path, name: str, borders: list[int]) -> None:
    """As another program may have made them: the manifest has the SHA-256 of this index."""
    content = array("Q", borders).tobytes()
    (folder / f"{name}.documents").write_bytes(content)
    splits = read_manifest(folder).splits
    hashed = {"documents_sha256": sha256(content).hexdigest()}
    splits["train"] = [replace(shard, **hashed) if shard.name == name else shard for shard in splits["train"]]
    write_manifest(folder, splits, "uint16")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_a_small_corpus_is_refused_when_it_is_opened(folder, name):
    flip_bit(folder / name)
    with pytest.raises(CorpusError, match=f"{folder / name} has SHA-256 .* its manifest says"):
        open_made(folder)
    assert open_corpus(str(folder), BYTES, folder.parent, split="held_out").n_tokens == 2, "its files are sound"


WRONG_BORDERS = {  # what is wrong | borders | number that is named
    "not from the first token": ([1, 2, 3, 7], "number 0 of 0 to 3 is 1,"),
    "a document begins before the one before it": ([0, 3, 2, 7], "number 2 of 0 to 3 is 2,"),
    "a document is empty": ([0, 2, 2, 7], "number 2 of 0 to 3 is 2,"),
    "all are zero": ([0, 0, 0, 0], "number 1 of 0 to 3 is 0,"),
    "a document ends beyond the end": ([0, 2, 3, 8], "number 3 of 0 to 3 is 8,"),
    "the last document ends before the end": ([0, 2, 3, 6], "number 3 of 0 to 3 is 6,"),
    "a document begins beyond the end": ([0, 2, 9, 7], "number 3 of 0 to 3 is 7,"),
    "a number that no signed one can hold": ([0, 2, 2**64 - 1, 7], f"number 2 of 0 to 3 is {2**64 - 1},"),
}


@pytest.mark.parametrize("what", WRONG_BORDERS)
@pytest.mark.parametrize("is_large", [False, True])
def test_wrong_borders_are_refused_before_a_token_of_their_shard_is_read(folder, monkeypatch, what, is_large):
    borders, named = WRONG_BORDERS[what]
    write_borders(folder, "train-00001", borders)
    if is_large:
        monkeypatch.setattr(corpora, "SMALL_BYTES", 0)
        corpus = open_made(folder)
        assert corpus.read(0, 7)[1].tolist() == [True, False, True, True, False, False, False]
    with pytest.raises(CorpusError) as refused:
        corpus.read(8, 10) if is_large else open_made(folder)
    assert str(refused.value).startswith(f"{folder / 'train-00001.documents'}: {named}")


@pytest.mark.parametrize("wrong", [0, 127, 128, 2**17 - 1, 2**17, 2**17 + 1, 2**17 + 500])
def test_one_wrong_border_of_many_is_found_wherever_it_is(tmp_path, wrong):
    n = 2**17 + 500
    borders = [3 * number for number in range(n + 1)]
    borders[wrong] += 3
    (tmp_path / "a.tokens").touch()
    os.truncate(tmp_path / "a.tokens", 2 * 3 * n)
    (tmp_path / "a.documents").write_bytes(array("Q", borders).tobytes())
    counts = {"n_tokens": 3 * n, "n_documents": n, "marks": array("Q")}
    named = wrong if wrong in (0, n) else wrong + 1  # it is as large as the one behind it
    with pytest.raises(CorpusError, match=f"a.documents: number {named} of 0 to {n} is"):
        IndexedShard(tmp_path / "a.tokens", tmp_path / "a.documents", torch.uint16, **counts)


def test_borders_are_read_once_however_often_a_shard_is_opened(folder, monkeypatch):
    corpus, read, indexes_read = open_made(folder), NumberFile.read, []

    def count(file: NumberFile, start: int, stop: int) -> bytes:
        indexes_read.append(file.path.suffix)
        return read(file, start, stop)

    monkeypatch.setattr(NumberFile, "read", count)
    for _ in range(3):
        corpus.opened.clear()
        assert corpus.read(7, 14)[1].tolist() == [True, False, True, True, False, False, False]
    assert indexes_read == [".tokens", ".documents"] * 3


@pytest.mark.parametrize(("name", "n_bytes"), [("train-00000.documents", 8), ("train-00000.tokens", 2)])
def test_a_file_that_is_cut_while_it_is_open_is_named_by_the_next_read(folder, name, n_bytes):
    corpus = open_made(folder)
    corpus.read(0, 7)
    size = (folder / name).stat().st_size
    os.truncate(folder / name, n_bytes)
    with pytest.raises(CorpusError, match=f"{folder / name} has {n_bytes} bytes, and had {size} before"):
        corpus.read(0, 7)


# ---------------------------------------------------------------- beside the steps


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("number", range(len(FILES)))
def test_the_rank_of_a_host_that_hashes_a_damaged_file_stops_and_names_it(folder, number):
    flip_bit(folder / FILES[number])
    said = {}
    for rank in range(3):
        try:
            with BackgroundHash([open_made(folder)], part=rank, n_parts=3) as hashing:
                hashing.result.exception(timeout=60)
                hashing.check()
        except CorpusError as error:
            said[rank] = str(error)
    assert said.keys() == {number % 3}
    assert f"{folder / FILES[number]} has SHA-256" in said[number % 3] and "prepare it again" in said[number % 3]


@pytest.mark.usefixtures("all_are_large")
def test_damage_that_is_found_beside_the_last_step_is_told_too(folder):
    flip_bit(folder / FILES[3])
    with pytest.raises(CorpusError, match=FILES[3]):
        with BackgroundHash([open_made(folder)], part=0, n_parts=1) as hashing:
            hashing.result.exception(timeout=60)


@pytest.mark.usefixtures("all_are_large")
def test_what_is_sound_is_logged_once_it_is_hashed(folder, caplog):
    with BackgroundHash([open_made(folder)] * 2, part=0, n_parts=1) as hashing:
        hashing.result.result(timeout=60)
        hashing.check()
    (line,) = [line for line in caplog.messages if "hashed" in line]
    assert line.startswith("hashed 4 files of corpora") and line.endswith("none has changed")


@pytest.mark.usefixtures("all_are_large")
def test_a_run_that_ends_first_does_not_wait_and_says_how_many_were_hashed(folder, caplog, monkeypatch):
    monkeypatch.setattr(background_hash, "REST", 1e9)
    flip_bit(folder / FILES[3])
    with BackgroundHash([open_made(folder)], part=0, n_parts=1) as hashing:
        hashing.check()
    assert "hashed 0 of 4 files of corpora" in caplog.messages[-1]


def test_a_small_corpus_leaves_nothing_to_hash_beside_the_steps(folder):
    with BackgroundHash([open_made(folder)], part=0, n_parts=1) as hashing:
        assert hashing.hashes == {} and hashing.result is None
