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

UNWRITTEN = "{} cannot be written, and the run goes on: {}"


class LineFormatter(logging.Formatter):
    """Formats lines as `12:30:01 text`. Adds the level if it is above INFO, and the rank if it is not 0."""

    def __init__(self, rank: int, date_format: str):
        super().__init__("%(asctime)s", date_format)
        self.rank = f"rank {rank}: " if rank > 0 else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno > logging.INFO else ""
        return f"{record.asctime} {level}{self.rank}{record.message}"


class LineHandler(logging.StreamHandler):
    """Writes lines. Says once on stderr that they cannot be written; logging prints a traceback for each of them."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if self.has_failed:
            return
        self.has_failed = True
        with suppress(OSError):
            print(UNWRITTEN.format(self.name, sys.exc_info()[1]), file=sys.stderr)


@contextmanager
def go_on_unwritten(name: str, said: set[str]) -> Iterator[None]:
    """Log an OSError as one sentence, once for each `name`, and continue. `said`: names logged so far."""
    try:
        yield
    except OSError as error:
        if name not in said:
            said.add(name)
            logger.error(UNWRITTEN.format(name, error))


def start_logging(rank: int, dump_folder: Path | None) -> None:
    """Set up this package's logger in this process. A second call replaces the first. `rank` is the global rank.

    Without `dump_folder`, no log.txt is written.
    """
    package = logging.getLogger("torchtitan_lite")
    package.setLevel(IN_FILE)
    # A library that configures the root logger would print every line again.
    package.propagate = False
    console = LineHandler(sys.stdout if rank == 0 else sys.stderr)
    console.set_name("the console")
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    console.setFormatter(LineFormatter(rank, "%H:%M:%S"))
    package.handlers = [console]
    if rank == 0 and dump_folder:
        path = dump_folder / "log.txt"
        with go_on_unwritten(str(path), set()):
            file = LineHandler(path.open("a", encoding="utf-8"))  # a resumed run continues the file
            file.set_name(str(path))
            file.setFormatter(LineFormatter(rank, "%Y-%m-%d %H:%M:%S"))
            package.addHandler(file)


def describe_rank(rank: int, coordinates: dict[str, int]) -> str:
    """Format a rank and its mesh coordinates: `rank 3 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 1)`."""
    places = ", ".join(f"{dim} {coordinate}" for dim, coordinate in coordinates.items())
    return f"rank {rank} ({places})"
