"""`explain`: print who holds which slice of which weight, every collective of a step, and the step in words.

Everything is recorded in a dry run of step.py (dry_run.py); no table says what should happen.
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
from torchtitan_lite.tools.plan.dry_run import DryRun, PlannedRun, Sharding, group_pp_ranks, plan_run, sum_traffic
from torchtitan_lite.tools.plan.traffic import Collective
from torchtitan_lite.tools.tables import format_bytes, format_table

MOST_SHOWN = 8  # ranks or coordinates in a row; otherwise the first two and the last


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    try:
        planned = plan_run(options.config_args, options.gpus, options.device, imbalance=options.imbalance)
        if options.stage is not None and not 0 <= options.stage < planned.layout.pp:
            why, remedy = f"there are {planned.layout.pp} pp ranks", f"Use 0 to {planned.layout.pp - 1}"
            raise ConfigError([Problem("--stage", options.stage, why, remedy)])
    except ConfigError as error:
        print(f"This run could not start:\n{error}", file=sys.stderr)
        return 2
    groups, runs = run_pp_ranks(planned, options.stage)
    if options.json:
        print(json.dumps({"layout": asdict(planned.layout), "collectives": list_for_json(runs)}))
    else:
        print(explain(planned, groups, runs))
    return 0


def explain(planned: PlannedRun, groups: dict[int, list[int]], runs: dict[int, DryRun]) -> str:
    """Return the whole explanation, for people."""
    layout = planned.layout
    blocks = [
        f"{planned.config_name} on {layout.world_size:,} rank{'s' * (layout.world_size > 1)}: {layout}",
        draw_mesh(layout.degrees),
    ]
    if layout.ep:
        of_experts = {dim: getattr(layout, dim) for dim in ("pp", "dp_replicate", "efsdp", "ep")}
        blocks.append(f"experts of a layer, on the same ranks\n{draw_mesh(of_experts)}")
    for rank, alike in groups.items():
        title = f"pp rank {rank}" + f" (and {len(alike) - 1} like it)" * (len(alike) > 1) if layout.pp > 1 else "rank 0"
        blocks += [
            f"---- {title}: parameters",
            format_parameters(layout, runs[rank]),
            f"---- {title}: collectives of one step, bytes that one rank moves",
            format_collectives(list_sections(runs[rank])),
        ]
    return "\n\n".join([*blocks, "---- one step in words", describe_step(planned, runs)])


# ---------------------------------------------------------------- mesh and parameters


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

    def line(start: int) -> str:
        return "  ".join("..." if i is None else group(start + i * strides[across]) for i in steps(across))

    rows = [("", 0)]
    for dim in down:
        rows = [
            (f"{label}{dim} {'..' if i is None else i}  ", start + (i or 0) * strides[dim])
            for label, start in rows
            for i in steps(dim)
        ]
    title = f"mesh: {inner} in brackets" + f", {across} across" * bool(across)
    return "\n".join([title, *(f"  {label}{'...' if '..' in label else line(start)}" for label, start in rows)])


def elide(values: Iterable[int]) -> list[int | None]:
    """Return all of a few values; of many the first two, None for a gap, and the last."""
    values = list(values)
    return values if len(values) <= MOST_SHOWN else [*values[:2], None, values[-1]]


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
    parts = [
        f"{name} {begin}..{begin + size - 1}"
        for name, begin, size, whole in zip(names, offset, shape, parameter.shape, strict=True)
        if size < whole
    ]
    return ", ".join(parts) or "all"


def format_layers(layers: list[str]) -> str:
    """Return ["2", "3", "4"] as 2-4, and ["4", "3", "2"], the order of backward, as 4-2."""
    return layers[0] if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


# ---------------------------------------------------------------- collectives

# (layers with equal collectives, each of these collectives with its calls in a row, its module without the layer)
Folded = list[tuple[list[str], list[tuple[Collective, int]]]]


def list_sections(run: DryRun) -> list[tuple[str, int, Folded]]:
    """Return the parts of forward, of backward, and between them: which walk, how often, its collectives.

    In the order of the first call; equal parts and equal layers once.
    """
    walks = {"forward": "forward", "": "between"}
    sections: list[tuple[str, Folded]] = []
    times: list[int] = []
    # Where only the last of many microbatches reduces gradients, these are a section of their own.
    for (walk, n), group in groupby(
        run.collectives, key=lambda pair: (walks.get(pair[0].place.walk, "backward"), pair[1])
    ):
        section = walk, fold_layers(collective for collective, _ in group)
        if section in sections:
            times[sections.index(section)] += n
        elif n:
            sections.append(section)
            times.append(n)
    return [(walk, n, folded) for (walk, folded), n in zip(sections, times, strict=True)]


def fold_layers(collectives: Iterable[Collective]) -> Folded:
    """Group collectives by layer or root module, in the order of their first call; equal neighbors share a list."""
    by_owner: dict[str, list[Collective]] = {}
    for collective in collectives:
        parts = collective.place.module.split(".")
        n_owner = 2 if parts[0] == "layers" else 1
        place = replace(collective.place, module=".".join(parts[n_owner:]))
        by_owner.setdefault(".".join(parts[:n_owner]), []).append(replace(collective, place=place))
    folded: Folded = []
    for owner, own in by_owner.items():
        counted = [(collective, len(list(calls))) for collective, calls in groupby(own)]
        if folded and folded[-1][1] == counted:
            folded[-1][0].append(owner)
        else:
            folded.append(([owner], counted))
    return folded


def format_collectives(sections: list[tuple[str, int, Folded]]) -> str:
    if not sections:
        return "  none: there is only one rank"
    rows: list[tuple[str, ...]] = []
    for walk, times, folded in sections:
        rows.append((f"{walk}, {'once' if times == 1 else f'{times} times'}", *[""] * 5))
        for owners, counted in folded:
            name = owners[0] or "the step"
            if len(owners) > 1:
                name = f"layers.{format_layers([owner.removeprefix('layers.') for owner in owners])}: each"
            for number, (collective, calls) in enumerate(counted):
                place = collective.place
                rows.append(
                    (
                        "  " + name * (number == 0),
                        f"{collective.operation} over {collective.axis}" + f" x{calls}" * (calls > 1),
                        f"{list(collective.shape)} {collective.dtype}",
                        format_bytes(collective.n_bytes),
                        place.module + " again" * (place.walk == "recompute"),
                        f"{place.line} {place.function}" + f", {place.through}" * bool(place.through),
                    )
                )
    return format_table(rows)


# ---------------------------------------------------------------- words


def describe_step(planned: PlannedRun, runs: dict[int, DryRun]) -> str:
    """Describe one optimizer step of this layout, in numbered sentences."""
    layout, config = planned.layout, planned.config
    moved = sum_traffic(runs, lambda call: call.axis)
    shard = layout.dp_shard * layout.cp
    readers = f"Each of {layout.dp} data-parallel ranks" if layout.dp > 1 else "Every rank"
    sentences = [
        f"{readers} takes {layout.global_batch_size // layout.dp} of "
        f"{layout.global_batch_size} sequences of {config.training.seq_len} tokens, in microbatches: "
        f"{layout.n_microbatches} x {layout.microbatch_size}.",
        f"Of each sequence a cp rank computes an early and a late piece, 1/{layout.cp} in all." * (layout.cp > 1),
        "All ranks add up how many targets count; every loss is divided by that number.",
        f"Forward and backward go through the {len(layout.stages)} pipeline stages in the order of "
        f"{config.parallelism.pipeline_parallel_schedule}; hidden states and their gradients go from rank to rank."
        * (layout.pp > 1),
        f"Before a block runs, its parameters are gathered whole in {config.training.mixed_precision_param} from "
        f"{shard} ranks; "
        f"{'they are freed after it' if layout.zero_stage == 3 else 'they stay until the step ends'}." * (shard > 1),
        "Inside a block each tp rank computes its share of the heads and of the feed-forward on whole sequences, and "
        "gives back its share of the sequence." * (layout.tp > 1),
        f"Attention fetches the other cp ranks' keys and values ({config.parallelism.context_parallel_rotate_method})."
        * (layout.cp > 1),
        *describe_exchange(planned),
        {"none": "", "full": "Backward computes each block once more, collectives included."}.get(
            config.activation_checkpoint.mode, "Backward computes part of each block once more."
        ),
        f"Gradients are summed in {config.training.mixed_precision_reduce}, and each of {shard} ranks keeps its slice."
        * (shard > 1),
        f"The {layout.dp_replicate} replicas add up their slices." * (layout.dp_replicate > 1),
        "The norm of all gradients is one number over all ranks; if it is too large, gradients are scaled down.",
        f"{config.optimizer.name} updates the slices that this rank holds, without collectives.",
        "One rank moves, most by a rank of each axis: "
        f"{', '.join(f'{format_bytes(most.n_bytes)} over {axis}' for axis, most in moved.items())}." * bool(moved),
    ]
    return "\n".join(f"  {number}. {line}" for number, line in enumerate(filter(None, sentences), 1))


def describe_exchange(planned: PlannedRun) -> list[str]:
    """Say where the tokens of an MoE layer are computed."""
    moe, layout = planned.model_args.moe, planned.layout
    if moe is None:
        return []
    chosen = f"In {planned.model_args.n_moe_layers} layers a router picks {moe.top_k} of {moe.n_experts} experts"
    if layout.ep == 1:
        return [f"{chosen} for each token, and every rank computes its own tokens with all of them."]
    n_held = moe.n_experts // layout.ep
    exchange = f"{chosen} for each token. Each of {layout.ep} ep ranks has {n_held}: tokens are sent there, and back"
    return [f"{exchange}; here the most loaded rank gets {planned.imbalance:g} times the mean."]


# ---------------------------------------------------------------- the runs


def run_pp_ranks(planned: PlannedRun, stage: int | None) -> tuple[dict[int, list[int]], dict[int, DryRun]]:
    """Run one pp rank of each kind, or `stage` alone. Returns it with those that are like it, and its run."""
    groups = group_pp_ranks(planned) if stage is None else {stage: [stage]}
    return groups, {rank: planned.dry_run(rank) for rank in groups}


def list_for_json(runs: dict[int, DryRun]) -> list[dict[str, object]]:
    """Return every collective, in the order of its first call."""
    return [
        {"pp_rank": rank, "times": times, **asdict(collective)}
        for rank, run in runs.items()
        for collective, times in run.collectives
    ]
