"""Detect a step that hangs, and report what this rank waits for. One thread per rank checks once a second.

    main thread    begin(1) train_step end() save ... begin(2) train_step end() ...
    watch thread   ... is this step older than the limit? then:
                       write hang/restart-0/rank-00003.json
    launcher       2 s after the first file: read all files, print one paragraph (tools/faults/hang.py)

The limit for a step or a validation batch is comm.hang_seconds. If comm.hang_seconds is -1, the limit is 3/4 of
comm.train_timeout_seconds or twice the duration of the last step, whichever is longer. After a signal, the step must
end within STOP_WITHIN_S, or within twice the duration of the last step if that is longer. For a save, for loading the
initial state, for the first step and for the first validation, the limit is 3/4 of comm.init_timeout_seconds. A rank
that exceeds its limit also creates a file named `late`. A rank that has not advanced for half of the limit of a step
looks for the file `late`, in a step or between two steps. After a signal, the rank looks for the file immediately. If
the file exists, the rank writes its state too. Ranks that advance therefore do not read the shared folder. A rank that
is stopped or never releases the GIL cannot write, so each file also contains the state of every rank on the same host,
from /proc. If the late step ends after all, the rank deletes its report and the file `late`. A new start of the run
deletes the files of all earlier starts (dump_folder.py).

gloo aborts a rank if its collective differs from the collectives of its peers. A rank that ends with an error, or
because another rank has ended, writes a report of the same kind to hang/restart-0/failed-00003.json.

extensions/hang_report.py finds out what a rank is doing, and writes the report. hang_report.py is loaded only when
there is a report or a warning to write.
"""

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.build import Run
from torchtitan_lite.components.log import go_on_unwritten
from torchtitan_lite.components.signals import Phase, StopFlag
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Comm
from torchtitan_lite.dump_folder import HANG
from torchtitan_lite.faults.processes import read_state
from torchtitan_lite.parallel.process_groups import Place

logger = logging.getLogger(__name__)

# report at this fraction of the time-out, before collectives fail and ranks end
SHARE_OF_TIMEOUT = 0.75
N_STEPS = 8  # number of most recent steps whose collectives a hang report compares
# after a signal, a step counts as hanging if it does not end within this time, or within twice the duration of the last
# step if that is longer
STOP_WITHIN_S = 15.0


def meet_processes(
    place: Place, store: dist.Store, section: Comm, documents: list[str]
) -> dict[int, tuple[int, str]]:
    """Return a dict mapping ranks to (process id, hostname), for the ranks of this host and one rank of the next host.

    One rank of the next host is included, in case the launcher of that host is unreachable. `store` is the result of
    join_job. `documents`: hashes of the corpora. Raises UserError if a rank does not answer, or if its corpora differ
    from the corpora of this rank.
    """
    store.set_timeout(timedelta(seconds=section.init_timeout_seconds))
    own = (os.getpid(), socket.gethostname(), documents)
    store.set(f"process of rank {place.rank}", json.dumps(own))
    next_rank = (place.rank + len(place.host_ranks)) % place.world_size
    known = [*place.host_ranks, next_rank]
    names = [f"process of rank {rank}" for rank in known]
    try:
        answers = store.multi_get(names)
    except dist.DistStoreError:
        late = [str(rank) for rank in known if not store.check([f"process of rank {rank}"])]
        why = f"rank {', '.join(late)} has not started within"
        raise UserError(
            f"{why} comm.init_timeout_seconds = {section.init_timeout_seconds}. Check its host, or raise this key"
        ) from None
    processes = {}
    for rank, answer in zip(known, answers, strict=True):
        pid, hostname, theirs = json.loads(answer)
        processes[rank] = (pid, hostname)
        if theirs != documents:
            why = f"{hostname} and {own[1]} have different documents in training.dataset or validation.dataset"
            raise UserError(f"{why}. Copy the prepared corpus from one host to all others")
    return processes


@dataclass(eq=False)
class HangWatch(AbstractContextManager):
    """Watches the steps between `begin` and `end`. A context manager: leaving it ends the thread."""

    dump_folder: Path | None  # None: write nothing
    section: Comm
    run: Run
    place: Place
    processes: dict[int, tuple[int, str]]  # the result of meet_processes
    stop: StopFlag
    step: int = 0
    # start times (time of day) of the last steps
    begun_ns: deque[int] = field(default_factory=lambda: deque(maxlen=N_STEPS))
    is_in_step: bool = False
    began_s: float = field(default_factory=time.monotonic)
    last_s: float = 0.0  # duration of the last step; 0 before the first step has ended
    has_validated: bool = False
    written_in_s: float | None = None  # `began_s` of the late step that this rank has reported
    has_failed: bool = False
    has_warned: bool = False  # whether a warning about long steps has been logged
    leaving: threading.Event = field(default_factory=threading.Event)
    unwritten: set[str] = field(default_factory=set)  # files for which an error has been logged

    def __post_init__(self) -> None:
        self.stop.follow(self.find_phase)

    def start(self) -> None:
        """Start the thread. The thread watches the loading of the initial state first, then the steps."""
        if self.section.hang_seconds != 0:
            threading.Thread(target=self.watch, name="hang", daemon=True).start()

    def begin(self, step: int) -> None:
        """Note that a step begins."""
        self.step = step
        self.begun_ns.append(time.time_ns())
        # set before is_in_step, because the limit inside a step may be shorter than the limit between steps
        self.began_s = time.monotonic()
        self.is_in_step = True

    def end(self) -> None:
        """Record that the step has ended. Validation, saves and logging follow."""
        now_s = time.monotonic()
        is_first = self.last_s == 0  # the first step is the slowest
        self.last_s = now_s - self.began_s
        self.began_s = now_s
        self.is_in_step = False
        if (
            not (is_first or self.has_warned)
            and self.last_s > self.section.train_timeout_seconds / 2
        ):
            self.has_warned = True
            load_extension("hang_report").warn_of_timeout(
                self.last_s, self.section.train_timeout_seconds
            )

    def follow(self, batches: Iterator) -> Iterator:
        """Yield the batches of a validation, and watch each batch for hangs, like a step. The first validation may take
        longer than later validations."""
        try:
            for batch in batches:
                self.began_s = time.monotonic()
                self.is_in_step = self.has_validated
                yield batch
        finally:
            self.began_s = time.monotonic()
            self.is_in_step = False
            self.has_validated = True

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.leaving.set()
        if kind is not None:
            self.has_failed = True
            self.write("failed")

    def watch(self) -> None:
        while not self.leaving.wait(1.0):
            if self.written_in_s is None:
                if self.is_late():
                    self.written_in_s = self.began_s
                    self.write("rank")
            elif self.written_in_s != self.began_s:  # the step that was reported as late has ended
                self.written_in_s = None
                file = self.name_file("rank")
                with go_on_unwritten(str(file), self.unwritten):
                    self.late.unlink(missing_ok=True)
                    file.unlink(missing_ok=True)

    def is_late(self) -> bool:
        """Return whether this rank has not advanced within its time limit.

        If another rank is already late, the limit of this rank is half of the limit of a step, or 0 after a signal.
        """
        step_limit_s = self.find_limit()
        # a save or the first step may take longer than a later step
        limit_s = SHARE_OF_TIMEOUT * self.section.init_timeout_seconds
        is_later_step = self.is_in_step and self.last_s > 0
        if is_later_step:
            limit_s = step_limit_s
        # measure after choosing the limit, so that the measured wait is 0 s if a step begins in between
        waited_s = time.monotonic() - self.began_s
        if waited_s > limit_s:
            return True
        has_waited = waited_s > step_limit_s / 2
        if self.stop.received:
            has_waited = True
            stopping_s = time.monotonic() - self.stop.received_at_s
            if is_later_step and stopping_s > max(STOP_WITHIN_S, 2 * self.last_s):
                return True
        # only a rank that does not advance reads the shared folder
        return has_waited and self.late.exists()

    def find_limit(self) -> float:
        """Return the time limit of every step except the first, in seconds."""
        if self.section.hang_seconds > 0:
            return self.section.hang_seconds
        return max(2 * self.last_s, SHARE_OF_TIMEOUT * self.section.train_timeout_seconds)

    def find_phase(self) -> Phase:
        """Return the phase of this rank, which determines the effect of a signal.

        If a rank of this host has ended before the end of the run, write a report of what this rank is doing.
        """
        if self.has_failed:
            return Phase.FAILED
        # one agent started all ranks of this host, so their process ids are valid in this process
        pids = [self.processes[rank][0] for rank in self.place.host_ranks]
        if not self.leaving.is_set() and "Z" in map(read_state, pids):
            self.write("failed")
            return Phase.LOST_PEER
        return Phase.STEPS if self.last_s else Phase.START

    @cached_property
    def folder(self) -> Path:
        """Folder for the reports of this start of the job."""
        return (self.dump_folder or Path()) / HANG / f"restart-{self.place.restarts}"

    @cached_property
    def late(self) -> Path:
        """File that tells all ranks to write their states, because a rank has exceeded its time limit."""
        return self.folder / "late"

    def name_file(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.place.rank:05}.json"

    def write(self, kind: str) -> None:
        """Write a report of what this rank is doing. `kind` is "rank" if a step hangs, and "failed" if a rank has
        ended."""
        if self.dump_folder is None:
            return
        load_extension("hang_report").write_report(self, kind)
