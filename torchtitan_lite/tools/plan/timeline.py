"""Simulate a pipeline schedule: compute when each action runs and how long ranks are idle, and draw a picture.

    pp rank 0  F0F1....B0--F2B1--F3B2--..B3--    F is a forward, B a backward. A backward can be split into I (gradients
    pp rank 1  ..F0B0--F1B1--F2B2--F3B3--....    of inputs) and W (gradients of weights). Dots are idle time: the bubble

With p pp ranks, v stages per rank and m microbatches, the bubble is (p-1)/(v*m+p-1) of a step. This assumes that all
stages take equal time, that B takes as long as two F, and that sends take no time. The often quoted (p-1)/m is idle
time divided by *ideal* time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torchtitan_lite.tools.pictures import ROW_HEIGHT, draw_rows
from torchtitan_lite.tools.plan.orders import HALVES, Action, Order


class Event(NamedTuple):
    """An action of a simulated step, with its start and end."""

    rank: int  # pp rank
    start: float  # seconds from the start of the step
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """The events of one step."""

    events: list[Event]
    n_ranks: int

    @property
    def end_time(self) -> float:
        return max(event.end for event in self.events)

    @property
    def bubble(self) -> float:
        """Idle time of all ranks, as a fraction of the total time of all ranks."""
        busy_s = sum(event.end - event.start for event in self.events)
        return 1 - busy_s / (self.end_time * self.n_ranks)


def simulate(order: Order, seconds_of: Callable[[Action], float], send_s: float = 0.0) -> Timeline:
    """Simulate the actions of an order until no rank can continue. A send to another rank takes `send_s` seconds.

    An action that never runs, because of a deadlock, has no event.
    """
    last_stage = max(chain(*order)).stage
    # (stage, half of an action, microbatch) -> end time, pp rank
    done: dict[tuple[int, str, int], tuple[float, int]] = {}
    clocks_s = [0.0] * len(order)
    to_come = [deque(row) for row in order]
    events: list[Event] = []
    n_before = -1
    while len(events) > n_before:
        n_before = len(events)
        for rank, row in enumerate(to_come):
            while row and (needs := list_needs(row[0], last_stage)) <= done.keys():
                action = row.popleft()
                start_s = clocks_s[rank]
                for need in needs:
                    sent_s, sender = done[need]
                    if sender != rank:
                        sent_s += send_s
                    start_s = max(start_s, sent_s)
                end_s = start_s + seconds_of(action)
                for half in HALVES[action.kind]:
                    done[action.stage, half, action.microbatch] = end_s, rank
                clocks_s[rank] = end_s
                events.append(Event(rank, start_s, end_s, action))
    return Timeline(events, len(order))


def list_needs(action: Action, last_stage: int) -> set[tuple[int, str, int]]:
    """Return the work that an action waits for.

    F waits for the F of the previous stage. B or I waits for its F and for the backward of the next stage. W waits for
    its I.
    """
    stage, kind, microbatch = action
    if kind == "W":
        return {(stage, "I", microbatch)}
    if kind == "F":
        return {(stage - 1, "F", microbatch)} if stage else set()
    needs = {(stage, "F", microbatch)}
    if stage < last_stage:
        needs.add((stage + 1, "I", microbatch))
    return needs


def draw_timeline(timeline: Timeline) -> str:
    """Draw one row of actions per pp rank. The CSS variables --F, --B, --I and --W set the colors."""
    rows = [(f"pp {rank}", ROW_HEIGHT, []) for rank in range(timeline.n_ranks)]
    for rank, start, end, (stage, kind, microbatch) in timeline.events:
        title = f"{kind}{microbatch} of stage {stage}: {end - start:.4f} s"
        rows[rank][2].append((start, end, f"var(--{kind})", title, f"{kind}{microbatch}"))
    return draw_rows(rows, timeline.end_time)
