"""Fork the processes of multiprocessing from one that has imported what they need; end them with their parent."""

import multiprocessing
import os
import tempfile
import threading
from multiprocessing import util
from multiprocessing.connection import wait

LONGEST_SOCKET_BYTES = 103  # of the path of a Unix socket on macOS; 107 on Linux
SOCKET = "/pymp-abcdefgh/listener-abcdefgh"  # what multiprocessing appends to TMPDIR


def prepare_forkserver(modules: list[str]) -> None:
    """Let the fork server import `modules` before it forks.

    Its socket is under TMPDIR, or under /tmp if that path is too long, as on clusters. Python 3.14 does this itself.
    """
    multiprocessing.set_forkserver_preload(modules)
    temporary = tempfile.gettempdir()
    if len(os.fsencode(temporary + SOCKET)) > LONGEST_SOCKET_BYTES:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()  # made at its first call, then kept
        tempfile.tempdir = temporary


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
