"""End worker processes of multiprocessing when their parent ends."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


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
