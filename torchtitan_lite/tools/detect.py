"""Detect the GPUs and the memory limit of this host, without torch."""

import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.config.machine import MIB, Machine


def detect_machine() -> Machine:
    """Return the GPUs that are visible under CUDA_VISIBLE_DEVICES, or the CPU if no GPU is visible.

    The launcher asks for all of its ranks. If every rank asked a slow driver, one could fall back to the CPU.
    """
    gpus = list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return Machine("cpu", 1, measure_cpu_memory(), f"{platform.machine()} CPU")
    names, sizes, drivers = zip(*gpus, strict=True)
    # FSDP shards evenly, so the smallest GPU is the limit
    least = min(filter(None, sizes), default=None)
    return Machine("cuda", len(gpus), least, names[0], driver=drivers[0])


def list_gpus(visible: str | None) -> list[tuple[str, int | None, str]]:
    """Return the name, the bytes of memory and the driver of each GPU in CUDA_VISIBLE_DEVICES.

    If this variable is not set, returns all GPUs. The memory is None if it is not reported. Returns no GPU if
    nvidia-smi is missing, fails, or does not know one of the entries.
    """
    if visible == "":
        return []
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    if visible:
        command.append(f"--id={visible.replace(' ', '')}")
    gpus = []
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        answer = subprocess.check_output(command, text=True, timeout=20, stderr=subprocess.DEVNULL)
        for line in answer.splitlines():
            name, mib, driver = line.split(", ")
            gpus.append((name, int(mib) * MIB if mib.isdecimal() else None, driver))
    return gpus


def measure_cpu_memory(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes that processes on this host may use: its memory, or the lowest cgroup limit.

    Slurm and Docker set limits on the cgroup of this process or on a parent. Only cgroup version 2 is read.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    inside = root
    with suppress(OSError):
        inside /= proc.read_text().strip().removeprefix("0::/")
    for folder in (inside, *inside.parents):
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((folder / "memory.max").read_text()))
    return min(limits)
