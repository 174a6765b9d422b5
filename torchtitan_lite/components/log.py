"""Write log lines.

    rank 0         INFO and above       stdout, and dump_folder/log.txt with the date
    other ranks    WARNING and above    stderr, with the rank

Modules log through `logging.getLogger(__name__)` and can color words with `paint`. The formatter removes the color for
files and pipes.
"""

import logging
import re
import sys
from pathlib import Path

COLORS = {"red": 31, "green": 32, "cyan": 36}  # ECMA-48 "select graphic rendition"
ESCAPE_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def paint(text: str, color: str) -> str:
    """Color `text` with escape codes. `color` is a key of COLORS."""
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m"


class LineFormatter(logging.Formatter):
    """Formats lines as `12:30:01 text`. Adds the level if it is above INFO, and the rank if it is not 0."""

    def __init__(self, rank: int, *, date_format: str, color: bool):
        super().__init__("%(message)s", date_format)
        self.rank = rank
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        words = [self.formatTime(record, self.datefmt)]
        if record.levelno > logging.INFO:
            words.append(paint(record.levelname, "red"))
        if self.rank > 0:
            words.append(f"rank {self.rank}:")
        words.append(super().format(record))  # includes the traceback, if any
        line = " ".join(words)
        return line if self.color else ESCAPE_CODE.sub("", line)


def start_logging(rank: int, dump_folder: Path | None, *, color: bool = True) -> None:
    """Set up this package's logger in this process. A second call replaces the first. `rank` is the global rank.

    `color`: use color on a terminal. Without `dump_folder`, no log.txt is written.
    """
    stream = sys.stdout if rank == 0 else sys.stderr
    logger = logging.getLogger("torchtitan_lite")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()

    console = logging.StreamHandler(stream)
    console.setFormatter(
        LineFormatter(
            rank,
            date_format="%H:%M:%S",
            color=color and stream.isatty(),
        )
    )
    logger.addHandler(console)
    if rank == 0 and dump_folder:
        file = logging.FileHandler(
            dump_folder / "log.txt", encoding="utf-8"
        )  # appends: a resumed run continues it
        file.setFormatter(LineFormatter(rank, date_format="%Y-%m-%d %H:%M:%S", color=False))
        logger.addHandler(file)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = (
        False  # otherwise a library that configures the root logger would print every line again
    )


def describe_rank(rank: int, coordinates: dict[str, int]) -> str:
    """Format a rank and its mesh coordinates: `rank 3 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 1)`."""
    places = ", ".join(f"{dim} {coordinate}" for dim, coordinate in coordinates.items())
    return f"rank {rank} ({places})"
