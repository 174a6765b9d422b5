"""Stop a run on SIGINT or SIGTERM after a step that all ranks agree on: Ctrl-C, scancel, pre-emption, a spot notice.

    rank that gets a signal   step s - 1 ... | announce(s), forward, backward | all-reduce | find(s) | save, end
                              notes it         writes "stop after s: SIGTERM"
    every other rank          step s - 1 ... | announce(s), forward, backward | all-reduce | find(s) | save, end
                                                                                             reads it

Ranks get a signal at different instants, and some get none. What travels is one key of the store in which the ranks met
(torchrun's TCPStore): a write per signal, and one question per rank and step, 20 us on one host, which no device waits
for. An all-reduce of one integer over gloo took 2 ms on the same 8 ranks.

No rank passes the agreed step. A rank writes the key of step s before it takes part in the all-reduce of the gradient
norm of s, which spans all ranks, and compare_set returns only when the store has answered. The host of every rank reads
the result of that all-reduce (StepResult.finite) before find(s). So whoever asks for the key of s finds it, and nobody
has begun s + 1. Two ranks that write at the same time are both before that all-reduce, so they write the same key.

Until the first step is done there is nothing to save, and a signal ends the process at once. So does a second one.
"""

import logging
import os
import shlex
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torchtitan_lite.config.schema import Config

if TYPE_CHECKING:  # a run listens before it imports torch, which takes seconds
    from torch.distributed import Store

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Slurm gives a signal to launcher and ranks alike, and the launcher passes it on: copies of one signal arrive together.
COPIES_ARRIVE_WITHIN_S = 2.0


class StopRequest:
    """The signal that this process, `rank` of the run, got; and the step after which the run stops for one of any rank.

    Without `listen` it never gets one.
    """

    def __init__(self, rank: str = ""):
        self.rank = rank
        self.received: signal.Signals | None = None
        self.received_at_s = 0.0
        self.store: Store | None = None  # None: nothing is worth saving yet

    def listen(self) -> None:
        """Note the signals of this process from now on. Call in the main thread of a process of its own.

        A thread reads them from a pipe that C code writes to: while the main thread waits for a device or for a peer,
        no Python handler would run.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)  # no library sees a call interrupted
        threading.Thread(target=self.read, args=(reader,), name="signals", daemon=True).start()

    def read(self, reader: int) -> None:
        while True:
            if (number := os.read(reader, 1)[0]) in SIGNALS:
                self.note(signal.Signals(number))

    def note(self, received: signal.Signals) -> None:
        """Keep the first signal for the end of a step, or end this process."""
        now_s = time.monotonic()
        if self.store is None:
            self.end(received, "before the end of its first step, so there is nothing to save")
        elif self.received is None:
            self.received, self.received_at_s = received, now_s
            logger.info(f"{received.name}: the run stops at the end of a step; a second signal ends it at once")
        elif now_s - self.received_at_s > COPIES_ARRIVE_WITHIN_S:
            self.end(received, "at once, as this is the second signal")

    def end(self, received: signal.Signals, when: str) -> NoReturn:
        """End this process from any thread, with the status that shells give to a process which this signal ended."""
        os.write(2, f"rank {self.rank} was stopped by {received.name} {when}\n".encode())
        os._exit(128 + received)

    def wait_for_steps(self, store: "Store") -> None:
        """From now on, let a signal wait for the end of a step. `store` is the one in which all ranks met."""
        self.store = store

    def announce(self, step: int) -> None:
        """Before a step: if this process got a signal, tell all ranks to stop after this step."""
        if self.received is not None:
            self.store.compare_set(name_key(step), "", str(self.received.value))

    def find(self, step: int) -> signal.Signals | None:
        """After a step: return the signal for which the run stops now, the same on every rank; None: it goes on."""
        if self.store is None or not self.store.check([name_key(step)]):
            return None
        return signal.Signals(int(self.store.get(name_key(step))))


def name_key(step: int) -> str:
    return f"stop-after-{step}"


def describe_stop(
    received: signal.Signals, step: int, config: Config, newest: Path | None, args: list[str], ngpu: str | None
) -> str:
    """Return one line: where the run stopped, its newest checkpoint, and the command that continues from there.

    `args` are those of the run, `ngpu` is the variable NGPU with which it was started.
    """
    stopped = f"stopped by {received.name} after step {step} of {config.training.steps}"
    if newest is None:
        return f"{stopped}; nothing is saved{'' if config.checkpoint.enable else ', which takes --checkpoint.enable'}"
    variable = f"NGPU={ngpu} " if ngpu else ""
    changes = ["--job.no_overwrite"] if config.job.overwrite else []
    changes += ["--checkpoint.load_step=-1"] if config.checkpoint.load_step != -1 else []
    command = shlex.join(["./run_train.sh", *args, *changes])
    return f"{stopped}; newest checkpoint {newest}; to continue: {variable}{command}"
