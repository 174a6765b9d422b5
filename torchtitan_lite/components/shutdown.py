"""Stop all ranks after the same step on a signal: Ctrl-C, scancel, preemption, a spot notice, a closed terminal.

    rank that gets a signal   step s - 1 ... | forward, backward | all-reduce | update | save, end
                              stores it                            sends it
    every other rank          step s - 1 ... | forward, backward | all-reduce | update | save, end
                                                                   receives it

Ranks get a signal at different times, and some get none. Each rank adds its signal to the all-reduce of the gradient
norm (components/optim.py), which every rank reads once per step. So all ranks stop after the same step, without an
extra collective.

All signals within 5 s count as one. `timeout`, systemd, Slurm and terminals signal the launcher and the ranks, and the
launcher forwards the signal, so a rank gets several copies. A later signal ends the process immediately. During the
first step even the first signal ends it, because there is nothing to save.

After a crash, torchrun ends the other ranks of the host with SIGTERM. If a rank of this host has already ended, the
step cannot end either. So a signal then ends the process without a word: the launcher says why the run failed.
"""

import json
import logging
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torchtitan_lite.config.messages import name_command
from torchtitan_lite.config.reader import drop_keys, read_config
from torchtitan_lite.config.schema import ONE_SHOT, Config, get_value

logger = logging.getLogger(__name__)

# If ranks get different signals, the last one in this order decides.
SIGNALS = (signal.SIGQUIT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
STOPPED_BY = "stopped by "  # begins the record of a rank that a signal has ended
COPIES_ARRIVE_WITHIN_S = 5.0


def handle_signals(handler: Callable | signal.Handlers) -> None:
    """Set the handler of all SIGNALS. nohup ignores SIGHUP, and this stays so."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class StopRequest:
    """Holds the signal that this process received. Call `listen` to receive signals. `rank` is for messages."""

    def __init__(self, rank: str = ""):
        self.rank = rank
        self.received: signal.Signals | None = None
        self.received_at_s = 0.0
        self.is_first_step = True  # there is nothing to save yet
        # HangWatch sets the next two
        self.has_failed = False  # an exception ends this rank, and the launcher says so
        self.has_lost_peer: Callable[[], bool] = lambda: False

    @property
    def requested(self) -> int:
        """The signal that this rank received, as a number; 0: none."""
        return self.received or 0

    def listen(self) -> None:
        """Start receiving signals. Call this in the main thread.

        A thread reads the signals from a pipe that C code writes to, because no Python signal handler runs while the
        main thread waits for a device or for a peer.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handle_signals(lambda *_: None)
        for number in SIGNALS:
            signal.siginterrupt(number, False)  # do not interrupt system calls of libraries
        thread = threading.Thread(target=self.read, args=(reader,), name="signals", daemon=True)
        thread.start()

    def read(self, reader: int) -> None:
        while True:
            number = os.read(reader, 1)[0]
            if number in SIGNALS:
                self.note(signal.Signals(number))

    def note(self, received: signal.Signals) -> None:
        """Store the first signal until the end of a step. End this process on a later one, or during the first step."""
        now_s = time.monotonic()
        if self.has_failed:
            return
        elif self.has_lost_peer():
            os._exit(128 + received)
        elif self.is_first_step:
            self.end(
                received,
                "before the end of its first step, so there is nothing to save",
            )
        elif self.received is None:
            self.received = received
            self.received_at_s = now_s
            later = f"a signal more than {COPIES_ARRIVE_WITHIN_S:g} s from now ends it immediately"
            logger.info(f"{received.name}: the run stops at the end of a step; {later}")
        elif now_s - self.received_at_s > COPIES_ARRIVE_WITHIN_S:
            self.end(received, "immediately, because this is the second signal")

    def end(self, received: signal.Signals, when: str) -> NoReturn:
        """End this process from any thread, with exit status 128 + signal number, the convention of shells."""
        reason = f"{STOPPED_BY}{received.name}"
        if write_ending(128 + received, reason):
            os.write(2, f"rank {self.rank} was {reason} {when}\n".encode())
        os._exit(128 + received)


def write_ending(status: int, reason: str) -> bool:
    """Write why this rank ends to the file that torchrun names. Return whether no rank of this host has ended before.

    `status`: exit status of the run. The first ending of a process counts. tools/launch.py reads the file; torchrun
    itself reads `message`.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return True
    file = Path(name)
    earlier = list(file.parent.parent.glob(f"*/{file.name}"))
    if file not in earlier:
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"message": reason, "status": status}))
        unfinished.rename(file)
    return not earlier


def describe_newest(
    newest: Path | None,
    config: Config,
    args: list[str],
    ngpu: str | None,
    *,
    is_own: bool = True,
) -> str:
    """Name the newest checkpoint and the command that resumes from it.

    `args` are the arguments of the run, `ngpu` is the environment variable NGPU. If the checkpoint `is_own`, saved by
    this run, the command leaves out the keys in ONE_SHOT, which have acted. Otherwise the same command repeats the run.
    """
    if newest is None or config.checkpoint.load_only:
        return "nothing is saved"
    command = ["train", *args]
    if is_own:
        command = drop_keys(command, ONE_SHOT)
        in_file = read_config(command[1:]).config
        for key, off in ONE_SHOT.items():
            if get_value(in_file, key) != get_value(Config(), key):
                command.append(off)
    variable = f"NGPU={ngpu} " if ngpu else ""
    return f"newest checkpoint {newest}; to continue: {variable}{name_command(shlex.join(command))}"
