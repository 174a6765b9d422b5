"""Remarks of `plan` on a layout: settings that waste time or memory, each with a better value."""

from math import ceil

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.forecast import Forecast
from torchtitan_lite.tools.plan.planned_run import PlannedRun

MOST_BUBBLE = 0.15
LEAST_USED = 0.6  # fraction of the memory


def list_remarks(planned: PlannedRun, expected: Forecast, taken_bytes: float) -> list[str]:
    """Return all remarks. `taken_bytes`: memory taken on the fullest GPU."""
    remarks, cluster = warn_of_bubble(planned, expected.bubble), expected.cluster
    remarks += warn_of_groups(planned.layout, cluster)
    untimed = {name: None for kind in expected.workload.kinds for name in kind.untimed}
    if untimed:
        remarks.append(f"the time and memory of {', '.join(untimed)} are not in this forecast")
    if taken_bytes > cluster.memory_bytes:
        remarks.append("the layout does not fit in memory. `--search` ranks the layouts that fit")
    elif taken_bytes < LEAST_USED * cluster.memory_bytes:
        used = f"the layout uses {taken_bytes / GIB:.0f} of {cluster.memory_bytes / GIB:.1f} GiB"
        remarks.append(f"{used}. Less recompute, a larger microbatch or a smaller tp may be faster. Try --search")
    return remarks


def warn_of_bubble(planned: PlannedRun, bubble: float) -> list[str]:
    """Suggest more microbatches or stages. The bubble is about h/(v*m + h), h >= p-1: solve for h, then for v*m."""
    layout = planned.layout
    if bubble <= MOST_BUBBLE:
        return []
    per_rank = len(layout.stages) // layout.pp
    needed = per_rank * layout.n_microbatches * bubble / (1 - bubble) * (1 / MOST_BUBBLE - 1)
    n, stages = ceil(needed / per_rank / layout.pp) * layout.pp, ceil(needed / layout.n_microbatches)
    advice = f"Use {n} microbatches (training.global_batch_size = {n * layout.microbatch_size * layout.dp})"
    if stages * layout.pp <= planned.model_args.n_layers + 2:
        advice += f", or about {stages} stages per rank (Interleaved1F1B, pipeline_parallel_layers_per_stage)"
    return [f"the pipeline is idle for {bubble:.0%} of a step. {advice}"]


def warn_of_groups(layout: Layout, cluster: Cluster) -> list[str]:
    """Warn of groups that communicate in every layer and span nodes."""
    size, warnings = cluster.node_size, []
    for dim, key, what in (
        ("tp", "tensor_parallel_degree", "communicates several times per layer"),
        ("ep", "expert_parallel_degree", "sends tokens four times per layer"),
    ):
        degree = getattr(layout, dim)
        if degree > 1 and (size % degree or cluster.count_nodes(1, degree) > 1):
            inner = max(n for n in range(1, size + 1) if size % n == 0 and degree % n == 0)
            warnings.append(f"{dim} {degree} {what} across nodes of {size}. Use parallelism.{key} = {inner}")
    return warnings
