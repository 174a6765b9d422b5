"""Write log lines.

    rank 0         INFO and above       stdout
                   IN_FILE and above    dump_folder/log.txt with the date
    other ranks    WARNING and above    stderr, with the rank

Modules log through `logging.getLogger(__name__)`. If a log or a record cannot be written, for example because the disk
is full, the run reports the error once and continues.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

# log level of messages that go only to log.txt, because the launcher already prints them on the screen
IN_FILE = logging.INFO - 1

UNWRITTEN = "{} cannot be written, and the run continues: {}"


class LineHandler(logging.StreamHandler):
    """Writes lines as `12:30:01 text`. Adds the level if it is above INFO, and the rank if it is not 0.

    If lines cannot be written, one message appears on stderr. By default, `logging` prints a traceback for each line
    that cannot be written.
    """

    def __init__(self, name: str, stream: TextIO, rank: int, time_format: str):
        super().__init__(stream)
        self.set_name(name)
        self.rank = f"rank {rank}: " if rank > 0 else ""
        self.time_format = time_format
        self.has_failed = False

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno > logging.INFO else ""
        text = super().format(record)  # includes the traceback, if any
        return f"{time.strftime(self.time_format)} {level}{self.rank}{text}"

    def handleError(self, record: logging.LogRecord) -> None:
        if self.has_failed:
            return
        self.has_failed = True
        with suppress(OSError):
            print(UNWRITTEN.format(self.name, sys.exc_info()[1]), file=sys.stderr)


@contextmanager
def go_on_unwritten(name: str, said: set[str]) -> Iterator[None]:
    """Context manager: log an OSError in one sentence, once per `name`, and continue. `said`: names already logged."""
    try:
        yield
    except OSError as error:
        if name not in said:
            said.add(name)
            logger.error(UNWRITTEN.format(name, error))


def start_logging(rank: int, dump_folder: Path | None) -> None:
    """Set up this package's logger in this process. A second call replaces the settings of the first call. `rank` is
    the global rank.

    log.txt is written to `dump_folder`. `dump_folder` is None on all ranks except 0, and also on rank 0 if the run
    writes no files.
    """
    package = logging.getLogger("torchtitan_lite")
    package.setLevel(IN_FILE)
    # If a library configures the root logger, propagation would print every line twice.
    package.propagate = False
    screen = sys.stdout if rank == 0 else sys.stderr
    console = LineHandler("the console", screen, rank, "%H:%M:%S")
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    package.handlers = [console]
    if dump_folder:
        path = dump_folder / "log.txt"
        with go_on_unwritten(str(path), set()):
            file = path.open("a", encoding="utf-8")  # a resumed run appends to the file
            package.addHandler(LineHandler(str(path), file, rank, "%Y-%m-%d %H:%M:%S"))


def describe_rank(rank: int, coordinates: dict[str, int]) -> str:
    """Format a rank and its mesh coordinates: `rank 3 (pp 0, dp_replicate 0, dp_shard 1, cp 0, tp 1)`."""
    places = ", ".join(f"{dim} {coordinate}" for dim, coordinate in coordinates.items())
    return f"rank {rank} ({places})"
