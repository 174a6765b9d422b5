"""`plan --dry-run`: print the closed form, and beside it what step.py does as one rank of each kind on fake tensors.

A step with many microbatches is run with a few: `of a step of 8 microbatches`. Both columns are of that step.
"""

import argparse
import json

import torch

from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.tools.plan.command import describe, make_plan, report_problems
from torchtitan_lite.tools.plan.dry_run import dry_run, shorten
from torchtitan_lite.tools.plan.forecast import list_memory
from torchtitan_lite.tools.plan.planned_run import PlannedRun, group_pp_ranks
from torchtitan_lite.tools.plan.timeline import plan_order
from torchtitan_lite.tools.plan.transfers import Moved, estimate_traffic
from torchtitan_lite.tools.tables import format_bytes, format_table


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    try:
        plan = make_plan(options)
    except ConfigError as error:
        return report_problems(error, options)
    layout = plan.planned.layout
    short = shorten(plan.planned, 2 * layout.pp if layout.pp > 1 else 3)  # a full pipeline; first, middle, last
    rows = compare(short)
    if options.json:
        print(json.dumps([dict(zip(("pp_rank", "what", "closed_form", "dry_run"), row, strict=True)) for row in rows]))
        return 0
    print(
        f"{describe(plan, options)}\n\nclosed form and dry run of a step of {short.layout.n_microbatches} microbatches"
    )
    table = [(f"  pp rank {rank}", what, format_bytes(closed), format_bytes(dry)) for rank, what, closed, dry in rows]
    print(format_table([("", "", "closed form", "dry run"), *table], "<<>>"))
    return 0 if plan.fits else 1


def compare(planned: PlannedRun) -> list[tuple[int, str, float, float]]:
    """Return (pp rank, what, bytes of the closed form, bytes of the dry run)."""
    workload, order = planned.workload, plan_order(planned.config.parallelism, planned.layout)
    closed_memory, rows = list_memory(workload, order), []
    for rank in group_pp_ranks(planned):
        run = dry_run(planned, rank)
        rows.append((rank, "live memory at the peak", closed_memory[rank].live, run.peak_bytes))
        measured = run.sum_traffic(lambda call: (call.axis, call.operation))
        closed = estimate_traffic(workload, rank, order)
        for axis, operation in dict.fromkeys([*closed, *measured]):
            found = [moved.get((axis, operation), Moved(0, 0.0)) for moved in (closed, measured)]
            calls = " and ".join(dict.fromkeys(f"{each.n_calls:,.0f}" for each in found))
            rows.append((rank, f"{operation} over {axis}, {calls} calls", found[0].n_bytes, found[1].n_bytes))
    return rows
