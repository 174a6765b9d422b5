"""Write log lines.

    rank 0         INFO and above       stdout
                   IN_FILE and above    dump_folder/log.txt with the date
    other ranks    WARNING and above    stderr, with the rank

Modules log through `logging.getLogger(__name__)`.
"""

import logging
import sys
from pathlib import Path

IN_FILE = logging.INFO - 1  # level of lines that the launcher shows on the screen


class LineFormatter(logging.Formatter):
    """Formats lines as `12:30:01 text`. Adds the level if it is above INFO, and the rank if it is not 0."""

    def __init__(self, rank: int, date_format: str):
        super().__init__("%(message)s", date_format)
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        words = [self.formatTime(record, self.datefmt)]
        if record.levelno > logging.INFO:
            words.append(record.levelname)
        if self.rank > 0:
            words.append(f"rank {self.rank}:")
        words.append(super().format(record))  # includes the traceback, if any
        return " ".join(words)


def start_logging(rank: int, dump_folder: Path | None) -> None:
    """Set up this package's logger in this process. A second call replaces the first. `rank` is the global rank.

    Without `dump_folder`, no log.txt is written.
    """
    logger = logging.getLogger("torchtitan_lite")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()

    console = logging.StreamHandler(sys.stdout if rank == 0 else sys.stderr)
    console.setFormatter(LineFormatter(rank, "%H:%M:%S"))
    logger.addHandler(console)
    if rank == 0 and dump_folder:
        console.setLevel(logging.INFO)
        # Appends: a resumed run continues the file
        file = logging.FileHandler(dump_folder / "log.txt", encoding="utf-8")
        file.setFormatter(LineFormatter(rank, "%Y-%m-%d %H:%M:%S"))
        logger.addHandler(file)
    logger.setLevel(IN_FILE if rank == 0 else logging.WARNING)
    # A library that configures the root logger would print every line again.
    logger.propagate = False


def describe_rank(rank: int, coordinates: dict[str, int]) -> str:
    """Format a rank and its mesh coordinates: `rank 3 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 1)`."""
    places = ", ".join(f"{dim} {coordinate}" for dim, coordinate in coordinates.items())
    return f"rank {rank} ({places})"
