"""`plan --dry-run`: print the plan, then the closed form beside what step.py does on fake tensors, a rank of each kind.

A step with many microbatches is run with a few. Both columns describe that short step.
"""

import argparse

import torch

from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.tools.plan.command import describe, make_plan, report_problems
from torchtitan_lite.tools.plan.dry_run import dry_run, shorten
from torchtitan_lite.tools.plan.forecast import list_memory
from torchtitan_lite.tools.plan.planned_run import group_pp_ranks
from torchtitan_lite.tools.plan.timeline import plan_order
from torchtitan_lite.tools.plan.transfers import Moved, estimate_traffic
from torchtitan_lite.tools.tables import format_bytes, format_table


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    try:
        plan = make_plan(options)
    except ConfigError as error:
        return report_problems(error, options)
    print(describe(plan, options))
    short = shorten(plan.planned, max(3, 2 * plan.planned.layout.pp))  # first, middle, last; or a full pipeline
    order = plan_order(short.config.parallelism, short.layout)
    memory, rows = list_memory(short.workload, order), [("", "", "closed form", "dry run")]
    for rank in group_pp_ranks(short):
        run, closed, name = dry_run(short, rank), estimate_traffic(short.workload, rank, order), f"  pp rank {rank}"
        rows.append((name, "live memory at the peak", *map(format_bytes, (memory[rank].live, run.peak_bytes))))
        for axis, operation in closed | run.traffic:
            both = [traffic.get((axis, operation), Moved(0, 0)) for traffic in (closed, run.traffic)]
            calls = " and ".join(dict.fromkeys(f"{moved.n_calls:,.0f}" for moved in both))
            rows.append((name, f"{operation} over {axis}, {calls} calls", *(format_bytes(m.n_bytes) for m in both)))
    print(f"\na step of {short.layout.n_microbatches} microbatches\n{format_table(rows, '<<>>')}")
    return 0 if plan.fits else 1
