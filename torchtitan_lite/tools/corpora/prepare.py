"""Encode text files into a prepared corpus, on all cores. The folder is complete or does not exist.

    this process    reads batches of rows  ---------->  writes documents in order, hashes, renames OUT.tmp to OUT
    its workers                  parse, choose the split, encode

Order and content do not depend on the number of processes, and a single compressed file keeps all of them busy. A
document is `BOS text EOS`, without BOS if the tokenizer has none. A conversation is formatted by its chat template.
Empty documents are left out and counted; white space is text.

A hash selects the validation documents. For a row, it is the hash of the text, so equal rows stay together. For a file,
it is the hash of the path, so a file stays in its split when it changes. If the hashes leave a split empty, the corpus
is encoded again with another rule: one document for that split, or the last part of the only document.
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

from torchtitan_lite.data.corpus_folder import MANIFEST, CorpusManifest, Split, dump_manifest
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.faults.orphans import end_with_parent
from torchtitan_lite.tools.corpora.chat import ChatFormat, mark_targets, read_chat_format
from torchtitan_lite.tools.corpora.dialects import read_conversation
from torchtitan_lite.tools.corpora.text_files import Batch, MissingField, PreparationError, read_batches
from torchtitan_lite.tools.corpora.train_tokenizer import train_tokenizer

BATCHES_AHEAD = 4  # batches in memory per worker
VALIDATION_SHARE = 0.01  # default share of the documents
VALIDATION_TAIL = 0.1  # default share of the only document: its last part
HASHES = 2**64


def choose_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest type that can store every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class PrepareSettings:
    """Settings for converting rows to documents."""

    assets: str  # the tokenizer: an argument for load_tokenizer
    validation_share: float | None = None  # fraction of the documents, or of the only one; None: the defaults above
    column: str | None = "text"  # field of a JSON line, or column of a table; None: whole rows, for conversations
    is_chat: bool = False
    chat_column: str | None = None  # column with the messages; None: by dialect
    only_last_turn: bool = False  # of a conversation
    skip_bad: bool = False  # count a row without text instead of raising
    folder: str = ""  # file paths relative to this folder determine the split
    encoding: str = "utf-8"  # of text files without a byte order mark
    train_tokenizer: int = 0  # number of entries of a new tokenizer that replaces `assets`; 0: none


@dataclass(frozen=True)
class SplitRule:
    """Selects the validation documents."""

    below: int  # documents with a lower hash
    tail: float = 0.0  # above 0: this last part of every document, which is the only one


@dataclass
class Documents:
    """Documents of one split, in order."""

    tokens: array
    lengths: list[int] = field(default_factory=list)  # number of tokens of each document
    targets: bytearray = field(default_factory=bytearray)  # conversations: 1 for each token of the assistant
    n_text_bytes: int = 0


@dataclass
class RowCounts:
    """What became of the rows."""

    n_bad: int = 0  # rows that were skipped
    first_bad: str = ""  # location and problem of the first one
    n_empty: int = 0  # documents without a character
    dialects: Counter[str] = field(default_factory=Counter)  # number of conversations of each
    n_unknown: int = 0  # tokens that stand for text outside the vocabulary
    lowest: int = HASHES  # of the hashes of all documents
    highest: int = -1

    def add(self, other: "RowCounts") -> None:
        """Add the counts of later rows."""
        self.n_bad += other.n_bad
        self.first_bad = self.first_bad or other.first_bad
        self.n_empty += other.n_empty
        self.dialects.update(other.dialects)
        self.n_unknown += other.n_unknown
        self.lowest = min(self.lowest, other.lowest)
        self.highest = max(self.highest, other.highest)


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus that `prepare` wrote."""

    manifest: CorpusManifest
    counts: RowCounts
    split: str  # how the validation documents were chosen


def prepare(
    files: list[Path],
    out: Path,
    settings: PrepareSettings,
    *,
    n_processes: int = 1,
    validation_files: Iterable[Path] = (),
) -> PreparedCorpus:
    """Create the folder `out`. With `validation_files`, all documents of `files` are for training.

    Raises PreparationError for wrong input, UserError for a missing extra, OSError if a file cannot be written.
    """
    if out.exists():
        remedy = "Delete it, or choose another --out" if (out / MANIFEST).is_file() else "Choose another --out"
        raise PreparationError(f"{out} exists. {remedy}")
    unfinished = out.with_name(out.name + ".tmp")
    if unfinished.exists():
        raise PreparationError(f"{unfinished} exists. Delete it, or choose another --out")
    unfinished.mkdir(parents=True)
    try:
        if settings.train_tokenizer:
            texts = read_texts(files, settings)
            folder = train_tokenizer(texts, settings.train_tokenizer, unfinished / "tokenizer")
            settings = replace(settings, assets=str(folder))
        encode = partial(encode_files, unfinished, files, validation_files, settings, n_processes=n_processes)
        rule = SplitRule(0 if validation_files else int(get_share(settings) * HASHES))
        splits, counts = encode(rule)
        if get_share(settings) > 0 and not validation_files and len(splits) == 1:
            rule = choose_small_split(settings, splits, counts)
            for path in unfinished.glob("*.*"):
                path.unlink()
            splits, counts = encode(rule)
        missing = {"train", "validation"} if validation_files else {"train"}
        missing -= splits.keys()
        if missing:
            raise PreparationError(f"these files have no text for the split {missing.pop()}. {counts.first_bad}")
        tokenizer, _ = get_encoder(settings)
        manifest = CorpusManifest(choose_dtype(tokenizer.vocab_size), tokenizer.fingerprint, splits)
        (unfinished / MANIFEST).write_text(dump_manifest(manifest))
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    how = "the files of --validation" if validation_files else describe_split(settings, rule, splits)
    return PreparedCorpus(manifest, counts, how)


def encode_files(
    folder: Path,
    files: list[Path],
    validation_files: Iterable[Path],
    settings: PrepareSettings,
    rule: SplitRule,
    *,
    n_processes: int,
) -> tuple[dict[str, Split], RowCounts]:
    """Write the documents of all files to `folder`, without a manifest."""
    writers: dict[str, SplitWriter] = {}
    counts = RowCounts()
    batches = list_batches(files, validation_files, settings)
    for made, of_batch in map_in_order(partial(encode_batch, settings, rule), batches, n_processes):
        for name, documents in made.items():
            if name not in writers:
                writers[name] = SplitWriter(folder, name, has_targets=settings.is_chat)
            writers[name].write(documents)
        counts.add(of_batch)
    return {name: writers[name].finish() for name in sorted(writers)}, counts


def list_batches(files: list[Path], validation_files: Iterable[Path], settings: PrepareSettings) -> Iterator[Batch]:
    for path in files:
        yield from read_batches(path, settings.column, settings.encoding)
    for path in validation_files:
        for batch in read_batches(path, settings.column, settings.encoding):
            yield replace(batch, split="validation")


# ---------------------------------------------------------------- the validation split


def get_share(settings: PrepareSettings) -> float:
    return VALIDATION_SHARE if settings.validation_share is None else settings.validation_share


def choose_small_split(settings: PrepareSettings, splits: dict[str, Split], counts: RowCounts) -> SplitRule:
    """Return the rule for a corpus that the hashes put in one split: no split is empty, if that is possible."""
    (split,) = splits.values()
    if split.n_documents == 1 and not settings.is_chat:
        tail = VALIDATION_TAIL if settings.validation_share is None else settings.validation_share
        return SplitRule(0, tail)
    if counts.lowest == counts.highest:  # equal documents, or one conversation
        return SplitRule(0)
    return SplitRule(counts.lowest + 1 if "train" in splits else counts.highest)


def describe_split(settings: PrepareSettings, rule: SplitRule, splits: dict[str, Split]) -> str:
    """Say how the validation documents were chosen."""
    share = get_share(settings)
    if share == 0:
        return "none: --validation-share is 0"
    if "validation" not in splits:
        return "none: there is only one document, or all documents are equal"
    if rule.tail:
        return f"the last part of the only document, {rule.tail:g} of it"
    if rule.below == int(share * HASHES):
        return f"the documents with the lowest hashes, a share of about {share:g}"
    if "train" in splits and splits["validation"].n_documents <= splits["train"].n_documents:
        return f"the document with the lowest hash, because a share of {share:g} selects none"
    return f"all but the document with the highest hash, because a share of {share:g} selects every document"


# ---------------------------------------------------------------- workers and files


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
        self.largest_id = 0

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
        self.largest_id = max(self.largest_id, max(documents.tokens))

    def finish(self) -> Split:
        """Flush the files to disk, and return their description."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        hashes = {suffix: digest.hexdigest() for suffix, digest in self.digests.items()}
        return Split(
            self.n_tokens, self.n_documents, self.n_targets, self.n_text_bytes, hashes, largest_id=self.largest_id
        )


# ---------------------------------------------------------------- worker processes


@lru_cache(maxsize=1)
def get_encoder(settings: PrepareSettings) -> tuple[Tokenizer, ChatFormat | None]:
    tokenizer = load_tokenizer(settings.assets)
    return tokenizer, read_chat_format(tokenizer) if settings.is_chat else None


def encode_batch(settings: PrepareSettings, rule: SplitRule, batch: Batch) -> tuple[dict[str, Documents], RowCounts]:
    """Return the documents of a batch by split. Raises PreparationError for a bad row, unless skip_bad is set."""
    tokenizer, chat = get_encoder(settings)
    typecode = "H" if choose_dtype(tokenizer.vocab_size) == "uint16" else "I"
    made: dict[str, Documents] = {}
    counts = RowCounts()
    for document, turns in list_documents(settings, batch, chat, counts):
        for split, text in split_document(document, choose_split(settings, rule, batch, document, counts), rule.tail):
            documents = made.setdefault(split, Documents(array(typecode)))
            if chat:
                ids, ends = tokenizer.encode_special(text)
                documents.targets += mark_targets(ends, turns)
            else:
                ids = tokenizer.encode(text, bos=True, eos=True)
            documents.tokens.extend(ids)
            documents.lengths.append(len(ids))
            documents.n_text_bytes += len(text.encode())
            counts.n_unknown += ids.count(tokenizer.unknown_id)
    return made, counts


def list_documents(
    settings: PrepareSettings, batch: Batch, chat: ChatFormat | None, counts: RowCounts
) -> Iterator[tuple[str, list[range]]]:
    """Yield each document of a batch as text, with the character ranges of the assistant's turns. Raises like above."""
    for number, row in enumerate(batch.rows, batch.first):
        if isinstance(row, bytes) and not batch.is_text and not row.strip():  # a blank line
            continue
        try:
            text, turns = read_document(settings, batch, chat, row, counts)
        except ValueError as error:
            place = f"{batch.locate(number)}: {error}"
            if not settings.skip_bad:
                remedy = "Fix it, or skip such documents with --skip-bad"
                if isinstance(error, MissingField):
                    remedy = error.remedy
                raise PreparationError(f"{place}. {remedy}") from None
            counts.n_bad += 1
            counts.first_bad = counts.first_bad or place
            continue
        if text:
            yield text, turns
        else:
            counts.n_empty += 1


def read_document(
    settings: PrepareSettings, batch: Batch, chat: ChatFormat | None, row: object, counts: RowCounts
) -> tuple[str, list[range]]:
    """Return the text of a row, and the character ranges of the assistant's turns. Raises ValueError."""
    content = batch.parse(row, settings.column)
    if chat:
        dialect, conversation = read_conversation(content, settings.chat_column)
        document = chat.render(conversation, only_last_turn=settings.only_last_turn)
        counts.dialects[f"{dialect}, written by {chat.name}"] += 1
        return document
    if not isinstance(content, str):
        raise ValueError(f"its {settings.column!r} is not a string: {content!r:.60}")
    return content, []


def read_texts(files: Iterable[Path], settings: PrepareSettings) -> Iterator[str]:
    """Yield the texts of all files, for a new tokenizer. Raises PreparationError."""
    for batch in list_batches(files, (), settings):
        for text, _ in list_documents(settings, batch, None, RowCounts()):
            yield text


def choose_split(settings: PrepareSettings, rule: SplitRule, batch: Batch, text: str, counts: RowCounts) -> str:
    """Return the split of a document."""
    key = os.path.relpath(batch.path, settings.folder) if batch.is_text else text
    number = hash_document(key.encode())
    counts.lowest = min(counts.lowest, number)
    counts.highest = max(counts.highest, number)
    return batch.split or ("validation" if number < rule.below else "train")


def split_document(text: str, split: str, tail: float) -> list[tuple[str, str]]:
    """Return the parts of a document, each with its split. Only a document with a tail has two."""
    cut = int(len(text) * (1 - tail))
    parts = [("train", text[:cut]), ("validation", text[cut:])]
    if tail and all(part for _, part in parts):
        return parts
    return [(split, text)]


def hash_document(key: bytes) -> int:
    """Return a number below 2**64. The documents with the lowest numbers form the validation split."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
