"""The units in which a corpus is made: pieces of work that any process can do, at any time, with the same result.

    files    a.md  b.md  c.md | posts.jsonl ............. | d.jsonl.gz
    units    |------ 0 -----| |  1  |  2  |  3  |  4  |   |---- 5 ---|      by the files' sizes, whatever the machine
    shards   train-00000 and held_out-00000, train-00001 and held_out-00001, ...

A document is `BOS text EOS`, without BOS where the tokenizer has none. Which split it goes to, a hash of its text says:
equal documents are on one side, and no order of the files changes it.
"""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torchtitan_lite.data.corpora import Shard, choose_dtype
from torchtitan_lite.data.documents import Part, Tally, read_documents
from torchtitan_lite.data.shards import ShardWriter
from torchtitan_lite.data.sources import Source
from torchtitan_lite.data.tokenizer import Tokenizer, pack_ids

SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 2**22, 2**28


@dataclass(frozen=True)
class Recipe:
    """How documents become tokens, but for the tokenizer."""

    held_out_share: float  # of the documents, 0 <= share < 1
    field: str  # of a line of JSON
    skip_bad: bool  # a line without text is counted, and no error


@dataclass(frozen=True)
class FinishedUnit:
    shards: dict[str, Shard]  # by split; a split without documents has none
    tally: Tally


def plan_units(sources: list[Source]) -> list[list[Part]]:
    """Parts of files that make a shard together, in the order of the corpus: a function of the files' sizes alone.

    A unit is what a kill may cost, and what a process has to itself. So there are at least 256 where that leaves them a
    size worth waiting for the disk, and about a thousand at most, because each is some files in the end.
    """
    n_bytes = sum(source.n_bytes for source in sources)
    unit_bytes = max(SMALLEST_UNIT_BYTES, min(n_bytes // 256, LARGEST_UNIT_BYTES), n_bytes // 1024)
    units: list[list[Part]] = []
    small: list[Part] = []
    n_small_bytes = 0
    for source in sources:
        if source.holds_lines and not source.is_packed and source.n_bytes > unit_bytes:
            units += [small, *([part] for part in cut_lines(source, unit_bytes))]
            small, n_small_bytes = [], 0
            continue
        small.append(Part(source, 0, source.n_bytes))
        n_small_bytes += source.n_bytes
        if n_small_bytes >= unit_bytes:
            units.append(small)
            small, n_small_bytes = [], 0
    return [unit for unit in [*units, small] if unit]


def cut_lines(source: Source, unit_bytes: int) -> list[Part]:
    """Equal parts of at most `unit_bytes`; a part has the lines that begin in it."""
    n_parts = -(-source.n_bytes // unit_bytes)
    borders = [source.n_bytes * n // n_parts for n in range(n_parts + 1)]
    return [Part(source, borders[n], borders[n + 1]) for n in range(n_parts)]


def make_unit(
    number: int,
    parts: list[Part],
    folder: Path,
    *,
    recipe: Recipe,
    tokenizer: Tokenizer,
    report: Callable[[int], None],
) -> FinishedUnit:
    """Writes the shards of unit `number` into `folder`, over what a killed process left of them.

    `report` is told again and again how many more bytes of the files were read. Raises PreparationError for what is
    wrong with a file, OSError where a shard cannot be written.
    """
    writers: dict[str, ShardWriter] = {}
    tally = Tally()
    with ExitStack() as open_writers:
        for part in parts:
            for pieces in read_documents(
                part, field=recipe.field, skip_bad=recipe.skip_bad, tally=tally, report=report
            ):
                first = next(pieces, None)
                if first is None:
                    tally.n_empty += 1
                    continue
                split = choose_split(first, recipe.held_out_share)
                if split not in writers:
                    writers[split] = ShardWriter(folder, f"{split}-{number:05}", choose_dtype(tokenizer.vocab_size))
                    open_writers.callback(writers[split].close)
                write_document(chain([first], pieces), writers[split], tokenizer)
        return FinishedUnit({split: writers[split].finish() for split in sorted(writers)}, tally)


def write_document(pieces: Iterable[str], writer: ShardWriter, tokenizer: Tokenizer) -> None:
    writer.begin_document()
    if tokenizer.bos_id is not None:
        writer.write(pack_ids([tokenizer.bos_id]))
    for piece in pieces:
        n_bytes = len(piece) if piece.isascii() else len(piece.encode())  # the first is known without looking
        writer.write(tokenizer.encode_packed(piece), n_text_bytes=n_bytes)
    writer.write(pack_ids([tokenizer.eos_id]))


def choose_split(first_piece: str, held_out_share: float) -> str:
    """Each text hashes to a number below 2**64; the lowest are held out.

    The first piece stands for the document: when the split is needed, the others have not been read.
    """
    number = int.from_bytes(hashlib.sha256(first_piece.encode()).digest()[:8], "big")
    return "held_out" if number < held_out_share * 2**64 else "train"
