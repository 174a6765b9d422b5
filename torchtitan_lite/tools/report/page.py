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
from torchtitan_lite.tools.plan.explain import describe_step, draw_mesh, elide, format_parameters
from torchtitan_lite.tools.plan.planned_run import group_pp_ranks
from torchtitan_lite.tools.plan.timeline import draw_timeline, plan_order
from torchtitan_lite.tools.plan.transfers import estimate_traffic
from torchtitan_lite.tools.report.runs import Run, describe_run
from torchtitan_lite.tools.report.traces import Trace
from torchtitan_lite.tools.tables import format_bytes

FEW = 8  # maximum number of microbatches of a dry run
MOST_DEPTH = 10  # maximum depth of nested calls
MARKS = {"start": "var(--run2)", "save": "var(--pale)", "stop": "var(--tp)"}  # kind of record -> color
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
        page = write_page([Run(folder, f"var(--run{at % 4})") for at, folder in enumerate(options.runs)])
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
        parts += [f'<h3 style="color: {run.color}">{escape(run.name)}</h3>'] * (len(runs) > 1)
        parts += [f"<p>{escape(sentence)}</p>" for sentence in describe_run(run)]
    about = "Source: metrics.jsonl. Ticks below a curve: starts (green), saves (gray), stops (red)."
    parts += [f'<h2>By step</h2><p><i>{about}</i></p><div class="grid">', *draw_plots(runs), "</div>"]
    for run in runs:
        parts += [f'<h2 style="color: {run.color}">{escape(run.name)}</h2>'] * (len(runs) > 1)
        parts += [*draw_experts(run), *draw_traces(run), compare(run), *describe_mesh(run)]
    head = f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{head}<body>{"".join(parts)}</body></html>\n'


def draw_plots(runs: list[Run]) -> Iterator[str]:
    records = [(run.name, record) for run in runs for record in run.records[1:] if record["kind"] in MARKS]
    marks = [(record["step"], MARKS[record["kind"]], f"{name}: {record['kind']}") for name, record in records]
    for title, (*fields, from_zero) in PLOTS.items():
        curves, values = [], ""
        for run, (field, dashes) in product(runs, zip(fields, ("none", "4 4"), strict=True)):
            if points := run.list_values(field):
                curves.append((f"{run.name}, {field}", run.color, dashes, points))
                about = f"{points[-1][1]:,.4g}" if dashes == "none" else f"╌ {field} {points[-1][1]:,.4g}"
                values += f' <span style="color: {run.color}">{about}</span>'
        if curves:
            yield f"<figure><b>{title}</b>{values}{draw_curves(curves, marks, from_zero=from_zero)}</figure>"


def draw_experts(run: Run) -> Iterator[str]:
    loads, rows = run.list_values("expert_loads"), []  # (step, load of each expert of each layer)
    for layer in range(len(loads[0][1]) if loads else 0):
        ratios = [(step, max(load[layer]) / max(1, sum(load[layer])) * len(load[layer])) for step, load in loads]
        boxes = []
        for x, (step, ratio) in enumerate(thin(ratios)):
            color = f"color-mix(in srgb, var(--tp) {min(100, 40 * ratio - 40):.0f}%, var(--page))"
            boxes.append((x, x + 1, color, f"layer {layer}, step {step}: {ratio:.4f}", ""))
        rows.append((f"layer {layer}", ROW_HEIGHT, boxes))
    if rows:
        about = "Load of the busiest expert, relative to the mean of its layer: pale is 1, red is 3.5 (metrics.jsonl)."
        yield f"<h3>Experts</h3><p><i>{about}</i></p>{draw_rows(rows, len(rows[0][2]))}"


def describe_mesh(run: Run) -> Iterator[str]:
    layout, per_stage = run.planned.layout, run.planned.layout.strides["pp"]
    yield f"<h3>Mesh: {layout}</h3><pre>{draw_mesh(layout.degrees)}\n\n{escape(describe_step(run.planned))}</pre>"
    for pp in group_pp_ranks(run.planned):
        parameters, ranks = dry_run(shorten(run.planned, 1), pp).parameters, range(pp * per_stage, (pp + 1) * per_stage)
        slices = escape(format_parameters(parameters, elide(ranks)))
        yield f"<details><summary>Slices on pp rank {pp}, as in explain</summary><pre>{slices}</pre></details>"


def compare(run: Run) -> str:
    """Return a table of measurements and forecast. Bytes come from traces of NCCL, or from a dry run."""
    planned, expected, traced = run.planned, run.forecast, run.traces[0].moved if run.traces else {}
    tokens_per_s = run.find_median("tokens_per_s_per_rank")
    peak_bytes = GIB * max(gib for _, gib in run.list_values("peak_memory_gib"))
    on_cpu, bubble = planned.device_type == "cpu", run.pipeline and f"{run.pipeline.bubble:.1%}"
    whole = planned if traced else shorten(planned, FEW)
    found = traced or dry_run(whole).traffic
    closed = estimate_traffic(whole.workload, 0, plan_order(planned.config.parallelism, whole.layout))
    rows = [
        ("", "measured", f"forecast, {'one core per rank' if on_cpu else run.gpu}"),
        ("step (median)", f"{run.find_median('step_time_s'):.3g} s", f"{expected.step_time_s:.3g} s"),
        ("tokens/s per rank (median)", f"{tokens_per_s:,.0f}", f"{expected.tokens_per_s_per_gpu:,.0f}"),
        (f"memory of rank 0{', with Python' * on_cpu}", format_bytes(peak_bytes), format_bytes(run.memory[0].live)),
        ("bubble of the pipeline (traces)", bubble or "not traced", f"{expected.bubble:.1%}"),
        (f"bytes of rank 0 in {whole.layout.n_microbatches} microbatches:", "NCCL" if traced else "dry run", ""),
    ]
    for key in dict.fromkeys([*found, *closed]):
        moved = (format_bytes(each[key].n_bytes) if key in each else "-" for each in (found, closed))
        rows.append((f"{key[1]} over {key[0]}", *moved))
    body = "".join(f"<tr><td>{'<td>'.join(map(escape, row))}" for row in rows)
    return f"<h3>Measurements and forecast</h3><div class=wide><table>{body}</table></div>"


def draw_traces(run: Run) -> Iterator[str]:
    """Draw the time of a step by activity, the measured and the planned pipeline, and the calls of the slowest rank."""
    if not run.traces:
        yield "<p><i>There are no traces. Record them with --profiling.enable_profiling.</i></p>"
        return
    rows, step_s = [], max(sum(trace.parts.values()) for trace in run.traces)
    for trace in run.traces:
        for label, height, parts in ((f"rank {trace.rank}", ROW_HEIGHT, trace.parts), ("", 4, trace.hidden)):
            at, boxes = 0.0, []
            for part, seconds in parts.items():
                text = f"{part.removeprefix('exposed ')} {seconds / step_s:.0%}"
                boxes.append((at, at + seconds, color(part), f"{part}: {seconds:.4f} s", text))
                at += seconds
            rows.append((label, height, boxes))
    slowest = max(run.traces, key=lambda trace: trace.parts["computing"])
    part, seconds = max(slowest.parts.items(), key=lambda item: item[1])
    about = f"Rank {slowest.rank} computes longest. The largest part of its step is {part}: {seconds / step_s:.0%}."
    yield "<h3>Where the time of a step goes</h3><p><i>Source: traces. Thin bars are hidden communication.</i></p>"
    yield f"<p>{about}</p>{draw_rows(rows, step_s)}"
    timelines = {"measured in traces": run.pipeline, "planned": run.forecast.timeline} if run.pipeline else {}
    for about, timeline in timelines.items():
        title = f"Pipeline, {about}: {timeline.end_time:.3g} s, bubble {timeline.bubble:.1%}"
        yield f"<h3>{title}</h3>{draw_timeline(timeline)}"
    yield f"<h3>Calls of rank {slowest.rank}</h3>{draw_calls(slowest, step_s)}"


def draw_calls(trace: Trace, step_s: float) -> str:
    """Draw the calls of a rank over one step, with callers above. Calls inside communication have its color."""
    rows, callers = defaultdict(list), []  # (end, axis)
    for start, end, name, axis in trace.calls:
        while callers and callers[-1][0] <= start:
            callers.pop()
        axis = callers[-1][1] or axis if callers else axis
        if end - start > step_s / 800 and len(callers) < MOST_DEPTH:
            box = (start, end, color(axis or "computing"), f"{name} {axis}: {end - start:.4f} s", name)
            rows[len(callers)].append(box)
        callers.append((end, axis))
    return draw_rows([("", ROW_HEIGHT, rows[depth]) for depth in sorted(rows)], step_s, left=0)


def color(part: str) -> str:  # the color of a part of a step, or of the first dim of an axis
    return f"var(--{part.removeprefix('exposed ').removeprefix('hidden ').split()[0]}, var(--various))"
