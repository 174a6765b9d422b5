"""Explain a layout by dry runs of step.py: the step in words, each rank's weights, the line of every collective."""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, product
from math import prod

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
MOST_SHOWN, GAP = (
    8,
    "..",
)  # ranks or coordinates in a row; a longer row shows the first two, a gap, and the last
ROLES = {  # mesh dim -> work of its ranks in a step
    "pp": "{n} ranks hold successive layers; hidden states move to the next rank, and their gradients back",
    "dp_replicate": "{n} ranks read different sequences, hold the same weights, and all-reduce gradients",
    "dp_shard": "{n} ranks read different sequences, gather the weights of a block, and reduce-scatter gradients",
    "cp": "{n} ranks hold an early and a late piece of every sequence, and exchange keys and values",
    "tp": "{n} ranks gather the sequence, compute their heads and columns, and reduce-scatter partial sums",
    "ep": "{n} ranks hold different experts; tokens are sent to their experts, and results are sent back",
}


def main(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
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
    """Print the step in words, the mesh, and the parameters and collectives of one rank per kind of stage."""
    layout, short, per_stage = planned.layout, shorten(planned, FEW), planned.layout.strides["pp"]
    print(f"{describe_step(planned)}\n\n{draw_mesh(layout.degrees)}")
    if layout.ep:
        of_experts = {dim: getattr(layout, dim) for dim in ("pp", "dp_replicate", "efsdp", "ep")}
        print(f"\nexperts of a layer, on the same ranks\n{draw_mesh(of_experts)}")
    n_more = layout.n_microbatches - short.layout.n_microbatches
    for pp_rank, alike in group_pp_ranks(planned).items():
        run, ranks = dry_run(short, pp_rank), range(pp_rank * per_stage, (pp_rank + 1) * per_stage)
        title = f"pp rank {pp_rank}" + f" and {len(alike) - 1} like it" * (len(alike) > 1)
        print(f"\n---- {title}: parameters\n\n{format_parameters(run.parameters, elide(ranks))}")
        print(
            f"\n---- {title}: collectives of one rank\n\n{format_collectives(run.collectives, n_more)}"
        )


def explain_token(planned: PlannedRun, rank: int) -> None:
    """Follow the first microbatch of a rank forward through all stages: print weight slices and collectives."""
    layout, short, per_stage = planned.layout, shorten(planned, FEW), planned.layout.strides["pp"]
    at = {dim: rank // layout.strides[dim] % degree for dim, degree in layout.degrees.items()}
    n_rows = layout.global_batch_size // layout.dp
    first = (at["dp_replicate"] * layout.dp_shard + at["dp_shard"]) * n_rows
    print(
        f"rank {rank} has the coordinates {', '.join(f'{dim} {index}' for dim, index in at.items())}."
    )
    print(
        f"It reads rows {first}..{first + n_rows - 1} of {layout.global_batch_size}. Forward of its first microbatch:"
    )
    runs = [dry_run(short, pp_rank) for pp_rank in range(layout.pp)]
    for stage, (fqns, pp_rank) in enumerate(zip(layout.stages, layout.stage_ranks, strict=True)):
        run, here = runs[pp_rank], rank % per_stage + pp_rank * per_stage
        own = tuple(
            fqn + end for fqn in fqns for end in ".,"
        )  # FSDP gathers "norm, output" together
        parameters = {
            fqn: parameter for fqn, parameter in run.parameters.items() if fqn.startswith(own)
        }
        print(f"\n---- stage {stage}: parameters\n\n{format_parameters(parameters, [here])}")
        arrives = stage > 0 and layout.stage_ranks[stage - 1] != pp_rank
        calls = [call for call in run.collectives if call.operation == "receive"][:arrives]
        forward = [call for call in run.collectives if call.site.phase == "forward"]
        n_calls = Counter(call for call in forward if f"{call.site.module}.".startswith(own))
        for (
            call
        ) in forward:  # all microbatches make the same calls: keep the calls of one microbatch
            if calls.count(call) * short.layout.n_microbatches < n_calls[call]:
                calls.append(call)
        print(f"\n---- stage {stage}: collectives of rank {here}\n\n{format_collectives(calls)}")


def describe_step(planned: PlannedRun) -> str:
    """Describe one optimizer step of this layout in words."""
    layout, config = planned.layout, planned.config
    rows, sizes = layout.global_batch_size, layout.degrees | {"ep": layout.ep}
    lines = [
        f"step: {rows} rows of {config.training.seq_len} tokens. Each of {layout.dp} data-parallel ranks reads "
        f"{rows // layout.dp}, in {layout.n_microbatches} microbatches of {layout.microbatch_size}",
        *(f"{dim}: {role.format(n=sizes[dim])}" for dim, role in ROLES.items() if sizes[dim] > 1),
        f"recompute: {config.activation_checkpoint.mode}. Backward recomputes activations that forward did not keep",
        f"update: ranks all-reduce the gradient norm; {config.optimizer.name} updates the local slices"
        + "; each hidden matrix is sent to one rank, orthogonalized, and sent back"
        * planned.workload.updates_matrices,
    ]
    return "\n".join(f"  {line}" for line in lines)


def draw_mesh(degrees: dict[str, int]) -> str:
    """Draw all ranks. The innermost dim is in brackets, the next one across, and the others down."""
    used = {dim: degree for dim, degree in degrees.items() if degree > 1} or {"tp": 1}
    *down, across, inner = used if len(used) > 1 else ["", *used]
    ranks = torch.arange(prod(used.values())).view(
        *(used[dim] for dim in down), used.get(across, 1), used[inner]
    )
    lines = [f"mesh: {inner} in brackets" + f", {across} across" * bool(across)]
    for place in product(*(elide(range(used[dim])) for dim in down)):
        label = "".join(f"{dim} {index}  " for dim, index in zip(down, place, strict=True))
        groups = [GAP] if GAP in place else elide(ranks[place].tolist())
        lines.append(
            f"  {label}"
            + "  ".join(g if g == GAP else f"[{' '.join(map(str, elide(g)))}]" for g in groups)
        )
    return "\n".join(lines)


def elide(values: Sequence) -> list:
    return list(values) if len(values) <= MOST_SHOWN else [*values[:2], GAP, values[-1]]


def format_parameters(parameters: dict[str, Tensor], ranks: list[int | str]) -> str:
    """Return a table of the parameter slices on these ranks of a stage. Layers with equal slices share a row."""
    rows: dict[tuple, list[str]] = {}
    for fqn, parameter in parameters.items():
        owner, name = LAYER.fullmatch(fqn).groups()
        slices = tuple(GAP if rank == GAP else describe_slice(parameter, rank) for rank in ranks)
        rows.setdefault((owner.partition(".")[0], name, parameter.shape, slices), []).append(owner)
    table = [("", "", *(f"rank {rank}" for rank in ranks))]
    for (_, name, shape, slices), owners in rows.items():
        table.append((f"  {join_layers(owners)}.{name}", str(list(shape)), *slices))
    return format_table(table)


def describe_slice(parameter: Tensor, rank: int) -> str:
    """Return the slice of a parameter that a rank holds: "rows 0..31, columns 16..31"."""
    if not isinstance(parameter, DTensor):
        return "all"
    mesh, whole = parameter.device_mesh, parameter.shape  # the mesh spans all ranks of a stage
    coordinate = [
        int(index) for index in torch.unravel_index(torch.tensor(rank % mesh.size()), mesh.shape)
    ]
    shape, offset = _compute_local_shape_and_global_offset(
        whole, mesh.shape, coordinate, parameter.placements
    )
    names = {1: ["elements"], 2: ["rows", "columns"], 3: ["experts", "rows", "columns"]}[len(shape)]
    sizes = zip(names, offset, shape, whole, strict=True)
    held = [f"{name} {begin}..{begin + n - 1}" for name, begin, n, of in sizes if n < of]
    return "nothing" if 0 in shape else ", ".join(held) or "all"


def join_layers(owners: list[str]) -> str:
    """Return "layers.2-4" for "layers.2", "layers.3", "layers.4", and "layers.4-2" for the order of backward."""
    return owners[0] if len(owners) == 1 else f"{owners[0]}-{owners[-1].removeprefix('layers.')}"


def format_collectives(collectives: list[Collective], n_more: int = 0) -> str:
    """Return a table of the collectives in forward, in backward and between. Repeated passes and layers are merged.

    `n_more`: microbatches that the dry run left out. A pass that repeats is counted for each of them too.
    """
    parts = Counter()
    for phase, calls in groupby(
        collectives, key=lambda call: call.site.phase.replace("recompute", "backward")
    ):
        by_owner: dict[str, list[tuple]] = {}
        for call in calls:
            owner, module = LAYER.fullmatch(call.site.module).groups()
            tensor = f"{list(call.shape)} {call.dtype}", format_bytes(call.n_bytes)
            place = module + " again" * (call.site.phase == "recompute"), call.site.line
            by_owner.setdefault(owner, []).append(
                (f"{call.operation} over {call.axis}", *tensor, *place)
            )
        parts[phase, tuple((owner, tuple(rows)) for owner, rows in by_owner.items())] += 1
    table = [("", "collective", "whole tensor", "bytes of a rank", "module", "line")]
    for (phase, by_owner), n in parts.items():
        table.append((f"{phase}, {'once' if n == 1 else f'{n + n_more} times'}", *[""] * 5))
        for rows, alike in groupby(by_owner, key=lambda each: each[1]):
            owners = [owner for owner, _ in alike]
            name = f"  {join_layers(owners) or 'the step'}" + ": each" * (len(owners) > 1)
            for (operation, *rest), same in groupby(rows):
                n_calls = len(list(same))
                table.append((name, operation + f" x{n_calls}" * (n_calls > 1), *rest))
                name = ""
    return format_table(table) if parts else "none"
