"""Start the fork server that forks the ranks of `verify`."""

import multiprocessing
import os
from multiprocessing import forkserver

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "KINETO_LOG_LEVEL": "99",  # so that torch's profiler prints nothing
}
PRELOADED = [  # imported once by the fork server, instead of by each worker
    "torchtitan_lite.tools.fork_server",
    "torch.distributed",
    "torchtitan_lite.step",  # this and the next two are for the trial of train.py
    "torchtitan_lite.checkpoint.load",
    "torchtitan_lite.tools.verify.train_py",
]


def start_fork_server() -> None:
    """Start the process that forks workers, if it is not running. It imports torch while the caller continues."""
    os.environ.update(WORKER_ENVIRONMENT)  # libraries read these when they are imported
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
