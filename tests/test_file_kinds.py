"""Parquet, .zst and JSON lines under the name .json: the same corpus as the same texts in JSON lines, or a refusal."""

import gzip
import json
import random
from pathlib import Path

import pytest
from made_corpora import make_text, prepare_some, read_folder, write_inputs
from torchtitan_lite.data.documents import Tally, read_documents
from torchtitan_lite.data.shards import Recipe, make_plan

from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data import shards, text_files
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.tools.corpora import command as tool
from torchtitan_lite.tools.corpora.text_files import PreparationError, find_sources

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is in the extra `data`")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard", reason="zstandard is in the extra `data`")

DRAW = random.Random(0)
TEXTS = ["", "é😀", "last", *(make_text(DRAW, DRAW.randrange(60)) for _ in range(200))]
LINES = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)).encode()


def write_parquet(path: Path, **columns) -> None:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=7)


def compress(content: bytes) -> bytes:
    """In two frames, as `zstd` of several files and parallel writers make it; the first as `zstd --long=28` does."""
    options, half = zstandard.ZstdCompressionParameters.from_level(1, window_log=28), len(content) // 2
    first = zstandard.ZstdCompressor(compression_params=options).compressobj()
    return first.compress(content[:half]) + first.flush() + zstandard.ZstdCompressor().compress(content[half:])


WRITERS = {
    "a.parquet": lambda path: write_parquet(path, id=list(range(len(TEXTS))), text=TEXTS),
    "large.parquet": lambda path: write_parquet(path, text=pyarrow.array(TEXTS, pyarrow.large_string())),
    "a.jsonl.zst": lambda path: path.write_bytes(compress(LINES)),
    "a.json": lambda path: path.write_bytes(LINES),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.json.zst": lambda path: path.write_bytes(compress(LINES)),
}


def prepare(path: Path, out: Path, *more: str) -> int:
    return tool.main([str(path), "--out", str(out), "--processes", "1", "--held-out", "0.3", *more])


def list_documents(path: Path, **options) -> list:
    """Texts of a file, read in as many parts as it has."""
    (source,) = find_sources([path])[0]
    units = make_plan([source], Path("out"), Recipe(0), load_tokenizer("bytes")).units
    reading = {"field": "text", "skip_bad": False, "tally": Tally(), **options}
    return ["".join(pieces) for unit in units for part in unit for pieces in read_documents(part, **reading)]


@pytest.mark.parametrize("name", WRITERS)
def test_the_corpus_has_the_bytes_of_the_same_texts_in_json_lines(tmp_path, name):
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    WRITERS[name](tmp_path / name)
    assert prepare(tmp_path / "lines.jsonl", tmp_path / "expected") == prepare(tmp_path / name, tmp_path / "found") == 0
    expected, found = (read_folder(tmp_path / out) for out in ("expected", "found"))
    for changed in ("sources.jsonl", "manifest.json"):  # they name the file that was read
        assert expected.pop(changed) != found.pop(changed)
    assert expected == found and len(found) == 4


def test_a_parquet_file_is_read_in_parts_of_whole_row_groups_each_row_once_in_order(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", text=TEXTS)
    for unit_bytes in (300, 2000, 10**6):
        monkeypatch.setattr(shards, "SMALLEST_UNIT_BYTES", unit_bytes)
        (source,) = find_sources([tmp_path / "a.parquet"])[0]
        units = make_plan([source], Path("out"), Recipe(0), load_tokenizer("bytes")).units
        assert (len(units) > 3) == (unit_bytes < 10**6)
        assert list_documents(tmp_path / "a.parquet") == TEXTS


def test_files_of_folders_are_found_by_their_suffix_and_json_only_where_it_is_asked_for(tmp_path):
    for name, write in WRITERS.items():
        (tmp_path / "in").mkdir(exist_ok=True)
        write(tmp_path / "in" / name)
    (tmp_path / "in" / "pretty.json").write_text('{\n  "text": "x"\n}\n')
    (tmp_path / "in" / "deep.json").write_text("[" * 100_000)
    (tmp_path / "in" / "packed.parquet.gz").write_bytes(gzip.compress((tmp_path / "in" / "a.parquet").read_bytes()))
    sources, left_out = find_sources([tmp_path / "in"])
    assert {Path(source.path).name for source in sources} == {"a.parquet", "large.parquet", "a.jsonl.zst"}
    assert sum(left_out.values()) == 6
    sources, _ = find_sources([tmp_path / "in"], more_suffixes=[".json"])
    rows = {Path(source.path).name for source in sources if source.holds_rows}
    assert len(sources) == 8 and rows == set(WRITERS)  # one JSON object over several lines is one document


BAD = {  # name of a file -> how it is written | what the error says
    "cut.jsonl.zst": (lambda path: path.write_bytes(compress(LINES)[:-9]), "ends inside a frame"),
    "none.jsonl.zst": (lambda path: path.write_bytes(b"plain text"), "cannot be read"),
    "none.parquet": (lambda path: path.write_bytes(b"plain text"), "Parquet"),
    "cut.parquet": (lambda path: path.write_bytes(b"PAR1" + b"x" * 99), "Parquet"),
    "other.parquet": (lambda path: write_parquet(path, content=["a"]), "--text-column"),
    "null.parquet": (lambda path: write_parquet(path, text=["a"] * 10 + [None]), "row 11: field 'text' holds no text"),
    "numbers.parquet": (lambda path: write_parquet(path, text=[1, 2]), "row 1: field 'text' holds no text"),
    "other.jsonl": (lambda path: path.write_text('{"content": "a"}\n'), "line 1: no field 'text' in it (--text-column"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_named_and_nothing_is_left(tmp_path, capsys, name):
    write, why = BAD[name]
    write(tmp_path / name)
    assert prepare(tmp_path / name, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert name in error and why in error
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kinds", [("binary", "string"), ("large_binary", "large_string")])
def test_rows_without_a_text_are_counted_with_skip_bad_and_broken_utf_8_is_replaced(tmp_path, monkeypatch, kinds):
    monkeypatch.setattr(shards, "SMALLEST_UNIT_BYTES", 20)  # a part for each row group of 7 rows, read 2 at a time
    monkeypatch.setattr(text_files, "ROWS_AT_A_TIME", 2)
    as_bytes, as_text = (getattr(pyarrow, kind)() for kind in kinds)
    broken = pyarrow.array([b"a"] * 12 + [None, b"\xff\xfeb", b"c"], as_bytes).view(as_text)
    write_parquet(tmp_path / "a.parquet", text=broken)
    tally = Tally()
    assert list_documents(tmp_path / "a.parquet", skip_bad=True, tally=tally) == [*"a" * 12, "��b", "c"]
    assert (tally.n_bad_lines, tally.n_replaced) == (1, 2) and "row 13:" in tally.first_bad_line


@pytest.mark.parametrize("option", ["--text-column", "--field"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_text_column_names_a_field_of_lines_and_a_column_of_tables_alike(tmp_path, capsys, name, option):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "no", "body": "yes"}) + "\n")
    write_parquet(tmp_path / "a.parquet", text=["no"], body=["yes"])
    options = [option, "body", "--held-out", "0", "--tokenizer", "bytes"]
    assert prepare(tmp_path / name, tmp_path / "out", *options) == 0
    tokens = (tmp_path / "out" / "train-00000.tokens").read_bytes()
    assert tokens[2:-2:2] == b"yes"  # uint16, between BOS and EOS


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_without_its_package_a_file_is_refused_and_the_extra_named(tmp_path, monkeypatch, capsys, name, package):
    WRITERS[name](tmp_path / name)
    monkeypatch.setattr("torchtitan_lite.tools.corpora.text_files.find_spec", lambda package: None)
    assert prepare(tmp_path / name, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert name in error and package in error and "`data`" in error
    with pytest.raises(PreparationError):
        find_sources([tmp_path])
    assert package in (REPOSITORY / "pyproject.toml").read_text()


def test_lines_and_parquet_of_one_folder_make_one_corpus(tmp_path, capsys):
    write_inputs(tmp_path, {"a.md": "first", "b.jsonl": json.dumps({"text": "second"})})
    write_parquet(tmp_path / "in" / "c.parquet", text=["third", "fourth"])
    assert prepare_some(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 4
