"""Encode text files into a prepared corpus, on all cores. The folder is complete or does not exist.

    this process    reads batches of rows  ---------->  writes documents in order, hashes, renames OUT.tmp to OUT
    its workers                  parse, choose the split, encode

The corpus does not depend on the number of processes, and even a single compressed file keeps all processes busy. A
document is `BOS text EOS`, without BOS if the tokenizer has none. A conversation is formatted by the chat template.
Empty documents are left out and counted. A document that has only white space is not empty.

A hash selects the validation documents. A row is hashed by its text, so equal rows land in the same split. A file is
hashed by its path, so an edited file stays in its split. If a split would be empty, it gets the last document. If the
input is a single text file, no hash is used, and the last part of the text is for validation.
"""

import hashlib
import json
import multiprocessing
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from torchtitan_lite.config.messages import tell
from torchtitan_lite.data.corpus_folder import (
    CORPUS_MANIFEST,
    CorpusManifest,
    CorpusSplit,
    dump_manifest,
)
from torchtitan_lite.data.tokenizer import TOKENIZER_CONFIG, Tokenizer, load_tokenizer
from torchtitan_lite.faults.processes import end_with_parent
from torchtitan_lite.files import hash_file, import_extra
from torchtitan_lite.tools.corpora.chat import ChatFormat, mark_targets, read_chat_format
from torchtitan_lite.tools.corpora.dialects import drop_all_nulls, read_conversation
from torchtitan_lite.tools.corpora.text_files import (
    PARQUET,
    PreparationError,
    Row,
    get_kind,
    is_text,
    read_file,
)
from torchtitan_lite.tools.progress import show_progress

BOS = "<|begin_of_text|>"  # special tokens of a new tokenizer
EOS = "<|end_of_text|>"
CHUNK_ROWS = 32  # number of rows in one message to a worker
GROUP_ROWS = 128  # rows submitted at once, per worker
UINT16_IDS = 2**16


@dataclass(frozen=True)
class PrepareSettings:
    """Settings for converting rows to documents."""

    assets: str  # folder, file or name of the tokenizer: an argument of load_tokenizer
    validation_share: float = 0.01  # fraction of the documents that are for validation
    tail: float = 0.0  # this fraction at the end of the text is for validation; 0 unless the input is a single text
    validation: Sequence[Path] = ()  # all documents of these files and folders are for validation
    # column with the text or the messages. None: "text", or the columns of the dialect
    column: str | None = None
    is_chat: bool = False
    only_last_turn: bool = False  # only the last turn of a conversation has targets
    skip_bad: bool = False  # print and count bad rows instead of raising an error
    encoding: str = "utf-8"  # encoding of text files without a byte order mark
    # if not 0, train a new tokenizer with this number of entries and use it instead of `assets`
    train_tokenizer: int = 0


@dataclass(frozen=True)
class Document:
    """An encoded row."""

    counts: Counter[str]  # text for the summary -> number
    split: str = "train"
    tokens: array | tuple = ()  # empty if the row was left out
    n_text_bytes: int = 0  # size of the text in UTF-8
    targets: bytes = b""  # for conversations, one byte per token: 1 if the token is a target


def prepare(
    files: list[Path], out: Path, settings: PrepareSettings, *, n_processes: int = 1
) -> tuple[CorpusManifest, Counter[str]]:
    """Create the corpus in the new folder `out`. Return the manifest of the corpus, and the counts for the summary.

    Raises PreparationError for invalid input, UserError for a missing extra, OSError if a file cannot be written.
    """
    if out.exists():
        raise PreparationError(
            f"{out} exists. Choose a different --out, or delete it if it is an old corpus"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.tmp-") as work:
        folder = Path(work) / "corpus"
        folder.mkdir()
        if settings.train_tokenizer:
            assets = train_tokenizer(
                read_texts(files, settings), settings.train_tokenizer, folder / "tokenizer"
            )
            settings = replace(settings, assets=assets)
        # load the tokenizer here, to report a bad tokenizer before any row is encoded
        tokenizer = get_encoder(settings.assets, settings.is_chat)[0]
        documents = map_in_order(
            partial(encode_row, settings), read_rows(files, settings), n_processes
        )
        n_mb = sum(path.stat().st_size for path in files) / 1e6
        documents = show_progress(documents, n_mb, "MB", lambda each: each.n_text_bytes / 1e6)
        splits, counts = write_documents(documents, folder, has_floor=settings.validation_share > 0)
        for split in ("train", "validation") if settings.validation else ("train",):
            if split not in splits:
                raise PreparationError(
                    f"these files ({len(files)}) have no text for the split {split}. Name files with text"
                )
        dtype = "uint16" if tokenizer.vocab_size <= UINT16_IDS else "uint32"
        manifest = CorpusManifest(dtype, tokenizer.fingerprint, splits)
        (folder / CORPUS_MANIFEST).write_text(dump_manifest(manifest))
        folder.rename(out)
    return manifest, counts


def read_rows(files: list[Path], settings: PrepareSettings) -> Iterator[Row]:
    """Yield the rows of all files. Raises PreparationError for a file that cannot be read."""
    common = os.path.commonpath([path.absolute().parent for path in files])
    for path in files:
        name = os.path.relpath(path, common) if is_text(path) else ""
        try:
            contents = read_file(path, settings.encoding, settings.tail)
            number = 0
            for number, content in enumerate(contents, 1):
                yield Row(path, number, content, name)
            if not number:
                tell(f"{path} has no rows")
        # for damaged files, the libraries that read files raise many kinds of errors
        except Exception as error:
            raise PreparationError(
                f"{path} cannot be read: {error}. Correct this file, or leave it out"
            ) from None


def read_texts(files: list[Path], settings: PrepareSettings) -> Iterator[str]:
    """Yield the texts of all files. Raises PreparationError for a bad row, unless skip_bad is set."""
    for row in read_rows(files, settings):
        try:
            yield read_text(settings, row)[0]
        except Exception as error:  # with skip_bad, encode_row prints and counts the row later
            if not settings.skip_bad:
                raise explain_bad_row(row, error) from None


def map_in_order(function: Callable, rows: Iterator[Row], n_processes: int) -> Iterator:
    """Yield function(row) for each row, in order. `n_processes` processes compute them."""
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


# ---------------------------------------------------------------- a new tokenizer


def train_tokenizer(texts: Iterator[str], n_entries: int, folder: Path) -> str:
    """Write a byte-level BPE of `n_entries` to the new folder, and return the folder. Raises PreparationError.

    Ids 0 and 1 are BOS and EOS, and the next 256 are bytes. Each later id merges two tokens, and the most frequent
    pairs come first. transformers can read the file. Training with the file does not need the package `tokenizers`.
    """
    library = import_extra("tokenizers", "hf")
    tokenizer = library.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=n_entries, special_tokens=[BOS, EOS], show_progress=False
    )
    n_found = tokenizer.get_vocab_size()
    if n_found != n_entries:
        raise PreparationError(
            f"--train-tokenizer {n_entries}: these texts give a tokenizer of {n_found} entries (bytes, BOS, "
            f"EOS and pairs). Use {n_found}"
        )
    tokenizer.post_processor = library.processors.TemplateProcessing(
        f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config))
    return str(folder)


# ---------------------------------------------------------------- writing


def write_documents(
    documents: Iterator[Document], folder: Path, *, has_floor: bool
) -> tuple[dict[str, CorpusSplit], Counter[str]]:
    """Write the files of both splits. Return the splits that have documents, and the sum of Document.counts.

    If `has_floor` is true and all documents belong to one split, the last document is moved to the empty split.
    """
    totals = {"train": Counter(), "validation": Counter()}
    counts = Counter()
    last = None
    with ExitStack() as stack:

        @cache
        def create(name: str) -> BinaryIO:
            return stack.enter_context(open(folder / name, "wb"))

        def write(document: Document, split: str) -> None:
            start = totals[split]["n_tokens"].to_bytes(8, "little")
            create(f"{split}.tokens").write(document.tokens)
            create(f"{split}.documents").write(start)
            if document.targets:
                create(f"{split}.targets").write(document.targets)
            totals[split].update(
                n_documents=1,
                n_tokens=len(document.tokens),
                n_targets=sum(document.targets),
                n_text_bytes=document.n_text_bytes,
            )

        for document in documents:
            counts.update(document.counts)
            if document.tokens:
                if last:
                    write(last, last.split)
                last = document
        if last:
            empty = [split for split, total in totals.items() if not total]
            write(last, empty[0] if empty and has_floor else last.split)
    splits = {}
    for split, total in totals.items():
        if total:
            hashes = {}
            for suffix in ("tokens", "documents", "targets"):
                path = folder / f"{split}.{suffix}"
                if path.exists():
                    hashes[suffix] = hash_file(path)
            splits[split] = CorpusSplit(**total, sha256=hashes)
    return splits, +counts  # unary plus removes counts of zero


# ---------------------------------------------------------------- worker processes


@lru_cache(maxsize=1)
def get_encoder(assets: str, is_chat: bool) -> tuple[Tokenizer, ChatFormat | None]:
    tokenizer = load_tokenizer(assets)
    return tokenizer, read_chat_format(tokenizer) if is_chat else None


def encode_row(settings: PrepareSettings, row: Row) -> Document:
    """Encode the document of a row. Raises PreparationError for a bad row, unless skip_bad is set."""
    tokenizer, chat = get_encoder(settings.assets, settings.is_chat)
    counts = Counter()
    targets = b""
    try:
        if chat:
            content = row.parse(settings.encoding)
            if get_kind(row.path) == PARQUET:
                content = drop_all_nulls(content)
            dialect, conversation = read_conversation(content, settings.column)
            rendered = chat.render(conversation, only_last_turn=settings.only_last_turn)
            text = rendered.text
            ids, ends = tokenizer.encode_special(text)
            targets = bytes(mark_targets(ends, rendered.turns))
            counts[f"conversations in the dialect {dialect}, written by {chat.name}"] = 1
            counts.update(rendered.unused)
        else:
            text, unused = read_text(settings, row)
            counts.update(f"rows with a column {name}, which is not used" for name in unused)
            if not text:
                return Document(Counter(["empty documents left out"]))
            ids = tokenizer.encode(text, bos=True, eos=True)
        if "\0" in text:
            raise ValueError(f"character {text.index(chr(0))} of its text is NUL (U+0000)")
        # raises an error for a lone surrogate, which tiktoken would silently replace
        n_bytes = len(text.encode())
    except Exception as error:  # a row from a user's file can be wrong in any way
        if settings.skip_bad:
            tell(f"{row.path}, row {row.number}: {error}")
            return Document(Counter(["bad rows left out"]))
        raise explain_bad_row(row, error) from None
    counts["unknown tokens, for text outside the vocabulary"] = ids.count(tokenizer.unknown_id)
    tokens = array("H" if tokenizer.vocab_size <= UINT16_IDS else "I", ids)
    return Document(counts, choose_split(settings, row, text), tokens, n_bytes, targets)


def explain_bad_row(row: Row, error: Exception) -> PreparationError:
    return PreparationError(
        f"{row.path}, row {row.number}: {error}. Correct this row, or give `prepare` the option --skip-bad"
    )


def read_text(settings: PrepareSettings, row: Row) -> tuple[str, list[str]]:
    """Return the text of a row, and the names of its other columns that have a value. Raises ValueError."""
    content = row.parse(settings.encoding)
    if row.name:
        return content, []
    column = "text" if settings.column is None else settings.column
    text = content.get(column) if isinstance(content, dict) else None
    if not isinstance(text, str):
        raise ValueError(
            f"it has no text in {column!r} (give `prepare` --text-column for a column, or --chat): {content!r:.60}"
        )
    text.encode()  # raises an error for a lone surrogate, which JSON may contain
    empty = (None, "", [], {})
    unused = [name for name, value in content.items() if name != column and value not in empty]
    return text, unused


def choose_split(settings: PrepareSettings, row: Row, text: str) -> str:
    """Return the split, train or validation, that contains a document. The documents with the lowest hashes go to
    validation."""
    key = row.name or text
    digest = hashlib.sha256(key.encode()).digest()
    is_chosen = int.from_bytes(digest[:8], "big") < settings.validation_share * 2**64
    is_tail = settings.tail and row.number == 2
    is_named = any(
        Path(os.path.abspath(row.path)).is_relative_to(os.path.abspath(path))
        for path in settings.validation
    )
    return "validation" if is_chosen or is_tail or is_named else "train"
