"""Explain a layout by dry runs of step.py: the mesh, each rank's weights, the line of every collective."""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby, product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.tools.plan.dry_run import dry_run, shorten
from torchtitan_lite.tools.plan.meter import Collective
from torchtitan_lite.tools.plan.planned_run import PlannedRun, group_pp_ranks, plan_run
from torchtitan_lite.tools.tables import format_bytes, format_table

LAYER = re.compile(r"(layers\.\d+|[^.]*)\.?(.*)")  # an FQN's layer or root module, and the rest
FEW = 3  # microbatches of a dry run: the first, one in the middle, the last
MOST_SHOWN = 8  # ranks or groups; of more, the first two and the last are shown


def main(options: argparse.Namespace) -> int:
    planned = plan_run(options.config_args, options.gpus, options.device)
    n = planned.layout.world_size
    if not 0 <= options.rank < n:
        raise ConfigError(
            [Problem("--rank", options.rank, f"there are {n} ranks", f"Use 0 to {n - 1}")]
        )
    print(f"{planned.config_name} on {n:,} ranks: {planned.layout}\n")
    if options.token:
        explain_token(planned, options.rank)
    else:
        explain_step(planned)
    return 0


def explain_step(planned: PlannedRun) -> None:
    """Print the mesh, and the parameters and collectives of one rank per kind of stage."""
    layout = planned.layout
    short = shorten(planned, FEW)
    print(draw_mesh(layout.degrees))
    n_ranks = layout.strides["pp"]  # of a stage
    for pp_rank, alike in group_pp_ranks(planned).items():
        run = dry_run(short, pp_rank)
        ranks = elide(range(pp_rank * n_ranks, (pp_rank + 1) * n_ranks))
        title = f"pp rank {pp_rank} ({len(alike)} alike)"
        print_part(title, format_parameters(run.parameters, ranks), run.collectives)
    print(
        f"\nThe dry run has {short.layout.n_microbatches} of {layout.n_microbatches} microbatches."
    )


def explain_token(planned: PlannedRun, rank: int) -> None:
    """Follow the first microbatch of a rank forward through all stages: print weight slices and collectives."""
    layout = planned.layout
    short = shorten(planned, FEW)
    at = {dim: rank // layout.strides[dim] % degree for dim, degree in layout.degrees.items()}
    n_rows = layout.global_batch_size // layout.dp
    first = (at["dp_replicate"] * layout.dp_shard + at["dp_shard"]) * n_rows
    print(f"rank {rank} has the coordinates {', '.join(f'{dim} {at[dim]}' for dim in at)}.")
    rows = f"rows {first}..{first + n_rows - 1} of {layout.global_batch_size}"
    print(f"It reads {rows}. Forward of its first microbatch:")
    runs = [dry_run(short, pp_rank) for pp_rank in range(layout.pp)]
    before = layout.stage_ranks[0]
    for stage, pp_rank in enumerate(layout.stage_ranks):
        run = runs[pp_rank]
        here = rank % layout.strides["pp"] + pp_rank * layout.strides["pp"]
        # FSDP gathers "norm, output" together.
        own = tuple(fqn + end for fqn in layout.stages[stage] for end in ".,")
        parameters = {fqn: run.parameters[fqn] for fqn in run.parameters if fqn.startswith(own)}
        calls = []
        if pp_rank != before:
            calls.append(next(call for call in run.collectives if call.operation == "receive"))
        forward = [call for call in run.collectives if call.site.phase == "forward"]
        forward = [call for call in forward if f"{call.site.module}.".startswith(own)]
        n_calls = Counter(forward)
        for call in forward:  # all microbatches make the same calls: keep those of one
            if calls.count(call) * short.layout.n_microbatches < n_calls[call]:
                calls.append(call)
        print_part(f"stage {stage} on rank {here}", format_parameters(parameters, [here]), calls)
        before = pp_rank


def print_part(title: str, parameters: str, calls: list[Collective]) -> None:
    print(f"\n---- {title}: parameters\n\n{parameters}")
    print(f"\n---- {title}: collectives of one rank\n\n{format_collectives(calls)}")


def draw_mesh(degrees: dict[str, int]) -> str:
    """List the groups of the innermost dim, each with its place on the other dims."""
    *outer, inner = [dim for dim, degree in degrees.items() if degree > 1] or ["tp"]
    n = degrees[inner]
    sizes = [range(degrees[dim]) for dim in outer]
    lines = []
    for group, place in enumerate(product(*sizes)):
        labels = [f"{dim} {index}  " for dim, index in zip(outer, place, strict=True)]
        lines.append(f"  {''.join(labels)}ranks {group * n}..{group * n + n - 1}")
    return "\n".join([f"mesh: {len(lines)} groups of {inner}", *elide(lines)])


def elide(values: Sequence) -> list:
    return list(values) if len(values) <= MOST_SHOWN else [*values[:2], values[-1]]


def format_parameters(parameters: dict[str, Tensor], ranks: list[int]) -> str:
    """Return a table of the parameter slices on these ranks of a stage. Layers with equal slices share a row."""
    layers_of = defaultdict(list)  # by row
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
    """Return the slice of a parameter that a rank holds: "rows 0..31, columns 16..31"."""
    if not isinstance(parameter, DTensor):
        return "all"
    mesh = parameter.device_mesh  # spans all ranks of a stage
    coordinate = torch.unravel_index(torch.tensor(rank % mesh.size()), mesh.shape)
    shape, offset = _compute_local_shape_and_global_offset(
        parameter.shape, mesh.shape, list(map(int, coordinate)), parameter.placements
    )
    if 0 in shape:
        return "nothing"
    names = ("experts", "rows", "columns")[-len(shape) :] if len(shape) > 1 else ["elements"]
    held = []
    for name, begin, n, whole in zip(names, offset, shape, parameter.shape, strict=True):
        if n < whole:
            held.append(f"{name} {begin}..{begin + n - 1}")
    return ", ".join(held) or "all"


def join_layers(owners: list[str]) -> str:
    """Return "layers.2-4" for "layers.2", "layers.3", "layers.4", and "layers.4-2" for the order of backward."""
    return owners[0] if len(owners) == 1 else f"{owners[0]}-{owners[-1].removeprefix('layers.')}"


def format_collectives(collectives: list[Collective]) -> str:
    """Return a table of the collectives in forward, in backward and between. Repeated passes and layers are merged."""
    passes = Counter()
    for phase, calls in groupby(collectives, key=find_pass):
        passes[phase, tuple(list_rows(calls))] += 1
    table = [("", "collective", "whole tensor", "bytes of a rank", "module", "line")]
    for (phase, rows), n in passes.items():
        table.append((f"{phase}: {n} x", *[""] * 5))
        table += rows
    return format_table(table)


def find_pass(call: Collective) -> str:
    return call.site.phase.replace("recompute", "backward")


def list_rows(calls: Iterable[Collective]) -> list[tuple[str, ...]]:
    """Return the rows of one pass. Successive layers with the same collectives share their rows."""
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
