"""Detect the GPUs, memory limits and compilers of this host, and what was launched. No torch.

Look up the peak FLOP/s of a GPU.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from torchtitan_lite import REPOSITORY

MIB, GIB = 2**20, 2**30
# environment variable: the launcher's Machine as JSON, for its ranks
FROM_LAUNCHER = "TORCHTITAN_LITE_MACHINE"


@dataclass(frozen=True)
class Machine:
    """One host. A host without GPUs counts as one device, because its ranks share one memory."""

    device_type: Literal["cuda", "cpu"]
    n_devices: int
    memory_bytes_per_device: int | None  # None: unknown
    name: str  # as the driver reports it
    is_here: bool = True  # False: another host, so this host's compilers and memory do not matter


# Dense bfloat16 peak of one GPU in FLOP/s: half of NVIDIA's number if that number assumes 2:4 sparsity. The first key
# found in the driver's name of the GPU applies.
PEAK_BF16_FLOPS = {
    "GB200": 2.5e15,  # nvidia.com, Blackwell architecture datasheet: 5 PFLOP/s sparse
    "B200": 2.25e15,  # same sheet: 4.5 PFLOP/s sparse
    "GH200": 989e12,  # nvidia.com, GH200 datasheet: 1,979 TFLOP/s sparse
    "H200 NVL": 835e12,  # nvidia.com, H200 datasheet: 1,671 sparse
    "H200": 989e12,  # same sheet: 1,979 sparse
    "H100 NVL": 835e12,  # nvidia.com, H100 datasheet: 1,671 sparse
    "H100 PCIe": 756e12,  # same sheet: 1,513 sparse
    "H100": 989e12,  # same sheet, SXM: 1,979 sparse
    "H800": 989e12,  # H100 with slower NVLink
    "H20": 148e12,  # nvidia.com, H20 datasheet: dense
    "A100": 312e12,  # nvidia.com, A100 datasheet: dense
    "A800": 312e12,  # A100 with slower NVLink
    "A40": 149.7e12,  # nvidia.com, A40 datasheet: dense
    "A30": 165e12,  # nvidia.com, A30 datasheet: dense
    "L40S": 362e12,  # nvidia.com, L40S datasheet: dense
    "L4": 121e12,  # nvidia.com, L4 datasheet: 242 sparse
}
# in float32 training of a 135M model, on one thread; a rough guess for other CPUs
CPU_FLOPS_PER_CORE = 20e9


def peak_flops(name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a GPU; None if unknown, and for V100 and T4."""
    for words, peak in PEAK_BF16_FLOPS.items():
        if re.search(rf"\b{words}\b", name):
            return peak
    return None


# Names of GPUs without float8 (compute capability below 8.9). Any other GPU is assumed to have it.
WITHOUT_FLOAT8 = r"\b(V100|T4|A100|A800|A40|A30|A16|A10|A10G|A2|GeForce RTX [23]0..|RTX A....)\b"


def detect_machine() -> Machine:
    """Return the GPUs that are visible under CUDA_VISIBLE_DEVICES, or the CPU if there are none.

    Ranks use the launcher's answer. If every rank asked a slow driver, one could time out and fall back to the CPU.
    """
    answer = os.environ.get(FROM_LAUNCHER)
    if answer:
        return Machine(**json.loads(answer))
    gpus = list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return Machine("cpu", 1, measure_cpu_memory(), f"{platform.machine()} CPU")
    names, sizes = zip(*gpus, strict=True)
    # FSDP shards evenly, so the smallest GPU is the limit
    return Machine("cuda", len(gpus), min(filter(None, sizes), default=None), names[0])


@cache
def describe_launch() -> dict[str, str | None]:
    """Return the git commit of this repository, which ends in "-dirty" if files differ, the command, and the host.

    The commit is None if this is not a git repository.
    """
    commit = ""
    if (REPOSITORY / ".git").exists() and shutil.which("git"):
        git = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
        answer = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True)
        commit = answer.stdout.strip()
    command = shlex.join(sys.argv)
    return {"commit": commit or None, "command": command, "host": platform.node()}


def list_gpus(visible: str | None) -> list[tuple[str, int | None]]:
    """Return the name and the bytes of memory (None: not reported) of each GPU in CUDA_VISIBLE_DEVICES, or of all GPUs.

    Returns no GPU if nvidia-smi is missing, fails, or does not know one of the entries.
    """
    if visible == "":
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    if visible:
        command.append(f"--id={visible.replace(' ', '')}")
    gpus = []
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        answer = subprocess.check_output(command, text=True, timeout=20, stderr=subprocess.DEVNULL)
        for line in answer.splitlines():
            name, mib = line.split(", ")
            gpus.append((name, int(mib) * MIB if mib.isdecimal() else None))
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


def find_missing_compiler(device_type: str) -> str:
    """Return what inductor needs and this host lacks; "" if it lacks nothing.

    On a CPU, inductor needs a C++ compiler (CXX, else g++). On CUDA, triton needs a C compiler (CC, else gcc or clang).
    Both need Python's headers.
    """
    variable = "CXX" if device_type == "cpu" else "CC"
    default = "g++" if device_type == "cpu" else "gcc clang"
    names = os.environ.get(variable, default)
    if not any(map(shutil.which, names.split())):
        return f"there is no compiler {names} ({variable}) here"
    headers = Path(sysconfig.get_path("include"))
    return "" if (headers / "Python.h").is_file() else f"{headers} has no Python.h"
