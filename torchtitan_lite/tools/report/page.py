"""Write the HTML page of `report`: summary, curves, experts, traces, and measurements next to the forecast."""

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from statistics import mean, median
from typing import NamedTuple

from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.pictures import (
    ROW_HEIGHT,
    Samples,
    draw_curves,
    draw_key,
    draw_rows,
    draw_table,
    thin,
    wrap_page,
)
from torchtitan_lite.tools.plan.memory import RankMemory
from torchtitan_lite.tools.plan.page import draw_layout
from torchtitan_lite.tools.plan.timeline import draw_timeline
from torchtitan_lite.tools.report.runs import (
    AXES,
    RecordedRun,
    list_differences,
    list_findings,
    summarize,
)
from torchtitan_lite.tools.report.traces import Trace
from torchtitan_lite.tools.tables import format_bytes, format_seconds, write_table

REFRESH_S = 10  # with --watch, the page is rewritten at intervals of this many seconds
LEAST_SHARE = 1000  # calls shorter than 1/1000 of a step are not drawn
N_WIDEST = 3  # number of longest exposed collectives that the page names
MOST_CURVES = 12  # number of colors in the style sheet
FINAL_FIELDS = ("loss", "val_loss", "tokens_per_s_per_rank")
MARKS = {  # kind of record -> color
    "start": "var(--run2)",
    "save": "var(--pale)",
    "stop": "var(--tp)",
}
PLOTS = {  # title -> field, field of the dashed curve, whether the axis starts at 0
    "Loss": ("loss", "val_loss", False),
    "Gradient norm": ("grad_norm", "", True),
    "Learning rate": ("lr", "", True),
    "Tokens/s per rank": ("tokens_per_s_per_rank", "", True),
    "MFU": ("mfu_full", "mfu_causal", True),
    "Peak memory of rank 0, GiB": ("peak_memory_gib", "reserved_memory_gib", True),
}


class Series(NamedTuple):
    """The data of one curve: a run, or the mean and the spread of several runs."""

    name: str
    color: str
    runs: list[RecordedRun]

    def list_groups(self, field: str) -> list[str]:
        """Return the fields of the groups in optimizer.groups, such as "lr/PATTERN" for the field "lr"."""
        names = {}
        for run in self.runs:
            for record in run.records:
                names |= dict.fromkeys(name for name in record if name.startswith(f"{field}/"))
        return list(names)

    def list_samples(self, field: str, axis: str) -> Samples:
        """Return (position on the axis, value of each run) for each step that all runs have. Positions are averaged."""
        by_run = [dict(run.list_values(field)) for run in self.runs]
        samples = []
        for step in by_run[0]:
            if all(step in values for values in by_run):
                place = mean(run.places[step][axis] for run in self.runs)
                samples.append((place, [values[step] for values in by_run]))
        return samples


def main(options: argparse.Namespace) -> int:
    """Write the page. With --watch, keep rewriting the page until the run ends. Raises UserError if a folder has no
    run."""
    if len({folder.resolve() for folder in options.runs}) < len(options.runs):
        raise UserError("two of the folders belong to the same run. Name each run once")
    out = options.out or options.runs[0] / "report.html"
    is_new = True
    while True:
        try:
            runs = [RecordedRun(folder) for folder in options.runs]
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise UserError(
                f"report cannot read a run: {error}. "
                "Name the dump folder of a run that has started, such as outputs/debug"
            ) from None
        is_watched = options.watch and any(run.records[-1]["kind"] != "stop" for run in runs)
        page = write_page(runs, options.group, options.x, refresh=is_watched)
        write_table(out, page)
        if is_new:
            print(f"open {out} in a browser", flush=True)
            is_new = False
        if not is_watched:
            return 0
        time.sleep(REFRESH_S)


def write_page(runs: list[RecordedRun], key: str | None, axis: str, *, refresh: bool) -> str:
    """Return the page. Runs with equal values of `key` share a curve. If `refresh` is true, the browser reloads the
    page."""
    is_alone = len(runs) == 1
    if key and not any(key in run.settings for run in runs):
        raise UserError(
            f"--group {key}: no run has this key. Use a key in config.toml of the runs."
        )
    groups = defaultdict(list)
    for run in runs:
        name = run.name if is_alone else str(run.folder)
        groups[f"{key} = {run.show(key)}" if key else name].append(run)
    if len(groups) > MOST_CURVES:
        raise UserError(
            f"{len(groups)} curves need more than {MOST_CURVES} colors. Name fewer runs, or use --group KEY."
        )
    series = [
        Series(name, f"var(--run{at})", members)
        for at, (name, members) in enumerate(groups.items())
    ]
    title = " and ".join(groups)
    parts = [f"<h1>{escape(title)}</h1>"]
    if is_alone:
        parts += [f"<p>{escape(sentence)}</p>" for sentence in summarize(runs[0])]
    else:
        table = compare_runs(series, list_differences(runs))
        parts.append(f"<h2>Final results, and keys that differ</h2>{table}")
        for run in runs:
            if findings := "; ".join(list_findings(run)):
                parts.append(f"<p>Look at {escape(f'{run.folder}: {findings}')}.</p>")
    about = (
        "Source: metrics.jsonl. Ticks below a curve mark starts (green), saves (gray) and stops (red). "
        "The last value of each curve is above the plot, first for solid curves, then for dashed curves."
    )
    if key:
        about += (
            " A line is the mean over the runs of a group, at the steps that all these runs have. "
            "The band around the line reaches from the lowest to the highest value."
        )
    parts.append(f"<h2>By {axis}</h2><p><i>{about}</i></p>")
    if not is_alone:
        parts.append(draw_key((each.color, "", each.name) for each in series))
    parts.append('<div class="grid">')
    parts += draw_plots(series, axis)
    parts.append("</div>")
    if is_alone:
        parts += draw_experts(runs[0])
        if not refresh:
            parts += draw_traces(runs[0])
        parts.append(compare_with_forecast(runs[0]))
        if runs[0].plan:
            parts += draw_layout(runs[0].plan)
    return wrap_page(title, "".join(parts), REFRESH_S if refresh else 0)


def compare_runs(series: list[Series], keys: list[str]) -> str:
    """Draw a table of the final results and the values of `keys`, with one column per curve."""
    columns = [["", "runs", *AXES, *FINAL_FIELDS, *keys]]
    for each in series:
        last_places = []
        for run in each.runs:
            last_step, _ = run.list_values("loss")[-1]
            last_places.append(run.places[last_step])
        column = [each.name, str(len(each.runs))]
        for axis in AXES:
            column.append(format_mean([round(place[axis], 4) for place in last_places], 12))
        for field in FINAL_FIELDS:
            curves = [run.list_values(field) for run in each.runs]
            column.append(format_mean([points[-1][1] for points in curves if points]))
        for key in keys:
            values = dict.fromkeys(run.show(key) for run in each.runs)
            column.append(" or ".join(values))
        columns.append(column)
    return draw_table(zip(*columns, strict=True))


def format_mean(values: list[float], n_digits: int = 5) -> str:
    """Format the mean of several runs, and the range of their values if they differ: `1.9060 (1.9012 to 1.9101)`."""
    if not values:
        return ""
    text = f"{mean(values):,.{n_digits}g}"
    if min(values) < max(values):
        text += f" ({min(values):,.{n_digits}g} to {max(values):,.{n_digits}g})"
    return text


def draw_plots(series: list[Series], axis: str) -> Iterator[str]:
    """Draw a plot for each field of PLOTS that a run has."""
    marks = []
    for each in series:
        for run in each.runs:
            for record in run.records[1:]:
                if kind_color := MARKS.get(record["kind"]):
                    place = run.places[record["step"]][axis]
                    marks.append((place, kind_color, f"{run.name}: {record['kind']}"))
    for title, (field, dashed_field, from_zero) in PLOTS.items():
        curves = []
        lasts = defaultdict(str)  # field -> last value of each curve, in the color of the curve
        for each in series:
            dashes_of = {field: "none", dashed_field: "4 4"}
            dashes_of |= dict.fromkeys(each.list_groups(field), "1 3")
            for name, dashes in dashes_of.items():
                samples = each.list_samples(name, axis)
                if samples:
                    curves.append((f"{each.name}, {name}", each.color, dashes, samples))
                    last = f"{mean(samples[-1][1]):,.4g}"
                    lasts[name] += f' <span style="color: {each.color}">{last}</span>'
        if curves:
            values = "".join(
                f" {escape(name) if len(lasts) > 1 else ''}{last}" for name, last in lasts.items()
            )
            picture = draw_curves(curves, marks, axis=axis, from_zero=from_zero)
            yield f"<figure><b>{title}</b>{values}{picture}</figure>"


def draw_experts(run: RecordedRun) -> Iterator[str]:
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
    about = "Load of the busiest expert, relative to the mean of its layer: 1 is blank, 3.5 is red (metrics.jsonl)."
    yield f"<h3>Experts</h3><p><i>{about}</i></p>{draw_rows(rows, len(rows[0][2]))}"


def compare_with_forecast(run: RecordedRun) -> str:
    """Draw a table with the measurements next to the forecast."""
    if run.plan is None:
        return f"<p><i>No forecast and no traces. This checkout refuses the config: {escape(run.no_plan)}</i></p>"
    forecast = run.plan.forecast
    times_s = [step_s for _, step_s in run.list_values("step_time_s")]
    median_s = median(times_s[1:] or times_s)  # leave out the first step, which is a warm-up
    rows = [
        ["", "measured", f"forecast, {run.plan.cluster.name}"],
        ["step (median)", f"{median_s:.3g} s", f"{forecast.step_time_s:.3g} s"],
    ]
    # on a CPU, leave out memory, because the measurement includes Python and torch, and the forecast does not
    if not run.start["device"].endswith(" CPU"):
        peak_bytes = GIB * max(gib for _, gib in run.list_values("peak_memory_gib"))
        live_bytes = RankMemory(run.plan.workload).estimate(0).live
        rows.append(["memory of rank 0", format_bytes(peak_bytes), format_bytes(live_bytes)])
    return f"<h3>Measurements and forecast</h3>{draw_table(rows)}"


def draw_traces(run: RecordedRun) -> Iterator[str]:
    """Draw the time of a step by activity, and the measured and the planned pipeline."""
    if not run.traces:
        if run.plan:
            yield "<p><i>There are no traces. Record them with --profiling.enable_profiling.</i></p>"
        return
    step_s = max(sum(trace.parts.values()) for trace in run.traces)
    rows = []
    for trace in run.traces:
        rows.append((f"rank {trace.rank}", ROW_HEIGHT, draw_parts(trace.parts, step_s)))
        rows.append(("", 4, draw_parts(trace.hidden, step_s)))
    slowest = max(run.traces, key=lambda trace: trace.parts["computing"])
    about = (
        f"Rank {slowest.rank} computes longest. Source: traces. Thin bars are hidden communication."
    )
    boxes = draw_parts(slowest.parts, step_s)
    key = draw_key((color, "", title) for _, _, color, title, _ in boxes)
    yield f"<h3>Where the time of a step goes, measured</h3><p><i>{about}</i></p>{key}{draw_rows(rows, step_s)}"
    yield draw_calls(slowest, sum(slowest.parts.values()))
    if run.pipeline:
        timeline = run.pipeline
        title = f"Pipeline, measured: {timeline.end_time:.3g} s, bubble {timeline.bubble:.1%}"
        yield f"<h3>{title}</h3>{draw_timeline(timeline)}"


def draw_calls(trace: Trace, step_s: float) -> str:
    """Draw the phases, modules and collectives of a rank over a step, and name the longest exposed collectives."""
    rows = {"phase": [], "module": []}
    communication = []
    for call in trace.calls:
        length = call.end - call.start
        color = "var(--computing)"
        title = f"{call.name}: {format_seconds(length)}"
        if call.row not in ("phase", "module"):
            communication.append(call)
            color = "var(--tp)" if call.exposed > length / 2 else "var(--cp)"
            title += f" over {call.row}, {format_seconds(call.exposed)} exposed"
        elif kind := re.match("[FBIW]", call.name):  # a phase of the pipeline
            color = f"var(--{kind[0]})"
        if length > step_s / LEAST_SHARE:
            boxes = rows.setdefault(call.row, [])
            boxes.append((call.start, call.end, color, title, call.name))
    widest = sorted(communication, key=lambda call: -call.exposed)[:N_WIDEST]
    named = [f"{call.name} over {call.row} ({format_seconds(call.exposed)})" for call in widest]
    about = f"Rank {trace.rank}. Longest exposed calls: {', '.join(named)}."
    key = draw_key([("var(--tp)", "", "exposed"), ("var(--cp)", "", "hidden behind compute")])
    drawn = [(row.split()[0], ROW_HEIGHT, boxes) for row, boxes in rows.items() if boxes]
    return (
        f"<h3>Calls of a step, measured</h3><p>{escape(about)}</p>{key}{draw_rows(drawn, step_s)}"
    )


def draw_parts(parts: dict, step_s: float) -> list:
    """Return one box per part, placed side by side."""
    boxes = []
    end = 0.0
    for part, seconds in parts.items():
        start = end
        end += seconds
        axis = part.removeprefix("exposed ").removeprefix("hidden ")
        color = f"var(--{axis.split()[0]}, var(--various))"  # the color of the first mesh dim
        text = f"{axis} {seconds / step_s:.0%}"
        boxes.append((start, end, color, f"{part}: {seconds:.4f} s", text))
    return boxes
