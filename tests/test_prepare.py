"""Preparing a corpus: the bytes against an oracle that reads everything at once; what is refused, and what is said."""

import gzip
import io
import json
import os
import random
import shutil
import tracemalloc
from array import array
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import flip_bit
from made_corpora import Killed, delete, kill_at, make_text, prepare_some, read_folder, write_files, write_inputs
from torchtitan_lite.data.shards import Recipe, choose_split, make_plan, make_unit_in_worker

from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data import documents
from torchtitan_lite.data import tokenizer as tokenizer_module
from torchtitan_lite.data.corpus_folder import SPLITS, CorpusError, CorpusManifest, read_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.tools.corpora import command as tool
from torchtitan_lite.tools.corpora.prepare import hold, prepare_files
from torchtitan_lite.tools.corpora.text_files import PreparationError, Source
from torchtitan_lite.tools.prepare import Progress


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(REPOSITORY / "assets" / "tokenizer"))


def read_split(folder: Path, manifest: CorpusManifest, split: str) -> list[list[int]]:
    """The ids of each document, by the files alone."""
    documents = []
    for shard in manifest.splits[split]:
        ids = array("H" if manifest.dtype == "uint16" else "I", (folder / f"{shard.name}.tokens").read_bytes())
        begins = array("Q", (folder / f"{shard.name}.documents").read_bytes())
        assert begins[0] == 0 and begins[-1] == len(ids) == shard.n_tokens and len(begins) == shard.n_documents + 1
        documents += [list(ids[begins[n] : begins[n + 1]]) for n in range(shard.n_documents)]
    return documents


# ---------------------------------------------------------------- what is made


@pytest.mark.parametrize("seed", range(4))
def test_shards_hold_every_document_in_order_as_the_tokenizer_encodes_it(tmp_path, tokenizer, small_units, seed):
    draw = random.Random(seed)
    files, texts = write_files(tmp_path / "in", draw, n_files=draw.randrange(1, 10))
    texts += ["the last one"]
    files.append(tmp_path / "in" / "last.txt")
    files[-1].write_text("the last one")
    share = draw.choice([0, 0.1, 0.5])
    try:
        made = prepare_files(files, tmp_path / "out", tokenizer, validation_share=share)
    except PreparationError as error:
        assert "holds out all" in str(error) and share > 0
        return

    manifest = read_manifest(tmp_path / "out")
    assert manifest == made and (manifest.dtype, manifest.vocab_size) == ("uint16", 2304)
    assert manifest.tokenizer_identity == tokenizer.identity and manifest.held_out_share == share
    for ours, split in SPLITS.items():
        expected = [text for text in texts if text and choose_split(text, share) == ours]
        found = read_split(tmp_path / "out", manifest, split)
        assert found == [tokenizer.encode(text, bos=True, eos=True) for text in expected]
        assert sum(shard.n_text_bytes for shard in manifest.splits[split]) == sum(len(t.encode()) for t in expected)
        for shard in manifest.splits[split]:
            assert sha256((tmp_path / "out" / f"{shard.name}.tokens").read_bytes()).hexdigest() == shard.tokens_sha256
    sources = [json.loads(line) for line in (tmp_path / "out" / "sources.jsonl").read_text().splitlines()]
    assert sources == [{"path": str(path), "bytes": path.stat().st_size} for path in files]
    assert not (tmp_path / "out.unfinished").exists()


@pytest.mark.parametrize("suffix", [".txt.gz", ".jsonl"])
def test_a_long_document_has_the_ids_of_its_whole_text(tmp_path, tokenizer, monkeypatch, suffix):
    for module in (documents, tokenizer_module):
        monkeypatch.setattr(module, "MAX_CHARACTERS", 1000)
    text = make_text(random.Random(1), 600) + " " * 1500 + "x" + "é" * 800
    content = (json.dumps({"text": text}) if suffix == ".jsonl" else text).encode()
    path = tmp_path / f"long{suffix}"
    path.write_bytes(gzip.compress(content, 1) if suffix.endswith(".gz") else content)
    manifest = prepare_files([path], tmp_path / "out", tokenizer, validation_share=0)
    assert read_split(tmp_path / "out", manifest, "train") == [tokenizer.encode(text, bos=True, eos=True)]


def test_a_large_vocabulary_takes_four_bytes_and_bos_may_be_missing(tmp_path):
    numbers = {"bos_id": None, "eos_id": 2**32 - 1, "vocab_size": 2**32}  # the last id has all bits set
    tokenizer = SimpleNamespace(**numbers, identity="points", encode_packed=lambda text: text.encode("utf-32-le"))
    (tmp_path / "a.txt").write_text("a😀")
    manifest = prepare_files([tmp_path / "a.txt"], tmp_path / "out", tokenizer, validation_share=0)
    assert manifest.dtype == "uint32"
    assert (tmp_path / "out" / "train-00000.tokens").read_bytes() == bytes.fromhex("61000000 00f60100 ffffffff")
    assert (tmp_path / "out" / "train-00000.documents").read_bytes() == bytes.fromhex("00" * 8 + "03" + "00" * 7)


def test_processes_change_no_byte(tmp_path, small_units, capsys):
    write_files(tmp_path / "in", random.Random(3), n_files=8)
    for n_processes in (1, 2):
        out = tmp_path / f"out{n_processes}"
        command = [str(tmp_path / "in"), "--out", str(out), "--held-out", "0.3", "--processes", str(n_processes)]
        assert tool.main(command) == 0
        assert read_folder(out) == read_folder(tmp_path / "out1")
    assert len(read_folder(tmp_path / "out1")) > 8  # several units had something to do
    with pytest.raises(PreparationError, match="was changed"):  # a worker that reads another tokenizer
        make_unit_in_worker(tmp_path, Recipe(0), "bytes", "identity of another", 0, [])


def test_what_says_that_a_corpus_is_whole_is_written_when_its_files_are_on_the_disk(tmp_path, tokenizer, monkeypatch):
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "a.txt").write_text("text")
    prepare_files([tmp_path / "a.txt"], tmp_path / "out", tokenizer, validation_share=0)
    unit = ["train-00000.tokens", "train-00000.documents", "corpus", "00000.json.unfinished", "units"]
    whole = ["sources.jsonl.unfinished", "corpus", "manifest.json.unfinished", "corpus", tmp_path.name]
    assert synced[2:] == [*unit, *whole]  # the first two are the plan and its folder


@pytest.mark.parametrize(
    ("suffix", "scale"), [(".txt", 1), (".txt", 10**7), (".jsonl.gz", 10**10), (".jsonl", 10**4), (".jsonl", 10**10)]
)
def test_units_hold_every_byte_once_in_order_and_are_neither_many_nor_huge(tokenizer, suffix, scale):
    draw = random.Random(scale)
    sizes = [draw.randrange(100) * scale for _ in range(200)]
    sources = [Source(f"{number}{suffix}", size, 0) for number, size in enumerate(sizes)]
    units = make_plan(sources, Path("out"), Recipe(0), tokenizer).units
    parts = [part for unit in units for part in unit]
    for source in sources:
        mine = [part for part in parts if part.source == source]
        assert mine[0].start == 0 and mine[-1].stop == source.n_bytes
        assert [part.stop for part in mine[:-1]] == [part.start for part in mine[1:]]
    numbers = [int(part.source.path.split(".")[0]) for part in parts]
    assert numbers == sorted(numbers) and len(units) <= 1024 + len(sizes)
    if suffix == ".jsonl":
        unit_bytes = max(2**22, min(sum(sizes) // 256, 2**28), sum(sizes) // 1024)
        assert max(sum(part.stop - part.start for part in unit) for unit in units) < 2 * unit_bytes


def test_validation_documents_are_a_share_chosen_by_the_text_alone():
    texts = [f"document {number}" for number in range(20_000)]
    chosen = [text for text in texts if choose_split(text, 0.01) == "validation"]
    assert 150 < len(chosen) < 250
    assert set(chosen) < {text for text in texts if choose_split(text, 0.02) == "validation"}
    assert all(choose_split(text, 0) == "train" for text in texts)
    # fixed for ever: another choice would move documents between the splits of corpora that users compare
    assert [text for text in "abcdefgh" if choose_split(text, 0.5) == "validation"] == list("bcdef")


# ---------------------------------------------------------------- refusals


def leave_unfinished(folder: Path, monkeypatch) -> None:
    """Stops a run in `folder` when some units are finished."""
    with monkeypatch.context() as patches:
        kill_at(25, patches)
        with pytest.raises(Killed):
            prepare_some(folder)
    assert list((folder / "out.unfinished" / "units").glob("*.json"))


def test_what_another_command_left_is_refused_unless_it_starts_over(
    tmp_path, small_units, monkeypatch, tokenizer, capsys
):
    files, _ = write_files(tmp_path / "in", random.Random(3), n_files=8)
    leave_unfinished(tmp_path, monkeypatch)
    for option, value in (("field", "body"), ("held-out", "0.4"), ("tokenizer", "bytes")):
        assert prepare_some(tmp_path, f"--{option}", value) == 2
        assert f"(other: {option})" in capsys.readouterr().err
    os.utime(files[0], ns=(1, 1))  # written again, with as many bytes
    assert prepare_some(tmp_path) == 2
    message = capsys.readouterr().err
    assert "(other: files)" in message and "--start-over" in message
    (tmp_path / "in" / "new.txt").write_text("one more")
    assert prepare_some(tmp_path, "--start-over") == 0
    found = read_folder(tmp_path / "out")
    delete(tmp_path / "out")
    assert prepare_some(tmp_path) == 0 and read_folder(tmp_path / "out") == found
    delete(tmp_path / "out")
    leave_unfinished(tmp_path, monkeypatch)
    os.truncate(next((tmp_path / "out.unfinished" / "corpus").glob("*-00000.tokens")), 2)
    assert prepare_some(tmp_path) == 1 and "changed since" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # prepare_files always starts over
    one = [tmp_path / "in" / "new.txt"]
    manifest = prepare_files(one, tmp_path / "out", tokenizer, validation_share=0)
    assert read_split(tmp_path / "out", manifest, "train") == [tokenizer.encode("one more", bos=True, eos=True)]


def test_a_second_prepare_says_that_the_first_is_at_work(tmp_path, capsys):
    write_inputs(tmp_path, {"a.txt": "text"})
    (tmp_path / "out.unfinished").mkdir()
    with hold(tmp_path / "out.unfinished"):
        assert prepare_some(tmp_path) == 1
        assert "Another process prepares a corpus" in capsys.readouterr().err


def test_a_corpus_is_replaced_only_where_that_is_asked_for(tmp_path, capsys):
    write_inputs(tmp_path, {"a.txt": "first"})
    assert prepare_some(tmp_path, "--held-out", "0") == 0
    first = read_folder(tmp_path / "out")
    (tmp_path / "in" / "a.txt").write_text("second")
    assert prepare_some(tmp_path, "--held-out", "0") == 2
    assert "--overwrite" in capsys.readouterr().err and read_folder(tmp_path / "out") == first
    (tmp_path / "in" / "b.jsonl").write_text("{")
    assert prepare_some(tmp_path, "--held-out", "0", "--overwrite") == 2
    assert read_folder(tmp_path / "out") == first  # the new one did not become whole
    (tmp_path / "in" / "b.jsonl").unlink()
    assert prepare_some(tmp_path, "--held-out", "0", "--overwrite") == 0
    assert read_folder(tmp_path / "out") != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_folder_that_is_no_corpus_is_never_replaced(tmp_path, capsys):
    write_inputs(tmp_path, {"a.txt": "text"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    assert prepare_some(tmp_path, "--overwrite") == 2
    assert "no prepared corpus" in capsys.readouterr().err
    assert read_folder(tmp_path / "out") == {"thesis.tex": b"years of work"}
    (tmp_path / "out" / "thesis.tex").unlink()  # an empty folder holds nothing that could be lost
    assert prepare_some(tmp_path, "--held-out", "0") == 0


@pytest.mark.parametrize(
    ("contents", "more", "said"),
    [
        ({}, (), "No file was found to read."),
        ({"a.png": "x"}, (), "No file was found to read. Left out: 1 files that are not known as text (1 .png)"),
        ({"a.txt": "", "b.jsonl": "\n\n"}, (), "There is no text in the 2 files"),
        ({"a.jsonl": "{}\n{}"}, ("--skip-bad",), "Left out: 2 bad lines, the first"),
        ({"a.jsonl": '{"text": "a"}\n{"text": 1}'}, (), "a.jsonl, line 2: field 'text' holds no text"),
        ({"a.txt": "a"}, ("--held-out", "0.99999999"), "--held-out 0.99999999 holds out all of the 1 documents"),
        ({"a.txt": "a"}, ("--tokenizer", "/nowhere"), "--tokenizer /nowhere: "),
        ({"a.txt": "a"}, ("--out", "."), "--out '.' names no new folder"),
        ({"a.txt": "a"}, ("--out", "in/out"), "--out in/out is inside in"),
    ],
)
def test_wrong_input_is_named_and_nothing_is_left(tmp_path, monkeypatch, capsys, contents, more, said):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path, contents)
    assert tool.main(["in", "--out", "out", "--processes", "1", *more]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("args", [["in"], ["--out", "x"], ["in", "--out", "x", "--held-out", "1"]])
def test_a_wrong_command_line_is_refused(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        tool.main(args)
    assert stopped.value.code == 2


def test_bad_lines_that_were_left_out_are_an_error_without_skip_bad(tmp_path, small_units, monkeypatch, capsys):
    good = "".join(json.dumps({"text": f"good {number}"}) + "\n" for number in range(100))
    write_inputs(tmp_path, {"a.jsonl": '{"text": 1}\n' + good + "bad\n"})
    with monkeypatch.context() as patches:
        kill_at(25, patches)
        with pytest.raises(Killed):
            prepare_some(tmp_path, "--skip-bad")
    assert prepare_some(tmp_path) == 2
    assert "a.jsonl, line 1" in capsys.readouterr().err
    assert prepare_some(tmp_path, "--skip-bad") == 0
    said = capsys.readouterr().out
    assert "2 bad lines, the first" in said and "a.jsonl, line 1:" in said
    delete(tmp_path / "out")
    assert prepare_some(tmp_path) == 2
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "1"}\n' + good)  # repaired
    assert prepare_some(tmp_path) == 0


# ---------------------------------------------------------------- what is told


def test_the_summary_has_the_numbers_of_the_corpus(tmp_path, monkeypatch, capsys, tokenizer):
    monkeypatch.chdir(tmp_path)
    lines = '{"text": "good"}\nbad\n{"text": "\\ud800"}\n'
    write_inputs(tmp_path, {"a.jsonl": lines, "b.txt": "", "c.png": "", "e.jpg": "", "f.jpg": "", "d.txt": "x" * 1000})
    assert tool.main(["in", "--out", "out", "--skip-bad", "--held-out", "0"]) == 0
    n_tokens = sum(len(tokenizer.encode(text, bos=True, eos=True)) for text in ("good", "\ufffd", "x" * 1000))
    said = capsys.readouterr().out
    for words in (
        "documents  3, of which 0 are held out",
        f"tokens     {n_tokens:,} as uint16",
        f"{1007 / n_tokens:.2f} bytes per token",
        "from 3 files. Left out: 3 files that are not known as text (2 .jpg, 1 .png)",
        "empty      1 ",
        "replaced   1 ",
        "skipped    1 bad lines, the first: in/a.jsonl, line 2: not JSON",
        "./run_train.sh --training.dataset out",
    ):
        assert words in said, said
    assert tool.main(["in", "--out", "out2", "--skip-bad", "--held-out", "0.5", "--suffix", ".PNG", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["documents"], numbers["tokens"], numbers["n_bad_lines"]) == (3, n_tokens, 1)
    manifest = read_manifest(tmp_path / "out2")
    held_out = [len(document) for document in read_split(tmp_path / "out2", manifest, SPLITS["validation"])]
    assert (numbers["documents_held_out"], numbers["tokens_held_out"]) == (len(held_out), sum(held_out)) != (1, 1)
    assert (numbers["files_left_out"], numbers["n_empty"], numbers["identity"]) == (2, 2, manifest.identity)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_few_lines_elsewhere(monkeypatch):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda **_: os.terminal_size((120, 24)))
    for stream, n_lines in ((Terminal(), 0), (io.StringIO(), 3)):
        now_s = 0.0
        progress = Progress(200_000_000, 100_000_000, stream=stream, clock=lambda: now_s)  # noqa: B023
        for _ in range(180):
            now_s += 0.5
            progress.add(500_000)
        progress.clear()
        assert stream.getvalue().count("\n") == n_lines
        assert "[###################.]  95%  190.0 of 200.0 MB  1.0 MB/s  ETA 0:00:10" in stream.getvalue()


# ---------------------------------------------------------------- damage


@pytest.fixture
def corpus(tmp_path, small_units, capsys) -> Path:
    write_files(tmp_path / "in", random.Random(3), n_files=8)
    assert prepare_some(tmp_path) == 0
    capsys.readouterr()
    return tmp_path / "out"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [flip_bit, cut, Path.unlink])
def test_check_names_each_damaged_file_and_no_other(corpus, capsys, damage):
    names = sorted(path.name for path in corpus.iterdir() if path.name != "manifest.json")
    damaged = names[::3]
    assert tool.main(["--check", str(corpus)]) == 0 and "is whole" in capsys.readouterr().out
    for name in damaged:
        damage(corpus / name)
    assert tool.main(["--check", str(corpus)]) == 1
    said = capsys.readouterr().err
    assert [name for name in names if str(corpus / name) in said] == damaged
    if damage != flip_bit:
        with pytest.raises(CorpusError):
            read_manifest(corpus)


def test_check_refuses_a_manifest_that_was_changed_or_is_not_there(corpus, capsys):
    content = json.loads((corpus / "manifest.json").read_text())
    content["splits"]["train"][0]["tokens_sha256"] = "0" * 64
    (corpus / "manifest.json").write_text(json.dumps(content))
    assert tool.main(["--check", str(corpus)]) == 1 and "was changed" in capsys.readouterr().err
    assert tool.main(["--check", str(corpus / "nowhere")]) == 1 and "cannot be read" in capsys.readouterr().err


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("suffix", [".txt.gz", ".jsonl"])
def test_memory_does_not_grow_with_the_text(tmp_path, suffix):
    def quick(text: str) -> bytes:
        return b"\2\0\0\0" * (len(text) // 3)

    tokenizer = SimpleNamespace(bos_id=0, eos_id=1, vocab_size=300, identity="quick", encode_packed=quick)
    line = "some words é " * 700
    line = ((json.dumps({"text": line}) if suffix == ".jsonl" else line) + "\n").encode()
    peaks = []
    for n_megabytes in (8, 32):
        content = line * (n_megabytes * 10**6 // len(line))
        path = tmp_path / f"{n_megabytes}{suffix}"
        path.write_bytes(gzip.compress(content, 1) if suffix.endswith(".gz") else content)
        del content
        tracemalloc.start()
        prepare_files([path], tmp_path / f"out{n_megabytes}", tokenizer, validation_share=0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 10**6 and peaks[0] < 20 * 10**6, peaks
