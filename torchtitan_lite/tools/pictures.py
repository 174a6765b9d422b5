"""Write HTML pages with pictures: curves over steps, bars, and rows of boxes for heat maps and timelines.

Horizontal positions are percentages and heights are pixels, so a picture fits any width and its text keeps its size.
The <title> of each point and each box is its tooltip. STYLE has a color for each run, each mesh dim and each action of
a pipeline. A page is one file without scripts. This module does not import torch.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10
from statistics import mean

LEFT = 13.0  # start of the horizontal axis, in percent
WIDTH = 83.0  # length of the horizontal axis, in percent
PLOT_HEIGHT = 130  # in pixels
ROW_HEIGHT = 20  # in pixels
MOST_STEPS = 4  # maximum number of intervals between the ticks of an axis
MOST_POINTS = 300  # maximum number of points per curve
# if a picture has more boxes than this, all boxes of the same color become one shape without tooltips
MOST_BOXES = 700
PAGE_WIDTH = 1048  # maximum width in pixels
PHONE_WIDTH = 358
CHARACTER = 6.6  # width of a character in a box, in pixels
STYLE = """
:root { color-scheme: light dark; --page: light-dark(#fff, #15191d); --ink: light-dark(#1f262d, #e1e5e9);
  --pale: light-dark(#69727b, #98a1aa); --line: light-dark(#e4e7ea, #2d343b); --soft: light-dark(#f4f5f7, #1e242a);
  --run0: #4587cf; --run1: #d9822b; --run2: #35a075; --run3: #c05c98; --run4: #8a6fd0; --run5: #b8a02c;
  --run6: #c9504a; --run7: #2fa3b5; --run8: #8c6d4f; --run9: #6a9a2f; --run10: #5a62c4; --run11: #808890;
  --computing: #8ba1b8; --waiting: #8e969d40;
  --dp_replicate: #3d6fae; --dp_shard: #4c8fd6; --efsdp: #6f86c9; --pp: #9a6fd6; --cp: #2fa39c; --tp: #dd5f46;
  --ep: #d3a02c; --various: #8d949c; --F: #4c8fd6; --B: #ea8f3c; --I: #d9b92e; --W: #a573cf }
body { margin: 0 auto; max-width: 1080px; padding: 24px 16px; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums }
h1, h2, h3, p, figure { margin: 5px 0 } h2, h3 { margin-top: 32px } p { max-width: 88ch } i { color: var(--pale) }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 310px), 1fr)); gap: 18px 28px }
pre, .wide { overflow-x: auto } pre { font-size: 12.5px; background: var(--soft); padding: 8px }
table { border-collapse: collapse; font-size: 14px } h1, p, li { overflow-wrap: anywhere }
td { padding: 3px 18px 3px 0; border-bottom: 1px solid var(--line) } tr:first-child { font-weight: 600 }
svg { width: 100%; overflow: visible; display: block } svg svg { overflow: hidden } svg.box { width: auto }
text { font-size: 11px; fill: var(--pale) } .box text { fill: var(--ink) } line { stroke: var(--line) }
rect { fill: color-mix(in srgb, currentColor 62%, var(--page)); stroke: var(--page) }
path { stroke: color-mix(in srgb, currentColor 62%, var(--page)); stroke-width: 2 }
.band { fill-opacity: .18; stroke: none } polyline { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke }
.bar { display: flex; height: 18px; margin: 2px 0 9px; background: var(--soft); position: relative; border-radius: 3px }
.bar b { box-shadow: inset -1px 0 var(--page); background: color-mix(in srgb, currentColor 68%, var(--page)) }
.bar b:first-child { border-radius: 3px 0 0 3px } .bar b:hover { filter: brightness(.85) }
.bar .pale, .key .pale::before { background: color-mix(in srgb, currentColor 26%, var(--page)) }
.bar u { position: absolute; top: -4px; bottom: -4px; border-left: 2px solid var(--ink) }
.name { display: flex; justify-content: space-between; gap: 12px; font-size: 13.5px; margin: 0; max-width: none }
.name :last-child { white-space: nowrap }
.key { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--pale); margin: 4px 0 10px }
.key span::before { content: ""; display: inline-block; width: 11px; height: 11px; margin-right: 6px;
  border-radius: 2px; background: color-mix(in srgb, currentColor 68%, var(--page)) }
.key u { text-decoration: none; color: var(--pale) }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 14px 0 }
.facts div { background: var(--soft); padding: 9px 12px; border-radius: 6px; font-size: 13px; color: var(--pale) }
.facts b { display: block; font-size: 21px; font-weight: 600; color: var(--ink) }
@media (max-width: 700px) { .desk { display: none } pre { white-space: pre-wrap; overflow-wrap: anywhere }
  td { padding-right: 6px; font-size: 12.5px } }
.far { opacity: 0 } circle:hover { opacity: 1 }
@media print { h2, h3 { break-after: avoid } figure, svg, tr { break-inside: avoid } }
"""

Points = list[tuple[float, float]]  # (position on the horizontal axis, value)
Samples = list[tuple[float, list[float]]]  # (position on the horizontal axis, value of each run)
Curve = tuple[str, str, str, Samples]  # name, color, dashes of the line, samples
Box = tuple[float, float, str, str, str]  # start, end, color, title, text inside
Part = tuple[float, str, str, str]  # size, color, "" or "pale", title


def choose_ticks(low: float, high: float) -> list[float]:
    """Return at most MOST_STEPS + 1 round numbers from low to high."""
    size = 10 ** floor(log10((high - low) / MOST_STEPS))
    steps = (size, 2 * size, 5 * size, 10 * size)
    step = next(step for step in steps if (high - low) / step <= MOST_STEPS)
    first = ceil(low / step)
    last = floor(high / step)
    return [number * step for number in range(first, last + 1)]


def thin(points: Points) -> Points:
    """Return at most MOST_POINTS points. To keep spikes, take the lowest and the highest point of each group of
    neighboring points."""
    if len(points) <= MOST_POINTS:
        return points
    kept = set()
    size = 2 * ceil(len(points) / MOST_POINTS)
    for start in range(0, len(points), size):
        group = sorted(points[start : start + size], key=lambda point: point[1])
        kept |= {group[0], group[-1]}
    return sorted(kept)


def draw_curves(
    curves: list[Curve], marks: list[tuple[float, str, str]], *, axis: str, from_zero: bool
) -> str:
    """Draw each curve as the mean of its runs, in a band from the lowest to the highest value.

    `marks` are ticks below the curves: (position, color, title). `axis` is the unit of the axis, such as steps.
    """
    places = []
    values = []
    for *_, samples in curves:
        for place, of_runs in samples:
            places.append(place)
            values += of_runs
    first = min(places)
    last = max(places)
    if last <= first:
        last = first + 1
    low = 0 if from_zero else min(values)
    high = max(values)
    if high <= low:
        high = low + 1

    def across(place: float) -> float:
        return LEFT + WIDTH * (place - first) / (last - first)

    def down(value: float) -> float:
        return 8 + (PLOT_HEIGHT - 8) * (high - value) / (high - low)

    def connect(points: Points) -> str:
        return " ".join(f"{across(at) * 10:.1f},{down(value):.1f}" for at, value in points)

    shapes = []
    for tick in choose_ticks(low, high):
        y = down(tick)
        shapes.append(f'<line x1="{LEFT}%" x2="{LEFT + WIDTH}%" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(
            f'<text x="{LEFT - 1.5}%" y="{y + 4:.1f}" text-anchor="end">{tick:,.7g}</text>'
        )
    for tick in choose_ticks(first, last):
        place = f'x="{across(tick):.2f}%" y="{PLOT_HEIGHT + 22}" text-anchor="middle"'
        shapes.append(f"<text {place}>{tick:,.7g}</text>")
    for at, color, title in marks:
        place = f'x1="{across(at):.2f}%" x2="{across(at):.2f}%" y1="{PLOT_HEIGHT + 1}" y2="{PLOT_HEIGHT + 9}"'
        shapes.append(
            f'<line {place} style="stroke: {color}; stroke-width: 2"><title>{escape(title)}</title></line>'
        )
    frame = (
        f'<svg viewBox="0 0 1000 {PLOT_HEIGHT}" preserveAspectRatio="none" height="{PLOT_HEIGHT}">'
    )
    for name, color, dashes, samples in curves:
        points = thin([(at, mean(of_runs)) for at, of_runs in samples])
        band = ""
        if len(samples[0][1]) > 1:
            edge = [(at, max(of_runs)) for at, of_runs in samples]
            edge += [(at, min(of_runs)) for at, of_runs in reversed(samples)]
            band = f'<polygon class="band" points="{connect(edge)}" fill="{color}"/>'
        line = f'points="{connect(points)}" stroke="{color}" stroke-dasharray="{dashes}"'
        shapes.append(f"{frame}{band}<polyline {line}/></svg>")
        look = f'r="3" fill="{color}" class="{"far" if len(samples) > 40 else "near"}"'
        for at, value in points:
            place = f'cx="{across(at):.2f}%" cy="{down(value):.1f}"'
            title = f"{escape(name)}, {axis.removesuffix('s')} {at:.7g}: {value:.7g}"
            shapes.append(f"<circle {place} {look}><title>{title}</title></circle>")
    return f'<svg height="{PLOT_HEIGHT + 28}">{"".join(shapes)}</svg>'


def draw_rows(rows: list[tuple[str, int, list[Box]]], length: float) -> str:
    """Draw rows of boxes along an axis from 0 to `length`. A row is (label, height in pixels, boxes)."""
    shapes = []
    y = 0
    is_fine = sum(len(boxes) for *_, boxes in rows) > MOST_BOXES
    for label, height, boxes in rows:
        shapes.append(
            f'<text x="{LEFT - 1}%" y="{y + height / 2 + 4}" text-anchor="end">{escape(label)}</text>'
        )
        paths = defaultdict(list)  # color -> shapes
        for start, end, color, title, text in boxes:
            x = LEFT + WIDTH * start / length
            width = WIDTH * (end - start) / length
            if is_fine:
                paths[color].append(f"M{100 * x:.0f} 0h{max(1, 100 * width - 2):.0f}")
                continue
            inside = ""
            if look := choose_look(text, width):
                inside = f'<text x="3" y="{height / 2 + 4}" class="{look}">{escape(text)}</text>'
            shapes.append(
                f'<svg class="box" x="{x:.2f}%" y="{y}" width="{width:.2f}%" height="{height}" color="{color}">'
                f'<title>{escape(title)}</title><rect width="100%" height="100%"/>{inside}</svg>'
            )
        for color, steps in paths.items():
            shapes.append(
                f'<svg viewBox="0 0 10000 1" preserveAspectRatio="none" y="{y}" height="{height}" color="{color}">'
                f'<path d="{"".join(steps)}"/></svg>'
            )
        y += height + 2
    return f'<svg height="{y}">{"".join(shapes)}</svg>'


def choose_look(text: str, width: float) -> str:
    """Return the screens on which a text fits into a box of `width` percent: "all", "desk" (not on a phone), or ""
    (none)."""
    needed = 100 * (CHARACTER * len(text) + 5)
    if width * PHONE_WIDTH >= needed:
        return "all"
    return "desk" if width * PAGE_WIDTH >= needed else ""


def draw_bar(name: str, value: str, boxes: Iterable[Part], length: float, limit: float = 0) -> str:
    """Draw a bar of parts, with a name and a value above the bar, and a line across the bar at `limit`."""
    parts = "".join(
        f'<b class="{look}" style="width: {100 * size / length:.2f}%; color: {color}" title="{escape(title)}"></b>'
        for size, color, look, title in boxes
    )
    if limit:
        parts += f'<u style="left: {100 * limit / length:.2f}%"></u>'
    return f'<p class="name"><span>{escape(name)}</span><span>{escape(value)}</span></p><div class="bar">{parts}</div>'


def draw_key(entries: Iterable[tuple[str, str, str]]) -> str:
    """Draw a legend of colors. An entry is (color, "" or "pale", meaning)."""
    words = "".join(
        f'<span class="{look}" style="color: {color}"><u>{escape(text)}</u></span>'
        for color, look, text in entries
    )
    return f'<p class="key">{words}</p>'


def draw_facts(facts: dict[str, str]) -> str:
    """Draw tiles, each with a value and its label below. `facts` maps label to value."""
    cells = "".join(
        f"<div><b>{escape(fact)}</b>{escape(text)}</div>" for text, fact in facts.items()
    )
    return f'<div class="facts">{cells}</div>'


def draw_table(rows: Iterable[Sequence[str]]) -> str:
    """Draw a table; its first row is the heading. A browser may break long words at underscores."""
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}" for cell in row).replace("_", "_<wbr>")
        body += f"<tr>{cells}"
    return f"<div class=wide><table>{body}</table></div>"


def wrap_page(title: str, body: str, refresh_s: int = 0) -> str:
    """Return a whole page. The browser reloads the page every `refresh_s` seconds, or never if `refresh_s` is 0."""
    head = f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
    if refresh_s:
        head = f'<meta http-equiv="refresh" content="{refresh_s}">{head}'
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{head}<body>{body}</body></html>\n'
    )
