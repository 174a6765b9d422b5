"""`plan`: print what a layout costs, before it is queued.

memory, traffic, FLOPs    a dry run of step.py as one rank of each kind (dry_run.py)
bubble, time, tokens/s    the schedule, simulated with the closed form's durations (step_time.py)
warnings                  what wastes time or memory, and the number that would be right (remedies.py)
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.preflight import read_run_config
from torchtitan_lite.tools.plan.cluster import Cluster, find_cluster
from torchtitan_lite.tools.plan.dry_run import DryRun, PlannedRun, group_pp_ranks, plan_run, sum_traffic
from torchtitan_lite.tools.plan.forecast import Forecast, forecast
from torchtitan_lite.tools.plan.meter import KINDS
from torchtitan_lite.tools.plan.remedies import list_warnings
from torchtitan_lite.tools.plan.search import Search
from torchtitan_lite.tools.plan.search_report import print_search
from torchtitan_lite.tools.plan.simulator import draw_svg, draw_text, plan_order
from torchtitan_lite.tools.plan.traffic import Moved
from torchtitan_lite.tools.plan.workload import Workload
from torchtitan_lite.tools.tables import format_bytes, format_table


@dataclass(frozen=True)
class Plan:
    """A run's costs before it starts."""

    planned: PlannedRun
    gpu: str
    cluster: Cluster
    groups: dict[int, list[int]]  # pp rank that is run -> pp ranks that are like it
    runs: dict[int, DryRun]
    workload: Workload
    forecast: Forecast

    def reserved_bytes(self, run: DryRun) -> float:
        """Return the estimated bytes of the allocator, which keeps more than is in use."""
        return run.peak_bytes * self.cluster.reserve_factor

    @property
    def fits(self) -> bool:
        return all(self.reserved_bytes(run) <= self.cluster.memory_bytes for run in self.runs.values())

    @property
    def warnings(self) -> list[str]:
        bubble = self.forecast.bubble
        return list_warnings(self.planned.config, self.workload, self.cluster, bubble=bubble, fits=self.fits)

    @property
    def traffic(self) -> dict[tuple[str, str, str], Moved]:
        """(axis, operation, tier of links) -> what the rank moves that moves most."""
        find_tier = self.cluster.find_tier
        return sum_traffic(self.runs, lambda call: (call.axis, call.operation, find_tier(call.stride, call.n_ranks)))


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    try:
        cluster = find_cluster(options.gpu, options.hardware)
        if options.search:
            search_layouts(options.config_args, options, cluster)
            return 0
        plan = make_plan(options.config_args, options, cluster)
    except ConfigError as error:
        if options.json:
            print(json.dumps({"problems": list(map(asdict, error.problems))}, default=str))
        print(f"There is no plan:\n{error}", file=sys.stderr)
        return 2
    if options.svg:
        options.svg.write_text(draw_svg(plan.forecast.timeline, plan.planned.config_name), encoding="utf-8")
    print(json.dumps(list_for_json(plan)) if options.json else describe(plan, options.tokens))
    return 0 if plan.fits else 1


def search_layouts(config_args: list[str], options: argparse.Namespace, cluster: Cluster) -> None:
    reading = read_run_config(config_args)
    problems = list(reading.problems)
    if options.gpus is None:
        problems.append(Problem("--gpus", None, "a search needs their number", "Write --gpus 64, for instance"))
    if problems:
        raise ConfigError(problems)
    toml_file = options.toml or Path(f"{reading.config_name}_{options.gpus}_{options.gpu}.toml")
    model_args = resolve_model(reading.config.model)
    print_search(Search(reading.config, model_args, options.gpus, cluster, options.imbalance), toml_file)


def make_plan(config_args: list[str], options: argparse.Namespace, cluster: Cluster) -> Plan:
    device_type = "cpu" if options.gpu == "cpu" else "cuda"
    planned = plan_run(config_args, options.gpus, device_type, imbalance=options.imbalance)
    groups, runs = group_pp_ranks(planned), {}
    for pp_rank in groups:
        start = time.monotonic()
        runs[pp_rank] = planned.dry_run(pp_rank)
        print(f"  pp rank {pp_rank} run in {time.monotonic() - start:.1f} s", file=sys.stderr)
    workload = planned.describe_workload()
    expected = forecast(workload, cluster, plan_order(planned.config.parallelism, planned.layout))
    return Plan(planned, options.gpu, cluster, groups, runs, workload, expected)


# ---------------------------------------------------------------- for people


def describe(plan: Plan, n_tokens: float | None) -> str:
    planned, layout, rate = plan.planned, plan.planned.layout, plan.forecast.rate
    config = planned.config
    tokens_per_step = layout.global_batch_size * config.training.seq_len
    n_tokens = n_tokens or tokens_per_step * config.training.steps
    exposed = [f"{axis} {seconds:.3g} s" for axis, seconds in plan.forecast.exposed_s.items() if seconds]
    schedule = f", {config.parallelism.pipeline_parallel_schedule}, bubble {plan.forecast.bubble:.1%}"
    flops = [f"{run.n_flops / 1e12:,.3f} TFLOP on pp rank {rank}" for rank, run in plan.runs.items()]
    blocks = [
        f"{planned.config_name} on {layout.world_size:,} x {plan.gpu}: {layout}" + schedule * (layout.pp > 1),
        f"{layout.global_batch_size:,} sequences of {config.training.seq_len:,} are {tokens_per_step:,} tokens a step: "
        f"data-parallel ranks {layout.dp} x microbatches {layout.n_microbatches} x sequences {layout.microbatch_size}"
        f"{describe_experts(planned)}",
        f"peak memory of a GPU, of {plan.cluster.memory_bytes / GIB:.1f} GiB\n{describe_memory(plan)}",
        f"traffic of one step, of the rank that moves most\n{describe_traffic(plan)}",
        f"FLOPs of one step (matmuls and attention, recompute included): {', '.join(flops)}",
        f"one step {rate.step_time_s:.3g} s: {rate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {rate.mfu_full:.1%} "
        f"({rate.mfu_causal:.1%} with causal attention)\n"
        f"waits for other ranks in it, without the bubble: {', '.join(exposed) or 'nothing'}\n"
        f"{n_tokens:,.0f} tokens take {rate.count_days(n_tokens, layout.world_size):,.3g} days",
    ]
    if layout.pp > 1:
        blocks.append(f"timeline of a step (forecast)\n{draw_text(plan.forecast.timeline)}")
    if config.compile.enable:
        blocks.append("compile is on: its fusions are not known here, so activations need at most this much.")
    blocks += [f"warning: {warning}" for warning in plan.warnings]
    return "\n\n".join(blocks)


def describe_experts(planned: PlannedRun) -> str:
    """Return a line about the MoE layers; none for a dense model."""
    moe, layout = planned.model_args.moe, planned.layout
    if moe is None:
        return ""
    line = f"\na token passes through {moe.top_k} of {moe.n_experts} experts"
    if layout.ep == 1:
        return f"{line}, which each rank computes for its own tokens"
    held = f"each rank has {moe.n_experts // layout.ep} of them, shared with {layout.efsdp - 1} others by FSDP"
    return f"{line}; {held}; the most loaded rank gets {planned.imbalance:g} times the mean of the tokens"


def describe_memory(plan: Plan) -> str:
    rows = [("", *KINDS, "live", "reserved (est.)")]
    for pp_rank, alike in plan.groups.items():
        run = plan.runs[pp_rank]
        numbers = [run.memory.get(kind, 0) for kind in KINDS] + [run.peak_bytes, plan.reserved_bytes(run)]
        like = f" and {len(alike) - 1} like it" * (len(alike) > 1)
        rows.append((f"  pp rank {pp_rank}{like}", *map(format_bytes, numbers)))
    return format_table(rows)


def describe_traffic(plan: Plan) -> str:
    tiers = {"node": "inside a node", "network": "between nodes"}
    rows = [
        (f"  {axis}", operation, f"{moved.n_calls:,} calls", format_bytes(moved.n_bytes), tiers[tier])
        for (axis, operation, tier), moved in plan.traffic.items()
    ]
    return format_table(rows) if rows else "  none"


# ---------------------------------------------------------------- for programs


def list_for_json(plan: Plan) -> dict[str, object]:
    layout, rate = plan.planned.layout, plan.forecast.rate
    return {
        "layout": layout.degrees | ({"ep": layout.ep, "efsdp": layout.efsdp} if layout.ep else {}),
        "imbalance": plan.planned.imbalance,
        "gpu": plan.gpu,
        "fits": plan.fits,
        "pp_ranks": {
            rank: {
                "alike": plan.groups[rank],
                "memory": run.memory,
                "live_bytes": run.peak_bytes,
                "reserved_bytes": plan.reserved_bytes(run),
                "flops": run.n_flops,
            }
            for rank, run in plan.runs.items()
        },
        "traffic": [
            {"axis": axis, "operation": operation, "tier": tier, "calls": moved.n_calls, "bytes": moved.n_bytes}
            for (axis, operation, tier), moved in plan.traffic.items()
        ],
        "bubble": plan.forecast.bubble,
        **asdict(rate),
        "exposed_s": plan.forecast.exposed_s,
        "warnings": plan.warnings,
    }
