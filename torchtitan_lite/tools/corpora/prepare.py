"""Encode text files into a prepared corpus, on all cores. The folder is complete or does not exist.

    this process    reads batches of rows  ---------->  writes documents in order, hashes, renames OUT.tmp to OUT
    its workers                  parse, choose the split, encode

Order and content do not depend on the number of processes, and a single compressed file keeps all of them busy. A
document is `BOS text EOS`, without BOS if the tokenizer has none. A conversation is formatted by its chat template.

A hash selects the validation documents. For a row, it is the hash of the text, so equal rows stay together. For a file,
it is the hash of the path, so a file stays in its split when it changes.
"""

import hashlib
import multiprocessing
import os
import shutil
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

from torchtitan_lite.data.corpus_folder import MANIFEST, CorpusManifest, Split, dump_manifest
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.faults.orphans import end_with_parent
from torchtitan_lite.tools.corpora.chat import ChatFormat, read_chat_format
from torchtitan_lite.tools.corpora.text_files import CONVERSATION, Batch, PreparationError, read_batches

BATCHES_AHEAD = 4  # batches in memory per worker


def choose_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest type that can store every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class PrepareSettings:
    """Settings for converting rows to documents."""

    assets: str  # the tokenizer: an argument for load_tokenizer
    validation_share: float  # fraction of the documents
    column: str | None = "text"  # field of a JSON line, or column of a table; None: whole rows, for conversations
    is_chat: bool = False
    skip_bad: bool = False  # count a row without text instead of raising
    folder: str = ""  # file paths relative to this folder determine the split


@dataclass
class Documents:
    """Documents of one split, in order."""

    tokens: array
    lengths: list[int] = field(default_factory=list)  # number of tokens of each document
    targets: bytearray = field(default_factory=bytearray)  # conversations: 1 for each token of the assistant
    n_text_bytes: int = 0


@dataclass
class BadRows:
    """Rows that were skipped."""

    n: int = 0
    first: str = ""  # location and problem of the first one


def prepare(
    files: list[Path], out: Path, settings: PrepareSettings, *, n_processes: int = 1
) -> tuple[CorpusManifest, BadRows]:
    """Create the folder `out`.

    Raises PreparationError for wrong input, UserError for a missing extra, OSError if a file cannot be written.
    """
    unfinished = out.with_name(out.name + ".tmp")
    for path in (out, unfinished):
        if path.exists():
            raise PreparationError(f"{path} exists. Delete it, or choose another --out")
    unfinished.mkdir(parents=True)
    try:
        batches = (batch for path in files for batch in read_batches(path, settings.column))
        writers: dict[str, SplitWriter] = {}
        bad = BadRows()
        for made, faults in map_in_order(partial(encode_batch, settings), batches, n_processes):
            for name, documents in made.items():
                if name not in writers:
                    writers[name] = SplitWriter(unfinished, name, has_targets=settings.is_chat)
                writers[name].write(documents)
            bad = BadRows(bad.n + faults.n, bad.first or faults.first)
        if "train" not in writers:
            raise PreparationError(f"these {len(files)} files have no text to train on. {bad.first}")
        tokenizer, _ = get_encoder(settings)
        splits = {name: writers[name].finish() for name in sorted(writers)}
        manifest = CorpusManifest(choose_dtype(tokenizer.vocab_size), tokenizer.fingerprint, splits)
        (unfinished / MANIFEST).write_text(dump_manifest(manifest))
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return manifest, bad


def map_in_order(function: Callable, items: Iterable, n_processes: int) -> Iterator:
    """Yield function(item) for each item, in order, computed by `n_processes`."""
    if n_processes == 1:
        yield from map(function, items)
        return
    context, pending = multiprocessing.get_context("spawn"), deque()
    with ProcessPoolExecutor(n_processes, context, initializer=end_with_parent) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > BATCHES_AHEAD * n_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class SplitWriter:
    """Writes and hashes the files of a split."""

    def __init__(self, folder: Path, name: str, *, has_targets: bool):
        suffixes = ("tokens", "documents", "targets") if has_targets else ("tokens", "documents")
        self.files = {suffix: open(folder / f"{name}.{suffix}", "wb") for suffix in suffixes}
        self.digests = {suffix: hashlib.sha256() for suffix in suffixes}
        self.n_tokens = self.n_documents = self.n_targets = self.n_text_bytes = 0

    def write(self, documents: Documents) -> None:
        starts = array("q", accumulate(documents.lengths[:-1], initial=self.n_tokens))
        for suffix, content in {"tokens": documents.tokens, "documents": starts, "targets": documents.targets}.items():
            if suffix in self.files:
                self.files[suffix].write(content)
                self.digests[suffix].update(content)
        self.n_tokens += len(documents.tokens)
        self.n_documents += len(documents.lengths)
        self.n_targets += sum(documents.targets)
        self.n_text_bytes += documents.n_text_bytes

    def finish(self) -> Split:
        """Flush the files to disk, and return their description."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        hashes = {suffix: digest.hexdigest() for suffix, digest in self.digests.items()}
        return Split(self.n_tokens, self.n_documents, self.n_targets, self.n_text_bytes, hashes)


# ---------------------------------------------------------------- worker processes


@lru_cache(maxsize=1)
def get_encoder(settings: PrepareSettings) -> tuple[Tokenizer, ChatFormat | None]:
    tokenizer = load_tokenizer(settings.assets)
    return tokenizer, read_chat_format(tokenizer) if settings.is_chat else None


def encode_batch(settings: PrepareSettings, batch: Batch) -> tuple[dict[str, Documents], BadRows]:
    """Return the documents of a batch by split. Raises PreparationError for a bad row, unless skip_bad is set."""
    tokenizer, chat = get_encoder(settings)
    typecode = "H" if choose_dtype(tokenizer.vocab_size) == "uint16" else "I"
    made: dict[str, Documents] = {}
    bad = BadRows()
    for number, row in enumerate(batch.rows, batch.first):
        try:
            text, turns = batch.parse(row, settings.column), []
            if chat and text:
                if not isinstance(text, dict) or "messages" not in text:
                    raise ValueError("it has no field 'messages'")
                text, turns = chat.render(text["messages"])
            elif chat:
                text, turns = "", []
            elif not isinstance(text, str):
                raise ValueError(f"its {settings.column!r} is not a string: {text!r:.60}")
        except ValueError as error:
            fault = f"{batch.path}, row {number}: {error}"
            if not settings.skip_bad:
                talk = CONVERSATION.search(row) if isinstance(row, bytes) and not chat else None
                remedy = "Fix it, or skip such rows with --skip-bad"
                if talk:
                    remedy = "It looks like a conversation: add --chat"
                raise PreparationError(f"{fault}. {remedy}") from None
            bad = BadRows(bad.n + 1, bad.first or fault)
            continue
        if not text:
            continue
        content = text.encode(errors="replace")  # JSON strings may contain unpaired surrogates
        key = os.path.relpath(batch.path, settings.folder).encode() if batch.is_text else content
        split = "validation" if hash_document(key) < settings.validation_share * 2**64 else "train"
        documents = made.setdefault(split, Documents(array(typecode)))
        if chat:
            ids, starts = tokenizer.encode_special(text)
            documents.targets += bytes(any(start in turn for turn in turns) for start in starts)
        else:
            ids = tokenizer.encode(content.decode(), bos=True, eos=True)
        documents.tokens.extend(ids)
        documents.lengths.append(len(ids))
        documents.n_text_bytes += len(content)
    return made, bad


def hash_document(key: bytes) -> int:
    """Return a number below 2**64. The documents with the lowest numbers form the validation split."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
