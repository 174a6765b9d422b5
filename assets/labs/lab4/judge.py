"""Simulate the learner's 1F1B schedule for two numbers of microbatches."""

import re
import sys
from collections import Counter
from itertools import chain, product

from one_f_one_b import write_rows

from torchtitan_lite.tools.plan.orders import Action, Order
from torchtitan_lite.tools.plan.timeline import simulate

SIZES = ((4, 8), (4, 16))  # stages, microbatches
SECONDS = {"F": 1.0, "B": 2.0}


def read_action(text: str) -> Action:
    stage, kind, microbatch = re.fullmatch(r"(\d+)([FB])(\d+)", text).groups()
    return Action(int(stage), kind, int(microbatch))


def find_fault(order: Order) -> str:
    """Return an error message if an action does not run exactly once, or if the ranks deadlock. Otherwise return ""."""
    times = Counter(chain(*order))
    last_stage, _, _ = max(times)
    n_microbatches = 1 + max(microbatch for _, _, microbatch in times)
    for work in product(range(last_stage + 1), "FB", range(n_microbatches)):
        n = times[work]
        if n != 1:
            return f"runs {Action(*work)} {n} times, not once"
    done = {event.action for event in simulate(order, lambda action: 1.0).events}
    stuck = []
    for row in order:
        waiting = [str(action) for action in row if action not in done]
        stuck += waiting[:1]
    return f"deadlocks: {', '.join(stuck)} wait for one another" if stuck else ""


def judge(n_stages: int, n_microbatches: int) -> str:
    """Return an error text for the first fault of the schedule, or "" if the schedule is correct."""
    rows = [[read_action(text) for text in row] for row in write_rows(n_stages, n_microbatches)]
    if fault := find_fault(rows):
        return f"the schedule {fault}"
    bubble = simulate(rows, lambda action: SECONDS[action.kind]).bubble
    formula = (n_stages - 1) / (n_microbatches + n_stages - 1)
    if abs(bubble - formula) > 1e-9:
        return f"the bubble is {bubble:.1%}, but 1F1B has {formula:.1%}"
    for row in rows:
        kept = most = 0
        for action in row:
            kept += 1 if action.kind == "F" else -1
            most = max(most, kept)
        if most > n_stages:
            return f"stage {row[0].stage} stores the activations of {most} microbatches, more than {n_stages}"
    return ""


def main() -> int:
    for n_stages, n_microbatches in SIZES:
        fault = judge(n_stages, n_microbatches)
        print(f"{n_stages} stages, {n_microbatches} microbatches: {fault or 'right'}")
        if fault:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
