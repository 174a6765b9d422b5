"""A prepared corpus that nobody prepared, for measuring how it is read: random ids, or 100 GB of holes.

    train-00000.tokens   train-00001.tokens  ...    random ids, or a sparse file, which takes no room on the disk
    train-00000.documents <- train-00001 ...        one file of borders and links to it

It opens like any other. All shards have the same contents, so those of the first are hashed.
"""

import hashlib
import random
import struct
from pathlib import Path

from torchtitan_lite.config.files import hash_file
from torchtitan_lite.data.corpus_folder import BYTES_OF, MANIFEST, CorpusManifest, Shard, choose_dtype, dump_manifest
from torchtitan_lite.data.tokenizer import Tokenizer

DOCUMENT_TOKENS = 1000
BLOCK_TOKENS = 2**20
CODES = {"uint16": "H", "uint32": "I"}  # of the module struct


def fabricate_corpus(
    folder: Path, tokenizer: Tokenizer, *, n_shards: int, shard_tokens: int, sparse: bool = False
) -> None:
    """Makes `folder`. Documents have DOCUMENT_TOKENS, of which `shard_tokens` is a multiple."""
    assert shard_tokens % DOCUMENT_TOKENS == 0, f"{shard_tokens} tokens are no whole documents"
    folder.mkdir()
    dtype = choose_dtype(tokenizer.vocab_size)
    n_bytes, n_documents = shard_tokens * BYTES_OF[dtype], shard_tokens // DOCUMENT_TOKENS
    ids = random.Random(0).choices(range(tokenizer.vocab_size), k=BLOCK_TOKENS)
    block = b"" if sparse else struct.pack(f"<{len(ids)}{CODES[dtype]}", *ids)
    borders = struct.pack(f"<{n_documents + 1}Q", *range(0, shard_tokens + 1, DOCUMENT_TOKENS))
    shards: list[Shard] = []
    for number in range(n_shards):
        name = f"train-{number:05}"
        tokens, documents = folder / f"{name}.tokens", folder / f"{name}.documents"
        write_repeated(tokens, block, n_bytes)
        documents.symlink_to(f"{shards[0].name}.documents") if shards else documents.write_bytes(borders)
        if not shards:
            hashes = hash_file(tokens), hash_file(documents)
        shards.append(Shard(name, shard_tokens, n_documents, 3 * shard_tokens, *hashes))
    manifest = CorpusManifest(
        dtype=dtype,
        tokenizer_identity=tokenizer.identity,
        vocab_size=tokenizer.vocab_size,
        held_out_share=0.0,
        splits={"train": shards, "held_out": []},
        sources_sha256=hashlib.sha256().hexdigest(),
    )
    (folder / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")


def write_repeated(path: Path, block: bytes, n_bytes: int) -> None:
    """A file of `n_bytes` that holds `block` over and over; of an empty one, a hole."""
    with open(path, "wb", buffering=0) as file:
        while block and (n_left := n_bytes - file.tell()) > 0:
            file.write(block[:n_left])
        file.truncate(n_bytes)
