"""End ranks when the process that started them ends, and read the states of processes (Linux: /proc).

    run_train.sh       launcher  <-  fork server  <-  ranks
    plain torchrun     torchrun  <-  ranks

A process to the right of `<-` asks the kernel to kill it as soon as its parent ends (PR_SET_PDEATHSIG). This also works
for a rank that is stopped or holds the GIL, because the kernel ends it, and no Python code has to run. Without this
request, a fork server would outlive the launcher, because the ranks hold its pipe open (tools/fork_server.py). The
workers of `verify` and `prepare` also send this request to the kernel.
"""

import ctypes
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send a signal to this process when its parent ends. Only Linux supports this request; on other
    systems, this function does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def read_state(pid: int | str) -> str:
    """Return the state of a process's main thread: R running, S sleeping, D waiting for a disk, T stopped, Z ended.

    Returns "" on systems without /proc. The process must be in this PID namespace, and belong to this user.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z" if pid != "self" and read_state("self") else ""
