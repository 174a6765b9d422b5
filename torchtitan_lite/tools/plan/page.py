"""Draw a layout as one page: the slices of each rank, the pipeline, memory, time, traffic, and faster layouts.

`plan --html` writes this page. `report` adds the measurements of a run. All figures except these measurements come from
formulas.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, product
from operator import itemgetter

from torchtitan_lite.config.block import list_block_modules
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import name_command
from torchtitan_lite.config.model_rows import ModelArgs, ModuleRow
from torchtitan_lite.tools.pictures import (
    draw_bar,
    draw_facts,
    draw_key,
    draw_table,
    wrap_page,
)
from torchtitan_lite.tools.plan.cluster import list_strides
from torchtitan_lite.tools.plan.figures import list_memory, list_traffic
from torchtitan_lite.tools.plan.orders import list_order, shorten
from torchtitan_lite.tools.plan.planned_run import PlannedRun
from torchtitan_lite.tools.plan.remedies import list_faster, list_remarks
from torchtitan_lite.tools.plan.slices import choose_shown, find_slices
from torchtitan_lite.tools.plan.timeline import draw_timeline, simulate
from torchtitan_lite.tools.tables import format_bytes, format_seconds, plural

MOST_ACTIONS = 16384  # a step with more actions is drawn with fewer microbatches
FEW_RANKS = 16  # cards have text if the page shows at most this number of ranks
# left end and width of each box in a card
WEIGHT_X = (1.0, 27.0)
TOKENS_X = (33.0, 36.0)
EXPERTS_X = (74.0, 7.0)
WEIGHT = "var(--run0)"
TOKENS = "var(--run2)"
EXPERT_COLOR = "var(--run5)"
RESERVE = "allocator's reserve, CUDA, and the margin to the upper end of the 80 % range"
MEMORY_COLORS = {  # part -> color
    "parameters": "var(--run0)",
    "gradients": "var(--run1)",
    "optimizer": "var(--run4)",
    "gathered": "var(--run7)",
    "activations": "var(--run2)",
    "received": "var(--run5)",
    "working": "var(--run3)",
    RESERVE: "color-mix(in srgb, var(--pale) 38%, var(--page))",
}
TIME = {  # part of a step -> color
    "compute": "var(--computing)",
    "recompute": "var(--run3)",
    "waiting for tp": "var(--tp)",
    "waiting for cp": "var(--cp)",
    "waiting for ep": "var(--ep)",
    "waiting for dp": "var(--dp_shard)",
    "bubble": "var(--waiting)",
    "copies of FSDP": "var(--run2)",
    "optimizer": "var(--run4)",
}
FSDP_DIMS = {"dp_replicate", "dp_shard", "cp", "efsdp"}
PAGE_STYLE = """<style>
.mesh { display: flex; flex-wrap: wrap; gap: 14px } .mesh section { background: var(--soft); border-radius: 8px;
  padding: 9px 11px 11px; flex: 1 1 auto; max-width: 100%; box-sizing: border-box }
.mesh h4 { margin: 0 0 6px; font-size: 13.5px } .mesh h4 i { font-weight: 400 }
.lines, .cards { display: flex; flex-wrap: wrap; gap: 8px 20px } .cards { gap: 6px }
.line p { font-size: 12px; margin: 2px 0; color: var(--pale) }
.card { width: 122px; background: var(--page); padding: 3px 5px 4px; border-radius: 5px; box-sizing: border-box;
  font-size: 11.5px; border: 1px solid var(--line); line-height: 1.35 }
.card svg { overflow: hidden; margin: 1px 0 } .card rect { stroke: none; vector-effect: non-scaling-stroke }
.card small { display: none }
.big .card, .big .line { flex: 1 }
.big .card { padding: 6px 9px; min-width: 130px; max-width: 250px }
.big .card small { display: block; color: var(--pale); font-size: 11.5px }
.walk { width: 40px; height: 34px } .walk svg { overflow: hidden } .walk rect { stroke: none }
.walk .all, .card .all { fill: var(--soft); stroke: var(--line) }
.walk .pale, .card .pale { fill: color-mix(in srgb, currentColor 26%, var(--page)) }
.walk .held, .card .held { fill: color-mix(in srgb, currentColor 85%, var(--page)) }
td { line-height: 1.4 }
@media (max-width: 700px) { .steps td { overflow-wrap: anywhere }
  .mesh section { padding: 8px; flex: 1 1 100% } .card { width: 80px }
  .big .line { flex: 1 1 100% } .big .card { padding: 4px } }
</style>"""


def draw_page(planned: PlannedRun, config_args: list[str]) -> str:
    """Return the whole page of `plan --html`."""
    n_ranks = planned.layout.world_size
    name = f"{planned.config.job.config_name} on {n_ranks:,} x {planned.cluster.name}"
    args = f"{shlex.join(config_args)} --gpus {n_ranks} --gpu {planned.cluster.name}"
    search = name_command(f"plan {args.strip()} --search --toml best.toml")
    return wrap_page(
        name,
        f"<h1>{escape(name)}</h1><p>{escape(str(planned))}</p>{draw_forecast(planned)}"
        f"{''.join(draw_layout(planned))}"
        f"<p>To rank every layout, and write the best one as a config:</p><pre>{escape(search)}</pre>",
    )


def draw_forecast(planned: PlannedRun) -> str:
    forecast = planned.forecast
    bar = planned.speed_bar
    low, high = bar.widen(forecast.tokens_per_s_per_gpu)
    about = bar.describe(planned.cluster.name)
    capacity = planned.cluster.memory_bytes
    facts = {
        f"tokens/s per GPU (80 % range: {low:,.0f} to {high:,.0f})": f"{forecast.tokens_per_s_per_gpu:,.0f}",
        f"per step of {planned.workload.tokens_per_step:,} tokens": format_seconds(
            forecast.step_time_s
        ),
        "MFU": f"{100 * forecast.mfu_full:.3g}%",
        f"memory, at most ({'of' if planned.fits else 'does not fit into'} {capacity / GIB:.1f} GiB)": (
            f"{planned.taken_bytes / GIB:.1f} GiB"
        ),
    }
    if planned.layout.pp > 1:
        facts["bubble of the pipeline"] = f"{forecast.bubble:.1%}"
    return (
        f"{draw_facts(facts)}<p><i>A forecast from formulas. Error bar of {planned.family}: {about}. "
        "This trainer has never run on a GPU.</i></p>"
    )


def draw_layout(planned: PlannedRun) -> Iterator[str]:
    """Draw the parts of the page: mesh, pipeline, memory, time, traffic, remarks."""
    yield draw_mesh(planned)
    if planned.layout.pp > 1:
        yield draw_pipeline(planned)
    yield draw_memory(planned)
    yield draw_time(planned)
    yield draw_traffic(planned)
    remarks = "".join(f"<li>{escape(remark)}" for remark in list_remarks(planned))
    better = list_faster(planned)
    yield f"<h2>What to change</h2><ul>{remarks}</ul>"
    if better:
        table = [("key", "tokens/s per GPU", "", "memory, upper end")]
        table += [(f"{key} = {value}", *figures) for key, value, *figures in better]
        yield (
            "<p>Faster layouts that fit and differ in one key (with parallelism.data_parallel_shard_degree = -1):</p>"
            f"{draw_table(table)}"
        )
    elif planned.fits:
        yield "<p>No layout that differs in one key is faster and fits.</p>"


# ---------------------------------------------------------------- the mesh


def draw_mesh(planned: PlannedRun) -> str:
    """Draw a card for each rank: its slice of a weight, of the batch and of the experts of a layer."""
    layout = planned.layout
    args = planned.model_args
    weight = choose_drawn_matrix(args)
    shown = choose_shown(layout)
    # the page has a line of cards for each coordinate on these dims
    rows = [dim for dim in layout.used_dims[:-1] if dim != "pp"]
    places = [dict(zip(shown, place, strict=True)) for place in product(*shown.values())]
    sections = []
    for pp, in_stages in groupby(places, key=itemgetter("pp")):
        lines = ""
        for named, line in groupby(
            in_stages, key=lambda at: ", ".join(f"{dim} {at[dim]}" for dim in rows)
        ):
            cards = "".join(draw_card(planned, at, weight) for at in line)
            lines += f'<div class="line"><p>{named}</p><div class="cards">{cards}</div></div>'
        held = [layout.stages[stage] for stage in layout.stages_of(pp)]
        title = f"pp {pp} <i>{shorten_stages(held)}</i>" if layout.pp > 1 else "the whole model"
        sections.append(f'<section><h4>{title}</h4><div class="lines">{lines}</div></section>')
    n_shown = len(places)
    folded = ""
    if n_shown < layout.world_size:
        wide = [each for each, indices in shown.items() if len(indices) < layout.degrees[each]]
        folded = (
            f" The page shows {n_shown} of {layout.world_size:,} ranks: "
            f"the first and the last of {' and '.join(wide)}."
        )
    n_rows, n_columns = weight.weight
    sizes = f"{layout.global_batch_size:,} x {planned.config.training.seq_len:,}"
    entries = [
        (
            WEIGHT,
            "",
            f"{weight.name} of a layer, {n_rows:,} x {n_columns:,}: the rows that the rank stores",
        ),
        (WEIGHT, "pale", "the rows that the rank uses while the block runs"),
        (TOKENS, "", f"the batch, {sizes}: the tokens that the rank holds between matmuls"),
        (TOKENS, "pale", "the tokens that the rank uses in matmuls"),
    ]
    if args.moe:
        entries.append((EXPERT_COLOR, "", f"the rank's experts; a layer has {args.moe.n_experts}"))
    size = "big" if n_shown <= FEW_RANKS else ""
    return (
        f"{PAGE_STYLE}<h2>Who holds what</h2><p>A card for each rank.{folded}</p>{draw_key(entries)}"
        f'<div class="mesh {size}">{"".join(sections)}</div>'
    )


def choose_drawn_matrix(args: ModelArgs) -> ModuleRow:
    """Return the first matrix of the feed-forward network; in an MoE layer, the first matrix of attention."""
    block = list_block_modules(args, moe=args.is_moe(args.n_layers - 1))
    colwise = [row for row in block if row.kind == "linear" and row.tp_style == "colwise"]
    return max(colwise, key=lambda row: row.name.endswith("w1"))


def shorten_stages(stages: Sequence[Sequence[str]]) -> str:
    """Describe the modules of stages: "tok_embeddings, layers 0-1". If there are more than two stages, describe the
    first two."""
    names = []
    for stage in stages[:2]:
        for are_layers, fqns in groupby(stage, key=lambda fqn: fqn.startswith("layers.")):
            modules = list(fqns)
            if are_layers:
                first = modules[0].removeprefix("layers.")
                last = modules[-1].removeprefix("layers.")
                modules = [f"layer {first}" if first == last else f"layers {first}-{last}"]
            names += modules
    if len(stages) > 2:
        names.append(f"... ({len(stages)} stages)")
    return ", ".join(names)


def draw_card(planned: PlannedRun, at: dict[str, int], weight: ModuleRow) -> str:
    """Draw the slices that the rank at these coordinates stores and uses."""
    layout = planned.layout
    rank = sum(list_strides(layout)[dim] * index for dim, index in at.items())
    moe = planned.model_args.moe
    n_rows = weight.weight[0]
    seq_len = planned.config.training.seq_len
    n_experts = moe.n_experts if moe else 0
    held = find_slices(layout, rank, n_rows, seq_len, n_experts)
    shapes = draw_box("all", WEIGHT, WEIGHT_X)
    shapes += draw_box("pale", WEIGHT, WEIGHT_X, held.used_rows, n_rows)
    shapes += draw_box("held", WEIGHT, WEIGHT_X, held.held_rows, n_rows)
    shapes += draw_box("all", TOKENS, TOKENS_X)
    n_sequences = layout.global_batch_size
    for look, spans in (("pale", held.used_tokens), ("held", held.held_tokens)):
        for span in spans:
            shapes += draw_box(look, TOKENS, TOKENS_X, held.sequences, n_sequences, span, seq_len)
    rows = show(held.held_rows)
    sequences = show(held.sequences)
    tokens = show(*held.held_tokens)
    told = (
        f"stores {weight.name} {rows}; uses {show(held.used_rows)}; sequences {sequences}; "
        f"holds tokens {tokens}; multiplies {show(*held.used_tokens)}"
    )
    if moe:
        shapes += draw_box("all", EXPERT_COLOR, EXPERTS_X)
        shapes += draw_box("held", EXPERT_COLOR, EXPERTS_X, held.experts, n_experts)
        told += f"; experts {show(held.experts)}"
    return (
        f'<div class="card">rank {rank}<svg viewBox="0 0 82 42"><title>rank {rank}: {told}</title>{shapes}</svg>'
        f"<small>rows {rows}</small><small>sequences {sequences}, tokens {tokens}</small></div>"
    )


def draw_box(
    look: str,
    color: str,
    x: tuple[float, float],
    rows: range = range(1),
    n_rows: int = 1,
    columns: range = range(1),
    n_columns: int = 1,
) -> str:
    """Draw a slice of a matrix. `x` has the left end and the width of the matrix in the picture."""
    left, width = x
    left += width * columns.start / n_columns
    width *= len(columns) / n_columns
    y = 1 + 40 * rows.start / n_rows
    # a slice that is not empty is at least 1 high, to be visible
    height = max(bool(rows), 40 * len(rows) / n_rows)
    at = f'x="{left:.1f}" width="{width:.1f}" y="{y:.1f}" height="{height:.1f}"'
    return f'<rect class="{look}" color="{color}" {at}/>'


def show(*spans: range) -> str:
    return ", ".join(f"{span.start}..{span.stop - 1}" for span in spans if span) or "none"


# ---------------------------------------------------------------- pipeline, memory, time, bytes


def draw_pipeline(planned: PlannedRun) -> str:
    layout = planned.layout
    times = planned.step_time
    pipeline = planned.workload.pipeline
    if 2 * len(layout.stages) * layout.n_microbatches > MOST_ACTIONS:
        pipeline, _ = shorten(pipeline)[0]
    timeline = simulate(list_order(pipeline), times.seconds_of, times.send_s)
    letters = {
        "F": "forward",
        "B": "backward",
        "I": "gradients of inputs",
        "W": "gradients of weights",
    }
    used = {event.action.kind for event in timeline.events}
    key = draw_key((f"var(--{kind})", "", word) for kind, word in letters.items() if kind in used)
    about = (
        f"{layout.n_microbatches:,} microbatches pass through {len(layout.stages)} stages. Between two stages, a rank "
        f"sends {format_bytes(planned.workload.hidden_bytes / layout.tp)} for each microbatch in forward, and the "
        f"same in backward. Ranks are idle for {planned.forecast.bubble:.1%} of a step. The pipeline takes "
        f"{format_seconds(times.pipeline_s)}. The picture shows a step of {pipeline.n_microbatches} microbatches."
    )
    return (
        f"<h2>One step of the pipeline, forecast</h2><p>{about}</p>{key}{draw_timeline(timeline)}"
    )


def draw_memory(planned: PlannedRun) -> str:
    capacity = planned.cluster.memory_bytes
    memories = list_memory(planned)
    live = max(memory.live for memory in memories.values())
    length = 1.02 * max(capacity, planned.taken_bytes)
    is_small = live < length / 20  # if true, the bars show only live memory
    if is_small:
        length = live
    bars = ""
    entries = {}  # part that a bar shows -> entry of the legend
    for name, memory in memories.items():
        most = planned.find_most_taken(memory.live)
        sizes = memory._asdict() | {RESERVE: 0 if is_small else most - memory.live}
        parts = []
        for part, size in sizes.items():
            color = MEMORY_COLORS[part]
            parts.append((size, color, "", f"{part}: {format_bytes(size)}"))
            if size:
                entries[part] = (color, "", part)
        value = f"{format_bytes(memory.live)}, at most {format_bytes(most)}"
        bars += draw_bar(name, value, parts, length, 0 if is_small else capacity)
    line = "" if is_small else " (the line across the bars)"
    about = (
        f"{planned.cluster.name} has {capacity / GIB:.1f} GiB{line}. Gathered: weights of other ranks, for a matmul. "
        "Received: inputs and gradients from other stages. Working: temporary tensors of a block, or of the loss. "
        f"Error of the forecast: {planned.source_of_reserve}"
    )
    return f"<h2>Peak memory, forecast</h2><p>{about}.</p>{draw_key(entries.values())}{bars}"


def draw_time(planned: PlannedRun) -> str:
    """Draw the parts of a step, and for each axis the exposed and the overlapped communication."""
    parts_s = planned.forecast.parts_s
    length = planned.forecast.step_time_s
    parts = []
    entries = []
    for part, seconds in parts_s.items():
        if seconds:
            parts.append((seconds, TIME[part], "", f"{part}: {format_seconds(seconds)}"))
            entries.append((TIME[part], "", f"{part} {seconds / length:.1%}"))
    bars = draw_bar("the step", format_seconds(length), parts, length)
    linked_s = Counter()  # axis -> seconds of the collectives that can overlap with compute
    for calls in list_traffic(planned):
        dims = set(calls.axis.split(" x "))
        if dims == {"cp"}:
            linked_s["cp"] += calls.seconds
        elif dims <= FSDP_DIMS:
            linked_s["dp"] += calls.seconds
    for axis in ("tp", "ep", "cp", "dp"):
        part = f"waiting for {axis}"
        exposed_s = parts_s[part]
        hidden_s = max(0.0, linked_s[axis] - exposed_s)
        if exposed_s:
            value = f"{format_seconds(exposed_s)} exposed, {format_seconds(hidden_s)} hidden"
            halves = [(exposed_s, TIME[part], "", value), (hidden_s, TIME[part], "pale", value)]
            bars += draw_bar(f"communication over {axis}", value, halves, length)
    about = "Solid: ranks wait. Pale: hidden behind compute. Times are averaged over ranks. The bubble includes sends."
    return f"<h2>Where the time goes, forecast</h2><p>{about}</p>{draw_key(entries)}{bars}"


def draw_traffic(planned: PlannedRun) -> str:
    traffic = sorted(list_traffic(planned), key=lambda calls: -calls.n_bytes)
    if not traffic:
        return ""
    length = traffic[0].n_bytes
    bars = []
    for calls in traffic:
        name = f"{calls.operation} over {calls.axis}, {calls.where}"
        value = f"{format_bytes(calls.n_bytes)} in {plural(calls.n_calls, 'call')}"
        color = f"var(--{calls.axis.split()[0]})"
        bars.append(draw_bar(name, value, [(calls.n_bytes, color, "", value)], length))
    about = "One step of the rank that moves the most bytes."
    return f"<h2>Bytes that a rank moves, forecast</h2><p>{about}</p>{''.join(bars)}"
