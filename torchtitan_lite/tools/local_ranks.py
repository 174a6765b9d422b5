"""Track the ranks of this host for the launcher: forward signals, find their folders, record how they ended."""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torchtitan_lite.components.signals import COPIES_ARRIVE_WITHIN_S, describe_signal
from torchtitan_lite.tools.hosts import SIGNAL, is_first_host

ASK_EVERY_S = 0.2
ERROR = "error.txt"  # in the folder of a rank: the traceback of its exception


class Ending(NamedTuple):
    """How the ranks of this host have ended."""

    status: int  # exit status of the run
    reason: str  # one line; empty if the run succeeded
    details: str = ""  # the traceback of the rank that failed first, or the end of its stderr


def show(details: str) -> None:
    if details:
        print(details, file=sys.stderr, flush=True)


class Signals:
    """Forwards the signals that this launcher receives to the ranks of this host.

    `folder` has torchrun's files. Ranks that hang write their reports into `hangs`.
    """

    def __init__(self, folder: Path, hangs: Path):
        self.folder = folder
        self.hangs = hangs
        self.received: list[int] = []
        self.received_at_s = 0.0  # time of the first signal
        self.is_passed_on = False  # the first signal came from the launcher of a different host
        self.has_killed = False  # this launcher has killed its ranks
        self.react = self.forward

    @contextmanager
    def reacting(self, react: Callable[[], None]) -> Iterator[None]:
        """Context manager: until ranks run, let a signal call `react`, which is self.check or self.end."""
        self.react = react
        if self.received:
            react()
        try:
            yield
        finally:
            self.react = self.forward

    @property
    def ending(self) -> Ending:
        """The exit status and the reason that the first signal gives the run."""
        status = 128 + self.received[0]
        return Ending(status, describe_signal(status))

    def end(self) -> NoReturn:
        """End this process. Call this only if it has no ranks and no other host waits for it.

        Use this instead of `check` while C++ code is imported: an exception in a signal handler could abort the import.
        """
        # if _forkserver_pid is not set, the fork server is still importing, and ends by itself
        if fork_server := getattr(forkserver._forkserver, "_forkserver_pid", None):
            os.kill(fork_server, signal.SIGKILL)
        for folder in (self.folder, get_temp_dir()):
            shutil.rmtree(folder, ignore_errors=True)
        os.write(2, f"run_train.sh: {self.ending.reason}\n".encode())
        os._exit(self.ending.status)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has arrived."""
        if self.received:
            raise KeyboardInterrupt

    def pass_on(self, number: int, frame: object) -> None:
        """Handle a signal: forward it to the ranks, or interrupt this launcher."""
        now_s = time.monotonic()
        if self.received:
            is_copy = self.is_passed_on or now_s - self.received_at_s <= COPIES_ARRIVE_WITHIN_S
            if self.is_passed_on:  # the user may send the same signal to one host after another
                self.is_passed_on = False
                self.received_at_s = now_s
            if is_copy:
                return
        self.received_at_s = self.received_at_s or now_s
        self.received.append(number)
        self.react()

    def share(self, store: Any) -> None:
        """Send a received signal to the other hosts, or receive a signal from them. Runs in a thread."""
        with suppress(RuntimeError):  # the store has ended with NODE_RANK=0
            while not self.received:
                if store.check([SIGNAL]):
                    self.is_passed_on = True
                    os.kill(os.getpid(), int(store.get(SIGNAL)))
                    return
                time.sleep(ASK_EVERY_S)
                if not threading.main_thread().is_alive():
                    return
            store.set(SIGNAL, str(self.received[0]))

    def forward(self) -> None:
        """Send the first signal to the ranks. After a second signal, or if a step hangs, kill the ranks."""
        if not self.received:
            return
        number = self.received[0]
        is_hanging = False
        start = find_last_start(self.folder)
        with suppress(FileNotFoundError):  # a file is deleted if the step ends meanwhile
            for file in self.hangs.glob("restart-*/rank-*.json"):
                # compare times, because a different host may have numbered the restarts
                is_hanging |= start is not None and file.stat().st_mtime > start.stat().st_mtime
        if is_hanging or len(self.received) > 1:
            number = signal.SIGKILL
        self.end_ranks(number)

    def end_ranks(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.has_killed = True
        for rank in multiprocessing.active_children():
            with suppress(ProcessLookupError):  # the rank has just exited
                os.kill(rank.pid, number)

    def report_hang(self, text: str) -> None:
        if is_first_host():
            show(text)
        if self.received:
            self.end_ranks(signal.SIGKILL)


def find_last_start(folder: Path) -> Path | None:
    """Return the folder of the last start, or None before the first start. It has a subfolder for each local rank."""
    return max(folder.glob("*/attempt_*"), key=number_start, default=None)


def number_start(folder: Path) -> int:
    return int(folder.name.removeprefix("attempt_"))
