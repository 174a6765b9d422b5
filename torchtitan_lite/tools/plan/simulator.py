"""A pipeline schedule, simulated and drawn: how long a step takes, who idles, how many microbatches are in flight.

    pp rank 0  F0F1....B0--F2B1--F3B2--..B3--    PipelineOrder: what each pp rank does, from torch's own schedule
    pp rank 1  ..F0B0--F1B1--F2B2--F3B3--....    classes or a CSV file. F forward, B backward, or its halves:
                                                 I gradients of inputs, W gradients of weights

    GPipe, 2 microbatches     pp rank 0: 0F0 0F1 0B0 0B1        pp rank 1: 1F0 1F1 1B0 1B1

A pp rank starts its next action when it is free and the action's input has arrived: from another rank one `send` after
it was done. Sends only delay; they take no rank's time. Bubble is the idle share of all pp ranks' time.

With even stages, B = 2F and no delay, GPipe and 1F1B idle (p-1)/(m+p-1) of a step, interleaved (p-1)/(v*m+p-1):
p pp ranks, m microbatches, v stages a rank. (P-1)/M, often quoted, is idle over *ideal* time. Durations come from
step_time.py.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from html import escape
from types import SimpleNamespace
from typing import NamedTuple

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schedule import Action, needs_of, read_rows
from torchtitan_lite.config.schema import Parallelism

PipelineOrder = list[list[Action]]  # the actions of each pp rank in one step, without the waits
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}  # of torch's stages
MEANINGS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
COLORS = {"F": "#4e79a7", "B": "#f28e2b", "I": "#edc948", "W": "#b07aa1"}
ROW_HEIGHT, LABEL_WIDTH = 22, 72  # pixels


# ---------------------------------------------------------------- the order of work


def plan_order(section: Parallelism, layout: Layout) -> PipelineOrder:
    """Return the order of a layout: of its CSV file, or of its schedule."""
    if layout.pp > 1 and section.pipeline_parallel_schedule_csv:
        return read_rows(section.pipeline_parallel_schedule_csv)
    n_stages_per_rank = len(layout.stages) // layout.pp
    return pipeline_order(section.pipeline_parallel_schedule, layout.pp, layout.n_microbatches, n_stages_per_rank)


@lru_cache(maxsize=1024)
def pipeline_order(schedule: str, pp: int, n_microbatches: int, n_stages_per_rank: int) -> PipelineOrder:
    """Return the order of a schedule by name. Without a pipeline: forward and backward of each microbatch in turn.

    No stage is built and no process group is needed.
    """
    if pp == 1:
        return [[Action(0, kind, microbatch) for microbatch in range(n_microbatches) for kind in "FB"]]
    schedule_class = get_schedule_class(schedule)
    # Before it runs, a schedule reads only these numbers of its stages.
    stage = SimpleNamespace(group_rank=0, group_size=pp, num_stages=pp * n_stages_per_rank, submod=None)
    stages = stage if issubclass(schedule_class, PipelineScheduleSingle) else [stage] * n_stages_per_rank
    # A schedule would also add sends and receives, which takes a thousand times longer than the order.
    without_sends = {"_prepare_schedule_with_comms": lambda *args, **kwargs: None}
    order = type("Order", (schedule_class,), without_sends)(stages, n_microbatches).pipeline_order
    return [number_from_zero([action for cell in order[rank] if cell for action in unfold(cell)]) for rank in range(pp)]


def unfold(cell) -> list[Action]:
    """Return the actions of one cell of torch's table: one, or DualPipeV's two; none for sends and gathers."""
    if cell.sub_actions:
        return [action for part in cell.sub_actions for action in unfold(part)]
    kind = KINDS.get(cell.computation_type.name)
    return [Action(cell.stage_index, kind, cell.microbatch_index)] if kind else []


def find_kind(kind: str, options: dict[str, object]) -> str:
    """Return the kind of a call of one of METHODS: half a backward has the method of a whole one."""
    return kind if options.get("full_backward", True) else "I"


def number_from_zero(row: list[Action]) -> list[Action]:
    """Number forwards from 0: in torch 2.13 1F1B's table numbers those of the last rank from 1, but runs from 0."""
    first = min(action.microbatch for action in row if action.kind == "F")
    return [Action(action.stage, "F", action.microbatch - first) if action.kind == "F" else action for action in row]


# ---------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Durations:
    """Seconds of one microbatch on each stage, and between two pp ranks."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]  # I; a whole backward B is I + W
    backward_weight: tuple[float, ...]
    send: float = 0.0

    @property
    def busy(self) -> list[float]:
        """Seconds of work of each stage for one microbatch."""
        return list(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    def of(self, action: Action) -> float:
        if action.kind == "F":
            return self.forward[action.stage]
        halves = {"I": self.backward_input[action.stage], "W": self.backward_weight[action.stage]}
        return sum(halves.values()) if action.kind == "B" else halves[action.kind]


class Event(NamedTuple):
    rank: int  # of mesh dim pp
    start: float  # seconds from the start of the step
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """When each pp rank does what."""

    events: list[Event]
    n_ranks: int

    @cached_property
    def end_time(self) -> float:
        return max(event.end for event in self.events)

    @cached_property
    def busy(self) -> list[float]:
        """Seconds of work of each pp rank."""
        seconds = [0.0] * self.n_ranks
        for event in self.events:
            seconds[event.rank] += event.end - event.start
        return seconds

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time."""
        return 1 - sum(self.busy) / (self.end_time * self.n_ranks)


def simulate(order: PipelineOrder, durations: Durations) -> Timeline:
    """Return when each action runs. The order must not deadlock: config/schedule.py refuses an order that does."""
    last_stage = max(action.stage for row in order for action in row)
    rank_of = {action.stage: rank for rank, row in enumerate(order) for action in row}
    done_at: dict[tuple[int, str, int], float] = {}
    clocks, next_of, events = [0.0] * len(order), [0] * len(order), []
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(order):
            while next_of[rank] < len(row):
                action = row[next_of[rank]]
                needs = needs_of(action, last_stage)
                if not needs <= done_at.keys():
                    break
                delays = [done_at[need] + durations.send * (rank_of[need[0]] != rank) for need in needs]
                start = max([clocks[rank], *delays])
                clocks[rank] = start + durations.of(action)
                for kind in "IW" if action.kind == "B" else action.kind:
                    done_at[action.stage, kind, action.microbatch] = clocks[rank]
                events.append(Event(rank, start, clocks[rank], action))
                next_of[rank] += 1
                progress = True
    assert len(events) == sum(map(len, order)), "the schedule deadlocks"
    return Timeline(events, len(order))


# ---------------------------------------------------------------- microbatches in flight


def count_in_flight(row: list[Action], waiting_weight: float = 1.0) -> Counter[tuple[int, str]]:
    """Return the microbatches in flight when they hold most: (stage, F or I: their last action) -> how many.

    After F a microbatch holds what its backward needs. Between I and W it holds `waiting_weight` times as much
    (memory.weigh_waiting).
    """
    held: Counter[tuple[int, str]] = Counter()
    peak, n_held, most = held, 0.0, 0.0
    for action in row:
        if action.kind != "F":
            held[action.stage, "I" if action.kind == "W" else "F"] -= 1
            n_held -= waiting_weight if action.kind == "W" else 1
        if action.kind in "FI":
            held[action.stage, action.kind] += 1
            n_held += waiting_weight if action.kind == "I" else 1
        if n_held > most:
            peak, most = held.copy(), n_held
    return peak


def list_samples(n_microbatches: int, n_ranks: int) -> list[tuple[int, float]]:
    """Return short schedules and their weights: the weighted sum of their results is that of the long schedule.

    Once a pipeline is full, all rounds of microbatches are alike, so time and microbatches in flight grow by the same
    amount with each: f(m) = f(a) + k * (f(a + round) - f(a)) for a = m - k * round. A schedule of four rounds or less
    is its own only sample.
    """
    size = n_microbatches // max(1, n_microbatches // n_ranks)
    n_skipped = (n_microbatches - 3 * size) // size
    if n_skipped < 2:
        return [(n_microbatches, 1)]
    short = n_microbatches - n_skipped * size
    return [(short, 1 - n_skipped), (short + size, n_skipped)]


@lru_cache(maxsize=4096)
def extrapolate_in_flight(
    schedule: str, pp: int, n_microbatches: int, n_stages_per_rank: int, waiting_weight: float
) -> list[Counter]:
    """Return what count_in_flight finds of each pp rank, from short schedules."""
    total: list[Counter] = [Counter() for _ in range(pp)]
    for length, weight in list_samples(n_microbatches, pp):
        for in_flight, row in zip(total, pipeline_order(schedule, pp, length, n_stages_per_rank), strict=True):
            for key, count in count_in_flight(row, waiting_weight).items():
                in_flight[key] += count * weight
    return total


# ---------------------------------------------------------------- pictures


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """Return one line per pp rank, at most `width` columns; with microbatch numbers if the shortest action has room.

    One column is a slice of time; dots are the bubble.
    """
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


def draw_svg(timeline: Timeline, title: str = "", width: int = 1000) -> str:
    """Return the picture as a whole SVG file. A rank's later stages are paler; a tooltip names each action."""
    scale = (width - LABEL_WIDTH - 8) / timeline.end_time
    top = 30
    height = top + timeline.n_ranks * ROW_HEIGHT + 30
    frame = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11"'
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-weight="bold">{escape(title) or "pipeline"}: bubble {timeline.bubble:.1%}</text>',
    ]
    for rank in range(timeline.n_ranks):
        y = top + rank * ROW_HEIGHT
        shapes.append(f'<text x="8" y="{y + 15}">pp rank {rank}</text>')
        shapes.append(
            f'<rect x="{LABEL_WIDTH}" y="{y}" width="{width - LABEL_WIDTH - 8}" height="{ROW_HEIGHT - 3}" fill="#eee"/>'
        )
    for event in timeline.events:
        action, x, y = event.action, LABEL_WIDTH + event.start * scale, top + event.rank * ROW_HEIGHT
        box_width = (event.end - event.start) * scale
        opacity = 1 / (1 + 0.5 * (action.stage // timeline.n_ranks))
        box = f'x="{x:.2f}" y="{y}" width="{box_width:.2f}" height="{ROW_HEIGHT - 3}" fill="{COLORS[action.kind]}"'
        name = f"stage {action.stage}, {MEANINGS[action.kind]}, microbatch {action.microbatch}"
        shapes.append(
            f'<rect {box} fill-opacity="{opacity:.2f}" stroke="white" stroke-width="0.5"><title>{name}</title></rect>'
        )
        if box_width > 7 * len(str(action.microbatch)) + 3:  # room for the number
            middle = x + box_width / 2
            shapes.append(f'<text x="{middle:.2f}" y="{y + 14}" text-anchor="middle">{action.microbatch}</text>')
    kinds = [kind for kind in COLORS if any(event.action.kind == kind for event in timeline.events)]
    for index, kind in enumerate(kinds):
        x, y = LABEL_WIDTH + index * 150, height - 22
        shapes.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLORS[kind]}"/>')
        shapes.append(f'<text x="{x + 17}" y="{y + 10}">{MEANINGS[kind]}</text>')
    return "\n".join([*shapes, "</svg>\n"])
