"""Show the progress of a tool: percentage, rate, remaining time. Writes nothing if stderr is not a terminal."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from torchtitan_lite.checkpoint.format import UNFINISHED

REDRAW_S = 0.5
CLEAR = "\r\033[K"
Item = TypeVar("Item")


def show_progress(
    items: Iterable[Item], total: float, unit: str, size: Callable[[Item], float] = lambda _: 1
) -> Iterator[Item]:
    """Yield the items, and keep updating one line of output: `12% of 100 MB, 3.1 MB/s, 0:00:28 left`.

    `total` is roughly the sum of `size` over all items. The line disappears at the end.
    """
    started_s = time.monotonic()
    drawn_s = 0.0
    done = 0.0
    is_shown = sys.stderr.isatty()
    for item in items:
        now_s = time.monotonic()
        if is_shown and now_s > drawn_s + REDRAW_S:
            drawn_s = now_s
            draw(done, total, unit, now_s - started_s)
        yield item
        done += size(item)
    if is_shown:
        write_text(CLEAR)


def draw(done: float, total: float, unit: str, seconds: float, what: str = "") -> None:
    """Replace the previous progress line. Output of other processes may overwrite the line."""
    share = min(1.0, done / max(total, 1))
    line = f"{what}{share:.0%} of {round(total, 2):,g} {unit}"
    if share > 0:
        left = timedelta(seconds=round(seconds / share - seconds))
        line += f", {round(done / seconds, 2):,g} {unit}/s, {left} left"
    write_text(f"{CLEAR}{line}\r")


def write_text(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def watch_saves(folder: Path) -> None:
    """Show how much of a checkpoint is on disk while ranks write it to `folder`. Runs in a thread and never returns.

    safetensors creates a file with its full size and then fills it, so the blocks on disk are counted.
    """
    started_s = time.monotonic()
    is_drawn = False
    while True:
        time.sleep(REDRAW_S)
        total = 0
        written = 0
        with suppress(FileNotFoundError):  # a file was renamed meanwhile
            for path in folder.glob(f"*{UNFINISHED}/*"):
                status = path.stat()
                total += status.st_size
                written += min(status.st_size, 512 * status.st_blocks)
        if written < total:
            seconds = time.monotonic() - started_s
            draw(written / 1e6, total / 1e6, "MB", seconds, "saving: ")
        elif is_drawn:
            write_text(CLEAR)
        is_drawn = written < total
        if not is_drawn:
            started_s = time.monotonic()
