"""Processes of multiprocessing: fork them from one that has imported what they need, and end them with their parent."""

import multiprocessing
import os
import tempfile
import threading
from multiprocessing import util
from multiprocessing.connection import wait
from unittest.mock import patch

LONGEST_SOCKET_BYTES = 103  # of the path of a Unix socket: so many on macOS, 107 on Linux
SOCKET = "/pymp-abcdefgh/listener-abcdefgh"  # what multiprocessing appends to TMPDIR


def prepare_forkserver(modules: list[str]) -> None:
    """Let the processes of the context "forkserver" fork from one that imports `modules` first.

    They are asked for by a socket under TMPDIR, or under /tmp where its path would be too long: clusters have such a
    TMPDIR. Python looks after that itself from 3.14 on.
    """
    multiprocessing.set_forkserver_preload(modules)
    if len(os.fsencode(tempfile.gettempdir() + SOCKET)) > LONGEST_SOCKET_BYTES:
        with patch.object(tempfile, "tempdir", "/tmp"):
            util.get_temp_dir()  # made at its first call, then kept


def end_with_parent() -> None:
    """End this process, if multiprocessing started it, as soon as its parent has ended, for whatever reason.

    A worker that waits for its next job would not notice: the workers of a pool hold each other's pipes open.
    """
    parent = multiprocessing.parent_process()

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
