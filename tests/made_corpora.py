"""Corpora that tests write token by token, files for `prepare`, and a way to be killed at a chosen instant."""

import gzip
import json
import os
import random
from array import array
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from torchtitan_lite.data.corpus_folder import SPLITS, CorpusManifest, Shard, dump_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.tools import prepare as tool

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
    """A prepared corpus of these documents, one list of them for each shard."""
    folder.mkdir(parents=True)
    written = {
        split: [write_shard(folder, f"{split}-{n:05}", documents, dtype) for n, documents in enumerate(of_split)]
        for split, of_split in zip(SPLITS.values(), (shards, validation), strict=True)
    }
    write_manifest(folder, written, dtype, tokenizer_identity)
    return folder


def write_shard(folder: Path, name: str, documents: Sequence[Document], dtype: str) -> Shard:
    tokens, begins = array(CODES[dtype]), array("Q", [0])
    for document in documents:
        tokens.extend(document)
        begins.append(len(tokens))
    (folder / f"{name}.tokens").write_bytes(tokens.tobytes())
    (folder / f"{name}.documents").write_bytes(begins.tobytes())
    hashes = [sha256(content.tobytes()).hexdigest() for content in (tokens, begins)]
    return Shard(name, len(tokens), len(documents), len(tokens), *hashes)


def write_manifest(
    folder: Path, splits: dict[str, list[Shard]], dtype: str, tokenizer_identity: str = BYTES.identity
) -> None:
    manifest = CorpusManifest(dtype, tokenizer_identity, 2**16, 0.0, splits, "")
    (folder / "manifest.json").write_text(dump_manifest(manifest))


def write_flat(path: Path, tokens: Sequence[int], dtype: str = "uint16") -> Path:
    path.write_bytes(array(CODES[dtype], tokens).tobytes())
    return path


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


class Killed(BaseException):
    """No handler of errors sees it, as none sees SIGKILL."""


def kill_at(operation: int, monkeypatch) -> None:
    """Ends this process, as it were, before file-system operation number `operation`: nothing more is done to files."""
    n_done = 0

    def replace_one(name: str) -> None:
        real = getattr(os, name)

        def counted(*args, **kwargs):
            nonlocal n_done
            n_done += 1
            if n_done > operation:
                raise Killed(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, counted)

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        replace_one(name)
