"""Remarks of `plan` about a layout: what wastes time or memory, each with the number that would be right."""

from dataclasses import replace
from math import ceil, inf

from torchtitan_lite.config.checks import check_run
from torchtitan_lite.config.layout import Layout, plan_layout
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import format_toml
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.forecast import Forecast, forecast, list_memory
from torchtitan_lite.tools.plan.timeline import plan_order
from torchtitan_lite.tools.plan.workload import PlannedRun

MOST_BUBBLE = 0.15
LEAST_USED = 0.6  # of the memory
# Changes that free memory, cheapest first
LEVERS = (("activation_checkpoint.mode", "full"), ("parallelism.zero_stage", 3), ("training.local_batch_size", 1))


def list_remarks(planned: PlannedRun, cluster: Cluster, expected: Forecast, live_bytes: float) -> list[str]:
    """Return all remarks. `live_bytes`: of the rank that holds most."""
    remarks = [
        *warn_of_bubble(planned, cluster, expected.bubble),
        *warn_of_groups(planned.layout, cluster),
    ]
    needed = cluster.reserve(live_bytes)
    if needed > cluster.memory_bytes:
        remarks.append(find_memory(planned, cluster))
    elif needed < LEAST_USED * cluster.memory_bytes:
        used = f"it uses {needed / GIB:.0f} of {cluster.memory_bytes / GIB:.1f} GiB"
        remarks.append(f"{used}: less recompute, a larger microbatch or fewer ranks of tp may be faster. Try --search")
    return remarks


def warn_of_bubble(planned: PlannedRun, cluster: Cluster, bubble: float) -> list[str]:
    """The bubble is about (p-1)/(v*m+p-1): it falls with microbatches m and with stages a rank v. Simulated here."""
    layout, pp = planned.layout, planned.layout.pp
    if pp == 1 or bubble <= MOST_BUBBLE:
        return []
    what = f"the pipeline is idle for {bubble:.0%} of a step"
    per_rank = len(layout.stages) // pp
    needed = ceil((pp - 1) * (1 / MOST_BUBBLE - 1))  # v * m, if all stages are alike and sends take no time
    stages = ceil(needed / layout.n_microbatches)
    others = ""
    if per_rank < stages and stages * pp <= planned.model_args.n_layers + 2:
        others = f", or about {stages} stages a rank (Interleaved1F1B, pipeline_parallel_layers_per_stage)"
    for times in (1, 2, 4, 8):
        n = ceil(needed / per_rank / pp) * pp * times
        batch = n * layout.microbatch_size * layout.dp
        longer = replace(planned, layout=replace(layout, n_microbatches=n, global_batch_size=batch))
        order = plan_order(planned.config.parallelism, longer.layout)
        if forecast(longer.workload, cluster, order).bubble <= MOST_BUBBLE:
            return [f"{what}. Use {n} microbatches (training.global_batch_size = {batch}){others}"]
    return [f"{what}, and hardly less with more microbatches: stages are uneven, or sends take long{others}"]


def warn_of_groups(layout: Layout, cluster: Cluster) -> list[str]:
    """Groups that talk in every layer and span nodes."""
    size, warnings = cluster.node_size, []
    for dim, key, what in (
        ("tp", "tensor_parallel_degree", "talks several times a layer"),
        ("ep", "expert_parallel_degree", "sends tokens four times a layer"),
    ):
        degree = getattr(layout, dim)
        if degree > 1 and (size % degree or cluster.find_tier(1, degree) == "network"):
            inner = max(n for n in range(1, size + 1) if size % n == 0 and degree % n == 0)
            warnings.append(f"{dim} {degree} {what} across nodes of {size}. Use parallelism.{key} = {inner}")
    return warnings


def find_memory(planned: PlannedRun, cluster: Cluster) -> str:
    """Name the first changes that make it fit; else how many times as many GPUs would."""
    config, tried, n_gpus = planned.config, [], planned.layout.world_size
    what = "it does not fit the memory"
    for key, value in LEVERS:
        config = with_value(config, key, value)
        tried.append(f"{key} = {format_toml(value)}")
        if (needed := find_needed(planned, config, n_gpus, cluster)) <= cluster.memory_bytes:
            return f"{what}. With {' and '.join(tried)} it needs {needed / GIB:.0f} GiB"
    for times in (2, 4, 8, 16, 32, 64):
        wider = with_value(config, "parallelism.data_parallel_shard_degree", planned.layout.dp_shard * times)
        wider = with_value(wider, "training.global_batch_size", -1)
        if find_needed(planned, wider, n_gpus * times, cluster) <= cluster.memory_bytes:
            return f"{what}. With {' and '.join(tried)} it fits {n_gpus * times:,} such GPUs"
    return f"{what}, nor that of 64 times as many GPUs. `--search` looks for another layout"


def find_needed(planned: PlannedRun, config: Config, n_gpus: int, cluster: Cluster) -> float:
    """Return the bytes of a GPU that the same model needs under another config; infinite if check refuses it."""
    if check_run(config):
        return inf
    try:
        layout = plan_layout(config, planned.model_args, n_gpus)
    except ConfigError:
        return inf
    other = replace(planned, config=config, layout=layout)
    return cluster.reserve(
        max(each.live for each in list_memory(other.workload, plan_order(config.parallelism, layout)))
    )


def list_risks(planned: PlannedRun, expected: Forecast) -> list[str]:
    """Say what the layout does not defend against, and what to measure first."""
    layout, world_size = planned.layout, planned.layout.world_size
    copies = layout.dp_replicate
    held = "on one rank alone" if copies == 1 else f"on {copies} ranks, which all stop"
    back = "the run goes on from its last checkpoint"
    if not planned.config.checkpoint.enable:
        back = "the run starts over, because checkpoint.enable = false"
    waits = {what: seconds for what, seconds in expected.parts_s.items() if what.startswith(("waiting", "bubble"))}
    largest = max(waits, key=waits.get)
    return [
        f"a lost GPU or node: each shard of the optimizer's state is {held}, and {back}",
        f"a slow GPU, or one that computes wrong numbers: all {world_size:,} wait for the slowest in every step, and "
        "no rank repeats the work of another",
        f"measure first: {largest}, {waits[largest] / expected.step_time_s:.0%} of the step and its largest wait "
        "(profiling.enable_profiling)",
    ]
