"""Read a pipeline schedule from a CSV file, and run it on paper: a deadlock would hang thousands of GPUs.

    0F0,0F1,,0B0,0B1        row 1: pp rank 0, which holds stage 0. F forward, B backward, or its halves I and W
    ,1F0,1B0,1F1,1B1        row 2: pp rank 1. Empty cells are waits; the run finds its own

This is the "compute_only" form of torch.distributed.pipelining, which adds the sends and receives itself.
"""

import csv
import re
from collections import defaultdict, deque
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.files import read_regular_file

MOST_BYTES = 2**18  # 64 pp ranks with 200 microbatches whose backward is split have 242,000
CELL = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Action(NamedTuple):
    """One cell of a CSV schedule: `0F3` is stage 0, forward, microbatch 3."""

    stage: int
    kind: str  # F forward; B backward, or its halves I (gradients of inputs) and W (of weights)
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def read_rows(path: str) -> list[list[Action]]:
    """Return the actions of each pp rank, without the empty cells. Raises ValueError with the reason."""
    content = read_regular_file(Path(path), MOST_BYTES)
    rows: list[list[Action]] = []
    try:
        for number, cells in enumerate(csv.reader(content.decode().splitlines()), 1):
            row = []
            for cell in filter(None, map(str.strip, cells)):
                if (match := CELL.fullmatch(cell)) is None:
                    why = "which is no action such as 0F3, 0B3, 0I3, 0W3"
                    raise ValueError(f"has in line {number} {cell!r:.40}, {why}")
                row.append(Action(int(match[1]), match[2], int(match[3])))
            rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"is not CSV: {error}") from None
    if not any(rows):
        raise ValueError("has no actions")
    return rows


def find_fault(path: str, pp: int) -> str:
    """Return what is wrong with a schedule file for `pp` ranks, as a predicate ("has no actions"); empty: nothing."""
    try:
        rows = read_rows(path)
    except ValueError as error:
        return str(error)
    wrong_number = f"has {len(rows)} rows for {pp} pp ranks" if len(rows) != pp else ""
    return wrong_number or find_missing_action(rows) or find_deadlock(rows)


def find_missing_action(rows: list[list[Action]]) -> str:
    """Return a stage and microbatch that does not have F and B, or F, I and W, once each; empty: there is none."""
    ranks_of, kinds = defaultdict(set), defaultdict(list)
    for rank, row in enumerate(rows):
        for action in row:
            ranks_of[action.stage].add(rank)
            kinds[action.stage, action.microbatch].append(action.kind)
    for stage, ranks in ranks_of.items():
        if len(ranks) > 1:
            return f"has stage {stage} on rows {sorted(rank + 1 for rank in ranks)}, and one rank holds a stage"
    n_stages, n_microbatches = 1 + max(stage for stage, _ in kinds), 1 + max(microbatch for _, microbatch in kinds)
    for stage in range(n_stages):
        for microbatch in range(n_microbatches):
            found = "".join(sorted(kinds[stage, microbatch]))
            if found not in ("BF", "FIW"):
                held = f"microbatch {microbatch} of stage {stage}"
                return f"has {found or 'nothing'} for {held}, which needs F and B, or F, I and W"
    return ""


def find_deadlock(rows: list[list[Action]]) -> str:
    """Run the schedule on paper and return the actions that wait for each other; empty: there are none.

    Each rank takes its next action once what that needs is done, on any rank.
    """
    last_stage = max(action.stage for row in rows for action in row)
    done: set[tuple[int, str, int]] = set()
    next_of = [0] * len(rows)
    waiting: dict[tuple[int, str, int], list[int]] = defaultdict(list)  # what is not done yet -> ranks that need it
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        while next_of[rank] < len(rows[rank]):
            action = rows[rank][next_of[rank]]
            if missing := needs_of(action, last_stage) - done:
                waiting[missing.pop()].append(rank)
                break
            # B is both halves at once
            parts = {(action.stage, kind, action.microbatch) for kind in ("IW" if action.kind == "B" else action.kind)}
            done |= parts
            next_of[rank] += 1
            for part in parts:
                ready.extend(waiting.pop(part, ()))
    stuck = [
        f"row {rank + 1} at {row[at]}"
        for rank, (row, at) in enumerate(zip(rows, next_of, strict=True))
        if at < len(row)
    ]
    return f"deadlocks: {', '.join(stuck)} wait for one another" if stuck else ""


def needs_of(action: Action, last_stage: int) -> set[tuple[int, str, int]]:
    """Return the actions that must be done before this one.

    Forward: the stage before it. Backward: the stage after it, and its own forward. W: its own I.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return {(stage - 1, "F", microbatch)} if stage else set()
    if action.kind == "W":
        return {(stage, "I", microbatch)}
    after = {(stage + 1, "I", microbatch)} if stage < last_stage else set()
    return {(stage, "F", microbatch)} | after
