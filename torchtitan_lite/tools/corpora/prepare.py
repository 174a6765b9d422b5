"""Encode text files into a prepared corpus, on all cores. The folder is complete or does not exist.

    this process    reads batches of rows  ---------->  writes documents in order, hashes, renames OUT.tmp to OUT
    its workers                  parse, choose the split, encode

Order and content do not depend on the number of processes, and a single compressed file keeps all of them busy. A
document is `BOS text EOS`, without BOS if the tokenizer has none. A conversation is formatted by its chat template.
Empty documents are left out and counted; white space is text.

A hash selects the validation documents. For a row, it is the hash of the text, so equal rows stay together. For a file,
it is the hash of the path, so a file stays in its split when it changes. If that leaves a split empty, it gets the last
document. A single text file is cut instead: its last part validates.
"""

import hashlib
import multiprocessing
import os
import shutil
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

from torchtitan_lite.config.files import hash_file
from torchtitan_lite.data.corpus_folder import MANIFEST, CorpusManifest, Split, dump_manifest
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.faults.orphans import end_with_parent
from torchtitan_lite.tools.corpora.chat import ChatFormat, mark_targets, read_chat_format
from torchtitan_lite.tools.corpora.dialects import read_conversation
from torchtitan_lite.tools.corpora.text_files import Batch, MissingField, PreparationError, read_batches
from torchtitan_lite.tools.corpora.train_tokenizer import train_tokenizer

BATCHES_AHEAD = 4  # batches in memory per worker
BAD_ROWS = "bad rows left out"
EMPTY = "empty documents left out"
UNKNOWN = "tokens stand for text that the tokenizer does not know"


def choose_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest type that can store every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class PrepareSettings:
    """Settings for converting rows to documents."""

    assets: str  # the tokenizer: an argument for load_tokenizer
    validation_share: float = 0.01  # fraction of the documents
    column: str | None = "text"  # field of a JSON line, or column of a table; None: whole rows, for conversations
    is_chat: bool = False
    chat_column: str | None = None  # column with the messages; None: by dialect
    only_last_turn: bool = False  # of a conversation
    skip_bad: bool = False  # count a row without text instead of raising
    folder: str = ""  # file paths relative to this folder determine the split
    encoding: str = "utf-8"  # of text files without a byte order mark
    tail: float = 0.0  # above 0: the last part of a document validates; for a corpus of a single text
    validation_files: frozenset[Path] = frozenset()  # if any, they hold all validation documents
    train_tokenizer: int = 0  # number of entries of a new tokenizer that replaces `assets`; 0: none


@dataclass
class Documents:
    """Documents of one split, in order."""

    tokens: array
    lengths: list[int] = field(default_factory=list)  # number of tokens of each document
    targets: bytearray = field(default_factory=bytearray)  # conversations: 1 for each token of the assistant
    text_bytes: list[int] = field(default_factory=list)  # length of each document in UTF-8

    def pop(self) -> "Documents":
        """Remove and return the last document."""
        n = self.lengths.pop()
        last = Documents(self.tokens[-n:], [n], self.targets[-n:], [self.text_bytes.pop()])
        del self.tokens[-n:]
        del self.targets[-n:]
        return last


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus that `prepare` wrote."""

    manifest: CorpusManifest
    counts: Counter[str]  # what became of the rows -> number of them; see BAD_ROWS
    first_bad: str  # location and problem of the first bad row
    validation: str  # how the validation documents were chosen


def prepare(files: list[Path], out: Path, settings: PrepareSettings, *, n_processes: int = 1) -> PreparedCorpus:
    """Create the folder `out`.

    Raises PreparationError for wrong input, UserError for a missing extra, OSError if a file cannot be written.
    """
    if out.exists():
        raise PreparationError(f"{out} exists. Choose another --out, or delete it if it is an old corpus")
    unfinished = out.with_name(out.name + ".tmp")
    if unfinished.exists():
        raise PreparationError(f"{unfinished} exists. Delete it, or choose another --out")
    unfinished.mkdir(parents=True)
    try:
        if settings.train_tokenizer:
            texts = read_texts(files, settings)
            assets = train_tokenizer(texts, settings.train_tokenizer, unfinished / "tokenizer")
            settings = replace(settings, assets=assets)
        writers: dict[str, SplitWriter] = {}
        counts: Counter[str] = Counter()
        first_bad = ""
        held: dict[str, Documents] = {}  # the last batch, whose last document may change its split
        batches = read_files(files, settings)
        for made, of_batch, bad in map_in_order(partial(encode_batch, settings), batches, n_processes):
            counts += of_batch
            first_bad = first_bad or bad
            if made:
                write(held, writers, unfinished)
                held = made
        validation = fill_splits(settings, set(writers), held)
        write(held, writers, unfinished)
        if "train" not in writers:
            raise PreparationError(f"these {len(files)} files have no text to train on. {first_bad}")
        splits = {name: writers[name].finish() for name in sorted(writers)}
        tokenizer, _ = get_encoder(settings)
        manifest = CorpusManifest(choose_dtype(tokenizer.vocab_size), tokenizer.fingerprint, splits)
        (unfinished / MANIFEST).write_text(dump_manifest(manifest))
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return PreparedCorpus(manifest, counts, first_bad, validation)


def read_files(files: Iterable[Path], settings: PrepareSettings) -> Iterator[Batch]:
    for path in files:
        yield from read_batches(path, settings.column, settings.encoding)


def write(made: dict[str, Documents], writers: dict[str, "SplitWriter"], folder: Path) -> None:
    """Write documents of each split to its files."""
    for name, documents in made.items():
        if not documents.lengths:
            continue
        if name not in writers:
            writers[name] = SplitWriter(folder, name, has_targets=bool(documents.targets))
        writers[name].write(documents)


def fill_splits(settings: PrepareSettings, written: set[str], held: dict[str, Documents]) -> str:
    """If one split has all documents, move the last one to the other. Return how the validation split was chosen."""
    names = written | held.keys()
    share = settings.validation_share
    if settings.validation_files:
        return "the files of --validation"
    if settings.tail and len(names) == 2:
        return f"the last part of the text, {settings.tail:g} of it"
    if share == 0 or len(names) != 1:
        return f"a share of {share:g}, chosen by hashes"
    (name,) = names
    if written or len(held[name].lengths) > 1:
        other = "train" if name == "validation" else "validation"
        held[other] = held[name].pop()
        return f"one document, because a share of {share:g} selects none" if name == "train" else "all but one document"
    held["train"] = held.pop(name)
    return "none: there is only one document"


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
        self.totals = Counter(n_tokens=0, n_documents=0, n_targets=0, n_text_bytes=0)
        self.largest_id = 0

    def write(self, documents: Documents) -> None:
        starts = array("q", accumulate(documents.lengths[:-1], initial=self.totals["n_tokens"]))
        self.files["tokens"].write(documents.tokens)
        self.files["documents"].write(starts)
        if "targets" in self.files:
            self.files["targets"].write(documents.targets)
        self.totals.update(
            n_tokens=len(documents.tokens),
            n_documents=len(documents.lengths),
            n_targets=sum(documents.targets),
            n_text_bytes=sum(documents.text_bytes),
        )
        self.largest_id = max(self.largest_id, max(documents.tokens))

    def finish(self) -> Split:
        """Flush the files to disk, and return their description."""
        hashes = {}
        for suffix, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            hashes[suffix] = hash_file(Path(file.name))
        return Split(**self.totals, sha256=hashes, largest_id=self.largest_id)


# ---------------------------------------------------------------- worker processes


@lru_cache(maxsize=1)
def get_encoder(settings: PrepareSettings) -> tuple[Tokenizer, ChatFormat | None]:
    tokenizer = load_tokenizer(settings.assets)
    return tokenizer, read_chat_format(tokenizer) if settings.is_chat else None


def encode_batch(settings: PrepareSettings, batch: Batch) -> tuple[dict[str, Documents], Counter[str], str]:
    """Return the documents of a batch by split, counts of what became of the rows, and the first bad row.

    Raises PreparationError for a bad row, unless skip_bad is set.
    """
    tokenizer, chat = get_encoder(settings)
    typecode = "H" if choose_dtype(tokenizer.vocab_size) == "uint16" else "I"
    made: dict[str, Documents] = {}
    counts: Counter[str] = Counter()
    bad: list[str] = []
    n_unknown = 0
    for document, turns in list_documents(settings, batch, chat, counts, bad):
        for split, text in split_document(settings, batch, document):
            documents = made.setdefault(split, Documents(array(typecode)))
            if chat:
                ids, ends = tokenizer.encode_special(text)
                documents.targets += mark_targets(ends, turns)
            else:
                ids = tokenizer.encode(text, bos=True, eos=True)
            documents.tokens.extend(ids)
            documents.lengths.append(len(ids))
            documents.text_bytes.append(len(text.encode()))
            n_unknown += ids.count(tokenizer.unknown_id)
    if n_unknown:
        counts[UNKNOWN] += n_unknown
    return made, counts, "".join(bad[:1])


def list_documents(
    settings: PrepareSettings, batch: Batch, chat: ChatFormat | None, counts: Counter[str], bad: list[str]
) -> Iterator[tuple[str, list[range]]]:
    """Yield each document of a batch as text, with the character ranges of the assistant's turns. Raises as above."""
    for number, row in enumerate(batch.rows, batch.first):
        if isinstance(row, bytes) and not batch.is_text and not row.strip():  # a blank line
            continue
        try:
            text, turns = batch.parse(row, settings.column), []
            if chat:
                dialect, conversation = read_conversation(text, settings.chat_column)
                text, turns = chat.render(conversation, only_last_turn=settings.only_last_turn)
                counts[f"conversations in the dialect {dialect}, written by {chat.name}"] += 1
            elif not isinstance(text, str):
                raise ValueError(f"its {settings.column!r} is not a string: {text!r:.60}")
            text.encode()  # raises for half of a surrogate pair, which JSON may contain
        except ValueError as error:
            place = str(batch.path) if batch.is_text else f"{batch.path}, row {number}"
            if not settings.skip_bad:
                remedy = "Fix it, or skip such documents with --skip-bad"
                if isinstance(error, MissingField):
                    remedy = "Name another field with --text-column NAME. For conversations, add --chat"
                raise PreparationError(f"{place}: {error}. {remedy}") from None
            bad.append(f"{place}: {error}")
            counts[BAD_ROWS] += 1
            continue
        if text:
            yield text, turns
        else:
            counts[EMPTY] += 1


def read_texts(files: Iterable[Path], settings: PrepareSettings) -> Iterator[str]:
    """Yield the texts of all files. Raises PreparationError."""
    for batch in read_files(files, settings):
        for text, _ in list_documents(settings, batch, None, Counter(), []):
            yield text


def split_document(settings: PrepareSettings, batch: Batch, text: str) -> list[tuple[str, str]]:
    """Return the parts of a document that are not empty, each with its split. Only a text with a tail has two."""
    if settings.tail:
        cut = int(len(text) * (1 - settings.tail))
        parts = [("train", text[:cut]), ("validation", text[cut:])]
        return [(split, part) for split, part in parts if part]
    key = os.path.relpath(batch.path, settings.folder) if batch.is_text else text
    is_validation = hash_document(key.encode()) < settings.validation_share * 2**64
    if settings.validation_files:
        is_validation = batch.path in settings.validation_files
    return [("validation" if is_validation else "train", text)]


def hash_document(key: bytes) -> int:
    """Return a number below 2**64. The documents with the lowest numbers form the validation split."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
