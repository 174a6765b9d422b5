"""Write log lines for people.

    rank 0         INFO and above       stdout, and dump_folder/log.txt with the date
    other ranks    WARNING and above    stderr, with the rank

Modules log through `logging.getLogger(__name__)` and may `paint` words. The formatter removes the color for files and
pipes.
"""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

COLORS = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "cyan": 36}  # ECMA-48 "select graphic rendition"
ESCAPE_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def paint(text: str, color: str) -> str:
    """Wrap `text` in the escape codes of a row of COLORS."""
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m"


class LineFormatter(logging.Formatter):
    """`12:30:01 text`. Above INFO the line names its level, and on ranks other than 0 the rank."""

    def __init__(self, rank: int, *, date_format: str, color: bool):
        super().__init__("%(message)s", date_format)
        self.rank, self.color = rank, color

    def format(self, record: logging.LogRecord) -> str:
        words = [self.formatTime(record, self.datefmt)]
        if record.levelno > logging.INFO:
            words.append(paint(record.levelname, "red"))
        if self.rank > 0:
            words.append(f"rank {self.rank}:")
        line = " ".join([*words, super().format(record)])  # with the traceback, if any
        return line if self.color else ESCAPE_CODE.sub("", line)


def start_logging(rank: int, dump_folder: Path | None, *, color: bool = True) -> None:
    """Set up the logger of this package in this process; a second call replaces the first. `rank` is the global rank.

    `color` allows color on a terminal. Without `dump_folder`, write no log.txt.
    """
    stream = sys.stdout if rank == 0 else sys.stderr
    console = logging.StreamHandler(stream)
    console.setFormatter(LineFormatter(rank, date_format="%H:%M:%S", color=color and stream.isatty()))
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
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False  # a library that sets up the root logger must not print our lines a second time


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
