"""Write the page: summary, curves, experts, traces, measurements next to the forecast, and the mesh."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from itertools import product

from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.pictures import ROW_HEIGHT, draw_curves, draw_rows, thin
from torchtitan_lite.tools.plan.dry_run import dry_run, shorten
from torchtitan_lite.tools.plan.explain import (
    draw_mesh,
    elide,
    format_parameters,
)
from torchtitan_lite.tools.plan.planned_run import group_pp_ranks
from torchtitan_lite.tools.plan.timeline import draw_timeline, plan_order
from torchtitan_lite.tools.plan.transfers import estimate_traffic
from torchtitan_lite.tools.report.runs import Run, describe_run
from torchtitan_lite.tools.report.traces import Trace
from torchtitan_lite.tools.tables import format_bytes

FEW = 8  # maximum number of microbatches of a dry run
MOST_DEPTH = 10  # maximum depth of nested calls
MARKS = {
    "start": "var(--run2)",
    "save": "var(--pale)",
    "stop": "var(--tp)",
}  # kind of record -> color
PLOTS = {  # title -> field, field of the dashed curve, whether the axis starts at 0
    "Loss": ("loss", "val_loss", False),
    "Gradient norm": ("grad_norm", "", True),
    "Learning rate": ("lr", "", True),
    "Tokens/s per rank": ("tokens_per_s_per_rank", "", True),
    "MFU": ("mfu_full", "mfu_causal", True),
    "Peak memory of rank 0, GiB": ("peak_memory_gib", "reserved_memory_gib", True),
}
STYLE = """
:root { color-scheme: light dark; --page: light-dark(#fff, #15191d); --ink: light-dark(#1f262d, #e1e5e9);
  --pale: light-dark(#69727b, #98a1aa); --line: light-dark(#e4e7ea, #2d343b); --soft: light-dark(#f4f5f7, #1e242a);
  --run0: #4587cf; --run1: #d9822b; --run2: #35a075; --run3: #c05c98; --computing: #8ba1b8; --waiting: #8e969d40;
  --dp_replicate: #3d6fae; --dp_shard: #4c8fd6; --efsdp: #6f86c9; --pp: #9a6fd6; --cp: #2fa39c; --tp: #dd5f46;
  --ep: #d3a02c; --various: #8d949c; --F: #4c8fd6; --B: #ea8f3c; --I: #d9b92e; --W: #a573cf }
body { margin: 0 auto; max-width: 1080px; padding: 24px 16px; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums }
h1, h2, h3, p, figure { margin: 5px 0 } h2, h3 { margin-top: 32px } p { max-width: 88ch } i { color: var(--pale) }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 310px), 1fr)); gap: 18px 28px }
pre, .wide { overflow-x: auto } pre { font-size: 12.5px; background: var(--soft); padding: 8px }
table { border-collapse: collapse; font-size: 14px } p { overflow-wrap: anywhere }
td { padding: 3px 18px 3px 0; border-bottom: 1px solid var(--line) } tr:first-child { font-weight: 600 }
svg { width: 100%; overflow: visible; display: block } svg svg { overflow: hidden } svg.box { width: auto }
text { font-size: 11px; fill: var(--pale) } .box text { fill: var(--ink) } line { stroke: var(--line) }
rect { stroke: var(--page); fill: color-mix(in srgb, currentColor 62%, var(--page)) }
polyline { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke }
.far { opacity: 0 } circle:hover { opacity: 1 }
@media print { h2, h3 { break-after: avoid } figure, svg, tr { break-inside: avoid } }
"""


def main(options: argparse.Namespace) -> int:
    try:
        runs = [Run(folder, f"var(--run{at % 4})") for at, folder in enumerate(options.runs)]
        page = write_page(runs)
    except (UserError, OSError) as error:
        print(f"report cannot read this run: {error}", file=sys.stderr)
        return 2
    out = options.out or options.runs[0] / "report.html"
    out.write_text(page, encoding="utf-8")
    print(f"open {out} in a browser")
    return 0


def write_page(runs: list[Run]) -> str:
    title = escape(" and ".join(run.name for run in runs))
    parts = [f"<h1>{title}</h1>"]
    for run in runs:
        if len(runs) > 1:
            parts.append(f'<h3 style="color: {run.color}">{escape(run.name)}</h3>')
        for sentence in describe_run(run):
            parts.append(f"<p>{escape(sentence)}</p>")
    about = "Source: metrics.jsonl. Ticks below a curve: starts (green), saves (gray), stops (red)."
    parts.append(f'<h2>By step</h2><p><i>{about}</i></p><div class="grid">')
    parts += draw_plots(runs)
    parts.append("</div>")
    for run in runs:
        if len(runs) > 1:
            parts.append(f'<h2 style="color: {run.color}">{escape(run.name)}</h2>')
        parts += draw_experts(run)
        parts += draw_traces(run)
        parts += compare(run)
        parts += describe_mesh(run)
    head = f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{head}<body>{"".join(parts)}</body></html>\n'


def draw_plots(runs: list[Run]) -> Iterator[str]:
    marks = []
    for run in runs:
        for record in run.records[1:]:
            if kind_color := MARKS.get(record["kind"]):
                marks.append((record["step"], kind_color, f"{run.name}: {record['kind']}"))
    for title, (field, dashed_field, from_zero) in PLOTS.items():
        lines = (field, "none", ""), (dashed_field, "4 4", f"╌ {dashed_field} ")
        curves = []
        values = ""
        for run, (name, dashes, label) in product(runs, lines):
            if points := run.list_values(name):
                curves.append((f"{run.name}, {name}", run.color, dashes, points))
                values += f' <span style="color: {run.color}">{label}{points[-1][1]:,.4g}</span>'
        if curves:
            yield f"<figure><b>{title}</b>{values}{draw_curves(curves, marks, from_zero=from_zero)}</figure>"


def draw_experts(run: Run) -> Iterator[str]:
    records = run.list_values("expert_loads")  # (step, load of each expert of each layer)
    if not records:
        return
    rows = []
    for layer in range(len(records[0][1])):
        ratios = []
        for step, layers in records:
            load = layers[layer]
            ratios.append((step, max(load) / max(1, sum(load)) * len(load)))
        boxes = []
        for x, (step, ratio) in enumerate(thin(ratios)):
            color = f"color-mix(in srgb, var(--tp) {min(100, 40 * ratio - 40):.0f}%, var(--page))"
            boxes.append((x, x + 1, color, f"layer {layer}, step {step}: {ratio:.4f}", ""))
        rows.append((f"layer {layer}", ROW_HEIGHT, boxes))
    about = "Load of the busiest expert, relative to the mean of its layer: pale is 1, red is 3.5 (metrics.jsonl)."
    yield f"<h3>Experts</h3><p><i>{about}</i></p>{draw_rows(rows, len(rows[0][2]))}"


def describe_mesh(run: Run) -> Iterator[str]:
    layout = run.planned.layout
    ranks_per_stage = layout.strides["pp"]
    yield f"<h3>Mesh: {layout}</h3><pre>{draw_mesh(layout.degrees)}</pre>"
    one_microbatch = shorten(run.planned, 1)
    for pp_rank in group_pp_ranks(run.planned):
        first = pp_rank * ranks_per_stage
        ranks = elide(range(first, first + ranks_per_stage))
        parameters = dry_run(one_microbatch, pp_rank).parameters
        slices = format_parameters(parameters, ranks)
        summary = f"<summary>Slices on pp rank {pp_rank}, as in explain</summary>"
        yield f"<details>{summary}<pre>{escape(slices)}</pre></details>"


def compare(run: Run) -> Iterator[str]:
    """Draw a table of measurements and forecast. Bytes come from traces of NCCL, or from a dry run."""
    planned = run.planned
    forecast = run.forecast
    source = "NCCL"
    moved = run.traces[0].moved if run.traces else {}
    if not moved:
        source = "dry run"
        planned = shorten(planned, FEW)
        moved = dry_run(planned).traffic
    order = plan_order(planned.config.parallelism, planned.layout)
    closed_form = estimate_traffic(planned.workload, 0, order)
    on_cpu = planned.device_type == "cpu"
    peak_bytes = GIB * max(gib for _, gib in run.list_values("peak_memory_gib"))
    bubble = f"{run.pipeline.bubble:.1%}" if run.pipeline else "not traced"
    rows = [
        ("", "measured", f"forecast, {'one core per rank' if on_cpu else run.gpu}"),
        (
            "step (median)",
            f"{run.find_median('step_time_s'):.3g} s",
            f"{forecast.step_time_s:.3g} s",
        ),
        (
            "tokens/s per rank (median)",
            f"{run.find_median('tokens_per_s_per_rank'):,.0f}",
            f"{forecast.tokens_per_s_per_gpu:,.0f}",
        ),
        (
            f"memory of rank 0{', with Python' if on_cpu else ''}",
            format_bytes(peak_bytes),
            format_bytes(run.memory[0].live),
        ),
        ("bubble of the pipeline (traces)", bubble, f"{forecast.bubble:.1%}"),
        (
            f"bytes of rank 0 in {planned.layout.n_microbatches} microbatches:",
            source,
            "",
        ),
    ]
    for key in dict.fromkeys([*moved, *closed_form]):
        axis, operation = key
        row = [f"{operation} over {axis}"]
        for traffic in (moved, closed_form):
            row.append(format_bytes(traffic[key].n_bytes) if key in traffic else "-")
        rows.append(row)
    body = "".join(f"<tr><td>{'<td>'.join(map(escape, row))}" for row in rows)
    yield f"<h3>Measurements and forecast</h3><div class=wide><table>{body}</table></div>"


def draw_traces(run: Run) -> Iterator[str]:
    """Draw the time of a step by activity, the measured and the planned pipeline, and the calls of the slowest rank."""
    if not run.traces:
        yield "<p><i>There are no traces. Record them with --profiling.enable_profiling.</i></p>"
        return
    step_s = max(sum(trace.parts.values()) for trace in run.traces)
    rows = []
    for trace in run.traces:
        rows.append((f"rank {trace.rank}", ROW_HEIGHT, draw_parts(trace.parts, step_s)))
        rows.append(("", 4, draw_parts(trace.hidden, step_s)))
    slowest = max(run.traces, key=lambda trace: trace.parts["computing"])
    part = max(slowest.parts, key=slowest.parts.get)
    share = f"{slowest.parts[part] / step_s:.0%}"
    about = (
        f"Rank {slowest.rank} computes longest. The largest part of its step is {part}: {share}."
    )
    yield "<h3>Where the time of a step goes</h3><p><i>Source: traces. Thin bars are hidden communication.</i></p>"
    yield f"<p>{about}</p>{draw_rows(rows, step_s)}"
    if run.pipeline:
        timelines = {
            "measured in traces": run.pipeline,
            "planned": run.forecast.timeline,
        }
        for about, timeline in timelines.items():
            title = f"Pipeline, {about}: {timeline.end_time:.3g} s, bubble {timeline.bubble:.1%}"
            yield f"<h3>{title}</h3>{draw_timeline(timeline)}"
    yield f"<h3>Calls of rank {slowest.rank}</h3>{draw_calls(slowest, step_s)}"


def draw_parts(parts: dict, step_s: float) -> list:
    """Return a box for each part, one after another."""
    boxes = []
    end = 0.0
    for part, seconds in parts.items():
        start = end
        end += seconds
        text = f"{part.removeprefix('exposed ')} {seconds / step_s:.0%}"
        boxes.append((start, end, color(part), f"{part}: {seconds:.4f} s", text))
    return boxes


def draw_calls(trace: Trace, step_s: float) -> str:
    """Draw the calls of a rank over one step, with callers above. Calls inside communication have its color."""
    boxes = defaultdict(list)  # by depth
    callers = []  # (end, axis)
    for start, end, name, axis in trace.calls:
        while callers and callers[-1][0] <= start:
            callers.pop()
        if callers:
            axis = callers[-1][1] or axis
        depth = len(callers)
        callers.append((end, axis))
        if end - start > step_s / 800 and depth < MOST_DEPTH:
            title = f"{name} {axis}: {end - start:.4f} s"
            boxes[depth].append((start, end, color(axis or "computing"), title, name))
    rows = [("", ROW_HEIGHT, boxes[depth]) for depth in sorted(boxes)]
    return draw_rows(rows, step_s, left=0)


def color(part: str) -> str:
    """Return the color of a part of a step, or of the first dim of an axis."""
    return (
        f"var(--{part.removeprefix('exposed ').removeprefix('hidden ').split()[0]}, var(--various))"
    )
