"""Draw a pipeline's timeline: text for a terminal, SVG for a page, a trace for chrome://tracing or Perfetto; memory.

pp rank 0  F0F1F2F3......B0--B1--B2--B3--
pp rank 1  ..F0F1F2F3B0--B1--B2--B3--....       one column is a slice of time; dots are the bubble
"""

from html import escape
from itertools import accumulate

from torchtitan_lite.config.memory import Memory
from torchtitan_lite.config.messages import format_bytes, format_table
from torchtitan_lite.plan.simulator import Event, Timeline

COLOURS = {"F": "#4e79a7", "B": "#f28e2b", "I": "#edc948", "W": "#b07aa1"}
MEANINGS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
ROW_HEIGHT, LABEL_WIDTH = 22, 72  # pixels


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """Return one line per pp rank, at most `width` columns; with microbatch numbers if the shortest action has room."""
    labels = [f"pp rank {rank}" for rank in range(timeline.n_ranks)]
    indent = len(labels[-1]) + 2
    longest_number = len(str(max(event.action.microbatch for event in timeline.events)))
    shortest = min(event.end - event.start for event in timeline.events)
    per_column = shortest / (1 + longest_number)  # seconds
    numbered = timeline.end_time <= per_column * (width - indent)
    if not numbered:
        per_column = timeline.end_time / (width - indent)
    lines = [["."] * round(timeline.end_time / per_column) for _ in labels]
    for event in timeline.events:
        first, last = round(event.start / per_column), round(event.end / per_column)
        text = event.action.kind + str(event.action.microbatch) * numbered
        lines[event.rank][first:last] = text.ljust(last - first, "-")[: last - first]
    return "\n".join(f"{label:{indent}}{''.join(line)}" for label, line in zip(labels, lines, strict=True))


def draw_memory(ranks: list[Memory], width: int = 60) -> str:
    """Return a bar for each pp rank, of what it holds at its peak, on one scale; and the bytes of each part."""
    per_column = max(memory.live for memory in ranks) / width
    letters = dict(zip(vars(ranks[0]), "PGOUARW", strict=True))  # U: gathered, so unsharded
    bars, rows = [], [("", *(f"{letter} {part}" for part, letter in letters.items()), "live")]
    for rank, memory in enumerate(ranks):
        ends = [round(end / per_column) for end in accumulate(vars(memory).values())]
        pieces = zip(letters.values(), [0, *ends], ends, strict=False)
        bars.append(
            f"pp rank {rank:<{len(str(len(ranks) - 1))}}  " + "".join(c * (end - start) for c, start, end in pieces)
        )
        rows.append((f"pp rank {rank}", *map(format_bytes, [*vars(memory).values(), memory.live])))
    return "\n".join([*bars, "", format_table(rows)])


def draw_svg(timeline: Timeline, title: str = "", width: int = 1000) -> str:
    """Return the picture as a whole SVG file. A rank's later stages are paler; a tooltip names each action."""
    scale = (width - LABEL_WIDTH - 8) / timeline.end_time
    kinds = [kind for kind in COLOURS if any(event.action.kind == kind for event in timeline.events)]
    top = 30
    height = top + timeline.n_ranks * ROW_HEIGHT + 30
    shapes = [
        f'<text x="8" y="20" font-weight="bold">{escape(title) or "pipeline"}: bubble {timeline.bubble:.1%}</text>'
    ]
    for rank in range(timeline.n_ranks):
        y = top + rank * ROW_HEIGHT
        shapes.append(f'<text x="8" y="{y + 15}">pp rank {rank}</text>')
        shapes.append(
            f'<rect x="{LABEL_WIDTH}" y="{y}" width="{width - LABEL_WIDTH - 8}" height="{ROW_HEIGHT - 3}" fill="#eee"/>'
        )
    for event in timeline.events:
        shapes += draw_box(event, LABEL_WIDTH + event.start * scale, top + event.rank * ROW_HEIGHT, scale, timeline)
    for index, kind in enumerate(kinds):
        x, y = LABEL_WIDTH + index * 150, height - 22
        shapes.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        shapes.append(f'<text x="{x + 17}" y="{y + 10}">{MEANINGS[kind]}</text>')
    frame = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>', '<rect width="100%" height="100%" fill="white"/>']
    return "\n".join([*lines, *shapes, "</svg>\n"])


def draw_box(event: Event, x: float, y: float, scale: float, timeline: Timeline) -> list[str]:
    """Return the rectangle of one action, and its microbatch number if there is room."""
    action, width = event.action, (event.end - event.start) * scale
    opacity = 1 / (1 + 0.5 * (action.stage // timeline.n_ranks))
    box = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW_HEIGHT - 3}" fill="{COLOURS[action.kind]}"'
    name = f"stage {action.stage}, {MEANINGS[action.kind]}, microbatch {action.microbatch}"
    shapes = [
        f'<rect {box} fill-opacity="{opacity:.2f}" stroke="white" stroke-width="0.5"><title>{name}</title></rect>'
    ]
    if width > 7 * len(str(action.microbatch)) + 3:
        middle = x + width / 2
        shapes.append(f'<text x="{middle:.2f}" y="{y + 14}" text-anchor="middle">{action.microbatch}</text>')
    return shapes


def trace_chrome(timeline: Timeline) -> dict[str, object]:
    """Return the timeline in Chrome's trace format (JSON): one thread per pp rank, times in microseconds."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pp rank {rank}"}}
        for rank in range(timeline.n_ranks)
    ]
    boxes = [
        {
            "name": str(event.action),
            "cat": MEANINGS[event.action.kind],
            "ph": "X",
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "pid": 0,
            "tid": event.rank,
            "args": {"stage": event.action.stage, "microbatch": event.action.microbatch},
        }
        for event in timeline.events
    ]
    return {"traceEvents": names + boxes, "displayTimeUnit": "ms"}
