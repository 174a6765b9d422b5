"""Files to units of work, and the documents of a unit to its shards.

    files    a.md  b.md  c.md | posts.jsonl ............. | d.jsonl.gz
    units    |------ 0 -----| |  1  |  2  |  3  |  4  |   |---- 5 ---|      by the files' sizes, whatever the machine
    shards   train-00000 and held_out-00000, train-00001 and held_out-00001, ...

A unit is a pair of shards, and any process can make it at any time with the same bytes.

A document is `BOS text EOS`, without BOS where the tokenizer has none; a conversation is what its chat template writes.
A hash of its text says which split it is in: equal documents are in one split, and no order of the files changes it. In
a corpus with a name, a hash of the file's name says it. What the files hold is in corpus_folder.py.
"""

import hashlib
import json
import multiprocessing
import os
import signal
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path

from torchtitan_lite.config.files import replace_file, sync_folder
from torchtitan_lite.data.chat import ChatFormat
from torchtitan_lite.data.corpus_folder import MANIFEST, SPLITS, Shard, choose_dtype
from torchtitan_lite.data.documents import Tally, read_documents
from torchtitan_lite.data.text_files import Part, PreparationError, Source
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer, pack
from torchtitan_lite.processes import end_with_parent

FLUSHED_TOKENS = 2**19
SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 2**22, 2**28


@dataclass(frozen=True)
class Recipe:
    """How documents become shards, except for the tokenizer."""

    validation_share: float  # of the documents, 0 <= share < 1
    field: str = "text"  # of a line of JSON, or column of a table
    skip_bad: bool = False  # a line without text is counted, and no error
    chat: ChatFormat | None = None  # the field holds a conversation
    # A file is held out by its path below this folder, not by its text: another version holds out the same files.
    names_below: str = ""


class Unfinished(RuntimeError):
    """The corpus could not be finished, though nothing was wrong with the command. The same command continues."""


@dataclass(frozen=True)
class Plan:
    """What is prepared, and where."""

    out: Path
    sources: list[Source]
    units: list[list[Part]]
    recipe: Recipe
    tokenizer: Tokenizer

    @property
    def work(self) -> Path:
        return self.out.with_name(self.out.name + ".unfinished")

    @cached_property
    def n_bytes(self) -> int:
        return sum(source.n_bytes for source in self.sources)

    @property
    def is_committed(self) -> bool:
        """Whether the folder corpus has become OUT: it was made before plan.json was written."""
        return not (self.work / "corpus").exists() and (self.out / MANIFEST).is_file()


def make_plan(sources: list[Source], out: Path, recipe: Recipe, tokenizer: Tokenizer) -> Plan:
    """Divide the files into units, in the order of the corpus: a function of the files' sizes alone.

    A kill may cost a unit, and a process has a unit to itself. So there are at least 256 where that leaves them a size
    worth waiting for the disk, and about a thousand at most.
    """
    n_bytes = sum(source.n_bytes for source in sources)
    unit_bytes = max(SMALLEST_UNIT_BYTES, min(n_bytes // 256, LARGEST_UNIT_BYTES), n_bytes // 1024)
    units: list[list[Part]] = []
    small: list[Part] = []
    for source in sources:
        if source.holds_rows and not source.is_packed and source.n_bytes > unit_bytes:
            n_parts = -(-source.n_bytes // unit_bytes)
            borders = [source.n_bytes * n // n_parts for n in range(n_parts + 1)]
            units += [small, *([Part(source, borders[n], borders[n + 1])] for n in range(n_parts))]
            small = []
            continue
        small.append(Part(source, 0, source.n_bytes))
        if count_bytes(small) >= unit_bytes:
            units.append(small)
            small = []
    return Plan(out.resolve(), sources, [unit for unit in [*units, small] if unit], recipe, tokenizer)


def count_bytes(unit: list[Part]) -> int:
    return sum(part.stop - part.start for part in unit)


def make_units(
    plan: Plan, missing: list[int], *, n_processes: int = 1, report: Callable[[int], None] = lambda n_bytes: None
) -> None:
    """Make these units; `report` is called with the bytes that each has read. Raises PreparationError, Unfinished."""
    if n_processes == 1:
        for number in missing:
            make_unit(plan.work, number, plan.units[number], plan.recipe, plan.tokenizer)
            report(count_bytes(plan.units[number]))
        return
    context, vocabulary = multiprocessing.get_context("spawn"), plan.tokenizer.vocabulary
    largest_first = sorted(missing, key=lambda number: -count_bytes(plan.units[number]))
    make = partial(make_unit_in_worker, plan.work, plan.recipe, str(vocabulary.path), vocabulary.identity)
    others = multiprocessing.active_children()
    # An executor, because a Pool never notices that a process died, and may wait for ever for the lock that it held.
    with ProcessPoolExecutor(n_processes, context, initializer=end_with_parent) as executor:
        # Ctrl-C reaches workers too, but only the parent acts on it: a process inherits which signals are ignored.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            units = [executor.submit(make, number, plan.units[number]) for number in largest_first]
        finally:
            signal.signal(signal.SIGINT, handler)
        workers = [child for child in multiprocessing.active_children() if child not in others]
        try:
            for unit in as_completed(units):
                report(unit.result())
        except BrokenProcessPool:  # the executor has ended the other workers
            status = next((w.exitcode for w in workers if w.exitcode not in (None, -signal.SIGTERM)), "unknown")
            raise Unfinished(
                f"A worker ended with exit status {status}. If it had too little memory (status -9), "
                "use fewer --processes. Finished parts are kept, and the same command continues."
            ) from None
        except BaseException:  # do not wait for what they are at
            for worker in workers:
                worker.kill()
            raise


load_once = lru_cache(maxsize=1)(load_tokenizer)


def make_unit_in_worker(
    work: Path, recipe: Recipe, tokenizer_path: str, identity: str, number: int, parts: list[Part]
) -> int:
    tokenizer = load_once(tokenizer_path)
    if tokenizer.identity != identity:
        raise PreparationError(f"{tokenizer_path} was changed while the corpus was prepared.")
    make_unit(work, number, parts, recipe, tokenizer)
    return count_bytes(parts)


# ---------------------------------------------------------------- one unit


def make_unit(work: Path, number: int, parts: list[Part], recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Write the shards of a unit, over what a killed process left of them; then its record.

    Raises PreparationError for what is wrong with a file, OSError where a shard cannot be written.
    """
    writers: dict[str, ShardWriter] = {}
    tally, chat = Tally(), recipe.chat
    reading = {"field": recipe.field, "skip_bad": recipe.skip_bad, "render": chat.render if chat else None}
    documents = ((part.source, pieces) for part in parts for pieces in read_documents(part, tally=tally, **reading))
    bos, eos = (pack([] if token_id is None else [token_id]) for token_id in (tokenizer.bos_id, tokenizer.eos_id))
    with ExitStack() as open_writers:
        for source, pieces in documents:
            first = next(pieces, "")
            text = first.text if chat else first
            if not text:
                tally.n_empty += 1
                continue
            by_name = recipe.names_below and not source.holds_rows
            hashed = os.path.relpath(source.path, recipe.names_below) if by_name else text
            split = SPLITS[choose_split(hashed, recipe.validation_share)]
            if split not in writers:
                dtype = choose_dtype(tokenizer.vocab_size)
                writers[split] = ShardWriter(work / "corpus", f"{split}-{number:05}", dtype, marks=chat is not None)
                open_writers.callback(writers[split].close)
            writer = writers[split]
            writer.begin_document()
            if chat:
                ids, targets = tokenizer.encode_spelled(text, first.turns)
                tally.n_targets += sum(targets)
                writer.write(pack(ids), targets, n_text_bytes=len(text.encode()))
                continue
            writer.write(bos)
            for piece in chain([text], pieces):
                n_text_bytes = len(piece) if piece.isascii() else len(piece.encode())  # the first is known at once
                writer.write(tokenizer.encode_packed(piece), n_text_bytes=n_text_bytes)
            writer.write(eos)
        shards = {split: asdict(writers[split].finish()) for split in sorted(writers)}
    sync_folder(work / "corpus")
    with replace_file(work / "units" / f"{number:05}.json") as file:
        file.write(json.dumps({"shards": shards, "tally": asdict(tally)}).encode())


def choose_split(hashed: str, validation_share: float) -> str:
    """Return the split of a document: texts hash to numbers below 2**64, and the lowest are for validation.

    The first piece of its text decides (when the split is needed, the others have not been read), or its file's name.
    """
    number = int.from_bytes(hashlib.sha256(hashed.encode(errors="surrogateescape")).digest()[:8], "big")
    return "validation" if number < validation_share * 2**64 else "train"


class ShardWriter:
    """Writes NAME.tokens and NAME.documents into `folder`, with `marks` NAME.targets too; hashes them on the way.

    The files have no buffer of Python's: after a full disk, it would be written again when it is thrown away.
    """

    def __init__(self, folder: Path, name: str, dtype: str, *, marks: bool = False):
        self.name, self.is_uint16 = name, dtype == "uint16"
        kinds = {"tokens": "I", "documents": "Q"} | ({"targets": "B"} if marks else {})
        self.pending = {kind: array(code) for kind, code in kinds.items()}
        self.digests = {kind: hashlib.sha256() for kind in kinds}
        self.files = {kind: open(folder / f"{name}.{kind}", "wb", buffering=0) for kind in kinds}
        self.n_tokens = self.n_documents = self.n_text_bytes = 0

    def begin_document(self) -> None:
        self.pending["documents"].append(self.n_tokens)
        self.n_documents += 1

    def write(self, ids: bytes, targets: bytes = b"", *, n_text_bytes: int = 0) -> None:
        """Add ids, uint32, to the current document; they stand for `n_text_bytes` of its text in UTF-8.

        `targets` has a byte for each, if the shard has marks.
        """
        self.pending["tokens"].frombytes(ids)
        if targets:
            self.pending["targets"].frombytes(targets)
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
        hashes = {f"{kind}_sha256": digest.hexdigest() for kind, digest in self.digests.items()}
        return Shard(self.name, self.n_tokens, self.n_documents, self.n_text_bytes, **hashes)

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _flush(self) -> None:
        for kind, numbers in self.pending.items():
            content = memoryview(numbers).cast("B")
            if kind == "tokens" and self.is_uint16:
                content = content.cast("H")[::2]  # the lower half of each little-endian uint32
            content = memoryview(content.tobytes())
            self.digests[kind].update(content)
            while content:  # a disk that is nearly full takes a part
                content = content[self.files[kind].write(content) :]
            del numbers[:]
