"""Corpora that tests write token by token, files for `prepare`, and a way to be killed at a chosen instant."""

import gzip
import json
import random
from array import array
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path

from torchtitan_lite.data.corpus_folder import CorpusManifest, Split, dump_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.tools.corpora import command as tool

CODES = {"uint16": "H", "uint32": "I"}
BYTES = load_tokenizer("bytes")

Document = Sequence[int]


def write_corpus(
    folder: Path,
    shards: Sequence[Sequence[Document]],
    *,
    validation: Sequence[Sequence[Document]] = (),
    dtype: str = "uint16",
    tokenizer_identity: str = BYTES.identity,
) -> Path:
    """A prepared corpus of these documents, given in several lists."""
    folder.mkdir(parents=True)
    of_splits = {"train": list(chain(*shards)), "held_out": list(chain(*validation))}
    splits = {name: write_split(folder, name, documents, dtype) for name, documents in of_splits.items() if documents}
    (folder / "manifest.json").write_text(dump_manifest(CorpusManifest(dtype, tokenizer_identity, splits)))
    return folder


def write_split(folder: Path, name: str, documents: Sequence[Document], dtype: str) -> Split:
    tokens, begins = array(CODES[dtype]), array("q")
    for document in documents:
        begins.append(len(tokens))
        tokens.extend(document)
    hashes = {}
    for suffix, numbers in {"tokens": tokens, "documents": begins}.items():
        (folder / f"{name}.{suffix}").write_bytes(numbers)
        hashes[suffix] = sha256(numbers).hexdigest()
    return Split(len(tokens), len(documents), 0, len(tokens), hashes)


# ---------------------------------------------------------------- files for `prepare`

WORDS = ["alpha", "def", "return", "日本語", "naïve", "😀", "\n", "\n    ", "x = 1", "<|end_of_text|>", "ﬁ", "1234"]


def make_text(draw: random.Random, vocab_size: int) -> str:
    return " ".join(draw.choices(WORDS, k=vocab_size))


def write_files(folder: Path, draw: random.Random, *, n_files: int) -> tuple[list[Path], list[str]]:
    """Files of all kinds, and the texts of their documents in order."""
    folder.mkdir()
    files, texts = [], []
    for number in range(n_files):
        inside = [make_text(draw, draw.randrange(0, 60)) for _ in range(draw.randrange(1, 12))]
        suffix = draw.choice([".txt", ".md", ".py", ".txt.gz", ".jsonl", ".jsonl.gz"])
        if "jsonl" in suffix:
            content = "".join(json.dumps({"text": text}) + "\n" for text in inside)
        else:
            inside = inside[:1]
            content = inside[0]
        path = folder / f"{number}{suffix}"
        path.write_bytes(gzip.compress(content.encode()) if suffix.endswith(".gz") else content.encode())
        files.append(path)
        texts += inside
    return files, texts


def write_inputs(folder: Path, contents: dict[str, str]) -> None:
    (folder / "in").mkdir()
    for name, content in contents.items():
        (folder / "in" / name).write_text(content)


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def delete(path: Path) -> None:
    for inner in path.iterdir():
        delete(inner) if inner.is_dir() else inner.unlink()
    path.rmdir()


def prepare_some(folder: Path, *more: str) -> int:
    return tool.main([str(folder / "in"), "--out", str(folder / "out"), "--processes", "1", "--held-out", "0.3", *more])
