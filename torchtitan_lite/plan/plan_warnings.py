"""What is wrong with a layout though it would run, and the number that would be right."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from torchtitan_lite.config.cluster import Cluster, find_strides
from torchtitan_lite.config.layout import plan_layout
from torchtitan_lite.config.schema import Config, ConfigError
from torchtitan_lite.plan.forecast import forecast
from torchtitan_lite.plan.planned import Planned
from torchtitan_lite.plan.schedule_order import list_rows
from torchtitan_lite.plan.workload import describe_workload

MOST_BUBBLE = 0.15
GIB = 2**30


def list_warnings(planned: Planned, cluster: Cluster, *, bubble: float, fits: bool) -> list[str]:
    """Each with its remedy."""
    warnings = [
        *warn_of_bubble(planned, cluster, bubble),
        *warn_of_few_microbatches(planned),
        *warn_of_tensor_parallel(planned, cluster),
        *warn_of_torn_groups(planned, cluster),
    ]
    return warnings if fits else [*warnings, warn_of_memory(planned, cluster)]


def warn_of_bubble(planned: Planned, cluster: Cluster, bubble: float) -> list[str]:
    """Idle is about (p-1)/(v*m+p-1): more microbatches m, or more stages a rank v, make it smaller. Simulated here."""
    layout, pp = planned.layout, planned.layout.pp
    if pp == 1 or bubble <= MOST_BUBBLE:
        return []
    told = f"the pipeline is idle for {bubble:.0%} of a step"
    needed = ceil((pp - 1) * (1 / MOST_BUBBLE - 1))  # of v * m, where all stages are alike and sends take no time
    per_rank = len(layout.stages) // pp
    stages = ceil(needed / layout.n_microbatches)
    others = ""
    if per_rank < stages and stages * pp <= planned.shape.n_layers + 2:
        others = f", or about {stages} stages a rank (Interleaved1F1B, pipeline_parallel_layers_per_stage)"
    for times in (1, 2, 4, 8):
        n = ceil(needed / per_rank / pp) * pp * times
        if simulate_bubble(planned, cluster, n) <= MOST_BUBBLE:
            batch = n * layout.microbatch_size * layout.dp
            return [f"{told}. Use {n} microbatches (training.global_batch_size = {batch}){others}"]
    return [f"{told}, and hardly less with more microbatches: stages are uneven, or wait for what is sent{others}"]


def simulate_bubble(planned: Planned, cluster: Cluster, n_microbatches: int) -> float:
    """What the same layout would idle with another number of microbatches."""
    batch = n_microbatches * planned.layout.microbatch_size * planned.layout.dp
    layout = replace(planned.layout, n_microbatches=n_microbatches, global_batch_size=batch)
    workload = describe_workload(planned.config, planned.shape, layout)
    return forecast(workload, cluster, list_rows(planned.config.parallelism, layout)).bubble


def warn_of_few_microbatches(planned: Planned) -> list[str]:
    layout = planned.layout
    if layout.n_microbatches >= layout.pp:
        return []
    batch = layout.pp * layout.microbatch_size * layout.dp
    return [
        f"{layout.n_microbatches} microbatches never fill a pipeline of {layout.pp} ranks. "
        f"Use training.global_batch_size = {batch} or more, or a smaller microbatch"
    ]


def warn_of_tensor_parallel(planned: Planned, cluster: Cluster) -> list[str]:
    tp = planned.layout.tp
    if tp == 1 or cluster.find_tier(1, tp) == "node":
        return []
    most = max(n for n in range(1, cluster.node_size + 1) if cluster.node_size % n == 0 and tp % n == 0)
    return [
        f"tp {tp} talks several times a layer across nodes of {cluster.node_size}. "
        f"Use parallelism.tensor_parallel_degree = {most}"
    ]


def warn_of_torn_groups(planned: Planned, cluster: Cluster) -> list[str]:
    """A group that would have room in a node and lies in two of them, because nodes are no multiple of it."""
    strides = find_strides(planned.layout)
    warnings = []
    for dim in ("tp", "cp"):
        degree = getattr(planned.layout, dim)
        span = strides[dim] * degree
        if degree > 1 and span < cluster.node_size and cluster.node_size % span:
            fitting = [n for n in range(1, degree) if degree % n == 0 and cluster.node_size % (strides[dim] * n) == 0]
            warnings.append(
                f"groups of {dim} {degree} take {span} GPUs, which do not divide a node of {cluster.node_size}: "
                f"some lie across two. Use a {dim} of {' or '.join(map(str, fitting[-2:]))}"
            )
    return warnings


# ---------------------------------------------------------------- memory

# What frees memory, cheapest first
RELIEFS: dict[str, Callable[[Config], Config]] = {
    'activation_checkpoint.mode = "full"': lambda config: replace(
        config, activation_checkpoint=replace(config.activation_checkpoint, mode="full")
    ),
    "parallelism.zero_stage = 3": lambda config: replace(config, parallelism=replace(config.parallelism, zero_stage=3)),
    "training.local_batch_size = 1": lambda config: replace(
        config, training=replace(config.training, local_batch_size=1)
    ),
}


def warn_of_memory(planned: Planned, cluster: Cluster) -> str:
    """The first changes that make it fit, by the closed form; else how many times as many GPUs would."""
    config, tried = planned.config, []
    told = "it does not fit the memory"
    for name, relieve in RELIEFS.items():
        config = relieve(config)
        tried.append(name)
        needed = estimate_reserved(planned, config, planned.layout.world_size, cluster)
        if needed is not None and needed <= cluster.memory_bytes:
            return f"{told}. With {' and '.join(tried)} it needs {needed / GIB:.0f} GiB, by the closed form"
    for times in (2, 4, 8, 16, 32, 64):
        section = replace(config.parallelism, data_parallel_shard_degree=planned.layout.dp_shard * times)
        wider = replace(config, parallelism=section, training=replace(config.training, global_batch_size=-1))
        n_gpus = planned.layout.world_size * times
        needed = estimate_reserved(planned, wider, n_gpus, cluster)
        if needed is not None and needed <= cluster.memory_bytes:
            return f"{told}. With {' and '.join(tried)} it fits {n_gpus:,} such GPUs, by the closed form"
    return f"{told}, nor that of 64 times as many GPUs. `--search` looks for another layout"


def estimate_reserved(planned: Planned, config: Config, world_size: int, cluster: Cluster) -> float | None:
    """Bytes of the rank that holds most; None where `check` refuses the config."""
    try:
        layout = plan_layout(config, planned.shape, world_size)
    except ConfigError:
        return None
    rows = list_rows(config.parallelism, layout)
    workload = describe_workload(config, planned.shape, layout)
    return forecast(workload, cluster, rows).live_bytes * cluster.reserve_factor
