"""Detect this host's GPUs and memory limit, and which builds of torch its driver supports. Needs no torch."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.config.machine import MIB, Machine

# CUDA version of a torch build -> oldest NVIDIA driver that supports the build. Source: docs.nvidia.com, CUDA
# compatibility
LEAST_DRIVERS = {12: 525, 13: 580}
# GPUs with a compute capability below 7.5; builds of torch for CUDA 13 do not support these GPUs
BEFORE_TURING = r"\b(V100\w*|P100|P40|P4|TITAN (V|X|Xp)|GTX (9|10)..)\b"
# GPUs that need CUDA 12.8 or newer
BLACKWELL = r"\b(G?B[123]00|GB10|RTX (PRO|50..))\b"
PYPI_CUDA = "13.0"  # CUDA version of the torch wheels on PyPI, since torch 2.11
# Package index with builds of torch 2.11 to 2.14 for CUDA 12.6. These builds have kernels for GPUs from Maxwell to
# Hopper
OLDER_INDEX = "https://download.pytorch.org/whl/cu126"


def detect_machine() -> Machine:
    """Return the GPUs that are visible under CUDA_VISIBLE_DEVICES, or the CPU if no GPU is visible.

    The launcher calls this function once for all of its ranks. If each rank queried the driver, and one query timed
    out, that rank would run on the CPU while the others use GPUs.
    """
    gpus = list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return Machine("cpu", 1, measure_cpu_memory(), f"{platform.machine()} CPU")
    names, sizes, drivers = zip(*gpus, strict=True)
    # FSDP shards evenly, so the smallest GPU sets the limit
    least = min(filter(None, sizes), default=None)
    return Machine("cuda", len(gpus), least, names[0], driver=drivers[0])


def list_gpus(visible: str | None) -> list[tuple[str, int | None, str]]:
    """Return the name, the bytes of memory and the driver of each GPU in CUDA_VISIBLE_DEVICES, or of all GPUs if it is
    not set.

    The memory is None if nvidia-smi does not report it. Returns an empty list if nvidia-smi is missing or fails, or if
    CUDA_VISIBLE_DEVICES has an entry that nvidia-smi does not know.
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
    """Return the bytes of memory that processes on this host may use: the host's memory or the lowest cgroup limit,
    whichever is smaller.

    Slurm and Docker set limits on the cgroup of this process or on a parent. Only cgroup version 2 is read.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    inside = root
    with suppress(OSError):
        inside /= proc.read_text().strip().removeprefix("0::/")
    for folder in (inside, *inside.parents):
        with suppress(OSError, ValueError):  # the file does not exist, or contains "max"
            limits.append(int((folder / "memory.max").read_text()))
    return min(limits)


def explain_misfit(machine: Machine, cuda: str | None, install: str) -> tuple[str, str] | None:
    """Return why a build of torch for the CUDA version `cuda` cannot use the GPUs of `machine`, and a remedy.

    Returns None if this build can use the GPUs.

    `install` is a command or advice to install torch from OLDER_INDEX.
    """
    if not machine.driver or not cuda:
        return None
    major, minor = map(int, cuda.split(".")[:2])
    driver = int(machine.driver.partition(".")[0])
    is_new = re.search(BLACKWELL, machine.name)
    least = LEAST_DRIVERS.get(major, 0)
    older = f"install torch for CUDA 12.6: {install}"
    if driver < least:
        why = (
            f"CUDA {cuda} needs NVIDIA driver {least} or newer, but this host has {machine.driver}"
        )
        remedy = f"Update the driver to {LEAST_DRIVERS[13]} or newer"
        if driver >= LEAST_DRIVERS[12] and not is_new:
            remedy = f"{remedy}, or {older}"
        return why, remedy
    why = f"the builds for CUDA {cuda} have no kernels for {machine.name}"
    if major > 12 and re.search(BEFORE_TURING, machine.name):
        return why, f"I{older[1:]}"
    if is_new and (major, minor) < (12, 8):
        return why, "Install torch from PyPI"
    return None
