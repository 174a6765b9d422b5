"""Files to documents, against reading a file whole: which files, which lines, which characters."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest
from torchtitan_lite.data.documents import Tally, read_documents

from torchtitan_lite.data import documents as reading
from torchtitan_lite.tools.corpora.text_files import Part, PreparationError, find_sources, look_at


def read(part: Part, *, field: str = "text", skip_bad: bool = False) -> tuple[list[str], Tally]:
    """The documents of a part; their pieces are checked and put together."""
    tally, documents = Tally(), []
    for pieces in map(list, read_documents(part, field=field, skip_bad=skip_bad, tally=tally)):
        assert all(len(piece) == reading.MAX_CHARACTERS for piece in pieces[:-1])
        assert all(0 < len(piece) <= reading.MAX_CHARACTERS for piece in pieces)
        documents.append(pieces)
    return ["".join(pieces) for pieces in documents], tally


def read_whole(path: Path, **options) -> tuple[list[str], Tally]:
    source = look_at(str(path))
    return read(Part(source, 0, source.n_bytes), **options)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


# ---------------------------------------------------------------- text files

BROKEN = [
    b"\xff",
    b"a\x80\x80b",
    b"\xe2\x82",  # the euro sign without its end
    b"\xf0\x9f\x98",
    b"\xc0\xafx",
    b"\xed\xa0\x80",  # a surrogate
    b"\xf0\x90\xef\xbf\xbd",  # broken, then U+FFFD itself
]


def iterate_errors(content: bytes):
    """Each place where strict decoding fails, one after the other."""
    while True:
        try:
            content.decode()
            return
        except UnicodeDecodeError as error:
            yield error
            content = content[error.end :]


@pytest.mark.parametrize(("seed", "suffix"), [*((seed, ".txt") for seed in range(8)), (8, ".txt.gz")])
def test_text_in_pieces_is_the_text_wherever_blocks_and_pieces_are_cut(tmp_path, monkeypatch, suffix, seed):
    draw = random.Random(seed)
    monkeypatch.setattr(reading, "BLOCK_BYTES", draw.choice([2, 3, 5, 64]))
    monkeypatch.setattr(reading, "MAX_CHARACTERS", draw.choice([1, 2, 3, 7, 1000]))
    good = ["é", "€", "😀", "\ufffd", "a", "\r\n", "\r", "\x00", "\ufeff", "日本", "\u2028"]
    parts = [*(text.encode() for text in good), *BROKEN]
    content = b"".join(draw.choices(parts, k=draw.randrange(1, 60)))
    texts, tally = read_whole(write(tmp_path / f"a{suffix}", content))
    assert texts == [content.decode(errors="replace").removeprefix("\ufeff")]
    assert tally == Tally(n_replaced=sum(1 for _ in iterate_errors(content)))


def test_a_file_without_characters_is_an_empty_document(tmp_path):
    for content in (b"", b"\xef\xbb\xbf"):
        assert read_whole(write(tmp_path / "a.txt", content)) == ([""], Tally())


# ---------------------------------------------------------------- JSON lines


def make_lines(draw: random.Random) -> tuple[bytes, list[tuple[int, str]]]:
    """A file of lines, and the texts in it with the bytes at which their lines begin."""
    content, texts = b"", []
    for number in range(draw.randrange(1, 12)):
        kind = draw.random()
        text = "".join(draw.choices('aé😀\n"\\ ', k=draw.randrange(0, 30)))
        if kind < 0.2:
            content += draw.choice([b"\n", b"\r\n", b"  \n"])
            continue
        texts.append((len(content), text))
        line = json.dumps({"n": number, "text": text}, ensure_ascii=kind < 0.6).encode()
        content += line + draw.choice([b"\n", b"\r\n", b" \n"])
    return (content.rstrip() if draw.random() < 0.3 else content), texts


@pytest.mark.parametrize("seed", range(6))
def test_every_line_is_in_the_part_in_which_it_begins(tmp_path, seed):
    draw = random.Random(seed)
    content, texts = make_lines(draw)
    source = look_at(str(write(tmp_path / "a.jsonl", content)))
    for _ in range(20):
        borders = sorted({0, len(content), *(draw.randrange(len(content) + 1) for _ in range(draw.randrange(5)))})
        for start, stop in zip(borders, borders[1:], strict=False):
            expected = [text for begin, text in texts if start <= begin < stop]
            assert read(Part(source, start, stop)) == (expected, Tally()), (start, stop)


BAD_LINES = [
    (b'{"text": "a"', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"null", "not a JSON object"),
    (b'{"Text": "a"}', "no field 'text'"),
    (b'{"text": null}', "field 'text' holds no text"),
]


@pytest.mark.parametrize(("line", "why"), BAD_LINES)
def test_a_bad_line_is_named_with_its_number_in_the_file_or_counted(tmp_path, line, why):
    good = b'{"text": "good"}\n'
    path = write(tmp_path / "a.jsonl", good * 3 + b"\n" + line + b"\n" + good + b"[]\n")
    source = look_at(str(path))
    for start in (0, 1, len(good), len(good) * 3 + 1):  # the part may begin anywhere before
        with pytest.raises(PreparationError) as error:
            read(Part(source, start, source.n_bytes))
        assert str(error.value).startswith(f"{path}, line 5: {why}") and "--skip-bad" in str(error.value)
    texts, tally = read_whole(path, skip_bad=True)
    assert texts == ["good"] * 4 and tally.n_bad_lines == 2
    assert tally.first_bad_line.startswith(f"{path}, line 5: {why}")


def test_a_line_that_is_too_long_is_bad_and_ends_where_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 40)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 7)
    exact = b'{"text": "' + b"x" * 27 + b'"}\n'
    assert len(exact) == 40
    content = exact + b'{"text": "' + b"y" * 500 + b'"}\n' + b'{"text": "z"}\n'
    source = look_at(str(write(tmp_path / "a.jsonl", content)))
    with pytest.raises(PreparationError, match="line 2: it is longer than"):
        read(Part(source, 0, source.n_bytes))
    for border in range(len(content)):
        found = [read(Part(source, *ends), skip_bad=True) for ends in ((0, border), (border, source.n_bytes))]
        assert [text for texts, _ in found for text in texts] == ["x" * 27, "z"]
        assert sum(tally.n_bad_lines for _, tally in found) == 1


def test_broken_utf8_and_lone_surrogates_in_lines_are_replaced_and_counted(tmp_path):
    content = b'{"text": "a\xffb\xef\xbf\xbd"}\n{"text": "\\ud800c\\ud83d\\ude00"}\n'
    assert read_whole(write(tmp_path / "a.jsonl", content)) == (["a\ufffdb\ufffd", "\ufffdc😀"], Tally(n_replaced=2))


def test_the_field_is_chosen_and_a_byte_order_mark_is_no_json(tmp_path):
    content = b'\xef\xbb\xbf{"text": "a", "body": "b"}\n'
    assert read_whole(write(tmp_path / "a.ndjson", content), field="body") == (["b"], Tally())


# ---------------------------------------------------------------- which files


def test_a_folder_gives_its_text_files_sorted_and_counts_the_others(tmp_path):
    names = ["b/z.PY", "b/a.txt.gz", "a.md", "b.txt", "c.jsonl", "c.jsonl.gz", ".hidden.txt", ".git/a.txt"]
    for name in [*names, "b/x.png", "b/y.PNG", "b/LICENSE", "data.json", "b/c/deep.rs"]:
        write(tmp_path / name, b"x")
    sources, left_out = find_sources([tmp_path])
    found = [str(Path(source.path).relative_to(tmp_path)) for source in sources]
    assert found == ["a.md", "b.txt", "c.jsonl", "c.jsonl.gz", "b/a.txt.gz", "b/z.PY", "b/c/deep.rs"]
    assert left_out == {".png": 2, "no suffix": 1, ".json": 1, "hidden": 2}
    sources, left_out = find_sources([tmp_path], more_suffixes=[".json"])
    assert sources[4].path.endswith("data.json") and ".json" not in left_out


def test_a_file_that_is_named_is_read_whatever_its_suffix(tmp_path):
    for name in ("LICENSE", "data.csv", ".hidden", "packed.gz"):
        path = write(tmp_path / name, b"some text")
        assert [source.path for source in find_sources([path])[0]] == [str(path)]
        assert read_whole(path)[0] == ["some text"]


@pytest.mark.parametrize("name", ["photo.png", "packed.gz"])
def test_a_binary_file_that_is_named_is_refused(tmp_path, name):
    with pytest.raises(PreparationError, match=f"{name} has NUL bytes"):
        find_sources([write(tmp_path / name, b"\x89PNG\x00\x00")])


def test_links_to_files_are_followed_and_links_to_folders_are_not(tmp_path):
    write(tmp_path / "elsewhere" / "a.txt", b"x")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    assert [Path(source.path).name for source in find_sources([tmp_path / "in"])[0]] == ["b.txt"]


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    for given in (tmp_path / "nowhere.txt", tmp_path):
        with pytest.raises(PreparationError, match=r"(nowhere|gone)\.txt cannot be read \(No such file"):
            find_sources([given])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PreparationError, match="pipe is no regular file"):
        find_sources([tmp_path / "pipe"])
    path = write(tmp_path / "a.txt", b"x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PreparationError, match=r"a\.txt cannot be read \(Permission denied"):
        find_sources([path])


def test_a_file_that_is_named_twice_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", b"x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PreparationError, match=f"{path} is named 2 times"):
        find_sources([tmp_path, Path("a.txt")])


def test_a_packed_file_that_was_cut_off_or_is_not_packed_is_named(tmp_path):
    packed = gzip.compress(b"text " * 1000)
    for content in (packed[:-1], packed[:-8], packed[:-20], b"plain text"):
        (tmp_path / "a.txt.gz").write_bytes(content)
        with pytest.raises(PreparationError, match=r"a\.txt\.gz cannot be read"):
            read_whole(tmp_path / "a.txt.gz")


def test_a_file_that_changes_after_it_was_found_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", b"before")
    os.utime(path, ns=(1, 1))
    source = look_at(str(path))
    for content in (b"after it", b"after!"):  # the second one by its time alone
        write(path, content)
        with pytest.raises(PreparationError, match=r"a\.txt was changed"):
            read(Part(source, 0, source.n_bytes))
