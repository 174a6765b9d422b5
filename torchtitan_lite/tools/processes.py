"""Start the fork server that forks the ranks of a run, or the workers of `verify`."""

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker

from torchtitan_lite.components.signals import SIGNALS

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "KINETO_LOG_LEVEL": "99",  # turns off the profiler's messages
}
PRELOADED = [  # the fork server imports these modules once, so its workers need not import them
    "torch.distributed",
    "torchtitan_lite.step",  # this module and the next two are for the trial that runs train.py
    "torchtitan_lite.checkpoint.load",
    "torchtitan_lite.tools.verify.train_py",
]


def start_worker_server() -> None:
    """Start the fork server of the workers."""
    os.environ.update(WORKER_ENVIRONMENT)  # libraries read these variables when they are imported
    start_fork_server(PRELOADED)


def start_fork_server(modules: list[str]) -> None:
    """Start a fork server, if none is running. The server imports the modules once, while the caller continues.

    The fork server blocks all signals. New ranks inherit the blocked signals, so a signal stays pending until a rank
    can handle it. The workers of `verify` never unblock the signals.
    """
    multiprocessing.set_forkserver_preload(["torchtitan_lite.tools.fork_server", *modules])
    # Killed workers leave semaphores of torch.compile behind. Python's resource tracker frees them, and prints a
    # warning.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # the resource tracker must start first, because starting it unblocks the signals
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
