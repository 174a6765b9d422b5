"""Simulate a pipeline schedule: duration of a step, bubble, microbatches in flight, and a picture.

    pp rank 0  F0F1....B0--F2B1--F3B2--..B3--    F forward, B backward, or its halves: I gradients of inputs,
    pp rank 1  ..F0B0--F1B1--F2B2--F3B3--....    W gradients of weights. Dots are idle time: the bubble

With p pp ranks, v stages per rank and m microbatches, the bubble is (p-1)/(v*m+p-1) of a step, if stages are equal, B
takes 2F and sends take no time. The often quoted (p-1)/m is idle time over *ideal* time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Parallelism
from torchtitan_lite.tools.pictures import ROW_HEIGHT, draw_rows
from torchtitan_lite.tools.plan.actions import Action, run_on_paper
from torchtitan_lite.tools.plan.orders import Order, list_order

MEANINGS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def plan_order(section: Parallelism, layout: Layout) -> Order:
    """Return the order of a layout's schedule."""
    n_stages_per_rank = len(layout.stages) // layout.pp
    return list_order(
        section.pipeline_parallel_schedule, layout.pp, layout.n_microbatches, n_stages_per_rank
    )


class Event(NamedTuple):
    """An action of a simulated step, with its start and end."""

    rank: int  # pp rank
    start: float  # seconds from the start of the step
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """The events of one simulated step."""

    events: list[Event]
    n_ranks: int

    @cached_property
    def end_time(self) -> float:
        return max(event.end for event in self.events)

    @property
    def bubble(self) -> float:  # idle fraction of the time of all ranks
        return 1 - sum(event.end - event.start for event in self.events) / (
            self.end_time * self.n_ranks
        )


def simulate(order: Order, seconds_of: Callable[[Action], float], send_s: float = 0.0) -> Timeline:
    """Simulate an order, which must not deadlock."""
    return Timeline([Event(*each) for each in run_on_paper(order, seconds_of, send_s)], len(order))


def list_samples(
    schedule: str, pp: int, n_microbatches: int, n_stages_per_rank: int
) -> list[tuple[Order, int]]:
    """Return short orders with weights. The weighted sum of their results is the result of the long order.

    In a full pipeline, each round of microbatches adds the same time and the same number of microbatches in flight:
    f(m) = f(a) + k * (f(a + round) - f(a)) for a = m - k * round. An order of at most four rounds is not shortened.
    """
    size = n_microbatches // max(1, n_microbatches // pp)
    n_skipped = (n_microbatches - 3 * size) // size
    lengths = [(n_microbatches, 1)]
    if n_skipped > 1:
        short = n_microbatches - n_skipped * size
        lengths = [(short, 1 - n_skipped), (short + size, n_skipped)]
    return [(list_order(schedule, pp, n, n_stages_per_rank), weight) for n, weight in lengths]


def draw_timeline(timeline: Timeline) -> str:
    """Draw one row of actions per pp rank. The CSS variables --F, --B, --I and --W set the colors."""
    rows = [(f"pp {rank}", ROW_HEIGHT, []) for rank in range(timeline.n_ranks)]
    for rank, start, end, (stage, kind, microbatch) in timeline.events:
        title = f"{MEANINGS[kind]} of microbatch {microbatch}, stage {stage}: {end - start:.4f} s"
        rows[rank][2].append((start, end, f"var(--{kind})", title, f"{kind}{microbatch}"))
    return draw_rows(rows, timeline.end_time)
