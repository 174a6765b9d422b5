"""Look up facts about devices by their names: the peak FLOP/s, and features that a device does not have.

tools/detect.py asks the driver for the names.
"""

import re
from dataclasses import dataclass
from typing import Literal

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Machine:
    """One host. A host without GPUs counts as one device, because its ranks share the memory of the host."""

    device_type: Literal["cuda", "cpu"]
    n_devices: int
    memory_bytes_per_device: int | None  # None: unknown
    name: str  # as the driver reports it
    # False if the run uses a machine other than this host; the compilers and memory of this host are then not checked
    is_here: bool = True
    driver: str = ""  # version of NVIDIA's driver; "": not known


# Dense bfloat16 peak of one GPU in FLOP/s: half of NVIDIA's number if that number assumes 2:4 sparsity. The first key
# that occurs in the driver's name for the GPU is used.
PEAK_BF16_FLOPS = {
    "GB300": 2.5e15,  # nvidia.com, GB300 NVL72 datasheet: 360 PFLOP/s sparse for 72 GPUs
    "B300": 2.25e15,  # nvidia.com, HGX B300 datasheet: 36 PFLOP/s sparse for 8 GPUs
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
    # The RTX rows are for float32 accumulation, because torch accumulates in float32. Sources: NVIDIA's white papers of
    # Ada, Blackwell and Ampere. GB300, B300, L40, A10G, RTX 5090 and RTX A6000 were entered from memory and not yet
    # compared with their source.
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX A6000": 154.8e12,
}
# cuDNN's attention may be wrong on these GPUs with few key/value heads per rank (model/attention.py)
WRONG_CUDNN = r"\bG?B[123]00\b"
SAFE_KV_HEADS = 8

# measured while training a 135M model in float32 on one thread; a rough guess for other CPUs
CPU_FLOPS_PER_CORE = 20e9


def peak_flops(name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a GPU; None if unknown, and for V100 and T4."""
    for words, peak in PEAK_BF16_FLOPS.items():
        if re.search(rf"\b{words}\b", name):
            return peak
    return None
