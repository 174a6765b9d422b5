"""Write log lines.

    rank 0         INFO and above       stdout
                   IN_FILE and above    dump_folder/log.txt with the date
    other ranks    WARNING and above    stderr, with the rank

Modules log through `logging.getLogger(__name__)`. If a log or a record cannot be written, because the disk is full, the
run reports it once and continues.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

IN_FILE = logging.INFO - 1  # level of lines that the launcher shows on the screen

UNWRITTEN = "{} cannot be written, and the run continues: {}"


class SayOnce(logging.Handler):
    """Says once on stderr that lines cannot be written. logging itself prints a traceback for each line."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if self.has_failed:
            return
        self.has_failed = True
        with suppress(OSError):
            print(UNWRITTEN.format(self.name, sys.exc_info()[1]), file=sys.stderr)


class Console(SayOnce, logging.StreamHandler):
    pass


class LogFile(SayOnce, logging.FileHandler):
    pass


@contextmanager
def go_on_unwritten(name: str, said: set[str]) -> Iterator[None]:
    """Log an OSError as one sentence, once for each `name`, and continue. `said`: names logged so far."""
    try:
        yield
    except OSError as error:
        if name not in said:
            said.add(name)
            logger.error(UNWRITTEN.format(name, error))


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
    package = logging.getLogger("torchtitan_lite")
    for handler in list(package.handlers):
        package.removeHandler(handler)
        handler.close()

    console = Console(sys.stdout if rank == 0 else sys.stderr)
    console.set_name("the console")
    console.setFormatter(LineFormatter(rank, "%H:%M:%S"))
    package.addHandler(console)
    if rank == 0 and dump_folder:
        console.setLevel(logging.INFO)
        path = dump_folder / "log.txt"
        with go_on_unwritten(str(path), set()):
            file = LogFile(path, encoding="utf-8")  # appends: a resumed run continues the file
            file.set_name(str(path))
            file.setFormatter(LineFormatter(rank, "%Y-%m-%d %H:%M:%S"))
            package.addHandler(file)
    package.setLevel(IN_FILE if rank == 0 else logging.WARNING)
    # A library that configures the root logger would print every line again.
    package.propagate = False


def describe_rank(rank: int, coordinates: dict[str, int]) -> str:
    """Format a rank and its mesh coordinates: `rank 3 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 1)`."""
    places = ", ".join(f"{dim} {coordinate}" for dim, coordinate in coordinates.items())
    return f"rank {rank} ({places})"
