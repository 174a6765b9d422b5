"""Start the fork server that forks the ranks of `verify`."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "KINETO_LOG_LEVEL": "99",  # turns off the profiler's messages
}
PRELOADED = [  # the fork server imports these modules once, so the workers need not import them
    "torchtitan_lite.tools.fork_server",
    "torch.distributed",
    "torchtitan_lite.step",  # this module and the next two are needed by the trial train.py
    "torchtitan_lite.checkpoint.load",
    "torchtitan_lite.tools.verify.train_py",
]


def start_fork_server() -> None:
    """Start the process that forks workers, if it is not running. The server imports torch while the caller
    continues."""
    os.environ.update(WORKER_ENVIRONMENT)  # libraries read these variables when they are imported
    multiprocessing.set_forkserver_preload(PRELOADED)
    # killed workers cannot free the semaphores of torch.compile; Python's tracker frees them, and would warn
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    forkserver.ensure_running()
