"""Run step.py in one process as one rank of any layout, with a fake process group and fake tensors.

    plan --dry-run, explain   ->   dry_run(planned, pp_rank)   ->   build_run, train_step under a Meter

A dry run calls the same functions as training, with the same arguments. Tests compare a dry run with the formulas of
plan: the collectives are equal, and memory is within a few percent. Collectives return at once and tensors have no
storage (fake_world.py), so a dry run for 16,384 ranks takes no more time and memory than a dry run for a single rank.
`shorten_run` leaves only a few microbatches in a step. The dry run is compared with the formulas for this shorter step.

Scratch memory of kernels is not counted, because no operator returns it. In a dry run for a GPU, operators save the
same tensors as CUDA kernels do: no S x S mask, and one kernel per norm. compile is off, so the memory is an upper bound
for a compiled run.
"""

import argparse
import re
from contextlib import ExitStack
from dataclasses import replace
from traceback import format_exception
from unittest.mock import patch

import torch

from torchtitan_lite import PACKAGE, build
from torchtitan_lite import step as stepping
from torchtitan_lite.checkpoint.load import create_optimizer_state
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import with_value
from torchtitan_lite.model.batch import find_fields
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.plan import command, fake_world
from torchtitan_lite.tools.plan.memory import RankMemory
from torchtitan_lite.tools.plan.meter import Meter
from torchtitan_lite.tools.plan.planned_run import PlannedRun, plan_run
from torchtitan_lite.tools.plan.transfers import Moved, estimate_traffic
from torchtitan_lite.tools.tables import format_bytes, format_table

# The fake tensors are on the CPU, because a CPU build of torch has no CUDA kernels.
CPU = torch.device("cpu")


def shorten_run(planned: PlannedRun, n_microbatches: int) -> PlannedRun:
    """Return the same run with at most this number of microbatches in a step."""
    layout = planned.layout
    if SCHEDULES[planned.config.parallelism.pipeline_parallel_schedule].fills_pipeline:
        n_microbatches = max(n_microbatches, len(layout.stages))
    n = min(n_microbatches, layout.n_microbatches)
    rows = layout.global_batch_size * n // layout.n_microbatches
    return replace(planned, layout=replace(layout, global_batch_size=rows, n_microbatches=n))


def dry_run(planned: PlannedRun, pp_rank: int = 0) -> Meter:
    """Run one optimizer step, with all its microbatches, as the first of the ranks with this pp rank.

    Return its memory and traffic. The optimizer state exists before the step, as in every step except the first.
    """
    config = with_value(planned.resolved, "compile.enable", False)
    model_args = planned.model_args
    layout = planned.layout
    meter = Meter(layout)
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(
            fake_world.fake_group(
                layout.world_size, rank=pp_rank * (layout.world_size // layout.pp)
            )
        )
        mesh = build_mesh(layout, CPU.type)
        parts = build.build_parts(config, model_args, layout, mesh)
        enter(fake_world.static_stages(config, model_args, layout))
        if planned.cluster.name != "cpu":
            enter(fake_world.gpu_kernels())
        if model_args.moe:
            enter(fake_world.even_experts(planned.workload))
        # The initial weights do not matter here, and computing them would take as long as a microbatch.
        enter(patch.object(build, "initialize_weights", lambda *args: None))
        enter(fake_world.fake_tensors())
        enter(meter.watching())
        run = build.build_run(config, model_args, layout, mesh, CPU, parts=parts)
        meter.name_modules(parts)
        fields = find_fields(config.training.loss, model_args.name)
        try:
            create_optimizer_state(run.optimizer)
            # compute the float8 scales, as the previous step would have done
            for follow_up in run.after_update:
                follow_up()
            meter.restart()
            batch = fake_world.make_fake_batch(layout, config.training.seq_len)
            stepping.train_step(run, batch.with_fields(fields))
        except (ArithmeticError, RuntimeError) as error:
            raise UserError(
                f"a step on tensors without values raises an error in this layout: {describe_crash(error)}. If this "
                "code needs values, use `verify`, which runs real steps. Otherwise, correct it, or change the layout"
            ) from error
        meter.parameters = run.parameters
    return meter


def describe_crash(error: Exception) -> str:
    """Describe an error, with the line of this package that raised it."""
    place = find_place("".join(format_exception(error)))
    return f"{type(error).__name__}: {error}{place}"


def find_place(traceback: str) -> str:
    """Return the innermost line of this package in a traceback, as " (file, line)". Lines in tools/ are skipped."""
    package = re.escape(str(PACKAGE))
    places = re.findall(rf'"{package}(/(?!tools/).*)", (line \d+)', traceback)
    return f" ({', '.join(places[-1])})" if places else ""


def main(options: argparse.Namespace) -> int:
    """Print the plan. Compare formulas with dry runs of a short step, one dry run per group of equal pp ranks."""
    status = command.main(options)
    planned = plan_run(options.config_args, options.gpus, options.gpu)
    short = shorten_run(planned, 2 * planned.layout.pp)
    w = short.workload
    rows = [("", "", "closed form", "dry run")]
    for rank, *_ in w.alike:
        name = f"  {planned.name_rank(rank)}"
        run = dry_run(short, rank)
        memory = RankMemory(w).estimate(rank)
        sizes = map(format_bytes, (memory.live, run.peak_bytes))
        rows.append((name, "live memory at the peak", *sizes))
        traffics = estimate_traffic(w, rank), run.traffic
        for key in traffics[0] | traffics[1]:
            axis, operation = key
            cells = []
            for traffic in traffics:
                moved = traffic.get(key, Moved(0, 0))
                cells.append(f"{moved.n_calls:,.0f}, {format_bytes(moved.n_bytes)}")
            rows.append((name, f"{operation} over {axis}, calls and bytes", *cells))
    print(f"\na step of {short.layout.n_microbatches} microbatches\n{format_table(rows, '<<>>')}")
    return status
