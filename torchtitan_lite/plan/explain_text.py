"""The text of `explain`: a mesh, slices of weights, collectives folded layer by layer, one step in words."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from torchtitan_lite.config.layout import MESH_DIMS, Layout
from torchtitan_lite.config.messages import format_bytes, format_table
from torchtitan_lite.plan.collectives import Collective
from torchtitan_lite.plan.dry_run import DryRun, Spread
from torchtitan_lite.plan.planned import Planned

MOST_SHOWN = 8  # ranks or coordinates in a row; otherwise the first two and the last


# ---------------------------------------------------------------- mesh and parameters


def draw_mesh(layout: Layout) -> str:
    """Draw every rank in the mesh: the innermost dim in brackets, the next across, the outer ones down."""
    used = [dim for dim, degree in layout.degrees.items() if degree > 1] or ["tp"]
    *down, across, inner = [None, *used] if len(used) == 1 else used
    strides, stride = {None: 0}, 1
    for dim in reversed(MESH_DIMS):
        strides[dim] = stride
        stride *= getattr(layout, dim)

    def steps(dim: str | None) -> list[int | None]:
        return elide(range(getattr(layout, dim) if dim else 1))

    def group(start: int) -> str:
        return f"[{' '.join('..' if i is None else str(start + i * strides[inner]) for i in steps(inner))}]"

    def line(start: int) -> str:
        return "  ".join("..." if i is None else group(start + i * strides[across]) for i in steps(across))

    lines = [f"mesh: {inner} in brackets" + f", {across} across" * bool(across)]
    rows = [("", 0)]
    for dim in down:
        rows = [
            (f"{label}{dim} {'..' if i is None else i}  ", start + (i or 0) * strides[dim])
            for label, start in rows
            for i in steps(dim)
        ]
    return "\n".join(lines + [f"  {label}{'...' if '..' in label else line(start)}" for label, start in rows])


def elide(values: Iterable[int]) -> list[int | None]:
    """Return all of a few values; of many the first two, None for a gap, and the last."""
    values = list(values)
    return values if len(values) <= MOST_SHOWN else [*values[:2], None, values[-1]]


def format_holdings(layout: Layout, run: DryRun) -> str:
    """Return a table of each parameter's slices on the ranks of this stage, with one row for equal layers."""
    per_stage = layout.world_size // layout.pp
    ranks = elide(range(run.pp_rank * per_stage, (run.pp_rank + 1) * per_stage))
    rows: dict[tuple, list[str]] = {}
    for fqn, parameter in run.parameters.items():
        head, _, rest = fqn.partition(".")
        layer, _, name = rest.partition(".") if head == "layers" else ("", "", fqn)
        slices = tuple("..." if rank is None else describe_slice(parameter, locate(layout, rank)) for rank in ranks)
        rows.setdefault((name, parameter.shape, slices), []).append(layer)
    table = [("", "", *("..." if rank is None else f"rank {rank}" for rank in ranks))]
    for (name, shape, slices), layers in rows.items():
        prefix = f"layers.{name_layers(layers)}." if layers[0] else ""
        table.append((prefix + name, str(list(shape)), *slices))
    return format_table(table)


def locate(layout: Layout, rank: int) -> dict[str, int]:
    """Return a rank's coordinates on every mesh dim that may shard a parameter."""
    place = {}
    for dim in reversed(MESH_DIMS):
        rank, place[dim] = divmod(rank, getattr(layout, dim))
    return {**place, "shard": place["dp_shard"] * layout.cp + place["cp"]}


def describe_slice(parameter: Spread, place: dict[str, int]) -> str:
    """Return the slice of the rank with these coordinates: "rows 0..31, columns 16..31"."""
    degrees = tuple(parameter.degrees.values())
    coordinate = [place[dim] for dim in parameter.degrees]
    shape, offset = _compute_local_shape_and_global_offset(parameter.shape, degrees, coordinate, parameter.placements)
    if 0 in shape:
        return "nothing"
    names = ("rows", "columns") if len(shape) == 2 else ("elements",)
    parts = [
        f"{name} {begin}..{begin + size - 1}"
        for name, begin, size, whole in zip(names, offset, shape, parameter.shape, strict=True)
        if size < whole
    ]
    return ", ".join(parts) or "all"


# ---------------------------------------------------------------- collectives


@dataclass(frozen=True)
class Exchange:
    """Equal collectives of different layers."""

    what: Collective  # of the first of them, its module without the layer
    owner: str  # "layers.3", or the module at the root; "" outside of the model
    calls: int = 1  # in a row


@dataclass
class Section:
    """A part of forward, of backward, or between them."""

    walk: str
    times: int
    owners: list[tuple[list[str], list[Exchange]]] = field(default_factory=list)  # equal layers, and their collectives


def list_exchanges(run: DryRun) -> list[Section]:
    """Return the collectives in the order of their first time; equal sections and equal layers once."""
    sections: list[Section] = []
    for walk, group in groupby(run.collectives, key=lambda pair: name_walk(pair[0])):
        pairs = list(group)
        section = Section(walk, pairs[0][1], fold(strip(collective) for collective, _ in pairs))
        known = next((other for other in sections if (other.walk, other.owners) == (walk, section.owners)), None)
        if known:
            known.times += section.times
        elif section.times:
            sections.append(section)
    return sections


def name_walk(collective: Collective) -> str:
    return {"forward": "forward", "": "between"}.get(collective.place.walk, "backward")


def strip(collective: Collective) -> Exchange:
    """Separate a collective from its layer or root module."""
    parts = collective.place.module.split(".")
    n_owner = 2 if parts[0] == "layers" else 1
    place = replace(collective.place, module=".".join(parts[n_owner:]))
    return Exchange(replace(collective, place=place), ".".join(parts[:n_owner]))


def fold(exchanges: Iterable[Exchange]) -> list[tuple[list[str], list[Exchange]]]:
    """Group exchanges by owner, in the order of their first; equal neighbours share one list."""
    by_owner: dict[str, list[Exchange]] = {}
    for exchange in exchanges:
        own = by_owner.setdefault(exchange.owner, [])
        if own and own[-1].what == exchange.what:
            own[-1] = replace(own[-1], calls=own[-1].calls + 1)
        else:
            own.append(exchange)
    folded: list[tuple[list[str], list[Exchange]]] = []
    for owner, own in by_owner.items():
        alike = [replace(exchange, owner="") for exchange in own]
        if folded and folded[-1][1] == alike:
            folded[-1][0].append(owner)
        else:
            folded.append(([owner], alike))
    return folded


def format_collectives(sections: list[Section]) -> str:
    if not sections:
        return "  none: there is only one rank"
    rows: list[tuple[str, ...]] = []
    for section in sections:
        times = "once" if section.times == 1 else f"{section.times} times"
        rows.append((f"{section.walk}, {times}", *[""] * 5))
        for owners, exchanges in section.owners:
            for at, exchange in enumerate(exchanges):
                what = exchange.what
                rows.append(
                    (
                        "  " + (name_owners(owners) if at == 0 else ""),
                        f"{what.operation} over {what.axis}" + f" x{exchange.calls}" * (exchange.calls > 1),
                        f"{list(what.shape)} {what.dtype}",
                        format_bytes(what.n_bytes),
                        what.place.module + " again" * (what.place.walk == "recompute"),
                        f"{what.place.line} {what.place.function}"
                        + f", {what.place.through}" * bool(what.place.through),
                    )
                )
    return format_table(rows)


def name_owners(owners: list[str]) -> str:
    if len(owners) == 1:
        return owners[0] or "the step"
    return f"layers.{name_layers([owner.removeprefix('layers.') for owner in owners])}: each"


def name_layers(layers: list[str]) -> str:
    """Return ["2", "3", "4"] as 2-4, and ["4", "3", "2"], the order of backward, as 4-2."""
    return layers[0] if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


# ---------------------------------------------------------------- words


def describe_step(planned: Planned, runs: dict[int, DryRun]) -> str:
    """Describe one optimizer step of this layout, in numbered sentences."""
    layout, config = planned.layout, planned.config
    moved = {axis: format_bytes(n_bytes) for axis, n_bytes in sum_by_axis(runs).items()}
    dtype = config.training.mixed_precision_param
    shard = layout.dp_shard * layout.cp
    micro = f"{layout.n_microbatches} x {layout.microbatch_size}"
    sentences = [
        f"Each of {layout.dp} data-parallel ranks takes {layout.global_batch_size // layout.dp} of "
        f"{layout.global_batch_size} sequences of {config.training.seq_len} tokens, in microbatches: {micro}.",
        f"Of each sequence a cp rank computes an early and a late piece, 1/{layout.cp} in all." * (layout.cp > 1),
        "All ranks add up how many targets count; every loss is divided by that number.",
        f"Forward and backward go through the {len(layout.stages)} pipeline stages in the order of "
        f"{config.parallelism.pipeline_parallel_schedule}; hidden states and their gradients go from rank to rank."
        * (layout.pp > 1),
        f"Before a block runs, its parameters are gathered whole in {dtype} from {shard} ranks; "
        f"{'they are freed after it' if layout.zero_stage == 3 else 'they stay until the step ends'}." * (shard > 1),
        "Inside a block each tp rank computes its share of the heads and of the feed-forward on whole sequences, and "
        "gives back its share of the sequence." * (layout.tp > 1),
        f"Attention fetches the other cp ranks' keys and values ({config.parallelism.context_parallel_rotate_method})."
        * (layout.cp > 1),
        {"none": "", "full": "Backward computes each block once more, collectives included."}.get(
            config.activation_checkpoint.mode, "Backward computes part of each block once more."
        ),
        f"Gradients are summed in {config.training.mixed_precision_reduce}, and each of {shard} ranks keeps its slice."
        * (shard > 1),
        f"The {layout.dp_replicate} replicas add up their slices." * (layout.dp_replicate > 1),
        "The norm of all gradients is one number over all ranks; if it is too large, gradients are scaled down.",
        f"{config.optimizer.name} updates the slices that this rank holds, without collectives.",
        "One rank moves, most by a rank of each axis: "
        + ", ".join(f"{n} over {axis}" for axis, n in moved.items())
        + "."
        if moved
        else "",
    ]
    return "\n".join(f"  {number}. {line}" for number, line in enumerate(filter(None, sentences), 1))


def sum_by_axis(runs: dict[int, DryRun]) -> Counter:
    """Return axis -> bytes of a step, of the rank that moves most over it."""
    most: Counter = Counter()
    for run in runs.values():
        own: Counter = Counter()
        for collective, times in run.collectives:
            own[collective.axis] += times * collective.n_bytes
        most |= own
    return most
