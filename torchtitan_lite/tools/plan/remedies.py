"""List the remarks of `plan`: settings that waste time or memory, each with a better value, and features that the
forecast does not model."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import ceil, gcd, lcm

from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import get_value, with_value
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.planned_run import PlannedRun
from torchtitan_lite.tools.plan.unmodeled import warn_of_unmodeled

MOST_TIMES = 64  # largest number of GPUs on which `plan` looks for enough memory, as a multiple of the GPUs of the run
MOST_IDLE = 0.15  # `plan` prints a remark if ranks are idle for more than this part of a step
LEVERS = [  # settings that save memory, in ascending order of the time that they cost
    ("training.loss_chunk_tokens", 1024),
    ("parallelism.zero_stage", 3),
    # selective recompute also repeats the all-gathers of norm outputs over tp
    ("activation_checkpoint.mode", "selective"),
    ("activation_checkpoint.mode", "full"),
    ("parallelism.pipeline_parallel_degree", 4),
    ("parallelism.tensor_parallel_degree", 8),
    ("optimizer.moments_dtype", "bfloat16"),
]

FASTER = {  # changes of one key that may make a run faster, besides doubling or halving a degree
    "parallelism.zero_stage": (1, 2, 3),
    "activation_checkpoint.mode": ("none", "selective", "full"),
    "training.local_batch_size": (1, 2, 4),
    "parallelism.pipeline_parallel_schedule": ("Interleaved1F1B", "ZBVZeroBubble"),
}
DEGREES = (
    "parallelism.pipeline_parallel_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.expert_parallel_degree",
)


def list_remarks(planned: PlannedRun) -> list[str]:
    """Return the remarks about a run."""
    cluster = planned.cluster
    expected = planned.forecast
    remarks = [*planned.notices, *warn_of_bubble(planned, expected.bubble)]
    remarks += warn_of_groups(planned.layout, cluster)
    remarks += warn_of_unmodeled(planned)
    waiting = expected.parts_s["waiting for dp"] / expected.step_time_s
    if waiting > MOST_IDLE:
        remarks.append(
            f"ranks wait for all-gathers and reductions over dp during {waiting:.0%} of a step. More sequences per "
            "rank (training.global_batch_size) or pipeline stages may be faster. Try --search"
        )
    if not planned.fits:
        sizes = f"{planned.taken_bytes / GIB:.1f} of {cluster.memory_bytes / GIB:.1f} GiB"
        levers = [
            f"{key} = {value} ({candidate.taken_bytes / GIB:.1f} GiB)"
            for key, value, candidate in list_changed(planned, LEVERS)
        ]
        advice = f"What helps: {'; '.join(levers)}" if levers else advise_gpus(planned)
        remarks.append(f"the layout does not fit in memory: it may take {sizes}. {advice}")
    return remarks


def advise_gpus(planned: PlannedRun) -> str:
    """Name a larger number of GPUs on which the layout fits. Tries 2, 4, ... MOST_TIMES times the current number."""
    config = with_value(planned.config, "parallelism.data_parallel_shard_degree", -1)
    times = 2
    while times <= MOST_TIMES:
        n_gpus = times * planned.layout.world_size
        with suppress(ConfigError):
            layout = plan_layout(config, planned.model_args, n_gpus)
            if replace(planned, config=config, layout=layout).fits:
                return f"What helps: {n_gpus:,} GPUs (with parallelism.data_parallel_shard_degree = -1)"
        times *= 2
    return f"Neither a change of one key nor {n_gpus:,} GPUs make it fit. Try --search"


def list_changed(
    planned: PlannedRun, changes: Iterable[tuple[str, object]]
) -> Iterator[tuple[str, object, PlannedRun]]:
    """Yield key, value and changed run for each change of a single key, if `check` accepts the run and the run fits in
    memory."""
    for key, value in changes:
        with suppress(ConfigError):
            config = with_value(planned.config, key, value)
            layout = plan_layout(config, planned.model_args, planned.layout.world_size)
            candidate = replace(planned, config=config, layout=layout)
            if candidate.fits:
                yield key, value, candidate


def list_faster(planned: PlannedRun) -> list[tuple[str, ...]]:
    """Return the five best single-key changes that fit and speed up this run: key, value, speed, gain, memory."""
    changes = [(key, value) for key, values in FASTER.items() for value in values]
    for key in DEGREES:
        degree = get_value(planned.config, key)
        changes += [(key, n) for n in (2 * degree, degree // 2) if n]
    base = planned.forecast.tokens_per_s_per_gpu if planned.fits else 0
    config = with_value(planned.config, "parallelism.data_parallel_shard_degree", -1)
    rows = []
    for key, value, candidate in list_changed(replace(planned, config=config), changes):
        speed = candidate.forecast.tokens_per_s_per_gpu
        if speed > 1.01 * base:
            gain = f"+{speed / base - 1:.0%}" if base else ""
            memory = f"{candidate.taken_bytes / GIB:.1f} GiB"
            rows.append((speed, (key, str(value), f"{speed:,.0f}", gain, memory)))
    return [row for _, row in sorted(rows, reverse=True)[:5]]


def warn_of_bubble(planned: PlannedRun, bubble: float) -> list[str]:
    """Suggest more microbatches, or the smallest number of interleaved stages that leaves a smaller bubble.

    The bubble is about h/(v*m + h) with h >= p-1. This function computes h from the forecast bubble, and then the m
    that reduces the bubble to MOST_IDLE.
    """
    if bubble <= MOST_IDLE:
        return []
    layout = planned.layout
    needed = layout.n_microbatches * bubble / (1 - bubble) * (1 / MOST_IDLE - 1)
    # pp and local_batch_size must divide the batch
    unit = lcm(layout.pp, planned.config.training.local_batch_size // layout.microbatch_size)
    n = ceil(needed / unit) * unit
    advice = (
        f"Use at least {n} microbatches "
        f"(training.global_batch_size = {n * layout.microbatch_size * layout.dp})"
    )
    config = with_value(planned.config, "parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
    sizes = [
        ("parallelism.pipeline_parallel_layers_per_stage", n)
        for n in range(planned.model_args.n_layers // layout.pp, 0, -1)
    ]
    for key, value, candidate in list_changed(replace(planned, config=config), sizes):
        if candidate.forecast.bubble < bubble:
            idle = f"{candidate.forecast.bubble:.0%}"
            advice += f", or Interleaved1F1B with {key} = {value} (idle for {idle})"
            break
    return [f"the pipeline is idle for {bubble:.0%} of a step. {advice}"]


def warn_of_groups(layout: Layout, cluster: Cluster) -> list[str]:
    """Warn of mesh dims that communicate in every layer and across nodes."""
    warnings = []
    for dim, key in (("tp", "tensor_parallel_degree"), ("ep", "expert_parallel_degree")):
        degree = getattr(layout, dim)
        inner = gcd(degree, cluster.node_size)
        if inner < degree:
            warnings.append(
                f"{dim} {degree} communicates in every layer across nodes of {cluster.node_size} ranks. "
                f"Use parallelism.{key} = {inner}"
            )
    return warnings
