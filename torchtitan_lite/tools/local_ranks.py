"""Forward the signals that a launcher receives: to the ranks of this host, and to the launchers of the other hosts.

no ranks run        the signal raises KeyboardInterrupt in the launcher
torch is imported   the signal ends the launcher immediately, because an exception could abort an import of C++
                    code. With several hosts, the signal is delayed until torch is loaded, and then reaches the
                    other hosts
ranks run           the first signal is forwarded to the ranks; a later signal kills them. If a step hangs, the
                    first signal kills them
"""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_lite.components.signals import COPIES_ARRIVE_WITHIN_S, describe_signal
from torchtitan_lite.config.messages import tell
from torchtitan_lite.tools.faults import hang
from torchtitan_lite.tools.hosts import SIGNAL, Ending, is_first_host

ASK_EVERY_S = 0.2


class Signals:
    """The signals that this launcher has received. `pass_on` handles them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.copies_until_s = 0.0
        self.interrupts = False  # whether a signal raises KeyboardInterrupt in this launcher
        self.importing: Path | None = None  # folder to delete if a signal ends the import of torch
        self.has_killed = False  # whether this launcher has killed the ranks
        self.hangs = Path()  # folder of the reports of ranks that hang
        self.started_at_s = time.time()  # the last start of the ranks

    def watch_hangs(self, folder: Path) -> None:
        """From now on, print the hangs that ranks report in `folder`. If a signal has arrived, a hang also kills the
        ranks."""
        self.hangs = folder
        watch = (folder, self.report_hang)
        threading.Thread(target=hang.watch, args=watch, name="hangs", daemon=True).start()

    @property
    def ending(self) -> Ending:
        """Exit status and reason of a run that ends because of the first signal."""
        status = 128 + self.received[0]
        return Ending(status, describe_signal(status))

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Context manager: signals raise KeyboardInterrupt. If a signal has already arrived, entering raises
        KeyboardInterrupt."""
        self.interrupts = True
        try:
            self.react()
            yield
        finally:
            self.interrupts = False

    def pass_on(self, number: int, frame: object) -> None:
        """Handle a signal: interrupt this launcher, or forward the signal to the ranks."""
        now_s = time.monotonic()
        end_s = now_s + COPIES_ARRIVE_WITHIN_S
        if not self.received:
            self.copies_until_s = max(self.copies_until_s, end_s)
        elif now_s <= self.copies_until_s:
            self.copies_until_s = min(self.copies_until_s, end_s)
            return
        self.received.append(number)
        self.react()

    def share(self, store: Any) -> None:
        """Send a received signal to the other hosts, or receive a signal from them. Runs in a thread."""
        # an error means that the store has ended, together with the launcher of NODE_RANK=0
        with suppress(RuntimeError):
            while not self.received:
                if store.check([SIGNAL]):
                    self.copies_until_s = inf  # a user may signal one host after another
                    os.kill(os.getpid(), int(store.get(SIGNAL)))
                    return
                time.sleep(ASK_EVERY_S)
                if not threading.main_thread().is_alive():
                    return
            store.set(SIGNAL, str(self.received[0]))

    def react(self) -> None:
        """Act on a signal. Before the ranks have started, interrupt this launcher, or end this launcher if it is
        importing torch. After that, forward the first signal to the ranks. On a later signal, or if a step hangs, kill
        the ranks."""
        if self.received:
            if self.interrupts:
                raise KeyboardInterrupt
            if self.importing:
                self.end(self.importing)
            must_kill = len(self.received) > 1 or self.is_hanging()
            self.end_ranks(signal.SIGKILL if must_kill else self.received[0])

    def end(self, folder: Path) -> NoReturn:
        """End this process, which has no ranks. `folder` contains its temporary files."""
        # without SIGKILL, a fork server that is importing modules would end only after the imports
        if fork_server := getattr(forkserver._forkserver, "_forkserver_pid", None):
            os.kill(fork_server, signal.SIGKILL)
        for temporary in (folder, get_temp_dir()):
            shutil.rmtree(temporary, ignore_errors=True)
        os.write(2, f"run_train.sh: {self.ending.reason}\n".encode())
        os._exit(self.ending.status)

    def is_hanging(self) -> bool:
        """Return whether any hang that a rank has reported since this start is still in progress."""
        with suppress(FileNotFoundError):  # the step has ended in the meantime
            files = self.hangs.glob("restart-*/rank-*.json")
            return any(file.stat().st_mtime > self.started_at_s for file in files)
        return False

    def end_ranks(self, number: int) -> None:
        self.has_killed |= number == signal.SIGKILL
        for rank in multiprocessing.active_children():
            with suppress(ProcessLookupError):  # the rank has just exited
                os.kill(rank.pid, number)

    def report_hang(self, text: str) -> None:
        if is_first_host():
            tell(text)
        if self.received:
            self.end_ranks(signal.SIGKILL)


def find_last_start(folder: Path) -> Path | None:
    """Return the folder of the last start, which has one folder per local rank; None before the first start."""
    return max(folder.glob("*/attempt_*"), key=os.path.getmtime, default=None)
