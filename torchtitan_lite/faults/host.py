"""Tell which processes run on the host of this process, and whether they have ended. Linux: /proc."""

import os
import socket
from pathlib import Path


def identify_host() -> str:
    """Return the boot of the kernel and the PID namespace. Processes with equal values see each other's process ids.

    Two containers can share a hostname but not their process ids.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def read_state(pid: int) -> str:
    """Return the state of a process's main thread: R runs, S sleeps, D waits for a disk, T is stopped, Z has ended.

    Returns "" if this process cannot see it: it may have ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
