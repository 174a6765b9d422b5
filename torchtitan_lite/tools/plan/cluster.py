"""Estimate the time of one kernel or collective, in seconds, from its size and the constants of the cluster.

    matmul (m, k) x (k, n)   2mnk / (peak * efficiency * size) + kernel launch
      size                   k/(k+256) * w/(w+1), with w = mn / (128 * 256 * multiprocessors), the waves of tiles
    elementwise              bytes / memory bandwidth
    collective               bytes / bandwidth + latency of every hop
    overlap                  a collective of c s during w s of compute costs max(0, c - w) + contention * min(c, w)
                             (LayerTime.expose)
    launches                 a layer takes at least host_s per kernel

Two effects matter most when layouts are compared: small matmuls are less efficient than large ones, and a collective
that is fully overlapped still slows compute down.

The comment on each constant names its source. "Fit" means that the constant is fitted to published runs. A fitted
constant has two digits, and the same value for all runs. For each trainer (stack), assets/benchmarks/published.py
repeats the fit without the runs of that trainer. To add a machine, add a row to ROWS.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil, log2, sqrt

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import GIB, MIB, PEAK_BF16_FLOPS, Machine

GB = 10**9
# ZeRO stage -> bytes that the allocator reserves per byte in use, for this trainer on one GPU. The values come from a
# replay on a simulated H200 (assets/benchmarks/2026-11-29-no-gpu.md), not from a run on a GPU. OWN_CONTEXT_BYTES is an
# assumption: the memory of CUDA without NCCL.
OWN_RESERVE = {1: 1.28, 2: 1.02, 3: 1.25}
OWN_CONTEXT_BYTES = GIB
TILE = 128 * 256  # elements of a matmul's result that one multiprocessor computes at a time


@dataclass(frozen=True)
class Cluster:
    """Identical GPUs in identical nodes. Bandwidths are bytes/s per GPU, in one direction. The defaults are an H100.

    An efficiency is the fraction of the datasheet's number that a large kernel or message reaches.
    """

    name: str  # name of the GPU, a value of --gpu

    # nvidia.com, H100 SXM and DGX H100 datasheets: NVLink 900 GB/s, eight NICs of 400 Gb/s
    peak_bfloat16: float = PEAK_BF16_FLOPS["H100"]  # dense FLOP/s
    peak_float32: float = 67e12
    float8_speed: float = 2.0  # float8 FLOP/s / bf16 FLOP/s; 1 if the GPU has no float8 units
    # memory of one GPU, as nvidia-smi reports it
    memory_bytes: float = 81559 * MIB
    memory_bandwidth: float = 3.35e12
    node_size: int = 8  # number of GPUs that the fast links connect
    # bandwidth inside a node: half of the datasheet's number, because the datasheet counts both directions
    link_bandwidth: float = 450 * GB
    network_bandwidth: float = 50 * GB  # between nodes
    n_multiprocessors: int = 132  # a multiprocessor computes one tile at a time

    # Efficiency of an infinitely large matmul at the power limit. Fit.
    matmul_efficiency: float = 0.64
    # Efficiency of matmuls in float8: first with a scale per tensor, then with a scale per row. Fit.
    float8_efficiency: float = 0.60
    rowwise_efficiency: float = 0.35
    # Cost of a tile's prologue and epilogue, as a number of elements of the inner dim. Fit.
    tile_depth: float = 256.0
    kernel_s: float = 5e-6  # start and end of a kernel. Fit.
    # cuDNN, torch's default attention kernel on Hopper: 529 TFLOP/s, arXiv:2407.08608, figure 5. Backward: fit.
    cudnn_forward: float = 0.53
    cudnn_backward: float = 0.49
    # Triton kernels: flex attention, and llm-foundry's kernel. Fit.
    triton_forward: float = 0.29
    triton_backward: float = 0.19
    # Fraction of the peak memory bandwidth that elementwise kernels reach. Fit. The copies of the STREAM benchmark
    # reach 80 to 90 % of the peak.
    memory_efficiency: float = 0.77
    # 370 of 450 GB/s on H100, 235 of 300 on A100: nccl-tests issue 212
    link_efficiency: float = 0.80
    network_efficiency: float = 0.92  # 46 to 48 GB/s on a 400 Gb/s NIC: nccl-tests issue 290
    # Latencies of NCCL's rings with the protocol Simple: per collective, per hop in a node, per hop between nodes.
    # Source: NCCL, tuning.cc.
    latency_s: float = 8.4e-6
    link_latency_s: float = 3.4e-6
    network_latency_s: float = 14e-6
    # An overlapped collective takes multiprocessors, memory bandwidth and power from compute. Overlapped compute and
    # collective take the longer of the two times, plus this fraction of the shorter time. The second value is for
    # groups that span nodes. Fit.
    contention: float = 0.30
    network_contention: float = 0.15
    # Time, in seconds, that the host needs to launch an eager kernel; a compiled kernel takes half of this time. Fit.
    # For comparison: elementwise operators of torch took 4 to 6 us on one loaded CPU core, forward or backward, without
    # a GPU driver.
    host_s: float = 11e-6
    # FLOP/s of a grouped matmul over experts, divided by the FLOP/s of one matmul. Fit.
    grouped_efficiency: float = 0.81
    # With async TP, this fraction of tp's collectives overlaps with matmuls. Fit.
    async_tp_hidden: float = 0.61
    # Bytes that the allocator reserves per byte in use: first without tp, then with tp. The second factor is larger,
    # because copies of hidden states are often allocated and freed. Fit.
    reserve_factor: float = 1.21
    tp_reserve_factor: float = 1.27
    context_bytes: float = 2 * GIB  # memory of CUDA and NCCL, outside of the allocator. Assumed.
    clock: float = 1.0  # clock, divided by the usual clock of this chip

    @property
    def links(self) -> float:
        """Bytes/s of a GPU over the links inside a node."""
        return self.link_bandwidth * self.link_efficiency

    @property
    def network(self) -> float:
        """Bytes/s of a GPU over its NIC."""
        return self.network_bandwidth * self.network_efficiency

    def peak(self, dtype: str) -> float:
        """Return the dense FLOP/s of matmuls in `bfloat16`, `float32` or `float8`."""
        if dtype == "float8":
            return self.float8_speed * self.peak_bfloat16
        return getattr(self, f"peak_{dtype}")

    def matmul_time(
        self, m: float, n: float, k: float, dtype: str, float8_recipe: str = ""
    ) -> float:
        """Return the time of a matmul (m, k) x (k, n), in seconds."""
        efficiency = self.matmul_efficiency
        if dtype == "float8":
            is_rowwise = float8_recipe == "rowwise"
            efficiency = self.rowwise_efficiency if is_rowwise else self.float8_efficiency
        waves = m * n / (TILE * self.n_multiprocessors)
        # If the result has less than one wave of tiles, the kernel splits the inner dim to use idle multiprocessors.
        splits = max(1.0, min(1 / waves, sqrt(k / (self.tile_depth * waves))))
        size = k / (k + self.tile_depth * splits) * waves * splits / (waves * splits + 1)
        return 2 * m * n * k / (self.peak(dtype) * self.clock * efficiency * size) + self.kernel_s

    def memory_time(self, n_bytes: float) -> float:
        """Return the time in which elementwise kernels read and write `n_bytes` in total, in seconds."""
        return n_bytes / (self.memory_bandwidth * self.memory_efficiency)

    def collective_time(self, stride: int, n: int, whole_bytes: float) -> float:
        """Return the time in seconds to all-gather or reduce-scatter a tensor over n ranks that are `stride` ranks
        apart."""
        if n == 1:
            return 0.0
        seconds = whole_bytes * (n - 1) / n / self.find_bandwidth(stride, n)
        return seconds + self.find_latency(stride, n)

    def count_nodes(self, stride: int, n: int) -> int:
        """Return the number of nodes spanned by a group of n ranks that are `stride` ranks apart."""
        return ceil(n / max(1, min(n, self.node_size // stride)))

    def find_bandwidth(self, stride: int, n: int) -> float:
        """Return the bandwidth of a collective over n ranks that are `stride` ranks apart, in bytes/s per rank.

        Between nodes, every rank of a node receives through its own NIC, and passes the data to the other ranks of the
        node over the links. Bandwidth falls with the number of nodes: 360, 345, 320, 300, 280, 260 GB/s on 4, 8, 16,
        32, 64, 128 nodes (nccl issue 1229).
        """
        n_nodes = self.count_nodes(stride, n)
        if n_nodes == 1:
            return self.links
        slowdown = 0.055 * max(0.0, log2(n_nodes / 4))
        return min(self.links, self.network * n / n_nodes) * max(0.3, 1 - slowdown)

    def find_latency(self, stride: int, n: int) -> float:
        """Return the time in seconds of a collective on zero bytes over n ranks that are `stride` ranks apart."""
        n_nodes = self.count_nodes(stride, n)
        links_s = (n - n_nodes) * self.link_latency_s
        network_s = (n_nodes - 1) * self.network_latency_s
        return self.latency_s + links_s + network_s


# GPUs of nodes in which NVLink does not connect all GPUs. Each GPU uses its PCIe slot (version 4, x16). The network
# bandwidth is an assumption.
without_nvlink = partial(Cluster, link_bandwidth=32 * GB, network_bandwidth=12.5 * GB)

# One row for each value of --gpu, with the constants that differ from the H100's
ROWS = [
    Cluster("h100"),
    # nvidia.com, H200 SXM and DGX H200 datasheets: an H100 with 141 GB at 4.8 TB/s. The H200's memory leaves more power
    # for matmuls than the H100's memory does, so the matmul efficiency of the H200 is fitted separately.
    Cluster("h200", memory_bytes=143771 * MIB, memory_bandwidth=4.8e12, matmul_efficiency=0.76),
    # nvidia.com, A100 SXM and DGX A100 datasheets: NVLink 600 GB/s, eight NICs of 200 Gb/s. torch's default attention
    # kernel on an A100 is FlashAttention-2: arXiv:2307.08691, figures 5 and 6. Efficiency of matmuls: fit.
    Cluster(
        "a100-80",
        peak_bfloat16=PEAK_BF16_FLOPS["A100"],
        peak_float32=19.5e12,
        float8_speed=1,
        memory_bytes=81920 * MIB,
        memory_bandwidth=2.039e12,
        link_bandwidth=300 * GB,
        network_bandwidth=25 * GB,
        n_multiprocessors=108,
        matmul_efficiency=0.78,
        cudnn_forward=0.60,
        cudnn_backward=0.50,
    ),
    # nvidia.com, DGX B200 datasheet: 1,440 GB and 64 TB/s for 8 GPUs, NVLink 1.8 TB/s, NICs of 400 Gb/s. The fit of the
    # matmul efficiency includes runs on B300, which has the same peak. Other efficiencies are the H100's. Triton's
    # attention kernels were written for older chips, so they are assumed to reach the same FLOP/s as on the H100.
    Cluster(
        "b200",
        peak_bfloat16=PEAK_BF16_FLOPS["B200"],
        peak_float32=75e12,
        memory_bytes=180 * GB,
        memory_bandwidth=8e12,
        link_bandwidth=900 * GB,
        n_multiprocessors=148,
        matmul_efficiency=0.69,
        triton_forward=0.13,
        triton_backward=0.08,
    ),
    # Peaks, memory sizes and numbers of multiprocessors were not looked up, and should be checked against NVIDIA's data
    # sheets. The efficiencies are assumed. The forecasts of the next five rows have not been compared with any run.
    without_nvlink(
        "4090",
        peak_bfloat16=PEAK_BF16_FLOPS["RTX 4090"],
        peak_float32=82.6e12,
        memory_bytes=24564 * MIB,
        memory_bandwidth=1.008e12,
        n_multiprocessors=128,
    ),
    without_nvlink(
        "5090",
        peak_bfloat16=PEAK_BF16_FLOPS["RTX 5090"],
        peak_float32=104.8e12,
        memory_bytes=32607 * MIB,
        memory_bandwidth=1.792e12,
        link_bandwidth=64 * GB,  # PCIe version 5
        n_multiprocessors=170,
    ),
    without_nvlink(
        "l40s",
        peak_bfloat16=PEAK_BF16_FLOPS["L40S"],
        peak_float32=91.6e12,
        memory_bytes=46068 * MIB,
        memory_bandwidth=864e9,
        n_multiprocessors=142,
    ),
    without_nvlink(
        "a6000",
        peak_bfloat16=PEAK_BF16_FLOPS["RTX A6000"],
        peak_float32=38.7e12,
        float8_speed=1,
        memory_bytes=49140 * MIB,
        memory_bandwidth=768e9,
        n_multiprocessors=84,
    ),
    # The V100 with 32 GB. A V100 has no bfloat16 units, so matmuls in bfloat16 are assumed to be as fast as in float32.
    Cluster(
        "v100",
        peak_bfloat16=15.7e12,
        peak_float32=15.7e12,
        float8_speed=1,
        memory_bytes=32768 * MIB,
        memory_bandwidth=900e9,
        link_bandwidth=150 * GB,
        network_bandwidth=12.5 * GB,
        n_multiprocessors=80,
    ),
    # torchtitan's machine of 2024: 96 GB of HBM2e at 2.4 TB/s, and a limit of 500 W, which lowers the clock. The value
    # 0.88 is from an older fit, which assets/benchmarks/published.py does not repeat.
    Cluster("h100-96", memory_bytes=96 * GB, memory_bandwidth=2.4e12, clock=0.88),
    # The values were measured, to one digit, with one rank on one core of an x86 server with AVX-512, and gloo over
    # loopback. The reserve factors (reserved / allocated memory) are 1, because free() returns memory to the system.
    Cluster(
        "cpu",
        peak_bfloat16=9e10,
        peak_float32=9e10,
        float8_speed=1,
        memory_bytes=4 * GIB,
        memory_bandwidth=4e10,
        node_size=64,
        link_bandwidth=1e9,
        network_bandwidth=1e9,
        n_multiprocessors=1,
        matmul_efficiency=0.5,
        cudnn_forward=0.35,
        cudnn_backward=0.35,
        latency_s=200e-6,
        kernel_s=20e-6,
        reserve_factor=1.0,
        tp_reserve_factor=1.0,
        context_bytes=GIB // 4,
    ),
]
CLUSTERS = {row.name: row for row in ROWS}


def describe_node(cluster: Cluster, n_ranks: int) -> Machine:
    """Return a remote host with `n_ranks` GPUs of the cluster."""
    if cluster.name == "cpu":  # memory_bytes is the memory of one rank
        return Machine("cpu", 1, int(cluster.memory_bytes * n_ranks), "CPU", is_here=False)
    return Machine("cuda", n_ranks, int(cluster.memory_bytes), cluster.name.upper(), is_here=False)


def find_gpu_row(device_name: str) -> str:
    """Return the value of --gpu for the device name that the driver reports, or "h100" if no value fits."""
    for name in CLUSTERS:
        if name.split("-")[0] in device_name.lower():
            return name
    return "h100"


def list_strides(layout: Layout) -> dict[str, int]:
    """Return a dict mapping each mesh dim to the distance in ranks between two neighbors along this dim.

    The result also has the dims fsdp, ep and efsdp and, for ZeRO++, the two parts of each FSDP dim: `near` has the
    ranks inside a node, and `far` one rank per node.
    """
    strides = {}
    stride = 1
    for dim, degree in reversed(layout.degrees.items()):
        strides[dim] = stride
        stride *= degree
    strides |= {"fsdp": strides["cp"], "ep": 1, "efsdp": layout.ep}
    for dim in ("fsdp", "efsdp"):
        strides[f"{dim}_near"] = strides[dim]
        strides[f"{dim}_far"] = strides[dim] * getattr(layout, f"{dim}_near")
    return strides
