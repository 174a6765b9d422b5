"""Start the fork server of the ranks of `verify`; end worker processes when their parent ends."""

import multiprocessing
import os
import threading
from multiprocessing import forkserver
from multiprocessing.connection import wait

WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
# What workers would import one after another: the last two for the trial of train.py.
PRELOADED = ["torch", "torch.distributed", "torchtitan_lite.step", "torchtitan_lite.checkpoint.load"]


def start_fork_server() -> None:
    """Start the process that forks workers, if it is not running. It imports torch while the caller continues."""
    os.environ.update(WORKER_ENVIRONMENT)  # read by libraries when they are imported
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def end_with_parent() -> None:
    """If multiprocessing started this process, end it as soon as its parent ends.

    A worker that waits for its next job would not notice, because the workers of a pool keep each other's pipes open.
    """
    parent = multiprocessing.parent_process()

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
