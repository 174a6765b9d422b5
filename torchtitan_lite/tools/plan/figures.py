"""List the memory and the traffic of a plan. `plan` prints these figures as text, and draws them with --html."""

from math import prod
from typing import NamedTuple

from torchtitan_lite.tools.plan.cluster import list_strides
from torchtitan_lite.tools.plan.memory import Memory, RankMemory
from torchtitan_lite.tools.plan.planned_run import PlannedRun
from torchtitan_lite.tools.plan.transfers import estimate_traffic


class Calls(NamedTuple):
    """The calls of one operation over one axis, in one step of one rank."""

    axis: str
    operation: str
    n_calls: float
    n_bytes: float  # bytes that the rank moves
    where: str
    seconds: float  # time, in seconds, if no other call uses the links at the same time


def list_memory(planned: PlannedRun) -> dict[str, Memory]:
    """Return a dict mapping names to the memory of the fullest pp rank, for each group of equal pp ranks."""
    rows = {}
    of_ranks = RankMemory(planned.workload)
    for alike in planned.workload.alike:
        by_rank = {rank: of_ranks.estimate(rank) for rank in alike}
        pp_rank = max(by_rank, key=lambda rank: by_rank[rank].live)
        like = f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
        rows[f"{planned.name_rank(pp_rank)}{like}"] = by_rank[pp_rank]
    return rows


def list_traffic(planned: PlannedRun) -> list[Calls]:
    """Return the calls of the pp rank that moves the most bytes."""
    layout = planned.layout
    cluster = planned.cluster
    w = planned.workload
    traffics = [estimate_traffic(w, rank) for rank, *_ in w.alike]
    busiest = max(traffics, key=lambda each: sum(moved.n_bytes for moved in each.values()))
    rows = []
    for (axis, operation), moved in busiest.items():
        dims = axis.split(" x ")
        n_ranks = prod(getattr(layout, dim) for dim in dims)
        stride = list_strides(layout)[dims[-1]]
        n_nodes = cluster.count_nodes(stride, n_ranks)
        seconds = moved.n_bytes / cluster.find_bandwidth(stride, n_ranks)
        seconds += moved.n_calls * cluster.find_latency(stride, n_ranks)
        where = f"over {n_nodes} nodes" if n_nodes > 1 else "inside a node"
        rows.append(Calls(axis, operation, *moved, where, seconds))
    return rows
