"""Writes the shards of a corpus. Their layout is said in torchtitan_lite/data/corpora.py.

Files are hashed while they are written, and are on the disk when their writer is closed. Whether a file counts is
decided elsewhere: by the manifest for a corpus, by the record of its unit for one in the making.
"""

import hashlib
import os
import struct
from pathlib import Path

from torchtitan_lite.data.corpora import Shard

BLOCK_BYTES = 2**20
SOURCES = "sources.jsonl"


class HashedFile:
    """A file that knows its SHA-256.

    It has a buffer of its own: one of Python's would write again when it is thrown away after the disk was full.
    """

    def __init__(self, path: Path):
        self.file = open(path, "wb", buffering=0)
        self.buffer = bytearray()
        self.digest = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self.buffer += content
        if len(self.buffer) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        self.digest.update(self.buffer)
        while self.buffer:  # a disk that is nearly full takes a part
            del self.buffer[: self.file.write(self.buffer)]

    def finish(self) -> str:
        """Everything is on the disk. The SHA-256 of it."""
        self.flush()
        os.fsync(self.file.fileno())
        self.close()
        return self.digest.hexdigest()

    def close(self) -> None:
        self.file.close()


class ShardWriter:
    """Writes NAME.tokens and NAME.documents into `folder`; documents are not held."""

    def __init__(self, folder: Path, name: str, dtype: str):
        self.name = name
        self.halved = dtype == "uint16"
        self.tokens = HashedFile(folder / f"{name}.tokens")
        self.documents = HashedFile(folder / f"{name}.documents")
        self.n_tokens = self.n_documents = self.n_text_bytes = 0

    def begin_document(self) -> None:
        self.documents.write(struct.pack("<Q", self.n_tokens))
        self.n_documents += 1

    def write(self, ids: bytes, *, n_text_bytes: int = 0) -> None:
        """Goes on with the document that was begun last. The ids, little-endian uint32, stand for `n_text_bytes` of its
        text in UTF-8."""
        self.tokens.write(halve(ids) if self.halved else ids)
        self.n_tokens += len(ids) // 4
        self.n_text_bytes += n_text_bytes

    def finish(self) -> Shard:
        """The shard, which is whole and on the disk."""
        self.documents.write(struct.pack("<Q", self.n_tokens))
        return Shard(
            name=self.name,
            n_tokens=self.n_tokens,
            n_documents=self.n_documents,
            n_text_bytes=self.n_text_bytes,
            tokens_sha256=self.tokens.finish(),
            documents_sha256=self.documents.finish(),
        )

    def close(self) -> None:
        """Without effect on a shard that is whole."""
        self.tokens.close()
        self.documents.close()


def halve(ids: bytes) -> bytes:
    """Of each little-endian uint32, the lower half."""
    lower = bytearray(len(ids) // 2)
    lower[0::2], lower[1::2] = ids[0::4], ids[1::4]
    return lower
