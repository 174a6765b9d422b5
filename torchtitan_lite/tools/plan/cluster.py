"""Constants of the planner: one row of peaks, bandwidths and efficiencies for each kind of GPU. No torch.

`plan --hardware FILE` overrides the constants:

    [hardware]
    node_size = 4                    # in the row that --gpu names; a GPU without a row needs all keys
    network_bandwidth = 12.5e9
"""

from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from math import inf
from pathlib import Path

from torchtitan_lite.config.machine import GIB, MIB, PEAK_BF16_FLOPS, Machine
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import load_toml

GB = 10**9


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs: the constants of the planner, the same for every plan and every published row.

    Bandwidths are bytes per second in one direction and per GPU, as the sheet has them; efficiencies say what part of a
    sheet's number large kernels and collectives reach.
    """

    peak_bfloat16: float  # dense FLOP/s
    peak_float32: float
    peak_float8: float  # equal to peak_bfloat16 where there are no such units
    memory_bytes: float  # of one GPU, as its driver reports it
    memory_bandwidth: float
    node_size: int  # GPUs that the fast links join
    link_bandwidth: float  # inside a node
    network_bandwidth: float  # between nodes
    matmul_efficiency: float = 0.65  # a whole layer's bf16 matmuls at the power limit: 600 to 680 of 989 TFLOP/s, H100
    float8_efficiency: float = 0.50  # the same with float8, casts and scales included: about 1,000 of 1,979 TFLOP/s
    attention_efficiency: float = 0.35  # torch's SDPA is FlashAttention-2: 300 to 400 TFLOP/s causal, arXiv:2407.08608
    memory_efficiency: float = 0.80  # of elementwise kernels: STREAM-like copies reach 80 to 90 %
    link_efficiency: float = 0.80  # NCCL's all-gather bus bandwidth for large messages: 360 of 450 GB/s in an H100 node
    latency_s: float = 15e-6  # of a collective, NCCL inside a node
    # Reserved over live bytes: what PyTorch's allocator holds beside what is in use. torchtitan's 8B on 8 H100, of
    # December 2024, reserves 82.4 GiB where 67.4 are live by a dry run; nothing else was used to find it.
    reserve_factor: float = 1.2

    def peak(self, dtype: str) -> float:
        """Return the dense FLOP/s of matmuls in `bfloat16`, `float32` or `float8`."""
        return {"bfloat16": self.peak_bfloat16, "float32": self.peak_float32, "float8": self.peak_float8}[dtype]

    def find_tier(self, stride: int, n: int) -> str:
        """Return the links of a group of n ranks, `stride` ranks apart: "node" (inside one) or "network"."""
        return "node" if stride * n <= self.node_size else "network"

    def find_bandwidth(self, stride: int, n: int) -> float:
        """Return the bytes per second and rank of a collective of such a group.

        Between nodes, the g ranks of a group in one node fetch over g network cards and share the result over links.
        """
        if self.find_tier(stride, n) == "node":
            return self.link_bandwidth * self.link_efficiency
        n_in_node = max(1, self.node_size // stride)
        return min(self.link_bandwidth, self.network_bandwidth * n_in_node) * self.link_efficiency


# A row for each --gpu. Memory: nvidia-smi's total of such a card. Links: NVIDIA counts both directions, here is half.
# FLOP/s in bfloat16, float32, float8 | bytes of memory, bytes/s | GPUs of a node, link, network
H100, H200, A100, B200 = (PEAK_BF16_FLOPS[name] for name in ("H100", "H200", "A100", "B200"))
CLUSTERS = {
    # nvidia.com, H100 SXM and DGX H100 datasheets: NVLink 900 GB/s, eight cards of 400 Gb/s
    "h100": Cluster(H100, 67e12, 2 * H100, 81559 * MIB, 3.35e12, 8, 450 * GB, 50 * GB),
    # nvidia.com, H200 SXM and DGX H200 datasheets: an H100 with 141 GB at 4.8 TB/s
    "h200": Cluster(H200, 67e12, 2 * H200, 143771 * MIB, 4.8e12, 8, 450 * GB, 50 * GB),
    # nvidia.com, A100 SXM and DGX A100 datasheets: NVLink 600 GB/s, eight cards of 200 Gb/s. Matmuls of a whole layer
    # at the power limit: 210 to 230 of 312 TFLOP/s; FlashAttention-2, arXiv:2307.08691: 150 to 190 TFLOP/s causal
    "a100-80": Cluster(A100, 19.5e12, A100, 81920 * MIB, 2.039e12, 8, 300 * GB, 25 * GB,
                       matmul_efficiency=0.70, attention_efficiency=0.50),
    # nvidia.com, DGX B200 datasheet: 1,440 GB and 64 TB/s for 8, NVLink 1.8 TB/s, cards of 400 Gb/s
    "b200": Cluster(B200, 75e12, 2 * B200, 180 * GB, 8e12, 8, 900 * GB, 50 * GB),
    # nvidia.com, V100 SXM2 32 GB and DGX-1 datasheets: NVLink 300 GB/s, four cards of 100 Gb/s for 8. It has no
    # bfloat16 units: that of fp32
    "v100": Cluster(15.7e12, 15.7e12, 15.7e12, 32510 * MIB, 0.9e12, 8, 150 * GB, 6.25 * GB),
    # one rank on one core of an x86 server with AVX-512, gloo over loopback: measured, to one digit; malloc gives back
    # what is freed
    "cpu": Cluster(9e10, 9e10, 9e10, 4 * GIB, 4e10, 64, 1e9, 1e9,
                   matmul_efficiency=0.5, latency_s=200e-6, reserve_factor=1.0),
}  # fmt: skip


# A GPU as its driver spells it -> its row. Variants of the same chip have other peaks or links, and no row.
ROW_OF_GPU = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA B200": "b200",
    "Tesla V100-SXM2-32GB": "v100",
}


def describe_node(gpu: str, cluster: Cluster, n_ranks: int) -> Machine:
    """Return a host elsewhere with `n_ranks` GPUs of the row `gpu`."""
    if gpu == "cpu":  # a row is one core with its share of the memory
        return Machine("cpu", 1, int(cluster.memory_bytes * n_ranks), "CPU", is_here=False)
    name = next((name for name, row in ROW_OF_GPU.items() if row == gpu), gpu)
    return Machine("cuda", n_ranks, int(cluster.memory_bytes), name, is_here=False)


def find_cluster(gpu: str, file: Path | None = None) -> Cluster:
    """Return the row of CLUSTERS, with values replaced by [hardware] of a TOML file. Raises ConfigError."""
    given, problems = read_hardware(file) if file else ({}, [])
    row = asdict(CLUSTERS[gpu]) if gpu in CLUSTERS else {}
    missing = [f.name for f in fields(Cluster) if f.default is MISSING and f.name not in {**row, **given}]
    if missing and not file:
        remedy = f"Known: {', '.join(CLUSTERS)}; describe others by --hardware FILE"
        problems.append(Problem("--gpu", gpu, "there is no such row", remedy))
    elif missing and not problems:
        why = f"there is no row for --gpu {gpu} to take the rest from, and the file does not say {', '.join(missing)}"
        remedy = f"Add them below [hardware], or use {', '.join(CLUSTERS)}"
        problems.append(Problem("--hardware", str(file), why, remedy))
    if problems:
        raise ConfigError(problems)
    return Cluster(**{**row, **given})


def read_hardware(file: Path) -> tuple[dict[str, float], list[Problem]]:
    """Return the keys of [hardware] in a TOML file, all positive numbers, and the problems."""
    try:
        section = load_toml(file).get("hardware")
    except ValueError as error:
        return {}, [Problem("--hardware", str(file), f"it {error}", "Name a TOML file with [hardware]")]
    known = [field.name for field in fields(Cluster)]
    if not isinstance(section, dict):
        return {}, [Problem("--hardware", str(file), "it has no table [hardware]", f"Its keys are {', '.join(known)}")]
    problems = []
    for key, value in section.items():
        if key not in known:
            near = get_close_matches(key, known, n=1) or known
            problems.append(Problem(f"hardware.{key}", value, "there is no such key", f"Use {', '.join(near)}"))
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            problems.append(Problem(f"hardware.{key}", value, "a positive number is needed", "Give it without a unit"))
        elif key == "node_size" and value % 1:
            problems.append(
                Problem(f"hardware.{key}", value, "a whole number of GPUs is needed", "Use 8, for instance")
            )
    return section, problems
