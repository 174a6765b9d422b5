"""Print the mesh of a layout, each rank's weights, and the code line of every collective, from dry runs of step.py."""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.plan.dry_run import dry_run, shorten_run
from torchtitan_lite.tools.plan.meter import Collective
from torchtitan_lite.tools.plan.page import show
from torchtitan_lite.tools.plan.planned_run import plan_run
from torchtitan_lite.tools.plan.slices import find_slices
from torchtitan_lite.tools.plan.walk import locate, write_walk
from torchtitan_lite.tools.tables import format_bytes, format_table, write_table

LAYER = re.compile(r"(layers\.\d+|[^.]*)\.?(.*)")  # splits an FQN after its layer or root module
FEW = 3  # microbatches of a dry run: the first, one in the middle, the last
MOST_SHOWN = 8  # if a mesh has more ranks, only the first two and the last are shown


def main(options: argparse.Namespace) -> int:
    """Print the mesh. For each group of equal pp ranks, print the slices and the collectives of one pp rank."""
    planned = plan_run(options.config_args, options.gpus, options.gpu)
    layout = planned.layout
    n_ranks = layout.world_size
    if (options.rank or 0) >= n_ranks:
        raise UserError(
            f"--rank = {options.rank}: there are {n_ranks} ranks. Use 0 to {n_ranks - 1}"
        )
    short = shorten_run(planned, FEW)
    if options.html:
        write_table(options.html, write_walk(short, options.rank or 0))
        print(f"open {options.html} in a browser")
        return 0
    print(f"{planned.config.job.config_name} on {n_ranks:,} ranks: {layout}\n")
    mesh = torch.arange(n_ranks).view([layout.degrees[dim] for dim in layout.used_dims])
    torch.set_printoptions(edgeitems=1)  # print only the first and the last ranks of a large mesh
    print(f"mesh ({', '.join(layout.used_dims)}):\n{mesh}")
    if options.rank is not None:
        rows = show(find_slices(layout, options.rank, 1, 1).sequences)
        print(f"\nrank {options.rank} reads rows {rows} of {layout.global_batch_size}")
    per_stage = layout.world_size // layout.pp
    for alike in planned.workload.alike:
        pp_rank = alike[0]
        run = dry_run(short, pp_rank)
        first = pp_rank * per_stage
        ranks = range(first, first + per_stage)
        if options.rank is not None:
            ranks = [first + options.rank % per_stage]
        elif per_stage > MOST_SHOWN:
            ranks = [*ranks[:2], ranks[-1]]
        title = f"---- {planned.name_rank(pp_rank)} ({len(alike)} alike)"
        print(f"\n{title}: parameters\n\n{format_parameters(run.parameters, ranks)}")
        print(f"\n{title}: collectives of one rank\n\n{format_collectives(run.collectives)}")
    n = short.layout.n_microbatches
    print(f"\nThe dry run has {n} of {layout.n_microbatches} microbatches.")
    return 0


def format_parameters(parameters: dict[str, Tensor], ranks: list[int]) -> str:
    """Return a table of the parameter slices on these ranks of a stage. Layers with equal slices share a row."""
    layers_of = defaultdict(list)  # row -> its layers
    for fqn, parameter in parameters.items():
        layer, name = LAYER.fullmatch(fqn).groups()
        slices = tuple(describe_slice(parameter, rank) for rank in ranks)
        kind = layer.partition(".")[0]
        shape = str(list(parameter.shape))
        layers_of[kind, name, shape, slices].append(layer)
    table = [("", "", *(f"rank {rank}" for rank in ranks))]
    for (_, name, shape, slices), layers in layers_of.items():
        table.append((f"  {join_layers(layers)}.{name}", shape, *slices))
    return format_table(table)


def describe_slice(parameter: Tensor, rank: int) -> str:
    """Return the slice of a parameter that a rank stores: "rows 0..31, columns 16..31"."""
    if not isinstance(parameter, DTensor):
        return "all"
    spans = locate(parameter, rank)
    if not all(spans):
        return "nothing"
    names = ("experts", "rows", "columns")[-len(spans) :] if len(spans) > 1 else ["elements"]
    held = []
    for name, span, whole in zip(names, spans, parameter.shape, strict=True):
        if len(span) < whole:
            held.append(f"{name} {show(span)}")
    return ", ".join(held) or "all"


def join_layers(owners: list[str]) -> str:
    """Return "layers.2-4" for "layers.2", "layers.3", "layers.4". If they are in the order of backward, return
    "layers.4-2"."""
    return owners[0] if len(owners) == 1 else f"{owners[0]}-{owners[-1].removeprefix('layers.')}"


def format_collectives(collectives: list[Collective]) -> str:
    """Return a table of the collectives in and between forward and backward. Identical passes, and identical layers
    within a pass, are printed once."""
    passes = Counter()
    for phase, calls in groupby(
        collectives, key=lambda call: call.site.phase.replace("recompute", "backward")
    ):
        passes[phase, tuple(list_walk_rows(calls))] += 1
    table = [("", "collective", "whole tensor", "bytes of a rank", "module", "line")]
    for (phase, rows), n in passes.items():
        table.append((f"{phase}: {n} x", *[""] * 5))
        table += rows
    return format_table(table)


def list_walk_rows(calls: Iterable[Collective]) -> list[tuple[str, ...]]:
    """Return the table rows of one pass, such as a forward. Successive layers with the same collectives share rows."""
    by_owner = defaultdict(list)
    for call in calls:
        owner, module = LAYER.fullmatch(call.site.module).groups()
        if call.site.phase == "recompute":
            module += " again"
        tensor = f"{list(call.shape)} {call.dtype}"
        n_bytes = format_bytes(call.n_bytes)
        operation = f"{call.operation} over {call.axis}"
        by_owner[owner].append((operation, tensor, n_bytes, module, call.site.line))
    table = []
    for cells, owners in groupby(by_owner, key=by_owner.get):
        owners = list(owners)
        name = f"  {join_layers(owners) or 'the step'}"
        if len(owners) > 1:
            name += ": each"
        for row in cells:
            table.append((name, *row))
            name = ""
    return table
