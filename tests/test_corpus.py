"""Opening corpora and reading any stretch of them, however large, with little memory; named ones are prepared once."""

import json
import os
import random
import signal
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_corpora import BYTES, write_corpus, write_flat

from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data import corpus as corpora_code
from torchtitan_lite.data import units
from torchtitan_lite.data.corpora import NAMED, CorpusError
from torchtitan_lite.data.corpus import Corpus, open_corpus
from torchtitan_lite.data.tokenizer import load_tokenizer

NO_CACHE = Path("nowhere")
EOS = BYTES.eos_id


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


# ---------------------------------------------------------------- any stretch


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_every_stretch_of_a_prepared_corpus_is_as_its_documents_say(tmp_path, dtype):
    draw = random.Random(0)
    shards = [make_documents(draw, n) for n in (3, 1, 6, 2)]
    tokens, begins = spell([document for shard in shards for document in shard])
    corpus = open_corpus(str(write_corpus(tmp_path / "made", shards, dtype=dtype)), BYTES, NO_CACHE)
    assert corpus.n_tokens == len(tokens)
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            assert read(corpus, start, stop) == (tokens[start:stop], begins[start:stop]), (start, stop)


def test_ids_above_the_signed_range_come_back_unchanged(tmp_path):
    small = write_corpus(tmp_path / "small", [[[65535, 32768, 1]]])
    assert read(open_corpus(str(small), BYTES, NO_CACHE), 0, 3)[0] == [65535, 32768, 1]
    large = write_corpus(tmp_path / "large", [[[2**32 - 1, 2**31, 65536]]], dtype="uint32")
    assert read(open_corpus(str(large), BYTES, NO_CACHE), 0, 3)[0] == [2**32 - 1, 2**31, 65536]


def test_the_splits_of_a_corpus_are_read_apart(tmp_path):
    folder = str(write_corpus(tmp_path / "made", [[[1, 2]], [[3]]], held_out=[[[4, 5], [6]]]))
    train, held_out = (open_corpus(folder, BYTES, NO_CACHE, split=split) for split in ("train", "held_out"))
    assert read(train, 0, 3) == ([1, 2, 3], [True, False, True])
    assert read(held_out, 0, 3) == ([4, 5, 6], [True, False, True])
    assert train.identity != held_out.identity


@pytest.mark.parametrize(("dtype", "vocab_size"), [("uint16", 2**16), ("uint32", 2**16 + 1)])
def test_every_stretch_of_a_flat_file_is_read_in_place_and_documents_end_with_eos(tmp_path, dtype, vocab_size):
    tokens = [7, 8, EOS, 9, EOS, EOS, 3, 65535, 4]
    begins = [True, False, False, True, False, True, True, False, False]
    path = write_flat(tmp_path / "train.bin", tokens, dtype)
    corpus = open_corpus(str(path), replace(BYTES, vocab_size=vocab_size), NO_CACHE)
    assert corpus.n_tokens == len(tokens)
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            assert read(corpus, start, stop) == (tokens[start:stop], begins[start:stop]), (start, stop)
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.bin"]


# ---------------------------------------------------------------- identity


def test_a_corpus_keeps_its_identity_where_it_is_moved(tmp_path):
    folder = write_corpus(tmp_path / "made", [[[1, 2], [3]]])
    before = open_corpus(str(folder), BYTES, NO_CACHE).identity
    (tmp_path / "elsewhere").mkdir()
    folder.rename(tmp_path / "elsewhere" / "made")
    assert open_corpus(str(tmp_path / "elsewhere" / "made"), BYTES, NO_CACHE).identity == before


def test_one_token_or_border_more_gives_another_identity(tmp_path):
    variants = [[[[1, 2], [3]]], [[[1, 2], [4]]], [[[1], [2, 3]]], [[[1, 2, 3]]], [[[1, 2], [3], [3]]]]
    folders = [write_corpus(tmp_path / str(n), shards) for n, shards in enumerate(variants)]
    assert len({open_corpus(str(folder), BYTES, NO_CACHE).identity for folder in folders}) == len(variants)


def test_the_identity_of_a_flat_file_tells_contents_and_borders_apart(tmp_path):
    tokens = [*range(300_000 % 2**16)] * 3
    paths = [write_flat(tmp_path / "a.bin", tokens), write_flat(tmp_path / "b.bin", [*tokens, 1])]
    tokens[len(tokens) // 2] += 1
    paths.append(write_flat(tmp_path / "c.bin", tokens))
    identities = [open_corpus(str(path), BYTES, NO_CACHE).identity for path in paths]
    identities += [
        open_corpus(str(paths[0]), replace(BYTES, eos_id=256), NO_CACHE).identity,
        open_corpus(str(paths[0]), replace(BYTES, vocab_size=2**17), NO_CACHE).identity,
    ]
    assert len(set(identities)) == 5
    assert open_corpus(str(paths[0]), replace(BYTES, identity="other"), NO_CACHE).identity == identities[0]


def test_a_change_at_either_end_of_a_large_flat_file_gives_another_identity(tmp_path):
    path = write_flat(tmp_path / "a.bin", [1])
    os.truncate(path, 10**9)
    identities = set()
    for place in (0, 10**9 // 2, 10**9 - 2):
        with open(path, "r+b") as file:
            file.seek(place // 2 * 2)
            file.write(b"\x07\x00")
        identities.add(open_corpus(str(path), BYTES, NO_CACHE).identity)
    assert len(identities) == 3


# ---------------------------------------------------------------- large ones


def test_a_corpus_of_more_shards_than_may_be_open_is_read_all_over(tmp_path):
    shards = [make_documents(random.Random(n), 2) for n in range(300)]
    folder = str(write_corpus(tmp_path / "made", shards))
    tokens, begins = spell([document for shard in shards for document in shard])
    corpus = open_corpus(folder, BYTES, NO_CACHE)
    assert corpus.opened == {}, "a start must not open every file"
    n_open = len(os.listdir("/proc/self/fd"))
    assert read(corpus, 0, len(tokens)) == (tokens, begins)
    assert len(os.listdir("/proc/self/fd")) <= n_open + 2 * corpora_code.MOST_OPEN_SHARDS
    del corpus
    assert len(os.listdir("/proc/self/fd")) <= n_open


def test_threads_that_read_one_corpus_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora_code, "MOST_OPEN_SHARDS", 2)
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


# Opens a corpus, reads its first batch and then windows all over it. Prints how many bytes were read up to the first
# batch, and by how many the process has grown at most in the end.
READ_LARGE = """
import os, random, sys
from pathlib import Path
import torch
from torchtitan_lite.components.corpus import open_corpus
from torchtitan_lite.components.data import SampleReader, SampleStream
from torchtitan_lite.components.tokenizer import load_tokenizer

def count_read_bytes():
    return int(Path("/proc/self/io").read_text().split()[1])

def measure_resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

name, window, n_windows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
tokenizer = load_tokenizer("bytes")
torch.zeros(window).long().sum()
read_before, resident_before = count_read_bytes(), measure_resident_bytes()
corpus = open_corpus(name, tokenizer, Path("nowhere"))
stream = SampleStream(SampleReader([corpus], 2048, 258), global_batch_size=8, seed=0)
stream.batch(12345, range(8))
read_bytes, most = count_read_bytes() - read_before, 0
draw = random.Random(0)
for n in range(n_windows):
    start = draw.randrange(corpus.n_tokens - window)
    corpus.read(start, start + window)
    most = max(most, measure_resident_bytes() - resident_before)
print(corpus.n_tokens, read_bytes, most)
"""


def read_large(name: Path, window: int, n_windows: int) -> tuple[int, int, int]:
    """n_tokens, bytes read up to the first batch, bytes of growth."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READ_LARGE, str(name), str(window), str(n_windows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    n_tokens, read_bytes, growth = map(int, done.stdout.split())
    return n_tokens, read_bytes, growth


def test_a_flat_file_of_100_gb_starts_at_once_and_takes_little_memory(tmp_path):
    path = write_flat(tmp_path / "large.bin", [1])
    os.truncate(path, 100 * 10**9)
    n_tokens, read_bytes, growth = read_large(path, 2**16, 3000)  # 400 MB in windows
    assert n_tokens == 50 * 10**9
    assert read_bytes < 40e6, "the file must not be read to open it"
    assert growth < 100e6


def test_a_prepared_corpus_of_100_gb_starts_at_once_and_takes_little_memory(tmp_path):
    """100 shards of 1 GB, each with a million documents, whose places are looked for in 8 MB of them."""
    n_shards, n_tokens, n_documents = 100, 5 * 10**8, 2**20
    folder = write_corpus(tmp_path / "large", [[[1]]] * n_shards)
    begins = array("Q", range(0, n_documents * 476, 476)) + array("Q", [n_tokens])
    (folder / "train-00000.documents").write_bytes(begins.tobytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    for number, shard in enumerate(manifest["splits"]["train"]):
        shard |= {"n_tokens": n_tokens, "n_documents": n_documents}
        os.truncate(folder / f"train-{number:05}.tokens", 2 * n_tokens)
        if number:
            (folder / f"train-{number:05}.documents").unlink()
            os.link(folder / "train-00000.documents", folder / f"train-{number:05}.documents")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    total, read_bytes, growth = read_large(folder, 2**13, 2000)
    assert total == n_shards * n_tokens
    assert read_bytes < 2e6 + 8 * begins.itemsize * len(begins), "of the shards of eight samples, borders are read"
    assert growth < 100e6


# ---------------------------------------------------------------- what cannot be read


def test_an_absent_corpus_and_an_empty_split_are_refused_by_name(tmp_path):
    for name in (tmp_path / "absent", tmp_path / "absent.bin"):
        with pytest.raises(CorpusError, match=f"there is no corpus {name}"):
            open_corpus(str(name), BYTES, NO_CACHE)
    folder = write_corpus(tmp_path / "made", [[[1, 2]]])
    with pytest.raises(CorpusError, match=f"{folder} has no held_out documents"):
        open_corpus(str(folder), BYTES, NO_CACHE, split="held_out")


@pytest.mark.parametrize("name", ["train-00001.tokens", "train-00001.documents"])
def test_a_shard_that_is_cut_or_lost_during_the_run_is_named(tmp_path, name):
    folder = write_corpus(tmp_path / "made", [[[1, 2]], [[3, 4]]])
    corpus = open_corpus(str(folder), BYTES, NO_CACHE)
    os.truncate(folder / name, 2)
    with pytest.raises(CorpusError, match=f"{name} has 2 bytes, and had"):
        corpus.read(1, 3)
    (folder / name).unlink()
    with pytest.raises(CorpusError, match=rf"{name} cannot be read \(No such file"):
        corpus.read(1, 3)
    assert read(corpus, 0, 2)[0] == [1, 2]


def test_a_shard_that_is_cut_while_it_is_open_is_named(tmp_path):
    folder = write_corpus(tmp_path / "made", [[[1, 2, 3, 4]]])
    corpus = open_corpus(str(folder), BYTES, NO_CACHE)
    assert read(corpus, 0, 4)[0] == [1, 2, 3, 4]
    os.truncate(folder / "train-00000.tokens", 6)
    assert read(corpus, 0, 3)[0] == [1, 2, 3]
    with pytest.raises(CorpusError, match="train-00000.tokens has 6 bytes, and had 8 before"):
        corpus.read(1, 4)


# ---------------------------------------------------------------- named corpora


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
    monkeypatch.setitem(NAMED, "tiny", lambda: files)
    return files


def list_documents(cache: Path, tokenizer) -> list[list[int]]:
    """Of both splits."""
    documents = []
    for split in ("train", "held_out"):
        corpus = open_corpus("tiny", tokenizer, cache, split=split)
        tokens, begins = read(corpus, 0, corpus.n_tokens)
        for token, begin in zip(tokens, begins, strict=True):
            if begin:
                documents.append([])
            documents[-1].append(token)
    return sorted(documents)


def encode_by_hand(files: list[Path], tokenizer) -> list[list[int]]:
    texts = [path.read_text(encoding="utf-8") for path in files]
    encode = tokenizer.encoding.encode_ordinary
    return sorted([tokenizer.bos_id, *encode(text), tokenizer.eos_id] for text in texts if text)


def test_a_named_corpus_is_prepared_on_first_use_and_found_afterwards(files, tokenizer, tmp_path, monkeypatch):
    assert list_documents(tmp_path / "cache", tokenizer) == encode_by_hand(files, tokenizer)
    monkeypatch.setattr(corpora_code, "prepare_files", lambda *_, **__: pytest.fail("prepared again"))
    assert list_documents(tmp_path / "cache", tokenizer) == encode_by_hand(files, tokenizer)


def test_a_prepared_cache_need_not_be_writable(files, tokenizer, tmp_path, monkeypatch):
    before = open_corpus("tiny", tokenizer, tmp_path / "cache").identity

    def refuse_writing(path, mode="r", *rest, **options):
        assert not set(mode) & set("wax+"), f"{path} is opened for writing"
        return open(path, mode, *rest, **options)

    monkeypatch.setattr(corpora_code, "open", refuse_writing, raising=False)
    assert open_corpus("tiny", tokenizer, tmp_path / "cache").identity == before


def test_changed_text_and_another_tokenizer_are_prepared_anew(files, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    before = open_corpus("tiny", tokenizer, cache).identity
    text = files[3].read_text()
    files[3].write_text(text.replace("function", "functiom"))  # of the same size
    assert list_documents(cache, tokenizer) == encode_by_hand(files, tokenizer)
    assert open_corpus("tiny", tokenizer, cache).identity != before
    open_corpus("tiny", BYTES, cache)
    assert len(list(cache.glob("tiny-*/manifest.json"))) == 3


def test_the_identity_of_a_named_corpus_does_not_depend_on_where_its_files_lie(files, tokenizer, tmp_path, monkeypatch):
    here = open_corpus("tiny", tokenizer, tmp_path / "cache").identity
    moved = write_files(tmp_path / "elsewhere", 90)
    monkeypatch.setitem(NAMED, "tiny", lambda: moved)
    assert open_corpus("tiny", tokenizer, tmp_path / "other_cache").identity == here


def cut_tokens(folder: Path) -> None:
    os.truncate(folder / "train-00000.tokens", 2)


def lose_documents(folder: Path) -> None:
    (folder / "train-00000.documents").unlink()


def tear_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 20)


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def flip_bit(folder: Path) -> None:
    content = bytearray((folder / "train-00000.tokens").read_bytes())
    content[-4] ^= 1
    (folder / "train-00000.tokens").write_bytes(content)


@pytest.mark.parametrize("damage", [cut_tokens, lose_documents, tear_manifest, lose_manifest, flip_bit])
def test_a_damaged_cache_is_named_and_prepared_again(files, tokenizer, tmp_path, damage, caplog):
    cache = tmp_path / "cache"
    open_corpus("tiny", tokenizer, cache)
    (manifest,) = cache.glob("tiny-*/manifest.json")
    damage(manifest.parent)
    assert list_documents(cache, tokenizer) == encode_by_hand(files, tokenizer)
    (line,) = [line for line in caplog.messages if "tiny is prepared again" in line]
    assert line.startswith(str(manifest.parent))


def test_a_named_corpus_without_files_is_refused(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(NAMED, "tiny", lambda: [])
    with pytest.raises(CorpusError, match="no files of tiny"):
        open_corpus("tiny", tokenizer, tmp_path)


def test_python_stdlib_is_sources_without_tests_or_installed_packages():
    files = NAMED["python_stdlib"]()
    assert files == sorted(files) and len(files) > 300
    assert sum(path.stat().st_size for path in files) > 5e6
    names = {f"{path.parent.name}/{path.name}" for path in files}
    assert {"json/decoder.py", "asyncio/events.py"} <= names
    folders = {part for path in files for part in path.parts}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


UNIT_BYTES = 2000

# A process that opens the named corpus "tiny" of a folder. It says "ready", waits for a line, and tells how many
# documents it encoded. With `die_after` above 0 it is killed while it encodes, after so many.
OPEN_IN_PROCESS = """
import json, os, signal, sys
from pathlib import Path
from torchtitan_lite.components import corpus
from torchtitan_lite.components.preparation import units
from torchtitan_lite.components.tokenizer import load_tokenizer
from torchtitan_lite.corpora import NAMED

texts, cache, die_after, unit_bytes = sys.argv[1:]
NAMED["tiny"] = lambda: sorted(Path(texts).iterdir())
units.SMALLEST_UNIT_BYTES = int(unit_bytes)
write_document, written = units.write_document, []

def count_and_write(*arguments):
    written.append(arguments)
    if len(written) == int(die_after) + 1 > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    write_document(*arguments)

units.write_document = count_and_write
tokenizer = load_tokenizer("assets/tokenizer")
print("ready", flush=True)
sys.stdin.readline()
identity = corpus.open_corpus("tiny", tokenizer, Path(cache)).identity
print(json.dumps({"n_encoded": len(written), "identity": identity}))
"""


def start_process(texts: Path, cache: Path, *, die_after: int = 0) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", OPEN_IN_PROCESS, str(texts), str(cache), str(die_after), str(UNIT_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_processes_that_arrive_together_prepare_once(tmp_path):
    texts = tmp_path / "texts"
    n_documents = sum(path.stat().st_size > 0 for path in write_files(texts, 500))
    processes = [start_process(texts, tmp_path / "cache") for _ in range(3)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert sorted(answer["n_encoded"] for answer in answers) == [0, 0, n_documents]
    assert len({answer["identity"] for answer in answers}) == 1


def test_a_process_killed_while_preparing_leaves_nothing_that_counts_and_its_work_to_the_next(
    files, tokenizer, tmp_path, monkeypatch
):
    texts, cache = files[0].parent, tmp_path / "cache"
    killed = start_process(texts, cache, die_after=60)
    killed.communicate("go\n", timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not list(cache.glob("tiny-*/manifest.json"))
    following = start_process(texts, cache)  # does not wait for the dead one's lock either
    found = json.loads(following.communicate("go\n", timeout=120)[0].split("\n")[1])
    assert 0 < found["n_encoded"] < len(encode_by_hand(files, tokenizer))
    assert not list(cache.glob("*.unfinished"))
    monkeypatch.setattr(units, "SMALLEST_UNIT_BYTES", UNIT_BYTES)
    assert open_corpus("tiny", tokenizer, tmp_path / "other").identity == found["identity"]
