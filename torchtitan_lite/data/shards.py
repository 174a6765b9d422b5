"""Documents to the shards of one unit of work.

A document is `BOS text EOS`, without BOS where the tokenizer has none. A hash of its text says which split it is in:
equal documents are in one split, and no order of the files changes it. What the files hold is in corpus_folder.py.
"""

import hashlib
import json
import os
from array import array
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from torchtitan_lite.config.files import replace_file, sync_folder
from torchtitan_lite.data.corpus_folder import SPLITS, Shard, choose_dtype
from torchtitan_lite.data.text_files import Part, Tally, read_documents
from torchtitan_lite.data.tokenizer import Tokenizer, pack

FLUSHED_TOKENS = 2**19


@dataclass(frozen=True)
class Recipe:
    """How documents become shards, except for the tokenizer."""

    validation_share: float  # of the documents, 0 <= share < 1
    field: str = "text"  # of a line of JSON
    skip_bad: bool = False  # a line without text is counted, and no error


def make_unit(work: Path, number: int, parts: list[Part], recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Write the shards of a unit, over what a killed process left of them; then its record.

    Raises PreparationError for what is wrong with a file, OSError where a shard cannot be written.
    """
    writers: dict[str, ShardWriter] = {}
    writer: ShardWriter | None = None  # of the current document
    tally = Tally()
    pieces = (read_documents(part, field=recipe.field, skip_bad=recipe.skip_bad, tally=tally) for part in parts)
    bos, eos = (pack([] if token_id is None else [token_id]) for token_id in (tokenizer.bos_id, tokenizer.eos_id))
    with ExitStack() as open_writers:
        for piece, is_first in chain.from_iterable(pieces):
            if is_first:
                if writer is not None:
                    writer.write(eos)
                if not piece:
                    tally.n_empty += 1
                    writer = None
                    continue
                split = SPLITS[choose_split(piece, recipe.validation_share)]
                if split not in writers:
                    dtype = choose_dtype(tokenizer.vocab_size)
                    writers[split] = ShardWriter(work / "corpus", f"{split}-{number:05}", dtype)
                    open_writers.callback(writers[split].close)
                writer = writers[split]
                writer.begin_document()
                writer.write(bos)
            n_text_bytes = len(piece) if piece.isascii() else len(piece.encode())  # the first is known without looking
            writer.write(tokenizer.encode_packed(piece), n_text_bytes=n_text_bytes)
        if writer is not None:
            writer.write(eos)
        shards = {split: asdict(writers[split].finish()) for split in sorted(writers)}
    sync_folder(work / "corpus")
    with replace_file(work / "units" / f"{number:05}.json") as file:
        file.write(json.dumps({"shards": shards, "tally": asdict(tally)}).encode())


def choose_split(first_piece: str, validation_share: float) -> str:
    """Return the split of a document: texts hash to numbers below 2**64, and the lowest are for validation.

    The first piece decides: when the split is needed, the others have not been read.
    """
    number = int.from_bytes(hashlib.sha256(first_piece.encode()).digest()[:8], "big")
    return "validation" if number < validation_share * 2**64 else "train"


class ShardWriter:
    """Writes NAME.tokens and NAME.documents into `folder`, and hashes them on the way.

    The files have no buffer of Python's: after a full disk, it would be written again when it is thrown away.
    """

    def __init__(self, folder: Path, name: str, dtype: str):
        self.name, self.is_uint16, kinds = name, dtype == "uint16", {"tokens": "I", "documents": "Q"}
        self.pending = {kind: array(code) for kind, code in kinds.items()}
        self.digests = {kind: hashlib.sha256() for kind in kinds}
        self.files = {kind: open(folder / f"{name}.{kind}", "wb", buffering=0) for kind in kinds}
        self.n_tokens = self.n_documents = self.n_text_bytes = 0

    def begin_document(self) -> None:
        self.pending["documents"].append(self.n_tokens)
        self.n_documents += 1

    def write(self, ids: bytes, *, n_text_bytes: int = 0) -> None:
        """Add ids, uint32, to the current document; they stand for `n_text_bytes` of its text in UTF-8."""
        self.pending["tokens"].frombytes(ids)
        self.n_tokens += len(ids) // 4
        self.n_text_bytes += n_text_bytes
        if len(self.pending["tokens"]) >= FLUSHED_TOKENS:
            self._flush()

    def finish(self) -> Shard:
        """Return the shard, which is whole and on the disk."""
        self.pending["documents"].append(self.n_tokens)
        self._flush()
        for file in self.files.values():
            os.fsync(file.fileno())
        hashes = (self.digests[kind].hexdigest() for kind in ("tokens", "documents"))
        return Shard(self.name, self.n_tokens, self.n_documents, self.n_text_bytes, *hashes)

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _flush(self) -> None:
        for kind, numbers in self.pending.items():
            content = memoryview(numbers.tobytes())
            if kind == "tokens" and self.is_uint16:  # the lower half of each little-endian uint32
                halves = bytearray(len(content) // 2)
                halves[0::2], halves[1::2] = content[0::4], content[1::4]
                content = memoryview(halves)
            self.digests[kind].update(content)
            while content:  # a disk that is nearly full takes a part
                content = content[self.files[kind].write(content) :]
            del numbers[:]
