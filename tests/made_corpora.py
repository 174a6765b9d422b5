"""Write corpora token by token."""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path

from torchtitan_lite.data.corpus_folder import CorpusManifest, CorpusSplit, dump_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")
WORDS = [
    "alpha",
    "def",
    "return",
    "日本語",
    "naïve",
    "😀",
    "\n",
    "\n    ",
    "x = 1",
    "<|end_of_text|>",
    "ﬁ",
    "1234",
]

Document = Sequence[int]


def write_corpus(
    folder: Path,
    shards: Sequence[Sequence[Document]],
    *,
    validation: Sequence[Sequence[Document]] = (),
    tokenizer_fingerprint: str = BYTES.fingerprint,
) -> Path:
    """Write a prepared corpus of these documents, given in several lists."""
    folder.mkdir(parents=True)
    of_splits = {"train": list(chain(*shards)), "validation": list(chain(*validation))}
    splits = {
        name: write_split(folder, name, documents)
        for name, documents in of_splits.items()
        if documents
    }
    (folder / "manifest.json").write_text(
        dump_manifest(CorpusManifest("uint16", tokenizer_fingerprint, splits))
    )
    return folder


def write_split(folder: Path, name: str, documents: Sequence[Document]) -> CorpusSplit:
    tokens, begins = array("H"), array("q")
    for document in documents:
        begins.append(len(tokens))
        tokens.extend(document)
    hashes = {}
    for suffix, numbers in {"tokens": tokens, "documents": begins}.items():
        (folder / f"{name}.{suffix}").write_bytes(numbers)
        hashes[suffix] = sha256(numbers).hexdigest()
    return CorpusSplit(len(tokens), len(documents), 0, len(tokens), hashes)
