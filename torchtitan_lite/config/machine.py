"""Facts about a device, by its name: peak FLOP/s, float8, builds of torch. tools/detect.py asks the driver."""

import re
from dataclasses import dataclass
from typing import Literal

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Machine:
    """One host. A host without GPUs counts as one device, because its ranks share one memory."""

    device_type: Literal["cuda", "cpu"]
    n_devices: int
    memory_bytes_per_device: int | None  # None: unknown
    name: str  # as the driver reports it
    is_here: bool = True  # False: another host, so this host's compilers and memory do not matter
    driver: str = ""  # version of NVIDIA's driver; "": not known


# Dense bfloat16 peak of one GPU in FLOP/s: half of NVIDIA's number if that number assumes 2:4 sparsity. The first key
# found in the driver's name of the GPU applies.
PEAK_BF16_FLOPS = {
    "GB300": 2.5e15,  # nvidia.com, GB300 NVL72 datasheet: 360 PFLOP/s sparse for 72
    "B300": 2.25e15,  # nvidia.com, HGX B300 datasheet: 36 PFLOP/s sparse for 8
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
    "L40": 181e12,  # nvidia.com, L40 datasheet: dense
    "L4": 121e12,  # nvidia.com, L4 datasheet: 242 sparse
    "A10G": 70e12,  # nvidia.com, A10G datasheet: dense
    # With float32 sums, as torch computes. Sources to compare with: NVIDIA's white papers of Ada, Blackwell and Ampere.
    # GB300, B300, L40, A10G, RTX 5090 and RTX A6000 were entered from memory and not yet compared with their source.
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX A6000": 154.8e12,
}
# CUDA that a torch is built for -> oldest driver that runs it. Source: docs.nvidia.com, CUDA compatibility
LEAST_DRIVERS = {12: 525, 13: 580}
# GPUs below compute capability 7.5, for which no torch for CUDA 13 has kernels; and GPUs that need CUDA 12.8
BEFORE_TURING = r"\b(V100\w*|P100|P40|P4|TITAN (V|X|Xp)|GTX (9|10)..)\b"
BLACKWELL = r"\b(G?B[123]00|GB10|RTX (PRO|50..))\b"
# cuDNN's attention may be wrong on these GPUs with fewer heads of keys per rank (model/attention.py)
WRONG_CUDNN = r"\bG?B[123]00\b"
SAFE_KV_HEADS = 8
PYPI_CUDA = "13.0"  # of the torch on PyPI, from version 2.11 on
# Builds of torch 2.11 to 2.14 for an older CUDA, with kernels from Maxwell to Hopper
OLDER_INDEX = "https://download.pytorch.org/whl/cu126"

# in float32 training of a 135M model, on one thread; a rough guess for other CPUs
CPU_FLOPS_PER_CORE = 20e9


def peak_flops(name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a GPU; None if unknown, and for V100 and T4."""
    for words, peak in PEAK_BF16_FLOPS.items():
        if re.search(rf"\b{words}\b", name):
            return peak
    return None


# Names of GPUs without float8 (compute capability below 8.9). Any other GPU is assumed to have it.
WITHOUT_FLOAT8 = r"\b(V100|T4|A100|A800|A40|A30|A16|A10|A10G|A2|GeForce RTX [23]0..|A\d{4})\b"


def explain_misfit(machine: Machine, cuda: str | None, install: str) -> tuple[str, str] | None:
    """Return why a torch built for this CUDA cannot use the GPUs of `machine`, and a remedy. Return None if it can.

    `install` is a command or a sentence that says how to install torch from OLDER_INDEX.
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
        return why, "Install the torch of PyPI"
    return None
