"""What `prepare` tells people: how far it is, and what it has made."""

import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TextIO

from torchtitan_lite.components.log import ERASE_LINE
from torchtitan_lite.data.prepare import PreparedCorpus


class Progress:
    """How far it is: a line rewritten in place on a terminal, else one line every half minute.

    [#########...........]  47%  1,203.4 of 2,560.0 MB  14.1 MB/s  ETA 0:01:36
    """

    BAR_WIDTH = 20

    def __init__(self, n_bytes: int, n_done: int, *, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self.n_bytes, self.n_done, self.n_done_before = n_bytes, n_done, n_done
        self.stream, self.clock = stream, clock
        self.on_terminal = stream.isatty()
        self.interval_s = 0.2 if self.on_terminal else 30.0
        self.started_s = self.shown_s = clock()

    def add(self, n_bytes_more: int) -> None:
        self.n_done += n_bytes_more
        now_s = self.clock()
        if now_s - self.shown_s < self.interval_s:
            return
        self.shown_s = now_s
        width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be erased
        self.stream.write(ERASE_LINE + self.describe()[:width] if self.on_terminal else self.describe() + "\n")
        self.stream.flush()

    def describe(self) -> str:
        share = self.n_done / self.n_bytes if self.n_bytes else 1.0
        rate = (self.n_done - self.n_done_before) / max(self.clock() - self.started_s, 1e-9)
        left = str(timedelta(seconds=round((self.n_bytes - self.n_done) / rate))) if rate else "?"
        return (
            f"[{'#' * int(share * self.BAR_WIDTH):.<{self.BAR_WIDTH}}] {share:4.0%}  "
            f"{self.n_done / 1e6:,.1f} of {self.n_bytes / 1e6:,.1f} MB  {rate / 1e6:.1f} MB/s  ETA {left}"
        )

    def clear(self) -> None:
        if self.on_terminal:
            self.stream.write(ERASE_LINE)
            self.stream.flush()


def describe_left_out(left_out: Counter[str]) -> str:
    """A sentence about files of a folder that were not read; empty where there are none."""
    if not left_out:
        return ""
    kinds = ", ".join(f"{n} {suffix}" for suffix, n in left_out.most_common(5))
    more = ", ..." if len(left_out) > 5 else ""
    return f" Left out: {left_out.total()} files that are not known as text ({kinds}{more}); --suffix .x adds a kind."


def count(corpus: PreparedCorpus, left_out: Counter[str]) -> dict[str, object]:
    """The numbers of a corpus, for programs."""
    train, held_out = (corpus.manifest.splits[split] for split in ("train", "held_out"))
    shards = train + held_out
    return {
        "folder": str(corpus.folder),
        "identity": corpus.manifest.identity,
        "dtype": corpus.manifest.dtype,
        "documents": sum(shard.n_documents for shard in shards),
        "documents_held_out": sum(shard.n_documents for shard in held_out),
        "tokens": sum(shard.n_tokens for shard in shards),
        "tokens_held_out": sum(shard.n_tokens for shard in held_out),
        "text_bytes": sum(shard.n_text_bytes for shard in shards),
        "files_left_out": left_out.total(),
        **asdict(corpus.tally),
    }


def describe(corpus: PreparedCorpus, left_out: Counter[str], out: str, *, n_files: int) -> str:
    """The same for people, and what to do next."""
    n = count(corpus, left_out)
    bytes_per_token = n["text_bytes"] / n["tokens"]
    rows = {
        "documents": f"{n['documents']:,}, of which {n['documents_held_out']:,} are held out for validation "
        f"({n['documents_held_out'] / n['documents']:.2%})",
        "tokens": f"{n['tokens']:,} as {n['dtype']}, of which {n['tokens_held_out']:,} are held out; "
        f"{bytes_per_token:.2f} bytes per token",
        "text": f"{n['text_bytes'] / 1e6:,.1f} MB from {n_files:,} files.{describe_left_out(left_out)}",
        "empty": f"{n['n_empty']:,} documents without text, left out" if n["n_empty"] else "",
        "replaced": f"{n['n_replaced']:,} pieces of broken UTF-8, by U+FFFD" if n["n_replaced"] else "",
        "skipped": f"{n['n_bad_lines']:,} bad lines, the first: {n['first_bad_line']}" if n["n_bad_lines"] else "",
    }
    lines = [f"  {name:10} {text}" for name, text in rows.items() if text]
    return "\n".join([f"{out} is whole:", *lines, f"Train on it: ./run_train.sh --training.dataset {out}"])
