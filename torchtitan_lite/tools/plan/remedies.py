"""Warnings of `plan` about layouts that run but waste time or memory, each with the number that would be right."""

from dataclasses import replace
from math import ceil

from torchtitan_lite.config.checks import check_run
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, plan_layout
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import format_toml
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.forecast import forecast, list_memory
from torchtitan_lite.tools.plan.memory import Memory
from torchtitan_lite.tools.plan.simulator import plan_order
from torchtitan_lite.tools.plan.workload import Workload, describe_workload

MOST_BUBBLE = 0.15
# Changes that free memory, cheapest first
RELIEFS = (("activation_checkpoint.mode", "full"), ("parallelism.zero_stage", 3), ("training.local_batch_size", 1))


def list_memory_of(
    config: Config, model_args: ModelArgs, world_size: int, *, imbalance: float = 1.0
) -> list[Memory] | None:
    """Return the closed form for each pp rank; None where there is none, or where `check` refuses the config."""
    if check_run(config):
        return None
    try:
        layout = plan_layout(config, model_args, world_size)
        workload = describe_workload(config, model_args, layout, imbalance=imbalance)
    except ConfigError:
        return None
    return list_memory(workload, plan_order(config.parallelism, layout))


# ---------------------------------------------------------------- warnings


def list_warnings(config: Config, workload: Workload, cluster: Cluster, *, bubble: float, fits: bool) -> list[str]:
    """Return all warnings, each with its remedy. `config` is resolved."""
    warnings = [
        *warn_of_bubble(config, workload, cluster, bubble),
        *warn_of_few_microbatches(workload.layout),
        *warn_of_groups(workload.layout, cluster),
    ]
    return warnings if fits else [*warnings, warn_of_memory(config, workload, cluster)]


def warn_of_bubble(config: Config, workload: Workload, cluster: Cluster, bubble: float) -> list[str]:
    """The bubble is about (p-1)/(v*m+p-1): it falls with microbatches m and with stages a rank v. Simulated here."""
    layout, pp = workload.layout, workload.layout.pp
    if pp == 1 or bubble <= MOST_BUBBLE:
        return []
    what = f"the pipeline is idle for {bubble:.0%} of a step"
    needed = ceil((pp - 1) * (1 / MOST_BUBBLE - 1))  # v * m, if all stages are alike and sends take no time
    per_rank = len(layout.stages) // pp
    stages = ceil(needed / layout.n_microbatches)
    others = ""
    if per_rank < stages and stages * pp <= workload.args.n_layers + 2:
        others = f", or about {stages} stages a rank (Interleaved1F1B, pipeline_parallel_layers_per_stage)"
    for times in (1, 2, 4, 8):
        n = ceil(needed / per_rank / pp) * pp * times
        if simulate_bubble(config, workload, cluster, n) <= MOST_BUBBLE:
            batch = n * layout.microbatch_size * layout.dp
            return [f"{what}. Use {n} microbatches (training.global_batch_size = {batch}){others}"]
    return [f"{what}, and hardly less with more microbatches: stages are uneven, or sends take long{others}"]


def simulate_bubble(config: Config, workload: Workload, cluster: Cluster, n_microbatches: int) -> float:
    """Return the bubble of the same layout with another number of microbatches."""
    batch = n_microbatches * workload.layout.microbatch_size * workload.layout.dp
    layout = replace(workload.layout, n_microbatches=n_microbatches, global_batch_size=batch)
    return forecast(replace(workload, layout=layout), cluster, plan_order(config.parallelism, layout)).bubble


def warn_of_few_microbatches(layout: Layout) -> list[str]:
    if layout.n_microbatches >= layout.pp:
        return []
    batch = layout.pp * layout.microbatch_size * layout.dp
    return [
        f"{layout.n_microbatches} microbatches never fill a pipeline of {layout.pp} ranks. "
        f"Use training.global_batch_size = {batch} or more, or a smaller microbatch"
    ]


def warn_of_groups(layout: Layout, cluster: Cluster) -> list[str]:
    """Groups that talk in every layer and span nodes; those that span two because no multiple of them is a node."""
    size = cluster.node_size

    def find_inner(degree: int) -> int | None:
        """Return the largest degree that stays inside a node, for one that does not."""
        if degree <= 1 or cluster.find_tier(1, degree) == "node":
            return None
        return max(n for n in range(1, size + 1) if size % n == 0 and degree % n == 0)

    warnings = []
    if inner := find_inner(layout.tp):
        what = f"tp {layout.tp} talks several times a layer across nodes of {size}"
        warnings.append(f"{what}. Use parallelism.tensor_parallel_degree = {inner}")
    for dim in ("tp", "cp"):
        degree, stride = getattr(layout, dim), layout.strides[dim]
        span = stride * degree
        if degree > 1 and span < size and size % span:
            fitting = [n for n in range(1, degree) if degree % n == 0 and size % (stride * n) == 0]
            warnings.append(
                f"groups of {dim} {degree} take {span} GPUs, which do not divide a node of {size}: "
                f"some span two. Use a {dim} of {' or '.join(map(str, fitting[-2:]))}"
            )
    if inner := find_inner(layout.ep):
        what = f"ep {layout.ep} sends tokens four times a layer across nodes of {size}"
        warnings.append(f"{what}. Use parallelism.expert_parallel_degree = {inner}, if its memory suffices")
    return warnings


def warn_of_memory(config: Config, workload: Workload, cluster: Cluster) -> str:
    """Name the first changes that make it fit, by the closed form; else how many times as many GPUs would."""

    def find_needed(config: Config, times: int = 1) -> float:
        """Return the reserved bytes of the rank with the highest peak, on `times` as many GPUs."""
        n_gpus = workload.layout.world_size * times
        memory = list_memory_of(config, workload.args, n_gpus, imbalance=workload.imbalance)
        return max(each.live for each in memory) * cluster.reserve_factor if memory else float("inf")

    tried = []
    what = "it does not fit the memory"
    for key, value in RELIEFS:
        config = with_value(config, key, value)
        tried.append(f"{key} = {format_toml(value)}")
        if (needed := find_needed(config)) <= cluster.memory_bytes:
            return f"{what}. With {' and '.join(tried)} it needs {needed / GIB:.0f} GiB, by the closed form"
    for times in (2, 4, 8, 16, 32, 64):
        shard_degree = workload.layout.dp_shard * times
        wider = with_value(config, "parallelism.data_parallel_shard_degree", shard_degree)
        if find_needed(with_value(wider, "training.global_batch_size", -1), times) <= cluster.memory_bytes:
            n_gpus = workload.layout.world_size * times
            return f"{what}. With {' and '.join(tried)} it fits {n_gpus:,} such GPUs, by the closed form"
    return f"{what}, nor that of 64 times as many GPUs. `--search` looks for another layout"
