"""Seconds of one kernel and of one collective on a cluster, by size.

    matmul (m, k) x (k, n)   2mnk / (peak * efficiency * size) + a kernel's start
      size                   k/(k+256) * w/(w+1), w = mn / (128 * 256 * multiprocessors): waves of tiles
    linear layer             forward (T, out, in), dX (T, in, out), dW (out, in, T): three different times
    elementwise              bytes / memory bandwidth
    collective               bytes / bandwidth + latency of each hop, as cluster.py has them for the group's nodes
    beside work w            a collective c costs max(0, c - w) + contention * min(c, w)

Small matmuls are slow and overlap is not free: without these two terms every layout of a model takes about the same
time, and the forecast cannot tell which is best. All constants are in cluster.py.
"""

from math import prod

from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.workload import Workload

TILE = 128 * 256  # of a matmul's result, computed by one multiprocessor


class Kernels:
    """Seconds of the kernels and collectives of a workload on a cluster."""

    def __init__(self, workload: Workload, cluster: Cluster):
        self.workload, self.cluster = workload, cluster
        self.strides = workload.layout.strides

    def matmul_time(self, m: float, n: float, k: float, dtype: str) -> float:
        """Return the seconds of (m, k) x (k, n)."""
        cluster = self.cluster
        recipe = f"{self.workload.float8_recipe}_efficiency" if dtype == "float8" else "matmul_efficiency"
        waves = m * n / (TILE * cluster.n_multiprocessors)
        size = k / (k + cluster.tile_depth) * waves / (waves + 1)
        return 2 * m * n * k / (cluster.peak(dtype) * getattr(cluster, recipe) * size) + cluster.kernel_s

    def linear_times(self, rows: float, out: float, into: float, dtype: str) -> list[float]:
        """Return the seconds of a linear layer: forward, gradient of its input, of its weight."""
        sizes = (rows, out, into), (rows, into, out), (out, into, rows)
        forward, of_input, of_weight = (self.matmul_time(*each, dtype) for each in sizes)
        if dtype != "float8":
            return [forward, of_input, of_weight]
        # Transformer Engine casts inside other kernels, and weights once a step
        is_inside = self.workload.float8_recipe == "te"
        cast = self.memory_time(rows * into if is_inside else 3 * into * (rows + out))
        return [forward + cast, of_input + cast, of_weight]

    def memory_time(self, n_bytes: float) -> float:
        """Return the seconds in which elementwise kernels read and write `n_bytes`."""
        return n_bytes / (self.cluster.memory_bandwidth * self.cluster.memory_efficiency)

    def collective_time(self, dims: tuple[str, ...], whole_bytes: float) -> float:
        """Return the seconds of one all-gather or reduce-scatter of a tensor over the group along `dims`."""
        n, stride = prod(getattr(self.workload.layout, dim) for dim in dims), self.strides[dims[-1]]
        if n == 1:
            return 0.0
        bandwidth = self.cluster.find_bandwidth(stride, n)
        return whole_bytes * (n - 1) / n / bandwidth + self.cluster.find_latency(stride, n)

    def exchange_time(self, n_rows: float) -> float:
        """Return the seconds of an all-to-all over ep in which a rank sends or receives `n_rows` rows, its own too.

        Rows for other nodes leave by the rank's own network card, beside those for its node.
        """
        w, n, cluster = self.workload, max(1, self.workload.layout.ep), self.cluster
        n_bytes, n_near = n_rows * w.args.dim * w.compute_bytes / n, min(n, cluster.node_size)
        near = (n_near - 1) * n_bytes / (cluster.link_bandwidth * cluster.link_efficiency)
        far = (n - n_near) * n_bytes / (cluster.network_bandwidth * cluster.network_efficiency)
        return (max(near, far) + cluster.find_latency(1, n)) * (n > 1)

    def expose(self, seconds: float, work: float) -> float:
        """Return what a collective costs that runs beside `work` seconds of kernels."""
        return max(0.0, seconds - work) + self.cluster.contention * min(seconds, work)
