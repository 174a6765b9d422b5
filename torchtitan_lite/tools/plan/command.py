"""`plan`: print what a layout costs before the job is queued. A closed form, without torch, so it answers at once.

    memory      memory.py           bubble, time    the simulated schedule, with durations from step_time.py
    traffic     transfers.py        remarks         settings that waste time or memory, and better values

`plan --dry-run` also runs step.py on fake tensors and prints both; `plan --search` ranks all layouts.
"""

import argparse
from math import prod

from torchtitan_lite.config.machine import GIB
from torchtitan_lite.tools.plan.bars import BARS, POOLED, find_family, find_most_taken
from torchtitan_lite.tools.plan.cadence import find_interval, measure_goodput
from torchtitan_lite.tools.plan.cluster import Cluster, find_cluster
from torchtitan_lite.tools.plan.forecast import Forecast, forecast, list_memory
from torchtitan_lite.tools.plan.planned_run import PlannedRun, group_pp_ranks, plan_run
from torchtitan_lite.tools.plan.remedies import list_remarks
from torchtitan_lite.tools.plan.search import search_layouts
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.timeline import plan_order
from torchtitan_lite.tools.plan.transfers import estimate_traffic
from torchtitan_lite.tools.tables import format_bytes, format_table

UNITS = {"days": 86400, "hours": 3600, "minutes": 60}  # in seconds


class Plan:
    """The forecast costs of a run: memory, time and traffic."""

    def __init__(self, planned: PlannedRun, gpu: str, cluster: Cluster):
        self.planned, self.gpu, self.cluster, workload = planned, gpu, cluster, planned.workload
        order = plan_order(planned.config.parallelism, planned.layout)
        self.memory = list_memory(workload, order)  # peak of each pp rank
        live_bytes = max(memory.live for memory in self.memory)  # of the fullest GPU
        self.taken_bytes = find_most_taken(cluster, live_bytes, planned.layout.tp)
        self.fits = self.taken_bytes <= cluster.memory_bytes
        self.forecast = forecast(StepTime(workload, cluster), [(order, 1)])
        self.remarks = list_remarks(planned, self.forecast, self.taken_bytes)
        moved = [estimate_traffic(workload, rank, order) for rank in group_pp_ranks(planned)]
        self.traffic = max(
            moved, key=lambda each: sum(moved.n_bytes for moved in each.values())
        )  # of the busiest rank

    def count_nodes(self, axis: str) -> int:
        """Return the number of nodes that a group along these mesh dims spans."""
        layout, dims = self.planned.layout, axis.split(" x ")
        return self.cluster.count_nodes(
            layout.strides[dims[-1]], prod(getattr(layout, dim) for dim in dims)
        )


def main(options: argparse.Namespace) -> int:
    if options.search:
        print(search_layouts(options))
        return 0
    plan = make_plan(options)
    print(describe(plan, options))
    return 0 if plan.fits else 1


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the plan for these command-line options. Raises ConfigError."""
    cluster, device_type = find_cluster(options.gpu), "cpu" if options.gpu == "cpu" else "cuda"
    return Plan(plan_run(options.config_args, options.gpus, device_type), options.gpu, cluster)


def describe(plan: Plan, options: argparse.Namespace) -> str:
    """Return the full answer as text."""
    layout, expected = plan.planned.layout, plan.forecast
    config, moe = plan.planned.config, plan.planned.model_args.moe
    tokens = expected.workload.tokens_per_step
    duration = format_duration(config.training.steps * expected.step_time_s)
    schedule = f", {config.parallelism.pipeline_parallel_schedule}, {len(layout.stages)} stages" * (
        layout.pp > 1
    )
    experts = (
        f"\na token passes through {moe.top_k} of {moe.n_experts} equally loaded experts"
        if moe
        else ""
    )
    blocks = [
        f"{plan.planned.config_name} on {layout.world_size:,} x {plan.gpu}: {layout}{schedule}, ZeRO "
        f"{layout.zero_stage}, recompute {config.activation_checkpoint.mode}\n"
        f"{layout.global_batch_size:,} sequences of {config.training.seq_len:,} are {tokens:,} tokens per step: "
        f"data-parallel replicas {layout.dp} x microbatches {layout.n_microbatches} x sequences "
        f"{layout.microbatch_size}{experts}",
        f"peak memory of a GPU with {plan.cluster.memory_bytes / GIB:.1f} GiB\n{describe_memory(plan)}",
        f"one step {expected.step_time_s:.3g} s, averaged over pp ranks\n{describe_time(expected, plan.gpu)}\n"
        f"  {config.training.steps:,} steps, {tokens * config.training.steps:,} tokens, take {duration}",
        f"traffic of one step, on the rank that moves most\n{describe_traffic(plan)}",
    ]
    if options.mtbf_hours:
        mtbf_s, stall_s = options.mtbf_hours * 3600, options.save_stall_s
        interval_s = find_interval(mtbf_s, stall_s)
        goodput = measure_goodput(interval_s, mtbf_s, options.restart_s, stall_s)
        blocks.append(
            f"checkpoints: save every {interval_s / 60:.1f} minutes (checkpoint.interval = "
            f"{max(1, round(interval_s / expected.step_time_s))}): goodput {goodput:.1%}"
        )
    if config.checkpoint.local_folder:
        n_bytes = (
            max(memory.parameters + memory.optimizer for memory in plan.memory)
            * plan.cluster.node_size
        )
        blocks.append(
            f"snapshots: at most {format_bytes(n_bytes)} each on a host; {config.checkpoint.local_folder} needs "
            f"{format_bytes(3 * n_bytes)}, for the last two and the one being written"
        )
    return "\n\n".join([*blocks, *(f"remark: {remark}" for remark in plan.remarks)])


def format_duration(seconds: float) -> str:
    """Return "16.1 minutes", in the largest unit of which there is at least one."""
    for unit, length in UNITS.items():
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} seconds"


def describe_memory(plan: Plan) -> str:
    rows = [("", *vars(plan.memory[0]), "live", "taken (est.)", "at most")]
    for pp_rank, alike in group_pp_ranks(plan.planned).items():
        memory = plan.memory[pp_rank]
        like = f" and {len(alike) - 1} like it" * (len(alike) > 1)
        tp = plan.planned.layout.tp
        reserved = plan.cluster.reserve(memory.live, tp) + plan.cluster.context_bytes
        sizes = [
            *vars(memory).values(),
            memory.live,
            reserved,
            find_most_taken(plan.cluster, memory.live, tp),
        ]
        cells = list(map(format_bytes, sizes))
        if not memory.gradients:  # the peak is at the loss of the only microbatch
            cells[1] = "none yet"
        rows.append((f"  pp rank {pp_rank}{like}", *cells))
    legend = (
        "taken: by the allocator and by CUDA; at most: upper end of the 80 % range, which must fit"
    )
    return f"{format_table(rows)}\n  {legend}\n  {BARS['memory'].describe(plan.gpu)}"


def describe_time(expected: Forecast, gpu: str) -> str:
    rows = [
        (f"  {what}", f"{seconds:.3f} s", f"{seconds / expected.step_time_s:.1%}")
        for what, seconds in expected.parts_s.items()
        if seconds
    ]
    family = find_family(expected.workload)
    bar = BARS[POOLED.get(family, family)]
    layout = expected.workload.layout
    low, high = bar.widen(expected.tokens_per_s_per_gpu)
    even = layout.pp - 1
    ideal = even / (even + len(layout.stages) // layout.pp * layout.n_microbatches)
    reason = f" (1F1B with equal stages and free sends: {ideal:.1%})" * (layout.pp > 1)
    return (
        f"{format_table(rows, '<>>')}\n"
        f"  {expected.tokens_per_s_per_gpu:,.0f} tokens/s/GPU (80 % range: {low:,.0f} to {high:,.0f}; "
        f"bar of {POOLED.get(family, family)}: {bar.describe(gpu)})\n"
        f"  MFU {expected.mfu_full:.1%}, {expected.mfu_causal:.1%} with causal attention; "
        f"bubble {expected.bubble:.1%}{reason}"
    )


def describe_traffic(plan: Plan) -> str:
    rows = []
    for (axis, operation), moved in plan.traffic.items():
        nodes = f"over {n} nodes" if (n := plan.count_nodes(axis)) > 1 else "inside a node"
        rows.append(
            (
                f"  {axis}",
                operation,
                f"{moved.n_calls:,.0f} calls",
                format_bytes(moved.n_bytes),
                nodes,
            )
        )
    return format_table(rows, "<<>>") if rows else "  none"
