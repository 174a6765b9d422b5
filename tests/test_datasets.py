"""Corpora with a name: prepared once into the cache, by the first process that comes, and again where damaged."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_corpora import BYTES

from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data import corpus as corpus_module
from torchtitan_lite.data import prepare
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.corpus_folder import DATASETS, CorpusError
from torchtitan_lite.data.tokenizer import load_tokenizer

UNIT_BYTES = 2000


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
    """A small corpus "tiny" of 90 files, some of them empty."""
    files = write_files(tmp_path / "texts", 90)
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
    monkeypatch.setattr(corpus_module, "prepare_files", lambda *_, **__: pytest.fail("prepared again"))

    def refuse_writing(path, mode="r", *rest, **options):
        assert not set(mode) & set("wax+"), f"{path} is opened for writing"
        return open(path, mode, *rest, **options)

    monkeypatch.setattr(corpus_module, "open", refuse_writing, raising=False)
    assert list_documents(tmp_path / "cache", tokenizer) == encode_by_hand(files, tokenizer)


def test_changed_text_and_another_tokenizer_are_prepared_anew_and_the_place_of_files_does_not_matter(
    files, tokenizer, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    before = open_corpus("tiny", tokenizer, cache).identity
    moved = write_files(tmp_path / "elsewhere", 90)
    with monkeypatch.context() as patches:
        patches.setitem(DATASETS, "tiny", lambda: moved)
        assert open_corpus("tiny", tokenizer, tmp_path / "other").identity == before
    files[3].write_text(files[3].read_text().replace("function", "functiom"))  # of the same size
    assert list_documents(cache, tokenizer) == encode_by_hand(files, tokenizer)
    assert open_corpus("tiny", tokenizer, cache).identity != before
    open_corpus("tiny", BYTES, cache)
    assert len(list(cache.glob("tiny-*/manifest.json"))) == 3


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "cut": lambda folder: os.truncate(folder / "train-00000.tokens", 2),
    "lost": lambda folder: (folder / "train-00000.documents").unlink(),
    "absent": lambda folder: (folder / "manifest.json").unlink(),
    "flipped": lambda folder: flip_bit(folder / "train-00000.tokens"),
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
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


# A process that opens the dataset "tiny". It says "ready", waits for a line, and tells how many units it made. With
# `die_after` above 0 it is killed when it has made so many.
OPEN_IN_PROCESS = """
import json, os, signal, sys
from pathlib import Path
from torchtitan_lite.data import corpus, prepare
from torchtitan_lite.data.corpus_folder import DATASETS
from torchtitan_lite.data.tokenizer import load_tokenizer

texts, cache, die_after, unit_bytes = sys.argv[1:]
DATASETS["tiny"] = lambda: sorted(Path(texts).iterdir())
prepare.SMALLEST_UNIT_BYTES = int(unit_bytes)
make_unit, made = prepare.make_unit, []

def count_and_make(*arguments):
    if len(made) == int(die_after) > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    make_unit(*arguments)
    made.append(arguments)

prepare.make_unit = count_and_make
tokenizer = load_tokenizer("assets/tokenizer")
print("ready", flush=True)
sys.stdin.readline()
identity = corpus.open_corpus("tiny", tokenizer, Path(cache)).identity
print(json.dumps({"n_made": len(made), "identity": identity}))
"""


def start_process(texts: Path, cache: Path, *, die_after: int = 0) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", OPEN_IN_PROCESS, str(texts), str(cache), str(die_after), str(UNIT_BYTES)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_processes_that_arrive_together_prepare_once_and_a_killed_ones_work_is_continued(
    files, tokenizer, tmp_path, monkeypatch
):
    texts, cache = files[0].parent, tmp_path / "cache"
    killed = start_process(texts, cache, die_after=3)
    killed.communicate("go\n", timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not list(cache.glob("tiny-*/manifest.json"))
    processes = [start_process(texts, cache) for _ in range(3)]  # they do not wait for the dead one's lock either
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    monkeypatch.setattr(prepare, "SMALLEST_UNIT_BYTES", UNIT_BYTES)
    assert {answer["identity"] for answer in answers} == {open_corpus("tiny", tokenizer, tmp_path / "other").identity}
    n_units = len(list((tmp_path / "other").glob("tiny-*/train-*.tokens")))
    assert sorted(answer["n_made"] for answer in answers) == [0, 0, n_units - 3] and n_units > 6
    assert not list(cache.glob("*.unfinished"))
