"""Warn of layouts that run but waste time or memory, each with the number that would be right."""

from dataclasses import replace
from math import ceil

from torchtitan_lite.config.hardware import Cluster
from torchtitan_lite.config.layout import plan_layout
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import format_toml
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.plan.dry_run import PlannedRun
from torchtitan_lite.plan.forecast import forecast, list_memory
from torchtitan_lite.plan.simulator import plan_order

MOST_BUBBLE = 0.15
GIB = 2**30


def list_warnings(planned: PlannedRun, cluster: Cluster, *, bubble: float, fits: bool) -> list[str]:
    """Return all warnings, each with its remedy."""
    warnings = [
        *warn_of_bubble(planned, cluster, bubble),
        *warn_of_few_microbatches(planned),
        *warn_of_tensor_parallel(planned, cluster),
        *warn_of_torn_groups(planned, cluster),
        *warn_of_expert_parallel(planned, cluster),
    ]
    return warnings if fits else [*warnings, warn_of_memory(planned, cluster)]


def warn_of_bubble(planned: PlannedRun, cluster: Cluster, bubble: float) -> list[str]:
    """The bubble is about (p-1)/(v*m+p-1): it falls with microbatches m and with stages a rank v. Simulated here."""
    layout, pp = planned.layout, planned.layout.pp
    if pp == 1 or bubble <= MOST_BUBBLE:
        return []
    what = f"the pipeline is idle for {bubble:.0%} of a step"
    needed = ceil((pp - 1) * (1 / MOST_BUBBLE - 1))  # v * m, if all stages are alike and sends take no time
    per_rank = len(layout.stages) // pp
    stages = ceil(needed / layout.n_microbatches)
    others = ""
    if per_rank < stages and stages * pp <= planned.model_args.n_layers + 2:
        others = f", or about {stages} stages a rank (Interleaved1F1B, pipeline_parallel_layers_per_stage)"
    for times in (1, 2, 4, 8):
        n = ceil(needed / per_rank / pp) * pp * times
        if simulate_bubble(planned, cluster, n) <= MOST_BUBBLE:
            batch = n * layout.microbatch_size * layout.dp
            return [f"{what}. Use {n} microbatches (training.global_batch_size = {batch}){others}"]
    return [f"{what}, and hardly less with more microbatches: stages are uneven, or sends take long{others}"]


def simulate_bubble(planned: PlannedRun, cluster: Cluster, n_microbatches: int) -> float:
    """Return the bubble of the same layout with another number of microbatches."""
    batch = n_microbatches * planned.layout.microbatch_size * planned.layout.dp
    layout = replace(planned.layout, n_microbatches=n_microbatches, global_batch_size=batch)
    workload = replace(planned, layout=layout).describe_workload()
    return forecast(workload, cluster, plan_order(planned.config.parallelism, layout)).bubble


def warn_of_few_microbatches(planned: PlannedRun) -> list[str]:
    layout = planned.layout
    if layout.n_microbatches >= layout.pp:
        return []
    batch = layout.pp * layout.microbatch_size * layout.dp
    return [
        f"{layout.n_microbatches} microbatches never fill a pipeline of {layout.pp} ranks. "
        f"Use training.global_batch_size = {batch} or more, or a smaller microbatch"
    ]


def warn_of_tensor_parallel(planned: PlannedRun, cluster: Cluster) -> list[str]:
    tp = planned.layout.tp
    if tp == 1 or cluster.find_tier(1, tp) == "node":
        return []
    most = max(n for n in range(1, cluster.node_size + 1) if cluster.node_size % n == 0 and tp % n == 0)
    return [
        f"tp {tp} talks several times a layer across nodes of {cluster.node_size}. "
        f"Use parallelism.tensor_parallel_degree = {most}"
    ]


def warn_of_torn_groups(planned: PlannedRun, cluster: Cluster) -> list[str]:
    """A group that would fit a node, but spans two because the node's size is no multiple of it."""
    strides = planned.layout.strides
    warnings = []
    for dim in ("tp", "cp"):
        degree = getattr(planned.layout, dim)
        span = strides[dim] * degree
        if degree > 1 and span < cluster.node_size and cluster.node_size % span:
            fitting = [n for n in range(1, degree) if degree % n == 0 and cluster.node_size % (strides[dim] * n) == 0]
            warnings.append(
                f"groups of {dim} {degree} take {span} GPUs, which do not divide a node of {cluster.node_size}: "
                f"some span two. Use a {dim} of {' or '.join(map(str, fitting[-2:]))}"
            )
    return warnings


def warn_of_expert_parallel(planned: PlannedRun, cluster: Cluster) -> list[str]:
    """Experts that could stay inside a node, with tokens that travel between nodes."""
    ep = planned.layout.ep
    if ep <= 1 or cluster.find_tier(1, ep) == "node":
        return []
    most = max(n for n in range(1, cluster.node_size + 1) if cluster.node_size % n == 0 and ep % n == 0)
    return [
        f"ep {ep} sends tokens four times a layer across nodes of {cluster.node_size}. "
        f"Use parallelism.expert_parallel_degree = {most}, if its memory suffices"
    ]


# ---------------------------------------------------------------- memory

# Changes that free memory, cheapest first
RELIEFS = (("activation_checkpoint.mode", "full"), ("parallelism.zero_stage", 3), ("training.local_batch_size", 1))


def warn_of_memory(planned: PlannedRun, cluster: Cluster) -> str:
    """Name the first changes that make it fit, by the closed form; else how many times as many GPUs would."""
    config, tried = planned.config, []
    what = "it does not fit the memory"
    for key, value in RELIEFS:
        config = with_value(config, key, value)
        tried.append(f"{key} = {format_toml(value)}")
        needed = estimate_reserved(planned, config, planned.layout.world_size, cluster)
        if needed is not None and needed <= cluster.memory_bytes:
            return f"{what}. With {' and '.join(tried)} it needs {needed / GIB:.0f} GiB, by the closed form"
    for times in (2, 4, 8, 16, 32, 64):
        wider = with_value(config, "parallelism.data_parallel_shard_degree", planned.layout.dp_shard * times)
        wider = with_value(wider, "training.global_batch_size", -1)
        n_gpus = planned.layout.world_size * times
        needed = estimate_reserved(planned, wider, n_gpus, cluster)
        if needed is not None and needed <= cluster.memory_bytes:
            return f"{what}. With {' and '.join(tried)} it fits {n_gpus:,} such GPUs, by the closed form"
    return f"{what}, nor that of 64 times as many GPUs. `--search` looks for another layout"


def estimate_reserved(planned: PlannedRun, config: Config, world_size: int, cluster: Cluster) -> float | None:
    """Return the reserved bytes of the rank with the highest peak; None where `check` refuses the config."""
    try:
        layout = plan_layout(config, planned.model_args, world_size)
    except ConfigError:
        return None
    workload = replace(planned, config=config, layout=layout).describe_workload()
    memory = list_memory(workload, plan_order(config.parallelism, layout))
    return max(each.live for each in memory) * cluster.reserve_factor
