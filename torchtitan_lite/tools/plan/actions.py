"""Judge a pipeline schedule on paper: which actions are missing, which wait for each other, and when each one runs.

0F0 0F1     0B0 0B1         pp rank 0, which holds stage 0. F forward, B backward, or its halves I and W
    1F0 1B0 1F1 1B1         pp rank 1. A rank waits for the inputs of its next action
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple


class Action(NamedTuple):
    """One action of a pp rank: `0F3` is stage 0, forward, microbatch 3."""

    stage: int
    kind: str  # F forward; B backward, or its halves I (gradients of inputs) and W (of weights)
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Event(NamedTuple):
    """An action of a simulated step, with its start and end."""

    rank: int  # pp rank
    start: float  # seconds from the start of the step
    end: float
    action: Action


Order = list[list[Action]]  # the actions of each pp rank in one step
HALVES = {"F": "F", "B": "IW", "I": "I", "W": "W"}  # kind -> work that is done after the action


def find_missing_action(rows: Order) -> str:
    """Describe a stage and microbatch without exactly F and B, or F, I and W; empty if there is none."""
    rank_of = {}  # by stage
    kinds = defaultdict(list)  # by stage and microbatch
    for rank, row in enumerate(rows):
        for stage, kind, microbatch in row:
            kinds[stage, microbatch].append(kind)
            if rank_of.setdefault(stage, rank) != rank:
                return f"has stage {stage} on two rows, but a stage belongs to one rank"
    last_stage, _ = max(kinds)
    n_microbatches = 1 + max(microbatch for _, microbatch in kinds)
    for stage in range(last_stage + 1):
        for microbatch in range(n_microbatches):
            found = "".join(sorted(kinds[stage, microbatch])) or "nothing"
            if found not in ("BF", "FIW"):
                work = f"microbatch {microbatch} of stage {stage}"
                return f"has {found} for {work}, which needs F and B, or F, I and W"
    return ""


def find_deadlock(rows: Order) -> str:
    """Describe the actions that wait for each other; empty if the schedule completes."""
    has_run = {event.action for event in run_on_paper(rows, lambda action: 1.0)}
    stuck = []
    for rank, row in enumerate(rows, 1):
        waiting = [action for action in row if action not in has_run]
        if waiting:
            stuck.append(f"row {rank} at {waiting[0]}")
    return f"deadlocks: {', '.join(stuck)} wait for one another" if stuck else ""


def run_on_paper(
    rows: Order, seconds_of: Callable[[Action], float], send_s: float = 0.0
) -> list[Event]:
    """Simulate the schedule until no rank can continue. Sending to another rank takes `send_s` seconds."""
    last_stage = max(chain(*rows)).stage
    done: dict[tuple[int, str, int], tuple[float, int]] = {}  # work -> its end and pp rank
    clocks_s = [0.0] * len(rows)
    n_run = [0] * len(rows)
    events: list[Event] = []
    n_before = -1
    while len(events) > n_before:
        n_before = len(events)
        for rank, row in enumerate(rows):
            for action in row[n_run[rank] :]:
                start_s = clocks_s[rank]
                needs = list_needs(action, last_stage)
                if not done.keys() >= needs:
                    break
                for need in needs:
                    sent_s, sender = done[need]
                    if sender != rank:
                        sent_s += send_s
                    start_s = max(start_s, sent_s)
                end_s = start_s + seconds_of(action)
                for half in HALVES[action.kind]:
                    done[action.stage, half, action.microbatch] = end_s, rank
                clocks_s[rank] = end_s
                n_run[rank] += 1
                events.append(Event(rank, start_s, end_s, action))
    return events


def list_needs(action: Action, last_stage: int) -> set[tuple[int, str, int]]:
    """Return what an action waits for. F: the previous stage. Backward: its F and the next stage. W: its I."""
    stage, kind, microbatch = action
    if kind == "W":
        return {(stage, "I", microbatch)}
    if kind == "F":
        return {(stage - 1, "F", microbatch)} if stage else set()
    needs = {(stage, "F", microbatch)}
    if stage < last_stage:
        needs.add((stage + 1, "I", microbatch))
    return needs
