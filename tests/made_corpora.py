"""Corpora that tests write themselves, token by token, without the code that prepares or reads them."""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from torchtitan_lite.data.corpus_folder import SPLITS, CorpusManifest, Shard, dump_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer

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
