"""Test corpora from files: each document appears once and in order, for any kind of file and any number of
processes."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import shlex
import subprocess
import sys
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from checkpoints import flip_bit
from made_corpora import BYTES, WORDS, write_corpus
from marks import each_row, read_lines

from torchtitan_lite import REPOSITORY
from torchtitan_lite.__main__ import main
from torchtitan_lite.config.messages import Problems, name_command
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.data.corpus_folder import (
    DATASETS,
    CorpusError,
    check_data,
    find_corpus,
    read_corpus_manifest,
)
from torchtitan_lite.data.dataset import Corpus
from torchtitan_lite.tools.corpora import command as tool
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, prepare
from torchtitan_lite.tools.corpora.text_files import PreparationError, find_files


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_files(folder: Path) -> list[str]:
    """Write texts of many lengths to files of three kinds. Return the texts in the order of the corpus."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 60))) for _ in range(900)]
    (folder / "sub").mkdir(parents=True)
    (folder / "1.txt").write_text(texts[0])
    write_rows(folder / "2.jsonl", texts[1:500])
    table = pyarrow.table({"text": texts[500:], "id": range(400)})
    pyarrow.parquet.write_table(table, folder / "sub" / "3.parquet", row_group_size=100)
    return texts


def list_documents(folder: Path, split: str) -> list[list[int]]:
    if split not in read_corpus_manifest(folder).splits:
        return []
    corpus = Corpus(str(folder), BYTES, Path("cache"), split=split)
    tokens = corpus.tokens.tolist()
    starts = corpus.documents.tolist()
    return [tokens[start:stop] for start, stop in pairwise([*starts, len(tokens)])]


def list_texts(folder: Path, split: str) -> list[str]:
    return [BYTES.decode(document[1:-1]) for document in list_documents(folder, split)]


def test_every_document_appears_once_in_order_for_any_number_of_processes(monkeypatch):
    monkeypatch.setattr("torchtitan_lite.tools.corpora.prepare.GROUP_ROWS", 50)
    texts = write_files(Path("in"))
    files, _ = find_files([Path("in")])
    contents = []
    for n in (1, 3):
        out = Path(f"out{n}")
        prepare(files, out, PrepareSettings("bytes", 0.0), n_processes=n)
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
    documents = list_documents(Path("out1"), "train")
    assert documents == [BYTES.encode(text, bos=True, eos=True) for text in texts]
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == ["manifest.json", "train.documents", "train.tokens"]


def test_rows_are_held_out_by_their_text():
    texts = [f"text {n}" for n in range(300)]
    prepare([write_rows(Path("a.jsonl"), texts)], Path("rows"), PrepareSettings("bytes", 0.3))
    hashes = {text: int(sha256(text.encode()).hexdigest()[:16], 16) for text in texts}
    validation = [text for text in texts if hashes[text] < 0.3 * 2**64]
    assert list_texts(Path("rows"), "validation") == validation


def test_files_are_held_out_by_their_path():
    held_out = []
    for version in ("old", "new"):
        Path(version).mkdir()
        for n in range(30):
            Path(version, f"{n}.txt").write_text(f"{n} {version}")
        files, _ = find_files([Path(version)])
        out = Path(f"of {version}")
        prepare(files, out, PrepareSettings("bytes", 0.3))
        texts = list_texts(out, "validation")
        held_out.append([text.removesuffix(version) for text in texts])
    assert held_out[0] == held_out[1]
    assert 0 < len(held_out[0]) < 30


ROW = b'{"text": "x"}\n'


def make_double() -> bytes:
    """Return the bytes of a Parquet file with two columns of the same name."""
    file = io.BytesIO()
    columns = [["one"], ["two"]]
    pyarrow.parquet.write_table(pyarrow.table(columns, names=["text", "text"]), file)
    return file.getvalue()


# file, options | content, with escapes | words of the message
REFUSED = r"""
line.jsonl | {"text": "x"}\n{"text": \n | line.jsonl, row 2: Expecting value
field.jsonl | {"content": "x"} | it has no text in 'text' (give `prepare` --text-column for a column, or --chat)
first.jsonl | nonsense\n{"text": "x"}\n | first.jsonl, row 1: Expecting value
comma.jsonl | {"text": "x"},\n{"text": "x"}\n | comma.jsonl, row 1: Extra data
quote.jsonl | {"text": "x\n{"text": "x"}\n | quote.jsonl, row 1: Invalid control character
surrogate.jsonl | {"text": "\\ud800"} | row 1: 'utf-8' codec can't encode character '\ud800'
empty.jsonl | {"text": ""} | these files (1) have no text
commas.json | {\n"text": "x"},\n{"text": "y"} | commas.json cannot be read: Expecting value: line 2
latin.txt | one\ntwo caf\xe9 | latin.txt cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 11
mac.txt --encoding=cp1252 | caf\x8e \x81 | so it is not cp1252
latin.jsonl | {"text": "x"}\n{"text": "caf\xe9"} | row 2: 'utf-8' codec can't decode byte 0xe9 in position 13
twice.jsonl | {"text": "x"}\n{"text": "x", "text": "y"} | row 2: an object has the key 'text' more
twice.json | [{"text": "x",\n"text": "y"}] | the key 'text' more than once
nul.jsonl | {"text": "x\\u0000"} | row 1: character 1 of its text is NUL
header.csv | id,text\n | header.csv has no rows
none.json | [] | none.json has no rows
binary.txt | \x01\0 | character 1 is NUL
utf16.txt | t\0e\0x\0t\0 | --encoding utf-16-le
fields.csv | id,text\n1,one, two\n | line 2 does not have the fields of the header
names.csv | text,text\none,two\n | 2 columns 'text'
empty.jsonl.gz | | it has 0 bytes
empty.jsonl.zst | | it has 0 bytes
empty.jsonl.xz | | it has 0 bytes
empty.jsonl.bz2 | | it has 0 bytes
quote.csv | text\n"one\ntwo\n | quote.csv cannot be read: unexpected end of data
picture.png | x | picture.png has an unknown suffix
archive.tar.gz | x | Unpack an archive
packed.txt.lz4 | x | Unpack an archive or a packed file
text.txt --suffix=.log | x | --suffix: no file has .log
text.txt --suffix= --validation /dev/null | x | no text for the split validation
text.txt --text-column=body | x | --text-column would have no effect
rows.parquet --encoding=cp1252 | x | --encoding would have no effect, because Parquet
text.txt --encoding=cp12 --skip-bad | x | --encoding: unknown encoding: cp12. Name an
text.txt --tokenizer=nowhere | x | --tokenizer nowhere: there is no tokenizer.json
in.jsonl --train-tokenizer=300 --chat | {"text": "a"} | no chat template
text.txt /dev/null --suffix= --train-tokenizer=300 | x | a pipe can be read only once
in.jsonl --train-tokenizer=300 | {"text": "a"}\n{"messages": []} | in.jsonl, row 2: it has no text in 'text'
in.jsonl --train-tokenizer=300 --text-column=body | {"text": "a"} | in.jsonl, row 1: it has no text in 'body'
"""
UNREADABLE = {  # file, options -> content, words of the message
    "half.jsonl.gz": (gzip.compress(ROW * 99)[:-9], "half.jsonl.gz cannot be read"),
    "half.txt.zst": (zstandard.compress(ROW * 99)[:-3], "half.txt.zst cannot be read"),
    "tail.jsonl.bz2": (bz2.compress(ROW) + b"x", "tail.jsonl.bz2 cannot be read: after"),
    "tail.txt.xz": (lzma.compress(ROW) + ROW, "tail.txt.xz cannot be read: after"),
    "names.parquet": (make_double(), "2 columns 'text'"),
}
for name, text, words in read_lines(REFUSED):
    UNREADABLE[name] = text.encode().decode("unicode_escape").encode("latin-1"), words


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prepare_here(run_tool):
    return partial(run_tool, "prepare", "--processes=1", "--out=out")


@each_row("name", UNREADABLE)
def test_files_that_cannot_be_prepared_are_named_and_nothing_is_left(name, prepare_here):
    content, words = UNREADABLE[name]
    file, *options = name.split()
    Path(file).write_bytes(content)
    assert words in prepare_here(file, *options, status=2)
    assert os.listdir() == [file]


BAD_ROWS = r"""{"text": "one", "url": "u", "label": null}
nonsense

{"text": "\ud800"}
{"text": ""}
{"text": " "}
"""


def test_bad_rows_are_printed_and_counted_with_skip_bad_and_the_corpus_is_checked(capsys, run_tool):
    Path("a.jsonl").write_text(BAD_ROWS)
    args = "a.jsonl --tokenizer=bytes --validation-share=0 --skip-bad --processes=1 --encoding=UTF8 --out".split()
    assert main(["prepare", *args, "out"]) == 0
    printed = capsys.readouterr()
    for words in ("bad rows left out: 2\n", "empty documents left out: 1\n", "not used: 1\n"):
        assert words in printed.out
    assert "label" not in printed.out
    assert "a.jsonl, row 2: Expecting value" in printed.err and "row 3" in printed.err
    assert list_texts(Path("out"), "train") == ["one", " "]
    for folder in ("out", "."):
        assert f"{folder} exists" in run_tool("prepare", *args, folder, status=2)
    run_tool("prepare", *args, "a.jsonl/out", status=1)
    run_tool("prepare", "--check", "out")
    manifest = Path("out/manifest.json")
    written = manifest.read_text()
    manifest.write_text(written.replace('"n_documents": ', '"n_documents": 1'))
    assert "but the manifest says" in run_tool("prepare", "--check", "out", status=1)
    manifest.write_text(written)
    flip_bit(Path("out/train.tokens"))
    Path("out/train.documents").write_bytes(b"")  # an incomplete copy
    damage = run_tool("prepare", "--check", "out", status=1)
    assert "train.tokens" in damage and "train.documents" in damage
    run_tool("prepare", "--check", "nowhere", status=2)


ROWS = ["grüße,\n“one”", "two\ttabs", "three"]
OBJECTS = [json.dumps({"id": n, "text": text}, ensure_ascii=False) for n, text in enumerate(ROWS)]
LINES = "\n".join(OBJECTS)
PRETTY = [json.dumps({"text": text}, indent=1) for text in ROWS]
SPACED = [f'{{ "id": 1,\n\n "text": {json.dumps(text)} }}' for text in ROWS]
NESTED = [f'{{"tags": [1, {{\n"a": 2}}],"text": {json.dumps(text)}}}' for text in ROWS]
LONG = [json.dumps({"id": "x" * 20_000, "text": text}) for text in ROWS]
CSV = "id,text\r\n" + "".join(f'{n},"{text}"\r\n' for n, text in enumerate(ROWS))
FORMS = {  # usual kinds of files, all with the documents ROWS
    "lines.jsonl": LINES.encode(),
    "lines.jsonl.bz2": bz2.compress(LINES.encode()),
    "lines.jsonl.zstd": zstandard.compress(LINES.encode()),
    "lines.jsonl.lzma": lzma.compress(LINES.encode(), lzma.FORMAT_ALONE),
    "lines.jsonl.xz": lzma.compress(OBJECTS[0].encode() + b"\n")
    + lzma.compress("\n".join(OBJECTS[1:]).encode()),
    "array.json": f"\n[{', '.join(OBJECTS)}]".encode(),
    "pretty array.json": f"[{','.join(PRETTY)}]".encode("utf-8-sig"),
    "pretty objects.json.gz": gzip.compress("\n".join(PRETTY).encode()),
    "spaced objects.json": "\n".join(SPACED).encode(),
    "nested objects.json.gz": gzip.compress("\n\n".join(NESTED).encode()),
    "one spaced object and lines.json": "\n".join([SPACED[0], *OBJECTS[1:]]).encode("utf-8-sig"),
    "long lines.json.xz": lzma.compress("\n \n".join(LONG).encode()),
    "one line.jsonl": "".join(OBJECTS).encode(),
    "one spaced line.json": " ".join(OBJECTS).encode(),
    "table.csv": CSV.encode(),
    "table.tsv": CSV.replace(",", "\t", 1).replace(',"', '\t"').encode("utf-16"),
}


@each_row("name", FORMS)
def test_rows_are_read_from_every_common_file_format(name, prepare_here):
    Path(name).write_bytes(FORMS[name])
    prepare_here(name, "--tokenizer=bytes", "--validation-share=0")
    assert list_texts(Path("out"), "train") == ROWS


# arguments | PYTHONUNBUFFERED | exit status if the output pipe is closed. The status may depend on the size of a
# buffer.
CLOSED = """
prepare a.jsonl --out out --tokenizer bytes --processes 1 | | 0
prepare a.jsonl --out out --tokenizer bytes --processes 1 --json | 1 | 0
prepare --check made | | 0
prepare --check made | 1 | 141
prepare --help | | 0 141
--help | | 0 141
check | | 0 141
check --keys | | 0 141
check >&- | | 0 141
plan --gpus 8 | | 0 141
lab 3 | | 0 141
"""


@each_row("args, unbuffered, statuses", CLOSED)
def test_a_tool_whose_output_is_not_read_ends_silently_and_keeps_its_files(
    args, unbuffered, statuses, here
):
    write_rows(Path("a.jsonl"), ROWS)
    write_corpus(here / "made", [[[1, 2]]])
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(REPOSITORY)}
    command = f"{shlex.quote(sys.executable)} -m torchtitan_lite {args}"
    streams = {"stderr": subprocess.PIPE, "env": environment}
    with os.fdopen(writer, "w") as output:
        ended = subprocess.run(command, shell=True, stdout=output, **streams)
    assert ended.stderr == b"" and str(ended.returncode) in statuses.split()
    if "--out" in args:
        assert main(["prepare", "--check", "out"]) == 0


@each_row("suffix", ["txt", "jsonl", "csv"])
@each_row("encoding", ["utf-8-sig", "utf-16", "utf-32", "cp1252"])
def test_a_file_is_read_in_its_encoding(encoding, suffix, prepare_here):
    content = {"txt": ROWS[0], "jsonl": LINES, "csv": CSV}[suffix]
    file = Path(f"a.{suffix}")
    file.write_bytes(content.encode(encoding))
    prepare_here(file, "--tokenizer=bytes", "--encoding=cp1252", "--validation-share=0")
    assert list_texts(Path("out"), "train") == (ROWS[:1] if suffix == "txt" else ROWS)


def test_links_are_followed_once_and_skipped_files_are_counted_by_reason():
    Path("in/a").mkdir(parents=True)
    Path("elsewhere").mkdir()
    for name in "in/a/1.txt in/2.LOG in/.hidden in/3.png.gz in/README elsewhere/4.txt".split():
        Path(name).write_text("text")
    Path("in/link").symlink_to("../elsewhere")
    Path("in/circle").symlink_to("../in")
    Path("in/same.txt").symlink_to("a/1.txt")
    files, skipped = find_files([Path("in"), Path("in/a/1.txt")], ["log", ""])
    names = ["in/2.LOG", "in/README", "in/a/1.txt", "in/link/4.txt"]
    assert [str(path) for path in files] == names
    assert skipped == {
        "files or folders reached twice": 3,
        "hidden files or folders left out": 1,
        "files of unknown suffix '.png' left out": 1,
    }
    Path("in/dead.txt").symlink_to("no")
    for missing in ("nowhere", "in"):
        with pytest.raises(PreparationError, match=f"{missing}.* does not exist"):
            find_files([Path(missing)])


# file, options | texts of both splits
NINETEEN = ", ".join(f'"row {n}"' for n in range(19))
SPLITS = f"""
one.txt | ["012345678901234567"] | ["89"]
one.txt --validation-share=0.5 | ["0123456789"] | ["0123456789"]
one.txt --validation-share=0 | ["01234567890123456789"] | []
one.txt --validation-share=0.01 | ["01234567890123456789"] | []
one.txt --validation row.jsonl | ["01234567890123456789"] | ["single"]
row.jsonl --validation-share=0.99 | ["single"] | []
rows.jsonl | [{NINETEEN}] | ["row 19"]
rows.jsonl --validation-share=0.999999 | ["row 19"] | [{NINETEEN}]
.held/../one.txt --validation .held | ["01234567890123456789"] | ["held"]
. --validation rows.jsonl | ["01234567890123456789", "single"] | [{NINETEEN}, "row 19"]
"""


@each_row("args, train, validation", SPLITS)
def test_no_split_is_empty_and_a_single_text_is_cut_into_both_splits(
    args, train, validation, prepare_here
):
    Path("one.txt").write_text("0123456789" * 2)
    write_rows(Path("row.jsonl"), ["single"])
    Path(".held").mkdir()
    write_rows(Path(".held/row.jsonl"), ["held"])
    write_rows(Path("rows.jsonl"), [f"row {n}" for n in range(20)])
    said = prepare_here(*args.split(), "--tokenizer=bytes")
    assert "empty" not in said and "1 documents" not in said and "1 files" not in said
    assert list_texts(Path("out"), "train") == json.loads(train)
    assert list_texts(Path("out"), "validation") == json.loads(validation)


def test_bad_rows_are_skipped_when_a_tokenizer_is_trained(prepare_here):
    Path("in.jsonl").write_text('{"text": "a"}\n{"messages": []}\n')
    options = ["--train-tokenizer=258", "--skip-bad"]
    assert "bad rows left out: 1" in prepare_here("in.jsonl", *options)


# manifests that `prepare` did not write
MANIFESTS = """
{
[]
{"format": "x"}
{"format": 2}
{"format": 3, "dtype": "uint16"}
{"format": 3, "dtype": "uint16", "tokenizer": "", "splits": {"train": {}}}
"""


@each_row("manifest", MANIFESTS.split("\n")[1:])
def test_a_manifest_in_a_different_format_is_refused(manifest, tmp_path):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(CorpusError, match=f"{tmp_path} is not a prepared corpus.*manifest.json"):
        read_corpus_manifest(tmp_path)


def list_problems(*args: str | Path) -> Problems:
    """Return the problems that `check` finds with these corpora. `args` are paths of corpora, then flags."""
    names = [str(arg) for arg in args if not str(arg).startswith("--")]
    flags = args[len(names) :]
    config = read_config([f"--training.dataset={','.join(names)}", *flags]).config
    return Problems(config, rules=check_data(config, BYTES))


def test_a_corpus_that_cannot_be_used_causes_one_problem_with_its_name_and_a_remedy(tmp_path):
    made = write_corpus(tmp_path / "made", [[[1, 2], [3]]])
    assert not list_problems(made, "--validation.no_enable")
    (problem,) = list_problems(made)
    assert "--validation-share" in problem.remedy
    (made / "train.tokens").write_bytes(b"1")
    names = [str(made), str(tmp_path), "nowhere", "c4"]
    problems = list_problems(*names)  # each corpus once
    assert [problem.value for problem in problems] == names
    assert "train.tokens has 1 bytes" in problems[0].why
    other = write_corpus(tmp_path / "other", [[[1]]], tokenizer_fingerprint="x")
    problem, *_ = list_problems(other)
    assert "a different tokenizer" in problem.why


# ---------------------------------------------------------------- corpora with a name


def test_a_named_corpus_is_prepared_once_and_ranks_without_it_print_the_command(
    monkeypatch,
):
    write_files(Path("in"))
    monkeypatch.setitem(DATASETS, "tiny", lambda path: find_files([Path(path)])[0])
    monkeypatch.setattr(tool, "DOWNLOADS", DATASETS)
    cache = Path("cache")
    with pytest.raises(CorpusError) as error:
        Corpus("tiny", BYTES, cache, dataset_path="in")
    command = error.value.remedy.removeprefix("Run: ")
    assert command.startswith(name_command("prepare"))

    # This simulates two runs that start at the same time.
    def prepare_as_another_does(files, out, settings, **options):
        prepare(files, out, settings, **options)
        prepare(files, out, settings, **options)

    monkeypatch.setattr(tool, "prepare", prepare_as_another_does)
    assert main(shlex.split(command.partition("torchtitan_lite ")[2])) == 0
    monkeypatch.setattr(tool, "prepare", lambda *_, **__: pytest.fail("prepared again"))
    tool.prepare_dataset("tiny", BYTES, cache, "in")
    (folder,) = cache.iterdir()  # no temporary folder is left
    corpus = Corpus("tiny", BYTES, cache, split="validation", dataset_path="in")
    assert corpus.n_tokens > 0
    Path("in/more.txt").write_text("more")
    assert find_corpus("tiny", BYTES, cache, "in") != folder


def test_dataset_c4_reads_the_training_files_and_c4_validation_the_validation_files():
    Path("c4/en").mkdir(parents=True)
    for name in ("train.00000-of-01024", "train.00001-of-01024", "validation.00000-of-00008"):
        write_rows(Path(f"c4/en/c4-{name}.json"), [f"{name} {n}" for n in range(40)])
    cache = Path("cache")
    for name, split in (("c4", "train"), ("c4_validation", "validation")):
        assert tool.prepare_dataset(name, BYTES, cache, "c4")
        texts = list_texts(find_corpus(name, BYTES, cache, "c4"), "train")
        assert len(texts) > 35
        assert all(text.startswith(split) for text in texts)
        corpus = Corpus(name, BYTES, cache, split=split, dataset_path="c4")
        assert corpus.n_tokens > 0
    with pytest.raises(CorpusError, match="(?s)allenai/c4.*training.dataset_path"):
        Corpus("c4", BYTES, cache, dataset_path="cache")


def test_a_file_that_needs_a_missing_package_is_refused_with_the_extra(
    tmp_path, monkeypatch, run_tool
):
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = run_tool("prepare", tmp_path, "--out", tmp_path / "out", status=2)
    assert f"`{sys.executable} -m pip install pyarrow` (the extra `data`)" in said
