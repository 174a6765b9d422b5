"""Test the ranks of a run before it starts: find slow links, and devices that are slow or compute wrong results.

    each rank        times the same matmuls of random numbers; their checksum must be equal on all ranks
    each mesh dim    times the same all-gathers, in all groups of the mesh dim at once

Every rank and group is measured in several rounds. Only the fastest round is used, because other processes on the host
can slow a round down. For each test, rank 0 prints the median and the slowest time, next to the time that `plan`
expects of this device. A rank or a process group is reported as slow if its time is far above the median. A rank is
reported as wrong if its checksum differs from the majority's; if there is no majority, all ranks are reported.
"""

import os
import signal
import socket
import tempfile
import timeit
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from statistics import median, median_low
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.components.signals import SIGNALS
from torchtitan_lite.config.messages import tell
from torchtitan_lite.config.schema import with_value
from torchtitan_lite.extensions.copies import compute_checksum
from torchtitan_lite.faults.processes import end_with_parent
from torchtitan_lite.parallel.exchange import collectives, list_ranks
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.process_groups import end_process, join_job, start_process
from torchtitan_lite.preflight import RunSpec
from torchtitan_lite.tools import launch
from torchtitan_lite.tools.check import check, choose_host
from torchtitan_lite.tools.plan.cluster import CLUSTERS, Cluster, find_gpu_row, list_strides
from torchtitan_lite.tools.tables import format_table

# For each device type: rows and dtype of the matrices, number of matmuls, bytes that a rank contributes to an
# all-gather, limits for matmuls and all-gathers. A time is reported as slow if the ratio of this time to the median
# exceeds the limit. Ranks on CPUs share the cores, so times vary more on CPUs than on GPUs.
LOADS = {
    "cuda": (8192, "bfloat16", 300, 2**26, 1.1, 1.1),
    "cpu": (256, "float32", 100, 2**20, 2.0, 4.0),
}
N_CALLS = 10
N_ROUNDS = 3
FOUND = "found"


class Measured(NamedTuple):
    """The time of a matmul or an all-gather."""

    place: str  # "rank 3 on node7", "tp of ranks [0, 1]"
    seconds: float
    expected_s: float
    checksum: int = 0  # sum over the results of all matmuls


def main(options: Namespace) -> int:
    spec = check(options.config_args, *choose_host())
    with tempfile.TemporaryDirectory(prefix="torchtitan_lite.") as name:
        folder = Path(name)
        signals = launch.Signals()
        signals.watch_hangs(folder / "hang")
        ending = launch.run_ranks(measure_rank, options.config_args, spec, folder, signals)
        is_sound = not (folder / FOUND).exists()
    tell(ending.details)
    if ending.reason:
        print(f"pulse: {ending.reason}")
    return ending.status if is_sound else 1


def measure_rank(args: list[str], folder: Path, spec: RunSpec) -> int:
    """Run the tests as one rank of torchrun. Rank 0 prints the result, and writes a file to `folder` if anything is
    wrong."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, without a KeyboardInterrupt
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end_with_parent()
    place, store = join_job(os.environ)
    machine = spec.machine
    # NCCL writes its traces to the folder.
    config = with_value(spec.config, "job.dump_folder", str(folder))
    device, host = start_process(place, store, machine.device_type, config)
    mesh = build_mesh(spec.layout, device.type)
    cluster = CLUSTERS[find_gpu_row(machine.name)]
    name = f"rank {place.rank} on {socket.gethostname()}"
    rounds: dict[str, list[Measured]] = defaultdict(list)
    for _ in range(N_ROUNDS):
        rounds["matmul"].append(measure_matmul(name, cluster, device))
        for dim in spec.layout.used_dims:
            stride = list_strides(spec.layout)[dim]
            link = measure_link(dim, mesh.world[dim], stride, cluster, device)
            rounds[f"all-gather over {dim}"].append(link)
    measured = {what: choose_fastest(of_rounds) for what, of_rounds in rounds.items()}
    rows: list[dict] = [{}] * place.world_size
    dist.all_gather_object(rows, measured, group=host)
    if place.rank == 0:
        text, found = judge_machine(rows, *LOADS[device.type][-2:])
        print(f"{spec.config.job.config_name} on {spec.layout}\n{text}")
        print("\n".join(found) or "nothing found wrong", flush=True)
        if found:
            (folder / FOUND).touch()
    end_process(host)
    return 0


def choose_fastest(rounds: list[Measured]) -> Measured:
    """Return the fastest round, with the sum of the checksums of all rounds."""
    fastest = min(rounds, key=lambda each: each.seconds)
    return fastest._replace(checksum=sum(each.checksum for each in rounds))


def measure_matmul(place: str, cluster: Cluster, device: torch.device) -> Measured:
    """Multiply the same two random matrices repeatedly. Return the median time, and a checksum of all results."""
    n, dtype, n_products, *_ = LOADS[device.type]
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, n, n, generator=generator).to(device, getattr(torch, dtype))
    checksums: list[int] = []

    def multiply() -> None:
        checksums.append(int(compute_checksum(a @ b)))  # int() makes the host wait for the device

    times_s = timeit.repeat(multiply, repeat=n_products, number=1)
    expected_s = cluster.matmul_time(n, n, n, dtype)
    return Measured(place, median(times_s), expected_s, sum(checksums))


def measure_link(
    dim: str, mesh: DeviceMesh, stride: int, cluster: Cluster, device: torch.device
) -> Measured:
    """Return the median time of an all-gather in this rank's group. LOADS has the number of bytes that each rank
    contributes. Collective."""
    ranks = list_ranks(mesh)
    n_bytes = LOADS[device.type][3]
    own = torch.zeros(n_bytes, dtype=torch.uint8, device=device)

    def gather() -> None:
        gathered = collectives.all_gather_into_tensor.default(own, ranks.n, ranks.group_name)
        # int() makes the host wait for the device
        int(collectives.wait_tensor.default(gathered)[0])

    times_s = timeit.repeat(gather, repeat=N_CALLS, number=1)
    expected_s = cluster.collective_time(stride, ranks.n, n_bytes * ranks.n)
    return Measured(f"{dim} of ranks {mesh.mesh.tolist()}", median(times_s), expected_s)


def judge_machine(
    rows: list[dict[str, Measured]], matmul_limit: float, link_limit: float
) -> tuple[str, list[str]]:
    """Return a table of all measurements, and one sentence for each fault. `rows` has one entry per rank, in rank
    order."""
    matmuls = [row["matmul"] for row in rows]
    # if most ranks have the same checksum, the median is this checksum
    usual = median(each.checksum for each in matmuls)
    found = [
        f"{each.place} computes wrong results: its checksum differs from the median of all ranks"
        for each in matmuls
        if each.checksum != usual
    ]
    table = [("", "median", "slowest", "expected", "the slowest")]
    for what in rows[0]:
        limit = matmul_limit if what == "matmul" else link_limit
        # Use each group once, because all ranks of a group measure the same link
        measured = {row[what].place: row[what] for row in rows}
        usual_s = median_low(each.seconds for each in measured.values())
        slowest = max(measured.values(), key=lambda each: each.seconds)
        times_s = (usual_s, slowest.seconds, slowest.expected_s)
        times = [f"{1000 * seconds:.3g} ms" for seconds in times_s]
        table.append((what, *times, slowest.place))
        for each in measured.values():
            ratio = each.seconds / usual_s
            if ratio > limit:
                found.append(f"{each.place} is slow: {what} takes {ratio:.2f} times the median")
    return format_table(table, "<>>>"), found
