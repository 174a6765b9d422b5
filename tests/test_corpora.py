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
from torchtitan_lite.tools.corpora import named
from torchtitan_lite.tools.corpora import prepare as preparing
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


def list_texts(folder: Path, split: str) -> list[str]:
    if split not in read_manifest(folder).splits:
        return []
    return [BYTES.decode(document[1:-1]) for document in list_documents(Corpus("", folder, split))]


def test_every_document_is_there_once_in_order_whatever_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "GROUP_ROWS", 50)
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
    validation = [BYTES.encode(t, bos=True, eos=True) for t in texts if hash_document(t) < 0.3 * 2**64]
    assert 60 < len(validation) < 120 and list_documents(Corpus("", tmp_path / "rows", "validation")) == validation
    for version in ("old", "new"):
        for n in range(30):
            (tmp_path / version).mkdir(exist_ok=True)
            (tmp_path / version / f"{n}.txt").write_text(f"{version} {n}")
        files, _ = find_files([tmp_path / version])
        prepare(files, tmp_path / f"of {version}", PrepareSettings("bytes", 0.3))
    old, new = (list_documents(Corpus("", tmp_path / f"of {v}", "validation")) for v in ("old", "new"))
    assert [d[4:] for d in old] == [d[4:] for d in new] and 0 < len(old) < 30


ROW = b'{"text": "x"}\n'
REFUSED = {  # file -> content, words of the message
    "half.jsonl.gz": (gzip.compress(ROW * 99)[:-9], "half.jsonl.gz cannot be read"),
    "half.txt.bz2": (bz2.compress(ROW * 99)[:-9], "half.txt.bz2 cannot be read"),
    "half.txt.xz": (lzma.compress(ROW * 99)[:-9], "half.txt.xz cannot be read"),
    "half.txt.zst": (zstandard.compress(ROW * 99)[:-3], "half.txt.zst cannot be read"),
    "line.jsonl": (ROW + b'{"text": \n', "line.jsonl, row 2: Expecting value"),
    "field.jsonl": (b'{"content": "x"}', "it has no 'text', only 'content'. Name another field with --text-column"),
    "list.jsonl": (ROW + b"5", "row 2: it is not a JSON object: 5"),
    "null.jsonl": (b'{"text": null}', "row 1: its 'text' is not a string: None"),
    "nan.jsonl": (b'{"text": NaN}', "row 1: its 'text' is not a string: nan"),
    "deep.jsonl": (ROW + b"[" * 100_000, "row 2: maximum recursion depth"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}', "row 1: 'utf-8' codec can't encode character '\\ud800'"),
    "empty.jsonl": (b'{"text": ""}', "no text to train on"),
    "element.json": (b'[{"text": "x"},\n {"text": }]', "element.json cannot be read: Expecting value: line 2"),
    "open.json": (b'[\n{"text": "x"}', "open.json cannot be read: Expecting"),
    "commas.json": (b'{\n"text": "x"},\n{"text": "y"}', "commas.json cannot be read: Expecting value: line 2"),
    "deep.json": (b"[" * 100_000, "deep.json cannot be read: maximum recursion depth"),
    "latin.txt": (b"one\ntwo caf\xe9", "latin.txt cannot be read: it is not utf-8: byte 11 (line 2) is 0xe9"),
    "latin.jsonl": (ROW + b'{"text": "caf\xe9"}', "row 2: it is not utf-8: byte 13"),
    "latin.csv": (b"text\ncaf\xe9", "latin.csv cannot be read: it is not utf-8: byte 8"),
    "binary.txt": (b"\x01\0", "character 1 is NUL"),
    "utf16.txt": ("text".encode("utf-16-le"), "--encoding utf-16-le"),
    "column.tsv": (b"id\tbody\n1\tx\n", "row 1: it has no 'text', only 'id', 'body'"),
    "fields.csv": (b"id,text\n1,one, two\n", "line 2 does not have the fields of the header"),
    "short.csv": (b"id,text\n1\n", "line 2 does not have the fields of the header"),
    "names.csv": (b"text,text\none,two\n", "line 2 does not have the fields of the header"),
    "quote.csv": (b'text\n"one\ntwo\n', "quote.csv cannot be read: unexpected end of data"),
    "picture.png": (b"x", "picture.png has an unknown suffix"),
    "archive.tar.gz": (b"x", "Unpack an archive"),
}


def prepare_here(*args: str) -> int:
    return main(["prepare", *args, "--tokenizer", "bytes", "--processes", "1"])


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_prepared_is_named_and_nothing_is_left(name, here, capsys):
    content, words = REFUSED[name]
    Path(name).write_bytes(content)
    assert prepare_here(name, "--out", "out") == 2
    assert words in capsys.readouterr().err
    assert os.listdir() == [name]


def test_bad_rows_are_printed_and_counted_with_skip_bad_and_the_corpus_is_checked(here, capsys):
    lines = ['{"text": "one"}', "nonsense", "", '{"text": "\\ud800"}', '{"text": ""}', '{"text": " "}']
    Path("a.jsonl").write_text("\n".join(lines))
    args = ["a.jsonl", "--validation-share", "0", "--skip-bad", "--out"]
    assert prepare_here(*args, "out") == 0
    printed = capsys.readouterr()
    assert "2 bad rows left out" in printed.out and "1 empty documents left out" in printed.out
    assert "a.jsonl, row 2: Expecting value" in printed.err and "row 3" in printed.err
    assert list_texts(Path("out"), "train") == ["one", " "]
    assert prepare_here(*args, "out") == 2
    assert prepare_here(*args, ".") == 2
    assert ". exists" in capsys.readouterr().err
    assert prepare_here(*args, "a.jsonl/out") == 1
    assert main(["prepare", "--check", "out"]) == 0
    flip_bit(Path("out/train.tokens"))
    assert main(["prepare", "--check", "out"]) == 1
    assert "train.tokens" in capsys.readouterr().err


ROWS = ["grüße,\n“one”", "two\ttabs", "three"]
OBJECTS = [json.dumps({"id": n, "text": text}, ensure_ascii=False) for n, text in enumerate(ROWS)]
LINES = "\n".join(OBJECTS)
PRETTY = [json.dumps({"text": text}, indent=1) for text in ROWS]
CSV = "id,text\r\n" + "".join(f'{n},"{text}"\r\n' for n, text in enumerate(ROWS))
FORMS = {  # what people have on disk, all with the documents ROWS
    "lines.jsonl": LINES.encode(),
    "lines.jsonl.bz2": bz2.compress(LINES.encode()),
    "lines.jsonl.xz": lzma.compress(LINES.encode()),
    "mark.jsonl": LINES.encode("utf-8-sig"),
    "utf16.jsonl": LINES.encode("utf-16"),
    "array.json": f"\n[{', '.join(OBJECTS)}]".encode(),
    "pretty array.json": f"[{','.join(PRETTY)}]".encode("utf-8-sig"),
    "pretty objects.json.gz": gzip.compress("\n".join(PRETTY).encode()),
    "one line.jsonl": "".join(OBJECTS).encode(),
    "table.csv": CSV.encode(),
    "table.tsv": CSV.replace(",", "\t", 1).replace(',"', '\t"').encode("utf-16"),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_read_from_every_form_that_people_have(name, here):
    Path(name).write_bytes(FORMS[name])
    assert prepare_here(name, "--out", "out", "--validation-share", "0") == 0
    assert list_texts(Path("out"), "train") == ROWS


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_a_file_is_read_in_its_encoding(encoding, suffix, here):
    content = {"txt": ROWS[0], "jsonl": OBJECTS[0], "csv": CSV[: CSV.index("1")]}[suffix]
    file = Path(f"a.{suffix}")
    file.write_bytes(content.encode(encoding))
    assert prepare_here(str(file), "--out", "out", "--encoding", "cp1252", "--validation-share", "0") == 0
    assert list_texts(Path("out"), "train") == ROWS[:1]


def test_links_are_followed_once_and_what_is_skipped_is_counted_by_its_reason(here):
    Path("in/a").mkdir(parents=True)
    Path("elsewhere").mkdir()
    for name in ("in/a/1.txt", "in/2.LOG", "in/.hidden", "in/3.png", "elsewhere/4.txt"):
        Path(name).write_text("text")
    for name, target in {"link": "../elsewhere", "circle": "../in", "same.txt": "a/1.txt", "dead.txt": "no"}.items():
        Path("in", name).symlink_to(target)
    files, skipped = find_files([Path("in"), Path("in/a/1.txt")], ["log"])
    assert [str(path) for path in files] == ["in/2.LOG", "in/a/1.txt", "in/link/4.txt"]
    assert skipped == {"reached twice": 3, "hidden": 1, "dead links": 1, "unknown suffix '.png'": 1}
    for missing in ("nowhere", "in/dead.txt"):
        with pytest.raises(PreparationError, match="does not exist"):
            find_files([Path(missing)])


SPLITS = [  # file, options -> texts of both splits, or the last and the first ones
    ("one.txt", [], ["012345678901234567"], ["89"]),
    ("one.txt", ["--validation-share=0.5"], ["0123456789"], ["0123456789"]),
    ("one.txt", ["--validation-share=0"], ["01234567890123456789"], []),
    ("one.txt", ["--validation", "row.jsonl"], ["01234567890123456789"], ["single"]),
    ("row.jsonl", ["--validation-share=0.99"], ["single"], []),
    ("rows.jsonl", [], [f"row {n}" for n in range(19)], ["row 19"]),
    ("rows.jsonl", ["--validation-share=0.999999"], ["row 19"], [f"row {n}" for n in range(19)]),
    (".", ["--validation", "rows.jsonl"], ["01234567890123456789", "single"], [f"row {n}" for n in range(20)]),
]


@pytest.mark.parametrize("case", SPLITS, ids=str)
def test_no_split_is_empty_and_a_single_text_is_cut(case, here):
    name, options, train, validation = case
    Path("one.txt").write_text("0123456789" * 2)
    Path("row.jsonl").write_text('{"text": "single"}')
    Path("rows.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(20)))
    assert prepare_here(name, *options, "--out", "out") == 0
    assert list_texts(Path("out"), "train") == train
    assert list_texts(Path("out"), "validation") == validation


@pytest.mark.parametrize(
    "options", ["--validation-share=1", "--validation-share=-1", "--validation-share=nan", "--encoding=nope"]
)
def test_options_that_cannot_be_used_are_refused(options, here):
    Path("one.txt").write_text("text")
    try:
        status = prepare_here("one.txt", "--out", "out", options)
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 2


def test_a_reader_that_ends_early_does_not_make_a_corpus_unwritten(here):
    Path("a.txt").write_text("text")
    words = [sys.executable, "-m", "torchtitan_lite", "prepare", "a.txt", "--out", "out", "--processes", "1"]
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
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
