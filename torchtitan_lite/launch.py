"""Start the ranks of this host with torchrun. If the run fails, end with one line: which rank, why, where to look.

    run_train.sh:  python -m torchtitan_lite.launch OPTION_OF_TORCHRUN... train.py ARGUMENT...

    on GPUs    launcher -> rank, rank, ...                          each starts Python and imports torch
    on CPUs    launcher -> a process that imports -> rank, rank, ...    forks of it, which share its memory

torchrun alone would end with its own traceback and a report of every rank that it stopped, below the line that matters.
The stderr of every rank goes to files in a temporary folder, which is kept if a rank failed and any file is not empty.

A signal does not end torchrun here, nor do ranks get its 30 seconds: they get the signal, finish a step, save and end
(components/shutdown.py), and that is waited for. A second signal kills them. No restart follows.

Exit status: 0 if every rank ended with 0; 130 if the ranks stopped for SIGINT, 143 for SIGTERM; else 1.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run_ranks: no traceback of an import

import argparse
import errno
import logging
import os
import platform
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api as launcher

from torchtitan_lite.config.hardware import detect_machine
from torchtitan_lite.processes import prepare_forkserver

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # that Agent passes on
PASSED_ON = "SIGHUP,SIGQUIT"  # that torchrun passes on; they end the ranks at once
REPEATED = {  # logger of torchrun -> prefixes of lines that repeat our last line
    "torch.distributed.elastic.agent.server.api": ("Received %s death signal",),
    "torch.distributed.elastic.multiprocessing.api": ("Sending process", "Closing process", "failed (exitcode"),
    "torch.multiprocessing.spawn": ("Terminating process",),
}


def main(args: list[str]) -> int:
    """Start the ranks and wait for their end. Return the exit status."""
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", PASSED_ON)
    options = torchrun.parse_args(args)
    if refusal := refuse_port(options):
        print(f"run_train.sh: {refusal}", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="torchtitan_lite."))
    options.log_dir = str(folder)
    if sys.platform == "linux" and detect_machine().device_type == "cpu":
        # Here ranks share few cores, and importing torch takes seconds of each. With GPUs a host has cores enough, and
        # some of their libraries must not be forked.
        options.run_path, options.start_method = True, "forkserver"
        prepare_forkserver(["train", "torch.distributed.run"])
    print(
        f"The stderr of every rank on {platform.node()} goes to {folder}, which is kept if a rank fails.",
        file=sys.stderr,
    )
    for name, starts in REPEATED.items():
        # While torchrun may start the ranks again, its own line says which of them has failed.
        dropped = tuple(start for start in starts if options.max_restarts == 0 or not start.startswith("failed"))
        logging.getLogger(name).addFilter(lambda record, dropped=dropped: not str(record.msg).startswith(dropped))

    status, failure = run_ranks(options, folder)
    has_failed = status == 1 or len(list(folder.glob("*/attempt_*"))) > 1  # torchrun makes one at each start
    if has_failed and any(path.stat().st_size for path in folder.rglob("*") if path.is_file()):
        print(f"The stderr of every rank is in {folder}.", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if failure is not None:
        print(f"run_train.sh: {failure}", file=sys.stderr)
    return status


def run_ranks(options: argparse.Namespace, folder: Path) -> tuple[int, str | None]:
    """Run torchrun to its end. Return the exit status, and why it is not 0."""
    try:
        for number in SIGNALS:
            signal.signal(number, interrupt)
        with (  # torchrun has no option for them
            patch.object(launcher, "LocalElasticAgent", Agent),
            patch.object(torchrun, "run_script_path", run_fork),
        ):
            torchrun.run(options)
    except ChildFailedError as error:
        return 1, describe_failure(error.failures, shown_ranks=options.local_ranks_filter.split(","))
    except SignalException as error:
        return 128 + error.sigval, f"stopped by {error.sigval.name}"
    except Exception as error:
        report = folder / "torchrun.txt"
        report.write_text(traceback.format_exc(), encoding="utf-8")
        return 1, f"torchrun failed: {type(error).__name__}: {first_line(error)} ({report} holds its traceback)"
    return 0, None


class Agent(LocalElasticAgent):
    """torchrun's process on this host, which starts its ranks and looks at them ten times a second.

    Raises SignalException where a signal has ended the run.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.received: list[signal.Signals] = []
        self.is_passed_on = False
        self.has_ranks = False
        for number in SIGNALS:
            signal.signal(number, self.note)

    def note(self, number: int, frame: object) -> None:
        self.received.append(signal.Signals(number))
        if not self.has_ranks:  # it waits for other hosts
            interrupt(number, frame)
        if len(self.received) > 1:  # here, since torchrun may wait half a minute for a rank that hears no SIGTERM
            send(signal.SIGKILL, self.list_ranks())

    def list_ranks(self) -> list[subprocess.Popen | BaseProcess]:
        """Return the processes of the ranks: none before all of them are started."""
        if isinstance(self._pcontext, MultiprocessContext):
            return self._pcontext._pc.processes
        return [handler.proc for handler in self._pcontext.subprocess_handlers.values()] if self._pcontext else []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self.has_ranks = True  # before the first one starts: an exception would leave it behind
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self.list_ranks()
        if len(self.received) > 1:  # while they were started
            send(signal.SIGKILL, ranks)
        if self.received and not self.is_passed_on:
            send(self.received[0], ranks)  # not to their children, such as compilers
            self.is_passed_on = True
        stopped = {128 + number: number for number in SIGNALS}  # wherever in the job the signal arrived
        unheard = {-number: number for number in self.received}  # by ranks that could not listen yet
        ends = set(map(read_exit_status, ranks))
        if self.received and ends == {0}:  # forks that could not listen yet
            interrupt(self.received[0], None)
        if not ends <= {None, 0, *stopped, *unheard}:
            send(signal.SIGHUP, ranks)  # for the SIGTERM of torchrun they would wait for the one that failed
        result = super()._monitor_workers(worker_group)
        self.has_ranks = result.state == WorkerState.HEALTHY
        if len(self.received) > 1:
            raise SignalException("", self.received[0])
        is_forked = isinstance(self._pcontext, MultiprocessContext)
        if is_forked and result.state == WorkerState.FAILED:  # of forks, torchrun names only one
            result.failures = {
                worker.global_rank: ProcessFailure(number, rank.pid, rank.exitcode, self._pcontext.error_files[number])
                for number, (worker, rank) in enumerate(zip(worker_group.workers, ranks, strict=True))
                if rank.exitcode
            }
        ends = {failure.exitcode for failure in result.failures.values()}
        if by_signal := ends & stopped.keys() or (ends if ends <= unheard.keys() else None):
            interrupt((stopped | unheard)[min(by_signal)], None)
        return result


def interrupt(number: int, frame: object) -> None:
    raise SignalException("", signal.Signals(number))


def send(number: signal.Signals, ranks: list[subprocess.Popen | BaseProcess]) -> None:
    for rank in ranks:
        if read_exit_status(rank) is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(rank.pid, number)


def read_exit_status(rank: subprocess.Popen | BaseProcess) -> int | None:
    """Return None while the rank runs, and -N if signal N has ended it."""
    return rank.exitcode if isinstance(rank, BaseProcess) else rank.poll()


def run_fork(script: str, *args: str) -> None:
    """Run a script as a rank, in a process that has already imported what it needs."""
    sys.argv = [script, *args]
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:  # multiprocessing would print neither of them to the stderr of the rank
        traceback.print_exc()
        sys.exit(1)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            sys.exit(1)
        raise


def describe_failure(failures: dict[int, ProcessFailure], *, shown_ranks: list[str]) -> str:
    """Return which rank failed first, and why. `shown_ranks`: ranks of this host whose output is on the terminal."""
    rank, failure = min(failures.items(), key=order_of_failure)
    if failure.exitcode > 0 and str(failure.local_rank) in shown_ranks:
        return f"rank {rank} ended with exit status {failure.exitcode}: see above"
    if has_message(failure):
        message = failure.error_file_data["message"]
        return f"rank {rank} failed: {first_line(message['message'] if isinstance(message, dict) else message)}"
    if failure.exitcode < 0:
        by_kernel = ", as Linux does to a process when the memory is used up" * (failure.exitcode == -signal.SIGKILL)
        return f"rank {rank} was killed by {failure.signal_name()}{by_kernel}"
    return f"rank {rank} ended with exit status {failure.exitcode}"


def order_of_failure(numbered: tuple[int, ProcessFailure]) -> tuple[bool, bool, int, int]:
    """Return a sort key that puts the cause first. The times of failures are whole seconds and do not suffice.

    A rank that was killed comes first: the others fail because their peer is gone. Last come those that were ended
    after that, by Agent or by torchrun. SIGABRT may be an effect as well as the cause.
    """
    rank, failure = numbered
    ended_here = (-signal.SIGHUP, -signal.SIGTERM)
    killed = failure.exitcode < 0 and failure.exitcode not in (*ended_here, -signal.SIGABRT)
    ended_later = failure.exitcode in ended_here and not has_message(failure)
    return ended_later, not killed, failure.timestamp, rank


def has_message(failure: ProcessFailure) -> bool:
    """Return whether the rank wrote its exception to a file, as `record` in train.py does."""
    return Path(failure.error_file).is_file()


def first_line(message: object) -> str:
    return next(iter(str(message).splitlines()), "")


def refuse_port(options: argparse.Namespace) -> str | None:
    """Say why the port of the rendezvous cannot be used, since torchrun would retry for long. None: it can be used."""
    port = options.rdzv_endpoint.rpartition(":")[2]
    if options.rdzv_conf != "is_host=1" or not port.isdecimal():
        return None
    both = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=both).close()
    except OverflowError as error:
        return f"MASTER_PORT={port} is no port: {error}"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"MASTER_PORT={port} is taken on this host by another program: choose a port that is free here"
        if error.errno == errno.EACCES:
            return f"MASTER_PORT={port} is for the system's own programs: choose one above 1023"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
