"""Files to corpora to tokens: every document once, in its order, whatever the kind of file and number of processes."""

import gzip
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from checkpoints import flip_bit
from made_corpora import BYTES, WORDS, write_corpus

from torchtitan_lite.data import text_files
from torchtitan_lite.data.corpus import Corpus, open_corpus
from torchtitan_lite.data.corpus_folder import DATASETS, CorpusError, check_corpora
from torchtitan_lite.tools.corpora import command as tool
from torchtitan_lite.tools.corpora.prepare import Recipe, choose_split, prepare
from torchtitan_lite.tools.corpora.text_files import PreparationError, find_files

NO_CACHE = Path("nowhere")


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
    for token, begins in zip(*(tensor.tolist() for tensor in corpus.read(0, corpus.n_tokens)), strict=True):
        documents += [[]] if begins else []
        documents[-1].append(token)
    return documents


def test_every_document_is_there_once_in_order_whatever_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BATCH_BYTES", 2000)
    texts = write_files(tmp_path / "in")
    files, _ = find_files([tmp_path / "in"])
    for n in (1, 3):
        prepare(files, tmp_path / f"out{n}", Recipe("bytes", 0.0), n_processes=n)
    assert list_documents(Corpus("", tmp_path / "out1", "train")) == [
        BYTES.encode(t, bos=True, eos=True) for t in texts
    ]
    one, three = ({p.name: p.read_bytes() for p in (tmp_path / f"out{n}").iterdir()} for n in (1, 3))
    assert one == three and sorted(one) == ["manifest.json", "train.documents", "train.tokens"]


def test_rows_are_held_out_by_their_text_and_files_by_their_path(tmp_path):
    texts = [f"text {n}" for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare([tmp_path / "a.jsonl"], tmp_path / "rows", Recipe("bytes", 0.3))
    held_out = [BYTES.encode(t, bos=True, eos=True) for t in texts if choose_split(t.encode(), 0.3) == "held_out"]
    assert 60 < len(held_out) < 120 and list_documents(Corpus("", tmp_path / "rows", "validation")) == held_out
    for version in ("old", "new"):
        for n in range(30):
            (tmp_path / version).mkdir(exist_ok=True)
            (tmp_path / version / f"{n}.txt").write_text(f"{version} {n}")
        files, _ = find_files([tmp_path / version])
        prepare(files, tmp_path / f"of {version}", Recipe("bytes", 0.3, folder=str(tmp_path / version)))
    old, new = (list_documents(Corpus("", tmp_path / f"of {v}", "validation")) for v in ("old", "new"))
    assert [d[4:] for d in old] == [d[4:] for d in new] and 0 < len(old) < 30


REFUSED = {  # files -> a word of the message
    "not JSON": ({"a.jsonl": '{"text": "x"}\n{"text": \n'}, "a.jsonl, row 2"),
    "no field": ({"a.jsonl": '{"content": "x"}\n'}, "--text-column"),
    "no text": ({"a.jsonl": '{"text": 5}\n'}, "row 1: its 'text' is no text"),
    "nothing": ({"a.txt": ""}, "no text to train on"),
    "unknown kind": ({"a.png": "x"}, "no file was found"),
    "no file": ({}, "no file was found"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_prepared_is_named_and_nothing_is_left(name, tmp_path, capsys):
    files, word = REFUSED[name]
    (tmp_path / "in").mkdir()
    for file, content in files.items():
        (tmp_path / "in" / file).write_text(content)
    assert tool.main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--processes", "1"]) == 2
    assert word in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["in"]


def test_bad_rows_are_counted_where_that_is_asked_for_and_the_corpus_is_checked(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnonsense\n\n{"text": "\\ud800"}\n')
    args = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--processes", "1"]
    assert tool.main([*args, "--held-out", "0", "--skip-bad"]) == 0
    assert "1 bad rows, the first" in capsys.readouterr().out
    assert tool.main(args) == 2 and "exists" in capsys.readouterr().err
    assert list_documents(Corpus("", tmp_path / "out", "train"))[1] == [256, ord("?"), 257]
    assert tool.main(["--check", str(tmp_path / "out")]) == 0
    flip_bit(tmp_path / "out" / "train.tokens")
    assert tool.main(["--check", str(tmp_path / "out")]) == 1 and "train.tokens" in capsys.readouterr().err


def test_any_stretch_is_read(tmp_path):
    draw = random.Random(1)
    documents = [[draw.randrange(2**16) for _ in range(draw.randrange(1, 9))] for _ in range(12)]
    corpus = Corpus("", write_corpus(tmp_path / "made", [documents]), "train")
    tokens = [token for document in documents for token in document]
    begins = [place == 0 for document in documents for place in range(len(document))]
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            found = [tensor.tolist() for tensor in corpus.read(start, stop)]
            assert found == [tokens[start:stop], begins[start:stop]]


def test_a_corpus_that_cannot_be_used_is_one_problem_with_its_name_and_a_remedy(tmp_path):
    made = write_corpus(tmp_path / "made", [[[1, 2], [3]]])
    assert check_corpora("training.dataset", [str(made)], split="train", tokenizer=BYTES) == []
    (problem,) = check_corpora("training.dataset", [str(made)], split="validation", tokenizer=BYTES)
    assert "--held-out" in problem.remedy
    (made / "train.tokens").write_bytes(b"1")
    names = [str(made), str(tmp_path), "nowhere", "c4"]
    problems = check_corpora("training.dataset", names, split="train", tokenizer=BYTES)
    assert [problem.value for problem in problems] == names and "train.tokens has 1 bytes" in problems[0].why
    other = write_corpus(tmp_path / "other", [[[1]]], tokenizer_identity="x")
    assert "another tokenizer" in check_corpora("d", [str(other)], split="train", tokenizer=BYTES)[0].why


def test_a_named_corpus_is_prepared_once_and_a_killed_ones_rest_is_no_obstacle(tmp_path, monkeypatch):
    write_files(tmp_path / "in")
    monkeypatch.setitem(DATASETS, "tiny", lambda path: find_files([tmp_path / "in"])[0])
    identity = open_corpus("tiny", BYTES, tmp_path / "cache").identity
    (folder,) = (tmp_path / "cache").glob("tiny-*/")
    folder.rename(folder.with_name(folder.name + ".tmp"))
    assert open_corpus("tiny", BYTES, tmp_path / "cache").identity == identity
    monkeypatch.setattr("torchtitan_lite.data.corpus.prepare", lambda *_, **__: pytest.fail("prepared again"))
    assert open_corpus("tiny", BYTES, tmp_path / "cache", split="validation").n_tokens > 0
    with pytest.raises(CorpusError, match="allenai/c4"):
        open_corpus("c4", BYTES, tmp_path / "cache")


def test_a_file_without_its_package_is_refused_and_the_extra_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    monkeypatch.setattr(text_files, "find_spec", lambda name: None)
    with pytest.raises(PreparationError, match="pyarrow.*extra `data`"):
        find_files([tmp_path])
