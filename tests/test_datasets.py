"""Corpora with a name: prepared once into the cache, by the first process that comes, and again where damaged."""

import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest
from checkpoints import flip_bit
from made_corpora import BYTES
from torchtitan_lite.data.shards import choose_split

from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data import corpus as corpus_module
from torchtitan_lite.data import prepare, shards
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.corpus_folder import DATASETS, CorpusError
from torchtitan_lite.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(REPOSITORY / "assets" / "tokenizer"))


def write_files(folder: Path, n_files: int) -> list[Path]:
    files = [folder / f"{n % 2}" / f"{n // 2:04}.py" for n in range(n_files)]
    for n, path in enumerate(files):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"def function_{n}_{line}(x):\n    return x * {line} + {n}  # é\n" for line in range(n % 7)]
        path.write_text("".join(lines), encoding="utf-8")
    return files


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A small corpus "tiny" of 180 files, some of them empty."""
    files = write_files(tmp_path / "texts", 180)
    monkeypatch.setitem(DATASETS, "tiny", lambda: files)
    return files


def list_documents(cache: Path, tokenizer) -> list[list[int]]:
    """Those of both splits."""
    documents = []
    for split in ("train", "validation"):
        corpus = open_corpus("tiny", tokenizer, cache, split=split)
        for token, begin in zip(*map(list, corpus.read(0, corpus.n_tokens)), strict=True):
            if begin:
                documents.append([])
            documents[-1].append(int(token))
    return sorted(documents)


def encode_by_hand(files: list[Path], tokenizer) -> list[list[int]]:
    texts = [path.read_text(encoding="utf-8") for path in files]
    return sorted(tokenizer.encode(text, bos=True, eos=True) for text in texts if text)


def test_a_dataset_is_prepared_on_first_use_and_found_afterwards_also_where_nothing_may_be_written(
    files, tokenizer, tmp_path, monkeypatch
):
    assert list_documents(tmp_path / "cache", tokenizer) == encode_by_hand(files, tokenizer)
    monkeypatch.setattr(prepare, "prepare_files", lambda *_, **__: pytest.fail("prepared again"))

    def refuse_writing(path, mode="r", *rest, **options):
        assert not set(mode) & set("wax+"), f"{path} is opened for writing"
        return open(path, mode, *rest, **options)

    monkeypatch.setattr(prepare, "open", refuse_writing, raising=False)
    assert list_documents(tmp_path / "cache", tokenizer) == encode_by_hand(files, tokenizer)


def test_changed_text_and_another_tokenizer_are_prepared_anew_and_the_place_of_files_does_not_matter(
    files, tokenizer, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    before = open_corpus("tiny", tokenizer, cache).identity
    moved = write_files(tmp_path / "elsewhere", 180)
    with monkeypatch.context() as patches:
        patches.setitem(DATASETS, "tiny", lambda: moved)
        assert open_corpus("tiny", tokenizer, tmp_path / "other").identity == before
    files[3].write_text(files[3].read_text().replace("function", "functiom"))  # of the same size
    assert list_documents(cache, tokenizer) == encode_by_hand(files, tokenizer)
    assert open_corpus("tiny", tokenizer, cache).identity != before
    open_corpus("tiny", BYTES, cache)
    monkeypatch.setattr(prepare.platform, "python_version", lambda: "4.0.0")  # composes Unicode by other tables
    open_corpus("tiny", BYTES, cache)
    assert len(list(cache.glob("tiny-*/manifest.json"))) == 4


def test_another_version_of_the_files_holds_out_the_same_ones(files, tokenizer, tmp_path, monkeypatch):
    """So that the first run validates on the same text with every Python."""

    def hold_out(cache: str) -> list[str]:
        corpus = open_corpus("tiny", tokenizer, tmp_path / cache, split="validation")
        tokens, begins = corpus.read(0, corpus.n_tokens)
        pieces = tokens.tensor_split(begins.nonzero().flatten()[1:])
        return ["".join(re.findall(r"function_(\d+)_0", tokenizer.decode(piece.tolist()))) for piece in pieces]

    monkeypatch.setattr(corpus_module, "VALIDATION_SHARE_OF_DATASETS", 0.3)
    before = hold_out("old")
    for path in files:
        path.write_text(path.read_text(encoding="utf-8") and f"# newer\n{path.read_text(encoding='utf-8')}")
    held_out = [n for n in range(180) if n % 7 and choose_split(f"{n % 2}/{n // 2:04}.py", 0.3) == "validation"]
    assert hold_out("new") == before == [str(n) for n in held_out]


DAMAGE = {
    "cut": lambda folder: os.truncate(folder / "train-00000.tokens", 2),
    "absent": lambda folder: (folder / "manifest.json").unlink(),
    "flipped": lambda folder: flip_bit(folder / "train-00000.tokens", -4),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_named_and_prepared_again(files, tokenizer, tmp_path, damage, caplog):
    open_corpus("tiny", tokenizer, tmp_path / "cache")
    (manifest,) = (tmp_path / "cache").glob("tiny-*/manifest.json")
    DAMAGE[damage](manifest.parent)
    assert list_documents(tmp_path / "cache", tokenizer) == encode_by_hand(files, tokenizer)
    (line,) = [line for line in caplog.messages if "tiny is prepared again" in line]
    assert line.startswith(str(manifest.parent))


def test_a_dataset_without_files_is_refused(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "tiny", lambda: [])
    with pytest.raises(CorpusError, match="no files of tiny"):
        open_corpus("tiny", tokenizer, tmp_path)


def test_python_stdlib_is_sources_without_tests_or_installed_packages():
    files = DATASETS["python_stdlib"]()
    assert files == sorted(files) and len(files) > 300
    assert sum(path.stat().st_size for path in files) > 5e6
    assert {"json/decoder.py", "asyncio/events.py"} <= {f"{path.parent.name}/{path.name}" for path in files}
    folders = {part for path in files for part in path.parts}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    assert not [path for path in files if path.name.startswith("_sysconfigdata")]  # written when Python is built


# ---------------------------------------------------------------- several processes


def open_and_count(cache: Path, tokenizer, arrived, answers, die_after: int) -> None:
    """In a forked process: open the corpus "tiny", answer how many units it made; die after `die_after`, if above 0."""
    make_unit, made = shards.make_unit, []

    def count_and_make(*arguments):
        if len(made) == die_after > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        make_unit(*arguments)
        made.append(arguments)

    shards.make_unit = count_and_make  # of this process alone
    arrived.wait(timeout=60)
    answers.put((open_corpus("tiny", tokenizer, cache).identity, len(made)))


def test_processes_that_arrive_together_prepare_once_and_a_killed_ones_work_is_continued(
    files, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(shards, "SMALLEST_UNIT_BYTES", 2000)
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()

    def start(n_processes: int, die_after: int) -> list:
        arguments = (tmp_path / "cache", tokenizer, fork.Barrier(n_processes), answers, die_after)
        processes = [fork.Process(target=open_and_count, args=arguments) for _ in range(n_processes)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
        return [process.exitcode for process in processes]

    assert start(1, die_after=3) == [-signal.SIGKILL]
    assert not list(tmp_path.glob("cache/tiny-*/manifest.json"))
    assert start(3, die_after=0) == [0, 0, 0]  # they do not wait for the dead one's lock either
    identities, n_made = zip(*(answers.get() for _ in range(3)), strict=True)
    assert set(identities) == {open_corpus("tiny", tokenizer, tmp_path / "other").identity}
    n_units = len(list(tmp_path.glob("other/tiny-*/train-*.tokens")))
    assert sorted(n_made) == [0, 0, n_units - 3] and n_units > 6
    assert not list(tmp_path.glob("cache/*.unfinished"))
