"""`explain`: print a step in words, who holds which slice of which weight, and every collective with its line of code.

Everything is recorded in a dry run of step.py (dry_run.py); no table says what should happen. `explain --token` follows
one token through the layout instead (token_way.py).
"""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import groupby
from math import prod

import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.tools.plan.dry_run import DryRun, Sharding, dry_run, shorten
from torchtitan_lite.tools.plan.meter import Collective
from torchtitan_lite.tools.plan.planned_run import PlannedRun, group_pp_ranks, plan_run
from torchtitan_lite.tools.plan.token_way import describe_way
from torchtitan_lite.tools.tables import format_bytes, format_table

MOST_SHOWN = 8  # ranks or coordinates in a row; otherwise the first two and the last
FEW = 3  # microbatches that are run: the first, one of the middle, the last


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    try:
        planned = plan_run(options.config_args, options.gpus, options.device)
        limits = {"--stage": (options.stage, planned.layout.pp), "--rank": (options.rank, planned.layout.world_size)}
        for key, (value, n) in limits.items():
            if value is not None and not 0 <= value < n:
                raise ConfigError([Problem(key, value, f"there are {n}", f"Use 0 to {n - 1}")])
    except ConfigError as error:
        print(f"This run could not start:\n{error}", file=sys.stderr)
        return 2
    if options.token:
        print(describe_way(planned, options.rank or 0))
        return 0
    short = shorten(planned, FEW)
    groups = group_pp_ranks(planned) if options.stage is None else {options.stage: [options.stage]}
    runs = {rank: dry_run(short, rank) for rank in groups}
    if options.json:
        calls = [{"pp_rank": rank, **asdict(call)} for rank, run in runs.items() for call in run.collectives]
        print(json.dumps({"layout": asdict(planned.layout), "collectives": calls}))
        return 0
    layout = planned.layout
    print(f"{planned.config_name} on {layout.world_size:,} ranks: {layout}\n\n{describe_step(planned)}\n")
    print(draw_mesh(layout.degrees))
    if layout.ep:
        of_experts = {dim: getattr(layout, dim) for dim in ("pp", "dp_replicate", "efsdp", "ep")}
        print(f"\nexperts of a layer, on the same ranks\n{draw_mesh(of_experts)}")
    for rank, alike in groups.items():
        title = f"pp rank {rank}" + f" (and {len(alike) - 1} like it)" * (len(alike) > 1) if layout.pp > 1 else "rank 0"
        print(f"\n---- {title}: parameters\n\n{format_parameters(layout, runs[rank])}")
        print(f"\n---- {title}: collectives of one step, bytes that one rank moves\n")
        print(format_collectives(runs[rank].collectives, layout.n_microbatches))
    return 0


def describe_step(planned: PlannedRun) -> str:
    """Describe one optimizer step of this layout, in numbered sentences."""
    layout, config, moe = planned.layout, planned.config, planned.model_args.moe
    shard = layout.dp_shard * layout.cp
    kept = "freed after it" if layout.zero_stage == 3 else "kept until the step ends"
    sentences = [
        f"Each of {layout.dp} data-parallel ranks takes {layout.global_batch_size // layout.dp} of "
        f"{layout.global_batch_size} sequences of {config.training.seq_len} tokens, in microbatches: "
        f"{layout.n_microbatches} x {layout.microbatch_size}.",
        f"A cp rank computes an early and a late piece of each sequence, 1/{layout.cp} in all." * (layout.cp > 1),
        f"Forward and backward go through {len(layout.stages)} pipeline stages in the order of "
        f"{config.parallelism.pipeline_parallel_schedule}; hidden states and their gradients go from rank to rank."
        * (layout.pp > 1),
        f"Before a block runs, its parameters are gathered in {config.training.mixed_precision_param} from {shard} "
        f"ranks; they are {kept}." * (shard > 1),
        "Inside a block each tp rank computes its heads and its columns of the feed-forward on whole sequences, and "
        "returns its slice of the sequence." * (layout.tp > 1),
        f"A router picks {moe.top_k} of {moe.n_experts} experts for each token. Each of {layout.ep} ep ranks has "
        f"{moe.n_experts // layout.ep}: tokens are sent there, and back."
        if moe
        else "",
        f"Recompute: {config.activation_checkpoint.mode}. Collectives of recomputed modules are made again."
        * (config.activation_checkpoint.mode != "none"),
        f"Gradients are summed in {config.training.mixed_precision_reduce}; each of {shard} ranks keeps its slice."
        * (shard > 1),
        f"The {layout.dp_replicate} replicas add up their slices." * (layout.dp_replicate > 1),
        f"The ranks agree on the norm of all gradients, and {config.optimizer.name} updates the slices they hold.",
    ]
    return "\n".join(f"  {number}. {line}" for number, line in enumerate(filter(None, sentences), 1))


def draw_mesh(degrees: dict[str, int]) -> str:
    """Draw every rank in the mesh: the innermost dim in brackets, the next across, the outer ones down.

    `degrees`: size of each dim, outermost first.
    """
    used = [dim for dim, degree in degrees.items() if degree > 1] or [list(degrees)[-1]]
    *down, across, inner = [None, *used] if len(used) == 1 else used
    sizes = list(degrees.values())
    strides = {None: 0, **{dim: prod(sizes[place + 1 :]) for place, dim in enumerate(degrees)}}

    def steps(dim: str | None) -> list[int | None]:
        return elide(range(degrees[dim] if dim else 1))

    def group(start: int) -> str:
        return f"[{' '.join('..' if i is None else str(start + i * strides[inner]) for i in steps(inner))}]"

    rows = [("", 0)]
    for dim in down:
        rows = [
            (f"{label}{dim} {'..' if i is None else i}  ", start + (i or 0) * strides[dim])
            for label, start in rows
            for i in steps(dim)
        ]
    lines = [f"mesh: {inner} in brackets" + f", {across} across" * bool(across)]
    for label, start in rows:
        line = "  ".join("..." if i is None else group(start + i * strides[across]) for i in steps(across))
        lines.append(f"  {label}{'...' if '..' in label else line}")
    return "\n".join(lines)


def elide(values: Iterable[int]) -> list[int | None]:
    """Return all of a few values; of many the first two, None for a gap, and the last."""
    values = list(values)
    return values if len(values) <= MOST_SHOWN else [*values[:2], None, values[-1]]


# ---------------------------------------------------------------- parameters


def format_parameters(layout: Layout, run: DryRun) -> str:
    """Return a table of each parameter's slices on the ranks of this stage, with one row for equal layers."""
    per_stage = layout.world_size // layout.pp
    ranks = elide(range(run.pp_rank * per_stage, (run.pp_rank + 1) * per_stage))
    rows: dict[tuple, list[str]] = {}
    for fqn, parameter in run.parameters.items():
        head, _, rest = fqn.partition(".")
        layer, _, name = rest.partition(".") if head == "layers" else ("", "", fqn)
        slices = tuple("..." if rank is None else describe_slice(parameter, layout, rank) for rank in ranks)
        rows.setdefault((name, parameter.shape, slices), []).append(layer)
    table = [("", "", *("..." if rank is None else f"rank {rank}" for rank in ranks))]
    for (name, shape, slices), layers in rows.items():
        prefix = f"layers.{format_layers(layers)}." if layers[0] else ""
        table.append((prefix + name, str(list(shape)), *slices))
    return format_table(table)


def describe_slice(parameter: Sharding, layout: Layout, rank: int) -> str:
    """Return the slice of a parameter that this rank holds: "rows 0..31, columns 16..31".

    A matrix of all experts has its rows as (in, out) features.
    """
    coordinates = {dim: rank // stride % getattr(layout, dim, 1) for dim, stride in layout.strides.items()}
    coordinates["dp_shard_cp"] = coordinates["dp_shard"] * layout.cp + coordinates["cp"]
    degrees, coordinate = tuple(parameter.degrees.values()), [coordinates[dim] for dim in parameter.degrees]
    shape, offset = _compute_local_shape_and_global_offset(parameter.shape, degrees, coordinate, parameter.placements)
    if 0 in shape:
        return "nothing"
    names = {1: ("elements",), 2: ("rows", "columns"), 3: ("experts", "rows", "columns")}[len(shape)]
    sizes = zip(names, offset, shape, parameter.shape, strict=True)
    return ", ".join(f"{name} {begin}..{begin + n - 1}" for name, begin, n, whole in sizes if n < whole) or "all"


def format_layers(layers: list[str]) -> str:
    """Return ["2", "3", "4"] as 2-4, and ["4", "3", "2"], the order of backward, as 4-2."""
    return layers[0] if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


# ---------------------------------------------------------------- collectives


def format_collectives(collectives: list[Collective], n_microbatches: int) -> str:
    """Return a table of forward, backward, and what is between them: equal parts and equal layers once.

    A part that comes in each of the FEW microbatches that were run comes in all; otherwise only in the first or last.
    """
    walks = {"forward": "forward", "": "between"}
    parts: dict[tuple, int] = {}
    for walk, calls in groupby(collectives, key=lambda call: walks.get(call.place.walk, "backward")):
        part = walk, fold_layers(calls)
        parts[part] = parts.get(part, 0) + 1
    rows: list[tuple[str, ...]] = []
    for (walk, folded), n in parts.items():
        times = n if n < 2 or n_microbatches <= FEW else n + n_microbatches - FEW
        rows.append((f"{walk}, {'once' if times == 1 else f'{times} times'}", *[""] * 5))
        for owners, calls in folded:
            name = owners[0] or "the step"
            if len(owners) > 1:
                name = f"layers.{format_layers([owner.removeprefix('layers.') for owner in owners])}: each"
            for number, (call, n_calls) in enumerate(calls):
                operation = f"{call.operation} over {call.axis}" + f" x{n_calls}" * (n_calls > 1)
                tensor = f"{list(call.shape)} {call.dtype}", format_bytes(call.n_bytes)
                module = call.place.module + " again" * (call.place.walk == "recompute")
                line = f"{call.place.line} {call.place.function}" + f", {call.place.through}" * bool(call.place.through)
                rows.append(("  " + name * (number == 0), operation, *tensor, module, line))
    return format_table(rows) if rows else "  none: there is only one rank"


def fold_layers(collectives: Iterable[Collective]) -> tuple:
    """Group collectives by layer or root module, in the order of their first call; equal neighbors share their calls.

    Returns (layers, ((collective with its module inside the layer, calls in a row), ...)), ...
    """
    by_owner: dict[str, list[Collective]] = {}
    for collective in collectives:
        parts = collective.place.module.split(".")
        n_owner = 2 if parts[0] == "layers" else 1
        place = replace(collective.place, module=".".join(parts[n_owner:]))
        by_owner.setdefault(".".join(parts[:n_owner]), []).append(replace(collective, place=place))
    folded: list[tuple[list[str], tuple]] = []
    for owner, own in by_owner.items():
        counted = tuple((collective, len(list(calls))) for collective, calls in groupby(own))
        if folded and folded[-1][1] == counted:
            folded[-1][0].append(owner)
        else:
            folded.append(([owner], counted))
    return tuple((tuple(owners), counted) for owners, counted in folded)
