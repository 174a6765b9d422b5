"""Files to corpora to tokens: every document once, in its order, whatever the kind of file and number of processes."""

import bz2
import gzip
import json
import lzma
import os
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from checkpoints import flip_bit
from made_corpora import BYTES, WORDS, write_corpus

from torchtitan_lite.__main__ import main
from torchtitan_lite.config.reader import REPOSITORY, read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus import Corpus, open_corpus
from torchtitan_lite.data.corpus_folder import (
    DATASETS,
    CorpusError,
    check_data,
    check_prepared,
    find_corpus,
    read_manifest,
)
from torchtitan_lite.tools.corpora import named, text_files
from torchtitan_lite.tools.corpora.named import prepare_datasets
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, hash_document, prepare
from torchtitan_lite.tools.corpora.text_files import PreparationError, find_files


def write_files(folder: Path, seed: int = 0) -> list[str]:
    """Files of all kinds below `folder`; the texts of their documents in order."""
    draw, texts = random.Random(seed), []
    (folder / "sub").mkdir(parents=True)
    for number in range(12):
        suffix = draw.choice([".txt", ".md", ".txt.gz", ".jsonl", ".json.gz", ".jsonl.zst", ".parquet"])
        inside = [" ".join(draw.choices(WORDS, k=draw.randrange(60))) for _ in range(draw.randrange(1, 700))]
        path = folder / ("sub" if number % 3 else ".") / f"{number:02}{suffix}"
        if ".js" in suffix:
            content = "\n".join(json.dumps({"text": text}) for text in inside).encode()
        elif suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": inside}), path, row_group_size=100)
        else:
            inside = inside[:1]
            content = inside[0].encode()
        if suffix.endswith(".gz"):
            content = gzip.compress(content)
        elif suffix.endswith(".zst"):
            content = zstandard.compress(content)
        if suffix != ".parquet":
            path.write_bytes(content)
        texts.append((str(path), [text for text in inside if text]))
    return [text for _, of_file in sorted(texts) for text in of_file]


def list_documents(corpus: Corpus) -> list[list[int]]:
    documents = []
    tokens, begins, _ = corpus.read(torch.tensor([0]), corpus.n_tokens)
    for token, is_first in zip(tokens[0].tolist(), begins[0].tolist(), strict=True):
        documents += [[]] if is_first else []
        documents[-1].append(token)
    return documents


def test_every_document_is_there_once_in_order_whatever_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BATCH_BYTES", 2000)
    texts = write_files(tmp_path / "in")
    files, _ = find_files([tmp_path / "in"])
    for n in (1, 3):
        prepare(files, tmp_path / f"out{n}", PrepareSettings("bytes", 0.0), n_processes=n)
    assert list_documents(Corpus("", tmp_path / "out1", "train")) == [
        BYTES.encode(t, bos=True, eos=True) for t in texts
    ]
    one, three = ({p.name: p.read_bytes() for p in (tmp_path / f"out{n}").iterdir()} for n in (1, 3))
    assert one == three and sorted(one) == ["manifest.json", "train.documents", "train.tokens"]


def test_rows_are_held_out_by_their_text_and_files_by_their_path(tmp_path):
    texts = [f"text {n}" for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare([tmp_path / "a.jsonl"], tmp_path / "rows", PrepareSettings("bytes", 0.3))
    validation = [BYTES.encode(t, bos=True, eos=True) for t in texts if hash_document(t.encode()) < 0.3 * 2**64]
    assert 60 < len(validation) < 120 and list_documents(Corpus("", tmp_path / "rows", "validation")) == validation
    for version in ("old", "new"):
        for n in range(30):
            (tmp_path / version).mkdir(exist_ok=True)
            (tmp_path / version / f"{n}.txt").write_text(f"{version} {n}")
        files, _ = find_files([tmp_path / version])
        prepare(files, tmp_path / f"of {version}", PrepareSettings("bytes", 0.3, folder=str(tmp_path / version)))
    old, new = (list_documents(Corpus("", tmp_path / f"of {v}", "validation")) for v in ("old", "new"))
    assert [d[4:] for d in old] == [d[4:] for d in new] and 0 < len(old) < 30


REFUSED = {  # files -> a word of the message
    "not JSON": ({"a.jsonl": '{"text": "x"}\n{"text": \n'}, "a.jsonl, row 2"),
    "no field": ({"a.jsonl": '{"content": "x"}\n'}, "--text-column"),
    "no text": ({"a.jsonl": '{"text": 5}\n'}, "row 1: its 'text' is not a string"),
    "half a download": ({"a.jsonl.gz": gzip.compress(b'{"text": "x"}' * 99)[:-9]}, "a.jsonl.gz cannot be read"),
    "nothing": ({"a.jsonl": '{"text": ""}'}, "no text to train on"),
    "an empty file": ({"a.txt": ""}, "'empty files': 1"),
    "unknown kind": ({"a.png": "x"}, "\"unknown suffix '.png'\": 1"),
    "no file": ({}, "no files to read"),
    "Latin-1": ({"a.txt": b"one\ntwo caf\xe9"}, "a.txt: it is not utf-8: byte 11 (line 2) is 0xe9"),
    "a row in Latin-1": ({"a.jsonl": b'{"text": "x"}\n{"text": "caf\xe9"}'}, "row 2: it is not utf-8: byte 13"),
    "a row in Latin-1 of a table": ({"a.csv": b"text\ncaf\xe9"}, "a.csv cannot be read: it is not utf-8: byte 8"),
    "binary": ({"a.txt": b"\x01\0"}, "character 1 is NUL"),
    "UTF-16 without a mark": ({"a.txt": "text".encode("utf-16-le")}, "--encoding utf-16-le"),
    "deep": ({"a.jsonl": '{"text": "x"}\n' + "[" * 100_000}, "row 2: maximum recursion depth"),
    "deep, first": ({"a.jsonl": "[" * 100_000}, "row 1: maximum recursion depth"),
    "half a character": ({"a.jsonl": '{"text": "\\ud800"}'}, "row 1: 'utf-8' codec can't encode character '\\ud800'"),
    "null": ({"a.jsonl": '{"text": null}'}, "row 1: its 'text' is not a string: None"),
    "NaN": ({"a.jsonl": '{"text": NaN}'}, "row 1: its 'text' is not a string: nan"),
    "a bad element": (
        {"a.json": '[{"text": "x"},\n {"text": }]'},
        "a.json cannot be read: row 2: Expecting value: line 2",
    ),
    "a list that does not end": ({"a.json": '[\n{"text": "x"}'}, "a.json cannot be read: row 1: Expecting"),
    "a column that is not there": ({"a.tsv": "id\tbody\n1\tx\n"}, "row 1: it has no 'text', only 'id', 'body'"),
    "a row of more fields": ({"a.csv": "id,text\n1,one, two\n"}, "line 2 has 3 fields"),
    "columns of one name": ({"a.csv": "text,text\none,two\n"}, "line 2 has 2 fields"),
    "an open quote": ({"a.csv": 'text\n"one\ntwo\n'}, "a.csv cannot be read: unexpected end of data"),
    "half of a bz2": ({"a.txt.bz2": bz2.compress(b"text" * 99)[:-9]}, "a.txt.bz2 cannot be read"),
    "half of an xz": ({"a.txt.xz": lzma.compress(b"text" * 99)[:-9]}, "a.txt.xz cannot be read"),
    "half of a zst": ({"a.txt.zst": zstandard.compress(b"text" * 99)[:-3]}, "a.txt.zst cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_prepared_is_named_and_nothing_is_left(name, tmp_path, capsys):
    files, word = REFUSED[name]
    (tmp_path / "in").mkdir()
    for file, content in files.items():
        (tmp_path / "in" / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["prepare", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--processes", "1"]) == 2
    assert word in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["in"]


def test_bad_rows_are_counted_where_that_is_asked_for_and_the_corpus_is_checked(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnonsense\n\n{"text": "\\ud800"}\n{"text": ""}\n{"text": " "}\n')
    args = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--processes", "1"]
    assert main(["prepare", *args, "--validation-share", "0", "--skip-bad"]) == 0
    output = capsys.readouterr().out
    assert (
        "2 bad rows" in output
        and "a.jsonl, row 2: Expecting value" in output
        and "1 empty documents left out" in output
    )
    assert main(["prepare", *args]) == 2 and "exists" in capsys.readouterr().err
    (tmp_path / "other.tmp").mkdir()  # what a process that was killed leaves
    assert main(["prepare", *args, "--out", str(tmp_path / "other")]) == 2
    assert re.search("other.tmp exists. Delete it", capsys.readouterr().err)
    assert main(["prepare", *args, "--out", str(tmp_path / "a.jsonl" / "out")]) == 1
    assert list_documents(Corpus("", tmp_path / "out", "train"))[1] == [256, ord(" "), 257]
    assert main(["prepare", "--check", str(tmp_path / "out")]) == 0
    flip_bit(tmp_path / "out" / "train.tokens")
    assert main(["prepare", "--check", str(tmp_path / "out")]) == 1 and "train.tokens" in capsys.readouterr().err


ROWS = ["grüße,\n“one”", "two\ttabs", "three"]
OBJECTS = [json.dumps({"id": n, "text": text}, ensure_ascii=False) for n, text in enumerate(ROWS)]
LINES = "\n".join(OBJECTS)
COMMAS = ",\n".join(OBJECTS)
CSV = "id,text\r\n" + "".join(f'{n},"{text}"\r\n' for n, text in enumerate(ROWS))
FORMS = {  # what people have on disk, all with the documents ROWS
    "lines.jsonl": LINES.encode(),
    "lines.jsonl.bz2": bz2.compress(LINES.encode()),
    "lines.jsonl.xz": lzma.compress(LINES.encode()),
    "mark.jsonl": LINES.encode("utf-8-sig"),
    "utf16.jsonl": LINES.encode("utf-16"),
    "array.json": f"[{COMMAS}]".encode(),
    "array of lines.json": f"\n[\n{COMMAS}\n]\n".encode(),
    "pretty array.json": json.dumps([json.loads(each) for each in OBJECTS], indent=2).encode(),
    "pretty objects.json": "".join(json.dumps(json.loads(each), indent=1) + "\n" for each in OBJECTS).encode(),
    "one line.jsonl": "".join(OBJECTS).encode(),
    "commas.jsonl": COMMAS.encode(),
    "table.csv": CSV.encode(),
    "table.tsv": CSV.replace(",", "\t", 1).replace(',"', '\t"').encode("utf-16"),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_read_from_every_form_that_people_have(name, tmp_path):
    (tmp_path / name).write_bytes(FORMS[name])
    prepare([tmp_path / name], tmp_path / "out", PrepareSettings("bytes", 0.0))
    documents = list_documents(Corpus("", tmp_path / "out", "train"))
    assert [BYTES.decode(document[1:-1]) for document in documents] == ROWS


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_a_text_is_read_in_its_encoding(encoding, tmp_path):
    (tmp_path / "a.txt").write_bytes(ROWS[0].encode(encoding))
    prepare([tmp_path / "a.txt"], tmp_path / "out", PrepareSettings("bytes", 0.0, encoding="cp1252"))
    (document,) = list_documents(Corpus("", tmp_path / "out", "train"))
    assert BYTES.decode(document[1:-1]) == ROWS[0]


def test_links_are_followed_once_and_what_is_skipped_is_counted_by_its_reason(tmp_path):
    folder = tmp_path / "in"
    (folder / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("in/a/1.txt", "in/2.LOG", "in/.hidden", "in/3.png", "elsewhere/4.txt"):
        (tmp_path / name).write_text("text")
    (folder / "empty.txt").touch()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "circle").symlink_to(folder)
    (folder / "same.txt").symlink_to(folder / "a" / "1.txt")
    (folder / "dead.txt").symlink_to("nowhere")
    files, skipped = find_files([folder, folder / "a" / "1.txt"], ["log"])
    assert [str(path.relative_to(folder)) for path in files] == ["2.LOG", "a/1.txt", "link/4.txt"]
    expected = {"reached twice": 3, "hidden": 1, "dead links": 1, "empty files": 1, "unknown suffix '.png'": 1}
    assert skipped == expected
    with pytest.raises(PreparationError, match="--suffix .png"):
        find_files([folder / "3.png"])


def list_texts(folder: Path, split: str) -> list[str]:
    tokens, begins, _ = Corpus("", folder, split).read(torch.tensor([0]), read_manifest(folder).splits[split].n_tokens)
    return BYTES.decode(tokens[0].tolist()).split("<|begin_of_text|>")[1:]


def prepare_texts(folder: Path, *args: str) -> int:
    common = ["--out", str(folder / "out"), "--tokenizer", "bytes", "--processes", "1"]
    return main(["prepare", *args, *common])


def test_no_split_is_empty_and_a_single_text_is_cut(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("0123456789" * 2)
    Path("row.jsonl").write_text('{"text": "single"}')
    Path("rows.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(20)))
    end = "<|end_of_text|>"
    cases = [
        ("one.txt", [], "012345678901234567", ["89"]),
        ("one.txt", ["--validation-share", "0.5"], "0123456789", ["0123456789"]),
        ("one.txt", ["--validation-share", "0"], "0123456789" * 2, []),
        ("row.jsonl", ["--validation-share", "0.99"], "single", []),
        ("rows.jsonl", [], "row 0", ["row 19"]),
        ("one.txt", ["--validation", "row.jsonl"], "0123456789" * 2, ["single"]),
    ]
    for number, (name, options, first, validation) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        assert prepare_texts(tmp_path / str(number), name, *options) == 0
        out = tmp_path / str(number) / "out"
        assert list_texts(out, "train")[0] == first + end
        found = list_texts(out, "validation") if "validation" in read_manifest(out).splits else []
        assert found == [text + end for text in validation]
    (tmp_path / "most").mkdir()
    assert prepare_texts(tmp_path / "most", "rows.jsonl", "--validation-share", "0.999999") == 0
    assert list_texts(tmp_path / "most" / "out", "train") == ["row 19" + end]
    for options in (["--validation-share=1"], ["--validation-share=-1"], ["--validation-share=nan"]):
        assert prepare_texts(tmp_path, "one.txt", *options) == 2 and "from 0 to below 1" in capsys.readouterr().err
    assert prepare_texts(tmp_path, "one.txt", "--validation", "row.jsonl", "--validation-share", "0.1") == 2
    assert prepare_texts(tmp_path, "one.txt", "--encoding", "nope") == 2
    assert main(["prepare", "one.txt", "--out", "."]) == 2 and ". exists" in capsys.readouterr().err


def test_a_reader_that_ends_early_does_not_make_a_corpus_unwritten(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    words = [sys.executable, "-m", "torchtitan_lite", "prepare", "a.txt", "--out", "out", "--processes", "1"]
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


MANIFESTS = {  # a manifest that is not ours -> a word of the reason
    "no JSON": "{",
    "a list": "[]",
    "of a checkpoint": '{"format": "x"}',
    "another format": '{"format": 2}',
    "no splits": '{"format": 3, "dtype": "uint16"}',
    "a list of splits": '{"format": 3, "splits": []}',
    "a number as split": '{"format": 3, "splits": {"train": 5}}',
    "a split without files": '{"format": 3, "dtype": "uint16", "tokenizer": "", "splits": {"train": {}}}',
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_foreign_manifest_is_a_sentence(name, tmp_path):
    (tmp_path / "manifest.json").write_text(MANIFESTS[name])
    with pytest.raises(CorpusError, match=f"{tmp_path} is not a prepared corpus.*manifest.json"):
        read_manifest(tmp_path)


def read(*args: str | Path) -> Config:
    """Return the config of a run on these corpora, with these flags."""
    names = [str(arg) for arg in args if not str(arg).startswith("--")]
    return read_config([f"--training.dataset={','.join(names)}", *args[len(names) :]]).config


def test_a_corpus_that_cannot_be_used_is_one_problem_with_its_name_and_a_remedy(tmp_path):
    made = write_corpus(tmp_path / "made", [[[1, 2], [3]]])
    assert check_data(read(made, "--validation.no_enable"), BYTES) == []
    (problem,) = check_data(read(made), BYTES)
    assert "--validation-share" in problem.remedy
    (made / "train.tokens").write_bytes(b"1")
    names = [str(made), str(tmp_path), "nowhere", "c4"]
    problems = check_data(read(*names), BYTES)  # each of them once
    assert [problem.value for problem in problems] == names and "train.tokens has 1 bytes" in problems[0].why
    other = write_corpus(tmp_path / "other", [[[1]]], tokenizer_fingerprint="x")
    assert "another tokenizer" in check_data(read(other), BYTES)[0].why


# ---------------------------------------------------------------- corpora with a name


def test_a_named_corpus_is_prepared_once_by_the_first_process_and_ranks_say_how_if_it_is_not(tmp_path, monkeypatch):
    write_files(tmp_path / "in")
    monkeypatch.setitem(DATASETS, "tiny", lambda path: find_files([Path(path)])[0])
    section = replace(
        Config().training, dataset=["tiny"], dataset_path=str(tmp_path / "in"), cache_folder=str(tmp_path)
    )
    config = replace(Config(), training=section)
    with pytest.raises(CorpusError) as error:
        check_prepared(config, BYTES)
    command = shlex.split(error.value.remedy.removeprefix("Run: "))
    assert command[:3] == ["python", "-m", "torchtitan_lite"]
    with pytest.raises(CorpusError, match="prepare"):
        open_corpus("tiny", BYTES, tmp_path, dataset_path=section.dataset_path)

    def prepare_as_another_does(files, out, settings, **options):  # two runs that start together
        for folder in (out, find_corpus("tiny", BYTES, tmp_path, section.dataset_path)):
            prepare(files, folder, settings, **options)

    monkeypatch.setattr(named, "prepare", prepare_as_another_does)
    assert main(command[3:]) == 0
    check_prepared(config, BYTES)
    monkeypatch.setattr(named, "prepare", lambda *_, **__: pytest.fail("prepared again"))
    prepare_datasets(config, BYTES)
    (folder,) = tmp_path.glob("tiny-*")  # and no other one was left
    assert open_corpus("tiny", BYTES, tmp_path, split="validation", dataset_path=section.dataset_path).n_tokens > 0
    (tmp_path / "in" / "sub" / "more.txt").write_text("more")
    assert find_corpus("tiny", BYTES, tmp_path, section.dataset_path) != folder


def test_c4_is_its_training_files_and_c4_validation_the_others(tmp_path):
    names = ["c4-train.00000-of-01024", "c4-train.00001-of-01024", "c4-validation.00000-of-00008"]
    for name in [f"en/{name}" for name in names] + [f".cache/{names[0]}"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lines = "".join(json.dumps({"text": f"{name} {n}", "url": "x"}) + "\n" for n in range(40))
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(lines.encode()))
    for name, split, folder, n in (("c4", "train", "c4-train", 80), ("c4_validation", "validation", names[2], 40)):
        named.prepare_dataset(name, BYTES, tmp_path / "cache", str(tmp_path))
        corpus = open_corpus(name, BYTES, tmp_path / "cache", split=split, dataset_path=str(tmp_path))
        texts = [BYTES.decode(document[1:-1]) for document in list_documents(corpus)]
        assert n * 0.9 < len(texts) <= n and all(text.startswith(f"en/{folder}") for text in texts)
    with pytest.raises(CorpusError, match="(?s)allenai/c4.*training.dataset_path"):
        open_corpus("c4", BYTES, tmp_path / "cache", dataset_path=str(tmp_path / "cache"))


def test_a_file_without_its_package_is_refused_and_the_extra_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["prepare", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert re.search("pyarrow.*extra `data`", capsys.readouterr().err)
