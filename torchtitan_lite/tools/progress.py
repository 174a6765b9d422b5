"""Show on a terminal how far a tool is: share, rate, remaining time. Elsewhere nothing is written."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

REDRAW_S = 0.5
Item = TypeVar("Item")


def show_progress(
    items: Iterable[Item], total: float, unit: str, size: Callable[[Item], float] = lambda _: 1
) -> Iterator[Item]:
    """Yield the items, and write one line over and over: `12% of 100 MB, 3.1 MB/s, 0:00:28 left`.

    `total`: sum of `size` over all items, roughly. The line disappears at the end.
    """
    started_s = time.monotonic()
    drawn_s = 0.0
    done = 0.0
    is_shown = sys.stderr.isatty()
    for item in items:
        now_s = time.monotonic()
        if is_shown and now_s > drawn_s + REDRAW_S:
            drawn_s = now_s
            share = min(1.0, done / max(total, 1))
            line = f"{share:.0%} of {total:,.3g} {unit}"
            if share > 0:
                seconds = now_s - started_s
                left = timedelta(seconds=round(seconds / share - seconds))
                line += f", {done / seconds:,.3g} {unit}/s, {left} left"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        yield item
        done += size(item)
    if is_shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def show_bytes(documents: Iterable, files: list[Path]) -> Iterator:
    """Yield the documents of some files, and show their share of the bytes."""
    total = sum(path.stat().st_size for path in files)
    return show_progress(documents, total / 1e6, "MB", lambda each: each.n_text_bytes / 1e6)
