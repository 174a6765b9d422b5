"""`plan`: print the memory, time and traffic of a layout. Formulas compute the plan in less than a second, without
torch.

    memory      memory.py           bubble, time    the simulated schedule, with durations from step_time.py
    traffic     transfers.py        remarks         settings that waste time or memory, and better values

`plan --dry-run` also runs step.py on fake tensors, and prints its results next to the formulas' results.
`plan --search` ranks all layouts.
"""

import argparse
import json
import sys
from datetime import timedelta
from math import ceil

from torchtitan_lite.config.machine import GIB
from torchtitan_lite.tools.plan.cadence import find_interval, measure_goodput
from torchtitan_lite.tools.plan.figures import list_memory, list_traffic
from torchtitan_lite.tools.plan.memory import Memory
from torchtitan_lite.tools.plan.page import draw_page
from torchtitan_lite.tools.plan.planned_run import PlannedRun, plan_run
from torchtitan_lite.tools.plan.remedies import list_remarks
from torchtitan_lite.tools.plan.search import search_layouts
from torchtitan_lite.tools.plan.unmodeled import list_unmodeled
from torchtitan_lite.tools.tables import format_bytes, format_table, plural, write_table


def main(options: argparse.Namespace) -> int:
    if options.search:
        print(search_layouts(options))
        return 0
    planned = plan_run(options.config_args, options.gpus, options.gpu)
    if options.html:
        write_table(options.html, draw_page(planned, options.config_args))
        print(f"open {options.html} in a browser", file=sys.stderr)
    if options.json:
        print(json.dumps(list_figures(planned), indent=2))
    else:
        print(describe_plan(planned, options))
    return int(not planned.fits)


def list_figures(planned: PlannedRun) -> dict[str, object]:
    """Return the figures of the plan for --json. Names end with the unit: bytes, or s for seconds."""
    speed = planned.forecast.tokens_per_s_per_gpu
    return vars(planned.forecast) | {
        "config_name": planned.config.job.config_name,
        "layout": str(planned),
        "gpu": planned.cluster.name,
        "fits": planned.fits,
        "taken_bytes": planned.taken_bytes,
        "live_bytes": planned.memory.live,
        "tokens_per_s_per_gpu_range": planned.speed_bar.widen(speed),
        "unmodeled": list_unmodeled(planned),
        "remarks": list_remarks(planned),
    }


def describe_plan(planned: PlannedRun, options: argparse.Namespace) -> str:
    """Return the full answer as text."""
    config = planned.config
    layout = planned.layout
    step_time_s = planned.forecast.step_time_s
    tokens = planned.workload.tokens_per_step
    n_steps = config.training.steps
    title = (
        f"{planned.config.job.config_name} on {layout.world_size:,} x {options.gpu}: {planned}\n"
        f"{layout.global_batch_size:,} sequences of {config.training.seq_len:,} are {tokens:,} tokens per step"
    )
    if moe := planned.model_args.moe:
        title += f"\na token passes through {moe.top_k} of {moe.n_experts} equally loaded experts"
    average = ", averaged over pp ranks" if layout.pp > 1 else ""
    duration = timedelta(seconds=ceil(n_steps * step_time_s))
    blocks = [
        title,
        f"peak memory of a GPU with {planned.cluster.memory_bytes / GIB:.1f} GiB\n{describe_memory(planned)}",
        f"one step {step_time_s:.3g} s{average}\n{describe_time(planned)}\n"
        f"  {n_steps:,} steps, {tokens * n_steps:,} tokens, take {duration} (h:min:s)",
        f"traffic of one step, on the rank that moves the most bytes\n{describe_traffic(planned)}",
    ]
    if options.mtbf_hours:
        mtbf_s = options.mtbf_hours * 3600
        interval_s = find_interval(mtbf_s, options.save_stall_s)
        goodput = measure_goodput(interval_s, mtbf_s, options.restart_s, options.save_stall_s)
        n = max(1, round(interval_s / step_time_s))
        blocks.append(
            f"checkpoints: save every {interval_s / 60:.1f} minutes (checkpoint.interval = {n}): "
            f"goodput {goodput:.1%}"
        )
    blocks += [f"remark: {remark}" for remark in list_remarks(planned)]
    return "\n\n".join(blocks)


def describe_memory(planned: PlannedRun) -> str:
    rows = [("", *Memory._fields, "live", "at most")]
    for name, memory in list_memory(planned).items():
        sizes = [*memory, memory.live, planned.find_most_taken(memory.live)]
        cells = list(map(format_bytes, sizes))
        if not memory.gradients:  # with one microbatch, the peak is at the loss, before backward
            cells[1] = "none yet"
        rows.append((f"  {name}", *cells))
    legend = "at most: live memory, allocator's reserve and CUDA, at the upper end of the 80 % range; this sum must fit"
    if planned.has_own_reserve:
        legend = "at most: live memory, allocator's reserve and CUDA; this sum must fit"
    return f"{format_table(rows)}\n  {legend}\n  {planned.source_of_reserve}"


def describe_time(planned: PlannedRun) -> str:
    expected = planned.forecast
    rows = []
    for what, seconds in expected.parts_s.items():
        if seconds:
            rows.append((f"  {what}", f"{seconds:.3f} s", f"{seconds / expected.step_time_s:.1%}"))
    bar = planned.speed_bar
    low, high = bar.widen(expected.tokens_per_s_per_gpu)
    compared = f"80 % range: {low:,.0f} to {high:,.0f}; {bar.describe(planned.cluster.name)}"
    bubble = f"bubble {expected.bubble:.1%}"
    _, p, m, v = planned.workload.pipeline
    if p > 1:
        even = (p - 1) / (v * m + p - 1)
        bubble += f" (1F1B with equal stages and sends that take no time: {even:.1%})"
    return (
        f"{format_table(rows, '<>>')}\n"
        f"  {expected.tokens_per_s_per_gpu:,.0f} tokens/s/GPU ({planned.family}: {compared})\n"
        f"  MFU {expected.mfu_full:.1%}, {expected.mfu_causal:.1%} with causal attention; {bubble}"
    )


def describe_traffic(planned: PlannedRun) -> str:
    rows = []
    for calls in list_traffic(planned):
        n_calls = plural(calls.n_calls, "call")
        n_bytes = format_bytes(calls.n_bytes)
        rows.append((f"  {calls.axis}", calls.operation, n_calls, n_bytes, calls.where))
    return format_table(rows, "<<>>") if rows else "  none"
