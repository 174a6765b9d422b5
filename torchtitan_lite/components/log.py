"""Write log lines for people, and a progress line on a terminal.

    rank 0         INFO and above      -> stdout, and dump_folder/log.txt: dated, never coloured
    other ranks    WARNING and above   -> stderr, with the rank named

Modules log through `logging.getLogger(__name__)` and may `paint` words; the formatter strips the colour for files and
pipes. On a terminal each log line first erases the progress line.
"""

import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

COLORS = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "cyan": 36}  # ECMA-48 "select graphic rendition"
ESCAPE_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
ERASE_LINE = "\r\x1b[K"  # to the start of the line, then clear to its end


def paint(text: str, color: str) -> str:
    """Wrap `text` in the escape codes of a row of COLORS."""
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m"


class LineFormatter(logging.Formatter):
    """`12:30:01 text`. Above INFO the line names its level, and on ranks other than 0 the rank."""

    def __init__(self, rank: int, *, date_format: str, color: bool, prefix: str = ""):
        super().__init__("%(message)s", date_format)
        self.rank, self.color, self.prefix = rank, color, prefix

    def format(self, record: logging.LogRecord) -> str:
        words = [self.formatTime(record, self.datefmt)]
        if record.levelno > logging.INFO:
            words.append(paint(record.levelname, "red"))
        if self.rank > 0:
            words.append(f"rank {self.rank}:")
        line = " ".join([*words, super().format(record)])  # with the traceback, where there is one
        return self.prefix + (line if self.color else ESCAPE_CODE.sub("", line))


def start_logging(rank: int, dump_folder: Path | None, *, color: bool = True) -> None:
    """Set up the logger of this package in this process; a second call replaces the first. `rank` is the global one.

    `color` allows colour on a terminal. Without `dump_folder` no log.txt is written.
    """
    stream = sys.stdout if rank == 0 else sys.stderr
    console = logging.StreamHandler(stream)
    prefix = ERASE_LINE if stream.isatty() else ""
    console.setFormatter(LineFormatter(rank, date_format="%H:%M:%S", color=color and stream.isatty(), prefix=prefix))
    handlers: list[logging.Handler] = [console]
    if rank == 0 and dump_folder is not None:
        file = logging.FileHandler(dump_folder / "log.txt", encoding="utf-8")  # appends: a resumed run continues it
        file.setFormatter(LineFormatter(rank, date_format="%Y-%m-%d %H:%M:%S", color=False))
        handlers.append(file)

    logger = logging.getLogger("torchtitan_lite")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        logger.addHandler(handler)
    # An export gathers each weight over two mesh dims, one after the other: DTensor warns of the latency, on each rank.
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(is_no_hint_on_latency)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False  # a library that sets up the root logger must not print our lines a second time


def is_no_hint_on_latency(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("While redistributing")


def describe_rank(rank: int, coordinates: dict[str, int]) -> str:
    """Return the rank with its mesh coordinates: `rank 3 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 1)`."""
    return f"rank {rank} ({', '.join(f'{dim} {coordinate}' for dim, coordinate in coordinates.items())})"


@contextmanager
def log_rank_on_error(rank: int, coordinates: dict[str, int]) -> Iterator[None]:
    """Context manager: log rank and mesh coordinates of an exception, and re-raise it."""
    try:
        yield
    except Exception as error:
        logger.error(f"{describe_rank(rank, coordinates)} failed: {type(error).__name__}: {error}")
        raise


class BottomLine:
    """The line at the bottom of a terminal, rewritten in place."""

    def __init__(self, stream: TextIO):
        self.stream, self.on_terminal = stream, stream.isatty()

    def rewrite(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be erased
        self.stream.write(ERASE_LINE + text[:width])
        self.stream.flush()

    def clear(self) -> None:
        """Erase the line, if there is a terminal."""
        if self.on_terminal:
            self.rewrite("")


def draw_bar(share_done: float, width: int = 20) -> str:
    """`[#########...........]  47%`"""
    return f"[{'#' * int(share_done * width):.<{width}}] {share_done:4.0%}"


class Progress(BottomLine):
    """How far a run is, on rank 0's terminal. Writes nothing where there is no terminal.

    step  137/2000 [#...................]   7%  ETA 0:12:34  waiting for data
    """

    def __init__(self, rank: int, n_steps: int, *, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        super().__init__(stream)
        self.on_terminal &= rank == 0
        self.n_steps, self.clock = n_steps, clock
        self.steps_begun = 0
        self.current_step = -1
        self.origin = (0, 0.0)  # the step and the time from which step time is measured

    def show(self, step: int, state: str) -> None:
        """Show that `step` (1 = first) is in `state`: "loading", "computing", "saving", ..."""
        if not self.on_terminal:
            return
        if step != self.current_step:
            self.current_step = step
            self.steps_begun += 1
            if self.steps_begun <= 2:  # measured from the second on: the first one also compiles and allocates
                self.origin = (step, self.clock())
        step_of_all = f"{step:{len(str(self.n_steps))}}/{self.n_steps}"
        bar = draw_bar((step - 1) / self.n_steps)
        self.rewrite(f"step {step_of_all} {bar}  ETA {self.estimate_end()}  {state}")

    def estimate_end(self) -> str:
        """Return the time left as h:mm:ss, from the mean time of the steps since the second; "?" before the third."""
        origin_step, origin_time = self.origin
        if self.steps_begun <= 2:
            return "?"
        step_time_s = (self.clock() - origin_time) / (self.current_step - origin_step)
        return str(timedelta(seconds=round(step_time_s * (self.n_steps - self.current_step + 1))))
