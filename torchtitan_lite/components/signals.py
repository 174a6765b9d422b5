"""Stop all ranks after the same step if any rank gets a signal.

Signals come from Ctrl-C, scancel, preemption, the notice of a spot instance, a closed terminal, or a scheduler that
warns a job before its time limit (SIGUSR1).

    rank that gets a signal   step s - 1 ... | forward, backward | all-reduce | update | save, end
                              stores it                            sends it
    every other rank          step s - 1 ... | forward, backward | all-reduce | update | save, end
                                                                   receives it

Ranks get a signal at different times, and some ranks get none. A rank that gets a signal adds the signal to the
all-reduce of the gradient norm (step.py). Every rank reads the result once per step, so all ranks stop after the same
step, without an extra collective. A validation can take longer than a step, so ranks also exchange signals before each
of its batches (validation.py).

All signals within 5 s are treated as one. `timeout`, systemd, Slurm and terminals send a signal to the launcher and to
the ranks. The launcher also forwards the signal to the ranks, so a rank gets several copies. After these 5 s, a second
signal ends the process immediately. During the first step, even the first signal ends the process, because there is
nothing to save.

After a crash, torchrun ends the other ranks of the host with SIGTERM. If a rank of this host has already ended, the
step cannot finish. A signal then ends the process without a message, because the launcher reports the failure.

A rank that ends writes the reason to a small file, whose path is in the environment variable TORCHELASTIC_ERROR_FILE:
{"status": 1, "message": "rank 3 failed: ...", "details": "Traceback ..."}. In the launcher, tools/agent.py reads the
file of the rank that failed first.
"""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NoReturn

logger = logging.getLogger(__name__)

# If ranks get different signals, the signal that is last in this order stops the run.
SIGNALS = (signal.SIGUSR1, signal.SIGQUIT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
STOPPED = tuple(128 + number for number in SIGNALS)  # exit statuses of a rank that a signal stopped
COPIES_ARRIVE_WITHIN_S = 5.0


class Phase(Enum):
    """Phases of a run on one rank. The phase determines the effect of a signal. faults/hang_watch.py tracks the
    phase."""

    START = "ends the process, because there is nothing to save before the end of the first step"
    STEPS = "ends the run after a step"
    LOST_PEER = "ends the process without a message, because the step can no longer finish"
    FAILED = "is ignored, because an exception is already ending this rank"


def handle_signals(handler: Callable | signal.Handlers) -> None:
    """Install `handler` for all SIGNALS. SIGHUP is skipped if it is already ignored, as under nohup."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


@dataclass(eq=False)
class StopFlag:
    """Stores the signal that this process received. Call `listen` to start."""

    rank: str = ""  # for messages
    received: int = 0  # number of the signal; 0 if there is none
    received_at_s: float = 0.0
    find_phase: Callable[[], Phase] = lambda: Phase.START

    def follow(self, find_phase: Callable[[], Phase]) -> None:
        """From now on, let `find_phase` (called in another thread) determine the effect of a signal."""
        self.find_phase = find_phase

    def listen(self) -> None:
        """Start receiving signals. Call this function in the main thread.

        A thread reads the signals from a pipe that C code writes to, because no Python signal handler runs while the
        main thread waits for a device or for a peer.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handle_signals(lambda *_: None)
        for number in SIGNALS:
            # signals must not interrupt system calls of libraries
            signal.siginterrupt(number, False)
        threading.Thread(target=self.read, args=(reader,), name="signals", daemon=True).start()

    def read(self, reader: int) -> None:
        while True:
            number = os.read(reader, 1)[0]
            if number in SIGNALS:
                self.note(signal.Signals(number))

    def note(self, received: signal.Signals) -> None:
        """Store the first signal until the step ends, or end this process, depending on the phase of the run."""
        now_s = time.monotonic()
        phase = self.find_phase()
        if phase is Phase.FAILED:
            return
        if phase is Phase.LOST_PEER:
            os._exit(128 + received)
        if phase is Phase.START:
            self.end(received, "before the end of its first step, so there is nothing to save")
        if not self.received:
            self.received = received
            self.received_at_s = now_s
            logger.info(
                f"{received.name}: the run stops at the end of a step; "
                f"a signal more than {COPIES_ARRIVE_WITHIN_S:g} s from now ends the run immediately"
            )
        elif now_s - self.received_at_s > COPIES_ARRIVE_WITHIN_S:
            self.end(received, "immediately, because this is the second signal")

    def end(self, received: signal.Signals, when: str) -> NoReturn:
        """End this process from any thread, with exit status 128 + signal number, the convention of shells."""
        status = 128 + received
        reason = describe_signal(status)
        if write_ending(status, reason):
            os.write(2, f"rank {self.rank} was {reason} {when}\n".encode())
        os._exit(status)


# ---------------------------------------------------------------- the end of a process


def describe_signal(status: int) -> str:
    """Describe the exit status of a run that a signal has stopped. The status is 128 + signal number."""
    return f"stopped by {signal.Signals(status - 128).name}"


def write_ending(status: int, message: str, details: str = "") -> bool:
    """Write the reason why this rank ends to the file that torchrun names. Return whether this rank is the first rank
    of this host to end.

    `status`: exit status of the run. `message`: one line, which torchrun also reads. `details`: a traceback. Only the
    first call in a process writes the file.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return True
    file = Path(name)
    earlier = list(file.parent.parent.glob(f"*/{file.name}"))
    if file not in earlier:
        file.parent.mkdir(parents=True, exist_ok=True)  # /tmp may have been cleaned
        unfinished = file.with_suffix(".tmp")
        ending = {"status": status, "message": message, "details": details}
        unfinished.write_text(json.dumps(ending))
        unfinished.rename(file)
    return not earlier
