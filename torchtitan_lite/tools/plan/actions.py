"""Judge a pipeline schedule on paper: which actions are missing, which wait for each other, and when each one runs.

0F0 0F1     0B0 0B1         pp rank 0, which holds stage 0. F forward, B backward, or its halves I and W
    1F0 1B0 1F1 1B1         pp rank 1. A rank waits for the inputs of its next action
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Action(NamedTuple):
    """One action of a pp rank: `0F3` is stage 0, forward, microbatch 3."""

    stage: int
    kind: str  # F forward; B backward, or its halves I (gradients of inputs) and W (of weights)
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def find_missing_action(rows: list[list[Action]]) -> str:
    """Describe a stage and microbatch without exactly F and B, or F, I and W; empty if there is none."""
    ranks_of, kinds = defaultdict(set), defaultdict(str)
    for rank, row in enumerate(rows):
        for stage, kind, microbatch in row:
            ranks_of[stage].add(rank + 1)
            kinds[stage, microbatch] += kind
    for stage, ranks in ranks_of.items():
        if len(ranks) > 1:
            return f"has stage {stage} on rows {sorted(ranks)}, but a stage belongs to one rank"
    for stage in range(1 + max(stage for stage, _ in kinds)):
        for microbatch in range(1 + max(microbatch for _, microbatch in kinds)):
            found = "".join(sorted(kinds[stage, microbatch]))
            if found not in ("BF", "FIW"):
                work = f"microbatch {microbatch} of stage {stage}"
                return f"has {found or 'nothing'} for {work}, which needs F and B, or F, I and W"
    return ""


def find_deadlock(rows: list[list[Action]]) -> str:
    """Describe the actions that wait for each other; empty if the schedule completes."""
    n_run = Counter(rank for rank, *_ in run_on_paper(rows, lambda action: 1.0))
    stuck = [
        f"row {rank + 1} at {row[n_run[rank]]}"
        for rank, row in enumerate(rows)
        if n_run[rank] < len(row)
    ]
    return f"deadlocks: {', '.join(stuck)} wait for one another" if stuck else ""


def run_on_paper(
    rows: list[list[Action]], seconds_of: Callable[[Action], float], send: float = 0.0
) -> Iterator[tuple]:
    """Simulate the schedule and yield (rank, start, end, action). Sending to another rank takes `send` seconds."""
    last_stage = max(action.stage for row in rows for action in row)
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    done: dict[tuple[int, str, int], float] = {}
    clocks, next_of, progressed = [0.0] * len(rows), [0] * len(rows), True
    while progressed:
        progressed = False
        for rank, row in enumerate(rows):
            while next_of[rank] < len(row):
                needs = list_needs(action := row[next_of[rank]], last_stage)
                if any(need not in done for need in needs):
                    break
                start = max(
                    [
                        clocks[rank],
                        *(done[need] + send * (rank_of[need[0]] != rank) for need in needs),
                    ]
                )
                clocks[rank] = start + seconds_of(action)
                for kind in "IW" if action.kind == "B" else action.kind:  # B does both halves
                    done[action.stage, kind, action.microbatch] = clocks[rank]
                yield rank, start, clocks[rank], action
                next_of[rank] += 1
                progressed = True


def list_needs(action: Action, last_stage: int) -> list[tuple[int, str, int]]:
    """Return what an action waits for. F: the previous stage. Backward: its F and the next stage. W: its I."""
    stage, kind, microbatch = action
    if kind == "F":
        return [(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [(stage, "I", microbatch)]
    return [(stage, "F", microbatch), (stage + 1, "I", microbatch)][: 1 + (stage < last_stage)]
