"""End ranks with the process that started them, and read the states of processes (Linux: /proc).

    run_train.sh       launcher  <-  fork server  <-  ranks
    plain torchrun     torchrun  <-  ranks

`<-` means: asks the kernel to be killed as soon as its parent ends (PR_SET_PDEATHSIG). The kernel does not need the
process to react, so even ranks that are stopped or hold the GIL end. A fork server does not end with the launcher
by itself, because the ranks hold its pipe open; it therefore makes the same request (tools/fork_server.py), as do the
workers of `verify` and `prepare`.
"""

import ctypes
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send a signal to this process when its parent ends. Does nothing on systems except Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def read_state(pid: int | str) -> str:
    """Return the state of a process's main thread: R runs, S sleeps, D waits for a disk, T is stopped, Z has ended.

    Returns "" if this system shows no processes. The process must be in this PID namespace, and belong to this user.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z" if pid != "self" and read_state("self") else ""
