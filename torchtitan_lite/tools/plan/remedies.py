"""Remarks of `plan` about a layout: what wastes time or memory, each with the number that would be right."""

from math import ceil

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.forecast import Forecast
from torchtitan_lite.tools.plan.planned_run import PlannedRun

MOST_BUBBLE = 0.15
LEAST_USED = 0.6  # of the memory


def list_remarks(planned: PlannedRun, expected: Forecast, taken_bytes: float) -> list[str]:
    """Return all remarks. `taken_bytes`: of the GPU that holds most."""
    remarks, cluster = warn_of_bubble(planned, expected.bubble), expected.cluster
    remarks += warn_of_groups(planned.layout, cluster)
    if taken_bytes > cluster.memory_bytes:
        remarks.append("it does not fit the memory. `--search` ranks the layouts that fit")
    elif taken_bytes < LEAST_USED * cluster.memory_bytes:
        used = f"it uses {taken_bytes / GIB:.0f} of {cluster.memory_bytes / GIB:.1f} GiB"
        remarks.append(f"{used}: less recompute, a larger microbatch or fewer ranks of tp may be faster. Try --search")
    return remarks


def warn_of_bubble(planned: PlannedRun, bubble: float) -> list[str]:
    """The bubble is about h/(v*m + h): h = p-1 hops, more if sends are slow. Solve it for h, then for v*m."""
    layout = planned.layout
    if bubble <= MOST_BUBBLE:
        return []
    per_rank = len(layout.stages) // layout.pp
    needed = per_rank * layout.n_microbatches * bubble / (1 - bubble) * (1 / MOST_BUBBLE - 1)
    n, stages = ceil(needed / per_rank / layout.pp) * layout.pp, ceil(needed / layout.n_microbatches)
    advice = f"Use {n} microbatches (training.global_batch_size = {n * layout.microbatch_size * layout.dp})"
    if stages * layout.pp <= planned.model_args.n_layers + 2:
        advice += f", or about {stages} stages a rank (Interleaved1F1B, pipeline_parallel_layers_per_stage)"
    return [f"the pipeline is idle for {bubble:.0%} of a step. {advice}"]


def warn_of_groups(layout: Layout, cluster: Cluster) -> list[str]:
    """Name groups that communicate in every layer and span nodes."""
    size, warnings = cluster.node_size, []
    for dim, key, what in (
        ("tp", "tensor_parallel_degree", "communicates several times a layer"),
        ("ep", "expert_parallel_degree", "sends tokens four times a layer"),
    ):
        degree = getattr(layout, dim)
        if degree > 1 and (size % degree or cluster.count_nodes(1, degree) > 1):
            inner = max(n for n in range(1, size + 1) if size % n == 0 and degree % n == 0)
            warnings.append(f"{dim} {degree} {what} across nodes of {size}. Use parallelism.{key} = {inner}")
    return warnings


def list_risks(planned: PlannedRun, expected: Forecast) -> list[str]:
    """Say what the layout does not defend against, and what to measure first."""
    layout, world_size = planned.layout, planned.layout.world_size
    held = "on one rank alone" if layout.dp_replicate == 1 else f"on {layout.dp_replicate} ranks, which all stop"
    back = "the run continues from its last checkpoint"
    if not planned.config.checkpoint.enable:
        back = "the run starts over, because checkpoint.enable = false"
    waits = {what: seconds for what, seconds in expected.parts_s.items() if what.startswith(("waiting", "bubble"))}
    largest = max(waits, key=waits.get)
    return [
        f"a lost GPU or node: each shard of the optimizer state is {held}, and {back}",
        f"a slow GPU, or one that computes wrong numbers: all {world_size:,} wait for the slowest in every step, and "
        "no rank repeats the work of another",
        f"measure first: {largest}, {waits[largest] / expected.step_time_s:.0%} of the step and its largest wait "
        "(profiling.enable_profiling)",
    ]
