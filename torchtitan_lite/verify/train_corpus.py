"""Corpora of random documents for the trial of train.py, and their samples, cut by other code than dataset.py's.

    documents     written as `prepare` would: two shards of training documents, one of held-out ones
    cut_sample    one row of a batch, token by token

Tokens are those of the tokenizer "bytes": a document is 256, some bytes, 257.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from torchtitan_lite.data.corpus_folder import MANIFEST, CorpusManifest, Shard, dump_manifest
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.model.head import IGNORE_INDEX

TOKENIZER = "bytes"
BEGIN, END = 256, 257
N_WORDS = 258
MOST_DOCUMENT_TOKENS = 50


@dataclass(frozen=True)
class Text:
    """One split of a corpus: documents laid end to end."""

    tokens: list[int]
    begins: frozenset[int]  # places of the first token of each document

    def count_samples(self, seq_len: int) -> int:
        """Every token but the first is a target in one sample."""
        return -(-(len(self.tokens) - 1) // seq_len)


def make_text(seed: int, n_tokens: int) -> Text:
    """Random documents of 3 to MOST_DOCUMENT_TOKENS tokens."""
    draw = random.Random(seed)
    tokens, begins = [], []
    while len(tokens) < n_tokens:
        begins.append(len(tokens))
        tokens += [BEGIN, *draw.choices(range(256), k=draw.randint(1, MOST_DOCUMENT_TOKENS - 2)), END]
    return Text(tokens, frozenset(begins))


def write_corpus(folder: Path, train: Text, held_out: Text) -> None:
    """A prepared corpus of these texts. The training documents are in two shards, cut at a border of documents."""
    folder.mkdir(parents=True)
    middle = sorted(train.begins)[len(train.begins) // 2]
    manifest = CorpusManifest(
        dtype="uint16",
        tokenizer_identity=load_tokenizer(TOKENIZER).identity,
        vocab_size=N_WORDS,
        held_out_share=0.0,
        splits={
            "train": [
                write_shard(folder, "train-00000", train, 0, middle),
                write_shard(folder, "train-00001", train, middle, len(train.tokens)),
            ],
            "held_out": [write_shard(folder, "held_out-00000", held_out, 0, len(held_out.tokens))],
        },
        sources_sha256=sha256().hexdigest(),
    )
    (folder / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")


def write_shard(folder: Path, name: str, text: Text, start: int, stop: int) -> Shard:
    """The documents in this stretch of a text: tokens and borders."""
    begins = sorted(place - start for place in text.begins if start <= place < stop)
    contents = {
        "tokens": array("H", text.tokens[start:stop]).tobytes(),
        "documents": array("Q", [*begins, stop - start]).tobytes(),
    }
    for kind, content in contents.items():
        (folder / f"{name}.{kind}").write_bytes(content)
    n_text_bytes = sum(token < BEGIN for token in text.tokens[start:stop])
    hashes = (sha256(content).hexdigest() for content in contents.values())
    return Shard(name, stop - start, len(begins), n_text_bytes, *hashes)


def cut_sample(text: Text, sample: int, seq_len: int, *, restart_positions: bool) -> list[list[int]]:
    """Tokens, targets, positions and document numbers of one sample, S each. Padding is a document of its own."""
    start, n = sample * seq_len, len(text.tokens)
    rows: list[list[int]] = [[], [], [], []]
    position = document = 0
    for place in range(start, start + seq_len):
        if place > start and (place in text.begins or place == n):
            document += 1
            position = 0 if restart_positions else position
        is_target = place + 1 < n and place + 1 not in text.begins
        values = (
            text.tokens[place] if place < n else 0,
            text.tokens[place + 1] if is_target else IGNORE_INDEX,
            position,
            document,
        )
        for row, value in zip(rows, values, strict=True):
            row.append(value)
        position += 1
    return rows


def cut_batch(
    texts: Sequence[Text], samples: Sequence[tuple[int, int]], seq_len: int, *, restart_positions: bool
) -> Batch:
    """A row for each (text, sample)."""
    rows = [cut_sample(texts[n], sample, seq_len, restart_positions=restart_positions) for n, sample in samples]
    return Batch(*(torch.tensor(field) for field in zip(*rows, strict=True)))
