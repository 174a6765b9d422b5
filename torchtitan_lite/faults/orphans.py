"""End this process with the process that started it, so that no rank trains on after torchrun was killed.

    run_train.sh       launcher  <-  fork server  <-  ranks
    a bare torchrun    torchrun  <-  ranks

`<-` means: asks the kernel to be killed as soon as its parent ends (PR_SET_PDEATHSIG). The kernel needs no thread of
the process for that, so it also ends ranks that are stopped, or hold the GIL. A fork server does not end with the
launcher by itself, because the ranks hold its pipe open; it makes the same request (tools/fork_server.py). The workers
of `verify` and `prepare` do so, too.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask for a signal at the end of the parent process. Does nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
