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
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from torchtitan_lite.config.files import hash_file
from torchtitan_lite.data.corpus_folder import MANIFEST, CorpusManifest, Split, dump_manifest
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.faults.orphans import end_with_parent
from torchtitan_lite.tools.corpora.chat import ChatFormat, mark_targets, read_chat_format
from torchtitan_lite.tools.corpora.dialects import read_conversation
from torchtitan_lite.tools.corpora.text_files import (
    UNREADABLE,
    PreparationError,
    Row,
    is_text,
    read_file,
)
from torchtitan_lite.tools.corpora.train_tokenizer import train_tokenizer

CHUNK_ROWS = 32  # sent to a worker at once
GROUP_ROWS = 128  # submitted at once, per worker
UINT16_IDS = 2**16
BAD_ROWS = "bad rows left out"
UNKNOWN = "unknown tokens, for text outside the vocabulary"
# Raised for a row that is not what it should be
BAD_ROW = (ValueError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class PrepareSettings:
    """Settings for converting rows to documents."""

    assets: str  # the tokenizer: an argument for load_tokenizer
    validation_share: float = 0.01  # of the documents
    tail: float = 0.0  # last part of a single text, which validates instead
    validation_files: frozenset[Path] = frozenset()  # all documents of these files validate
    column: str | None = (
        None  # of the text or the messages; None: "text", or by the dialect of the conversations
    )
    is_chat: bool = False
    only_last_turn: bool = False  # of a conversation
    skip_bad: bool = False  # print and count a bad row instead of raising
    encoding: str = "utf-8"  # of text files without a byte order mark
    train_tokenizer: int = 0  # number of entries of a new tokenizer that replaces `assets`; 0: none
    folder: str = ""  # set by `prepare`: file paths relative to this folder determine the split


@dataclass(frozen=True)
class Document:
    """An encoded row."""

    outcome: str  # for the summary; "": not counted
    split: str = "train"
    tokens: array | tuple = ()  # none: the row was left out
    n_text_bytes: int = 0  # in UTF-8
    targets: bytes = b""  # conversations: 1 for each token of the assistant
    n_unknown: int = 0  # tokens that stand for text outside the vocabulary


def prepare(
    files: list[Path], out: Path, settings: PrepareSettings, *, n_processes: int = 1
) -> tuple[CorpusManifest, Counter[str]]:
    """Create the folder `out`. Return its manifest, and the number of rows for each Document.outcome.

    Raises PreparationError for wrong input, UserError for a missing extra, OSError if a file cannot be written.
    """
    if out.exists():
        raise PreparationError(
            f"{out} exists. Choose another --out, or delete it if it is an old corpus"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    get_encoder.cache_clear()
    common = os.path.commonpath([path.absolute().parent for path in files])
    settings = replace(settings, folder=common)
    with TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.tmp-") as work:
        folder = Path(work) / "corpus"
        folder.mkdir()
        if settings.train_tokenizer:
            assets = train_tokenizer(
                read_texts(files, settings), settings.train_tokenizer, folder / "tokenizer"
            )
            settings = replace(settings, assets=assets)
        documents = map_in_order(
            partial(encode_row, settings), read_rows(files, settings), n_processes
        )
        splits, counts = write_documents(documents, folder, has_floor=settings.validation_share > 0)
        if "train" not in splits:
            raise PreparationError(f"these {len(files)} files have no text to train on")
        tokenizer, _ = get_encoder(settings.assets, settings.is_chat)
        dtype = "uint16" if tokenizer.vocab_size <= UINT16_IDS else "uint32"
        manifest = CorpusManifest(dtype, tokenizer.fingerprint, splits)
        (folder / MANIFEST).write_text(dump_manifest(manifest))
        folder.rename(out)
    return manifest, counts


def read_rows(files: list[Path], settings: PrepareSettings) -> Iterator[Row]:
    """Yield the rows of all files. Raises PreparationError for a file that cannot be read."""
    column = None if settings.is_chat else settings.column or "text"
    for path in files:
        try:
            for number, content in enumerate(
                read_file(path, column, settings.encoding, settings.tail), 1
            ):
                yield Row(path, number, content)
        except UNREADABLE as error:
            raise PreparationError(f"{path} cannot be read: {error}") from None


def read_texts(files: list[Path], settings: PrepareSettings) -> Iterator[str]:
    """Yield the texts of all files, without bad rows. Raises PreparationError."""
    for row in read_rows(files, settings):
        with suppress(*BAD_ROW):
            yield read_text(settings, row)


def map_in_order(function: Callable, rows: Iterator[Row], n_processes: int) -> Iterator:
    """Yield function(row) for each row, in order, computed by `n_processes`."""
    if n_processes == 1:
        yield from map(function, rows)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_processes, context, initializer=end_with_parent) as pool:
        previous = iter(())
        while group := list(islice(rows, GROUP_ROWS * n_processes)):
            submitted = pool.map(function, group, chunksize=CHUNK_ROWS)
            yield from previous
            previous = submitted
        yield from previous


# ---------------------------------------------------------------- writing


def write_documents(
    documents: Iterator[Document], folder: Path, *, has_floor: bool
) -> tuple[dict[str, Split], Counter[str]]:
    """Write the files of both splits. Return the splits that have documents, and the number for each outcome.

    `has_floor`: if all documents are in one split, the last one goes to the other.
    """
    train = SplitWriter(folder / "train")
    validation = SplitWriter(folder / "validation")
    writers = {"train": train, "validation": validation}
    counts = Counter()
    last = None
    for document in documents:
        counts[document.outcome] += 1
        counts[UNKNOWN] += document.n_unknown
        if not document.tokens:
            continue
        if last:
            writers[last.split].write(last)
        last = document
    if last:
        writer = writers[last.split]
        if has_floor and not (train.files and validation.files):
            writer = validation if train.files else train
        writer.write(last)
    del counts[""]
    counts = +counts  # without zeros
    return {name: writer.finish() for name, writer in writers.items() if writer.files}, counts


class SplitWriter:
    """Writes and hashes the files of a split."""

    def __init__(self, path: Path):
        """`path`: of the files, without their suffix."""
        self.path = path
        self.files = {}
        self.totals = Counter()

    def write(self, document: Document) -> None:
        start = self.totals["n_tokens"].to_bytes(8, "little")
        contents = {"tokens": document.tokens, "documents": start, "targets": document.targets}
        for suffix, content in contents.items():
            if content and suffix not in self.files:
                self.files[suffix] = open(f"{self.path}.{suffix}", "wb")
            if content:
                self.files[suffix].write(content)
        self.totals.update(
            n_documents=1,
            n_tokens=len(document.tokens),
            n_targets=sum(document.targets),
            n_text_bytes=document.n_text_bytes,
        )

    def finish(self) -> Split:
        """Flush the files to disk, and return their description."""
        hashes = {}
        for suffix, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            hashes[suffix] = hash_file(Path(file.name))
        return Split(**self.totals, sha256=hashes)


# ---------------------------------------------------------------- worker processes


@lru_cache(maxsize=1)
def get_encoder(assets: str, is_chat: bool) -> tuple[Tokenizer, ChatFormat | None]:
    tokenizer = load_tokenizer(assets)
    return tokenizer, read_chat_format(tokenizer) if is_chat else None


def encode_row(settings: PrepareSettings, row: Row) -> Document:
    """Encode the document of a row. Raises PreparationError for a bad row, unless skip_bad is set."""
    tokenizer, chat = get_encoder(settings.assets, settings.is_chat)
    outcome = ""
    targets = b""
    try:
        if chat:
            content = row.parse(settings.encoding)
            dialect, conversation = read_conversation(content, settings.column, tokenizer.normalize)
            text, turns = chat.render(conversation, only_last_turn=settings.only_last_turn)
            ids, ends = tokenizer.encode_special(text)
            targets = bytes(mark_targets(ends, turns))
            outcome = f"conversations in the dialect {dialect}, written by {chat.name}"
        else:
            text = read_text(settings, row)
            if not text:
                return Document("empty documents left out")
            ids = tokenizer.encode(text, bos=True, eos=True)
        n_bytes = len(text.encode())  # refuses half a surrogate pair, which tiktoken would replace
    except BAD_ROW as error:
        place = "" if is_text(row.path) else f", row {row.number}"
        problem = f"{row.path}{place}: {error}"
        if settings.skip_bad:
            print(problem, file=sys.stderr)
            return Document(BAD_ROWS)
        remedy = "Fix it, or give `prepare` the option --skip-bad"
        raise PreparationError(f"{problem}. {remedy}") from None
    typecode = "H" if tokenizer.vocab_size <= UINT16_IDS else "I"
    n_unknown = ids.count(tokenizer.unknown_id)
    return Document(
        outcome,
        choose_split(settings, row, text),
        array(typecode, ids),
        n_bytes,
        targets,
        n_unknown,
    )


def read_text(settings: PrepareSettings, row: Row) -> str:
    """Return the text of a row. Raises ValueError."""
    content = row.parse(settings.encoding)
    if is_text(row.path):
        return content
    if not isinstance(content, dict):
        raise ValueError(f"it is not a JSON object: {content!r:.60}")
    column = settings.column or "text"
    if column not in content:
        why = f"it has no {column!r}, only {', '.join(map(repr, content))}"
        raise ValueError(f"{why} (--text-column NAME reads another, --chat reads conversations)")
    text = content[column]
    if not isinstance(text, str):
        raise ValueError(f"its {column!r} is not a string: {text!r:.60}")
    text.encode()  # raises for half of a surrogate pair, which JSON may contain
    return text


def choose_split(settings: PrepareSettings, row: Row, text: str) -> str:
    """Return the split of a document."""
    key = os.path.relpath(row.path, settings.folder) if is_text(row.path) else text
    is_tail = settings.tail and row.number == 2
    is_chosen = hash_document(key) < settings.validation_share * 2**64
    if is_tail or is_chosen or row.path in settings.validation_files:
        return "validation"
    return "train"


def hash_document(key: str) -> int:
    """Return a number below 2**64. The documents with the lowest numbers form the validation split."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big")
