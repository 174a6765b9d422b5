"""Test the ranks of a run before it starts: which device is slow or computes wrong, which link is slow?

    each rank        the same matmuls of random numbers: seconds, and a checksum that must be equal on all ranks
    each mesh dim    all-gathers in all of its groups at once: seconds for 8 bytes, and for a large tensor
    each host        free space and write rate of the dump folder; variables of NCCL and gloo

Rank 0 prints the median and the slowest of each, next to what `plan` expects of this device. A rank, group or host far
above the median is slow. The checksum of most ranks is right; without a majority, all ranks are suspects.
"""

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median, median_low

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.components.shutdown import SIGNALS
from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.degrees import MESH_DIMS
from torchtitan_lite.config.machine import FROM_LAUNCHER, detect_machine
from torchtitan_lite.config.memory_bound import MASTER_BYTES, count_moment_bytes
from torchtitan_lite.faults.copies import compute_checksum
from torchtitan_lite.faults.orphans import end_with_parent
from torchtitan_lite.parallel.exchange import collectives, list_ranks
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.process_groups import end_process, join_job, start_process
from torchtitan_lite.preflight import Prepared, preflight
from torchtitan_lite.tools import launch
from torchtitan_lite.tools.check import check, choose_host
from torchtitan_lite.tools.plan.cluster import CLUSTERS, GB, find_row
from torchtitan_lite.tools.tables import format_bytes, format_table

# By device: rows and dtype of the matrices, number of products, bytes of a rank in a large all-gather, and how many
# times the median is slow. Ranks on CPUs share the cores, so their times differ.
SIZES = {"cuda": (8192, "bfloat16", 1000, 2**26, 1.1), "cpu": (256, "float32", 300, 2**20, 4.0)}
N_CALLS, FILE_BYTES, FOUND = 20, 2**26, "found"
VARIABLES = {
    "NCCL_DEBUG": "how much NCCL logs",
    "NCCL_SOCKET_IFNAME": "network interface for connections, and for data if there is no InfiniBand",
    "NCCL_IB_HCA": "InfiniBand adapters that NCCL may use",
    "NCCL_IB_DISABLE": "1: no InfiniBand, so links between nodes are slow",
    "NCCL_P2P_DISABLE": "1: GPUs of a node copy through the memory of the host, which is slow",
    "NCCL_ALGO": "replaces NCCL's choice of an algorithm for each message size",
    "NCCL_PROTO": "replaces NCCL's choice of a protocol for each message size",
    "GLOO_SOCKET_IFNAME": "network interface for gloo",
}


def main(options: Namespace) -> int:
    machine, n_ranks, n_hosts = choose_host()
    n_ranks = check(options.config_args, machine, n_ranks, n_hosts).layout.world_size
    os.environ[FROM_LAUNCHER] = json.dumps(asdict(machine))
    with tempfile.TemporaryDirectory(prefix="torchtitan_lite.") as folder:
        status, reason = launch.run_ranks(
            run_rank, options.config_args, n_ranks // n_hosts, n_hosts, Path(folder)
        )
        is_sound = not (Path(folder) / FOUND).exists()
    if reason:
        print(f"pulse: {reason}")
    return status if is_sound else 1


def run_rank(args: list[str], folder: Path) -> int:
    """Measure as one rank; torchrun calls it. Rank 0 prints, and leaves a file in `folder` if something is wrong."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once, without a KeyboardInterrupt
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end_with_parent()
    place, store = join_job(os.environ)
    machine = detect_machine()
    plan = preflight(args, machine=machine, n_ranks=place.world_size, n_hosts=place.n_hosts)
    device, groups = start_process(
        place, store, machine.device_type, plan.config, folder
    )  # writes NCCL's traces there
    mesh, host = (
        build_mesh(plan.layout, device.type),
        place.rank * place.n_hosts // place.world_size,
    )
    row = {"host": host, "name": f"rank {place.rank} on {socket.gethostname()}", "axes": {}}
    row["matmul_s"], row["checksum"] = measure_matmul(device)
    for dim in [dim for dim in (*MESH_DIMS, "ep") if getattr(plan.layout, dim) > 1]:
        dist.barrier(groups.host)
        row["axes"][dim] = measure_links(mesh.ep if dim == "ep" else mesh.world[dim], device)
    if place.local_rank == 0:
        row["write_s"], row["free_bytes"] = measure_folder(plan.dump_folder.absolute())
        row["variables"] = {name: os.environ.get(name) for name in VARIABLES}
    rows = [{}] * place.world_size if place.rank == 0 else None
    dist.gather_object(row, rows, group=groups.host)
    if rows:
        text, found = judge(rows, plan, find_row(machine.name))
        print(text, *(found or ["nothing found wrong"]), sep="\n", flush=True)
        if found:
            (folder / FOUND).touch()
    end_process(groups)
    return 0


def time_each(call: Callable[[], object], n_calls: int, device: torch.device) -> float:
    """Return the seconds of a call, the median of `n_calls`."""
    times_s = []
    for _ in range(n_calls):
        started_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
    return median(times_s)


def measure_matmul(device: torch.device) -> tuple[float, int]:
    """Return the seconds of a matmul, and the sum of the bits of all results."""
    n, dtype, n_products, *_ = SIZES[device.type]
    generator, checksums = torch.Generator().manual_seed(0), []
    a, b = (
        torch.randn(n, n, generator=generator).to(device, getattr(torch, dtype)) for _ in range(2)
    )
    seconds = time_each(lambda: checksums.append(compute_checksum(a @ b)), n_products, device)
    return seconds, sum(map(int, checksums))


def measure_links(mesh: DeviceMesh, device: torch.device) -> tuple[list[int], float, float]:
    """Return the ranks of this rank's group, and the seconds of a small and of a large all-gather. Collective.

    Each of n ranks sends P bytes, 8 or those in SIZES, and receives P(n-1).
    """
    ranks, seconds = list_ranks(mesh), []
    for n_bytes in (8, SIZES[device.type][3]):
        own = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        gather = partial(collectives.all_gather_into_tensor.default, own, ranks.n, ranks.group_name)
        seconds.append(
            time_each(
                lambda gather=gather: collectives.wait_tensor.default(gather()), N_CALLS, device
            )
        )
    return mesh.mesh.tolist(), *seconds


def measure_folder(folder: Path) -> tuple[float, int]:
    """Return the seconds in which a file reaches the disk, and the free bytes."""
    folder, content = (
        next(path for path in (folder, *folder.parents) if path.is_dir()),
        os.urandom(FILE_BYTES),
    )
    with tempfile.TemporaryFile(dir=folder) as file:
        started_s = time.perf_counter()
        file.write(content)
        os.fsync(file.fileno())
        return time.perf_counter() - started_s, shutil.disk_usage(folder).free


def judge(rows: list[dict], plan: Prepared, gpu: str) -> tuple[str, list[str]]:
    """Return a table of all measurements, and one sentence for each fault. `rows` has one entry per rank, by rank."""
    cluster, hosts, found = CLUSTERS[gpu], [row for row in rows if "variables" in row], []
    n, dtype, _, n_bytes, limit = SIZES["cpu" if gpu == "cpu" else "cuda"]
    table = [("", "rate", "median", "slowest", "expected", "the slowest")]

    def add(
        what: str, times_s: dict[str, float], expected_s: float = 0, work: float = 0, unit: str = ""
    ) -> None:
        usual_s, slowest = median_low(times_s.values()), max(times_s, key=times_s.get)
        times = [
            f"{1000 * seconds:.3g} ms" if seconds else ""
            for seconds in (usual_s, times_s[slowest], expected_s)
        ]
        table.append((what, f"{work / usual_s:.3g} {unit}" if work else "", *times, slowest))
        slow = [place for place, seconds in times_s.items() if work and seconds > limit * usual_s]
        found.extend(
            f"{place} is slow: {what} takes {times_s[place] / usual_s:.2f} times the median"
            for place in slow
        )

    (usual, n_usual), *others = Counter(row["checksum"] for row in rows).most_common()
    suspects = [
        row["name"]
        for row in rows
        if row["checksum"] != usual or (others and 2 * n_usual <= len(rows))
    ]
    found += [
        f"{name} computes wrong: equal matmuls have another checksum there" for name in suspects
    ]
    matmul_s = cluster.matmul_time(n, n, n, dtype)
    add(
        f"matmul of {n} rows",
        {row["name"]: row["matmul_s"] for row in rows},
        matmul_s,
        2 * n**3 / 1e12,
        "TFLOP/s",
    )
    for dim in rows[0]["axes"]:
        groups = {f"{dim} of ranks {row['axes'][dim][0]}": row["axes"][dim] for row in rows}
        small, large = ({place: group[at] for place, group in groups.items()} for at in (1, 2))
        size, stride = getattr(plan.layout, dim), plan.layout.strides[dim]
        large_s = cluster.collective_time(stride, size, n_bytes * size)
        add(f"{dim}, 8 bytes", small, cluster.find_latency(stride, size))
        add(
            f"{dim}, {format_bytes(n_bytes)} of each",
            large,
            large_s,
            n_bytes * (size - 1) / GB,
            "GB/s",
        )
        spanning = [
            place
            for place, (ranks, *_) in groups.items()
            if len({rows[rank]["host"] for rank in ranks}) > 1
        ]
        if dim == "tp" and spanning:
            found.append(
                f"{spanning[0]} spans hosts, where links are slow: use a smaller tensor_parallel_degree"
            )
    add(
        f"write {format_bytes(FILE_BYTES)}",
        {row["name"]: row["write_s"] for row in hosts},
        0,
        FILE_BYTES / GB,
        "GB/s",
    )
    free = min(row["free_bytes"] for row in hosts)
    needed = count_parameters(plan.model_args) * (
        MASTER_BYTES + count_moment_bytes(plan.config.optimizer)
    )
    lines = [
        f"{plan.dump_folder}: {format_bytes(free)} free, a checkpoint takes {format_bytes(needed)}"
    ]
    if plan.config.checkpoint.enable and free < needed:
        found.append(f"{plan.dump_folder} has no room for a checkpoint")
    for name, meaning in VARIABLES.items():
        values = {row["variables"][name]: row["name"] for row in hosts}
        lines += [f"{name} = {value}: {meaning}" for value in values if value]
        if len(values) > 1:
            found.append(
                f"{name} differs: {', '.join(f'{value} for {place}' for value, place in values.items())}"
            )
    return "\n".join(
        [f"{plan.config_name} on {plan.layout}", format_table(table, "<>>>>"), *lines]
    ), found
