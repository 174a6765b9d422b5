"""A pipeline schedule run on paper with durations: how long a step takes, who idles, what is held for backward.

    rank 0  F0F1....B0--F2B1--F3B2--..B3--    rows: the order of work of each pp rank (schedule_order.py, or a CSV file)
    rank 1  ..F0B0--F1B1--F2B2--F3B3--....    F forward, B backward, or its halves I (gradients of inputs), W (weights)

A rank starts its next action when it is free and what that needs has arrived: from another rank one `send` after it was
done. Sends cost the ranks nothing but this delay. Bubble is the share of all ranks' time, start to end, that is idle.

With even stages, B = 2F and no delay, GPipe and 1F1B idle (p-1)/(m+p-1) of a step, interleaved (p-1)/(v*m+p-1):
p ranks, m microbatches, v stages a rank. (P-1)/M, often quoted, is idle over *ideal* time. Durations may be modelled
(closed_form.py) or measured ones.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchtitan_lite.config.pipeline_csv import Action, needs_of

Rows = list[list[Action]]  # of each pp rank, in its order


@dataclass(frozen=True)
class Durations:
    """Seconds that one microbatch takes on each stage, and on its way between two ranks."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]  # I; a whole backward B is I + W
    backward_weight: tuple[float, ...]
    send: float = 0.0

    @property
    def busy(self) -> list[float]:
        """Seconds of work that each stage has with one microbatch."""
        return list(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    def of(self, action: Action) -> float:
        if action.kind == "F":
            return self.forward[action.stage]
        halves = {"I": self.backward_input[action.stage], "W": self.backward_weight[action.stage]}
        return sum(halves.values()) if action.kind == "B" else halves[action.kind]


def even_durations(n_stages: int, forward=1.0, backward_input=1.0, backward_weight=1.0, send=0.0) -> Durations:
    """All stages alike; by default a backward takes twice the time of a forward."""
    return Durations(*((seconds,) * n_stages for seconds in (forward, backward_input, backward_weight)), send)


class Event(NamedTuple):
    rank: int  # of mesh dim pp
    start: float  # seconds from the start of the step
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """When each pp rank did what, modelled or measured."""

    events: list[Event]
    n_ranks: int

    @cached_property
    def end_time(self) -> float:
        return max(event.end for event in self.events)

    @cached_property
    def busy(self) -> list[float]:
        """Seconds that each rank works."""
        seconds = [0.0] * self.n_ranks
        for event in self.events:
            seconds[event.rank] += event.end - event.start
        return seconds

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time."""
        return 1 - sum(self.busy) / (self.end_time * self.n_ranks)


def simulate(rows: Rows, durations: Durations) -> Timeline:
    """Runs the rows. They must not deadlock: pipeline_csv.py finds those that do."""
    last_stage = max(action.stage for row in rows for action in row)
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    done_at: dict[tuple[int, str, int], float] = {}
    clocks, next_of, events = [0.0] * len(rows), [0] * len(rows), []
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
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
    assert len(events) == sum(map(len, rows)), "the schedule deadlocks"
    return Timeline(events, len(rows))


def count_in_flight(row: list[Action]) -> Counter[int]:
    """Stage -> microbatches whose activations one rank holds when it holds most: forward done, backward not.

    Follows from the order alone. Between I and W the inputs of the matmuls are still needed, so I frees nothing.
    """
    held: Counter[int] = Counter()
    peak, n_held, most = held, 0, 0
    for action in row:
        change = {"F": 1, "I": 0}.get(action.kind, -1)
        held[action.stage] += change
        n_held += change
        if n_held > most:
            peak, most = held.copy(), n_held
    return peak


def list_samples(n_microbatches: int, n_ranks: int) -> list[tuple[int, float]]:
    """Lengths of a schedule that tell what a longer one does, with their weights.

    Once a pipeline is full, every round of microbatches is like the one before, so that time and microbatches held grow
    by the same amount with each: f(m) = f(a) + k * (f(a + round) - f(a)) for a = m - k * round. Of four rounds or less,
    the schedule is its own only sample.
    """
    size = n_microbatches // max(1, n_microbatches // n_ranks)
    n_skipped = (n_microbatches - 3 * size) // size
    if n_skipped < 2:
        return [(n_microbatches, 1)]
    short = n_microbatches - n_skipped * size
    return [(short, 1 - n_skipped), (short + size, n_skipped)]


def extrapolate(measure: Callable[[int], float], n_microbatches: int, n_ranks: int) -> float:
    """`measure(n_microbatches)`, which takes long for many, from its values for few."""
    return sum(weight * measure(length) for length, weight in list_samples(n_microbatches, n_ranks))
