"""Start the ranks of this host with torchrun. If the run fails, end with one line: which rank, why, where to look.

    run_train.sh:  python -m torchtitan_lite.launch OPTION_OF_TORCHRUN... train.py ARGUMENT...

torchrun alone would end with its own traceback and a report of every rank that it stopped, below the line that matters.
The stderr of every rank goes to files in a temporary folder, which is kept if a rank failed and any file is not empty.

Exit status: 0 if every rank ended with 0, else 1.
"""

import argparse
import errno
import logging
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# Signals that torchrun passes on to the ranks. SIGINT is not among them: here it becomes a KeyboardInterrupt, for which
# torchrun ends the ranks by SIGTERM, at once; a rank that gets SIGINT itself prints a traceback.
PASSED_ON = "SIGTERM,SIGHUP,SIGQUIT"
REPEATED = {  # logger of torchrun -> prefixes of lines that repeat our last line
    "torch.distributed.elastic.agent.server.api": ("Received %s death signal",),
    "torch.distributed.elastic.multiprocessing.api": ("Sending process", "failed (exitcode"),
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
    print(
        f"The stderr of every rank on {platform.node()} goes to {folder}, which is kept if a rank fails.",
        file=sys.stderr,
    )
    for name, starts in REPEATED.items():
        # While torchrun may start the ranks again, its own line says which of them has failed.
        dropped = tuple(start for start in starts if options.max_restarts == 0 or not start.startswith("failed"))
        logging.getLogger(name).addFilter(lambda record, dropped=dropped: not str(record.msg).startswith(dropped))

    failure = run_ranks(options, folder)
    has_failed = failure is not None or len(list(folder.glob("*/attempt_*"))) > 1  # torchrun makes one at each start
    if has_failed and any(path.stat().st_size for path in folder.rglob("*") if path.is_file()):
        print(f"The stderr of every rank is in {folder}.", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if failure is None:
        return 0
    print(f"run_train.sh: {failure}", file=sys.stderr)
    return 1


def run_ranks(options: argparse.Namespace, folder: Path) -> str | None:
    """Run torchrun to its end. Return how the run failed; None if it did not."""
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        return describe_failure(error.failures, shown_ranks=options.local_ranks_filter.split(","))
    except SignalException as error:
        return f"stopped by {error.sigval.name}"
    except KeyboardInterrupt:
        return "stopped by Ctrl-C"
    except Exception as error:
        report = folder / "torchrun.txt"
        report.write_text(traceback.format_exc(), encoding="utf-8")
        return f"torchrun failed: {type(error).__name__}: {first_line(error)} ({report} holds its traceback)"
    return None


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

    A rank that was killed comes first: the others fail because their peer is gone. Last come those that torchrun then
    ended by SIGTERM. SIGABRT may be an effect as well as the cause.
    """
    rank, failure = numbered
    killed = failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGABRT)
    ended_by_torchrun = failure.exitcode == -signal.SIGTERM and not has_message(failure)
    return ended_by_torchrun, not killed, failure.timestamp, rank


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
