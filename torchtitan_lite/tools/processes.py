"""End the worker processes of multiprocessing with their parent."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End this process, if multiprocessing started it, as soon as its parent has ended.

    A worker that waits for its next job does not notice, because the workers of a pool hold each other's pipes open.
    """
    parent = multiprocessing.parent_process()

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
