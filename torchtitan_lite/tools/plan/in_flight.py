"""Follow torch's pipeline on one pp rank: microbatches in flight, stages with gradients, and stages that are gathered.

0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1      two stages, two microbatches
        |       |   |           |
        |       |   |           `-- stage 0 reduces its gradients
        |       |   `-- stage 2 reduces its gradients
        |       `-- stage 2 has gradients
        `-- 4 microbatches in flight at most
"""

from collections import Counter, defaultdict
from functools import lru_cache

from torchtitan_lite.tools.plan.orders import Action, list_samples

# Between the two halves of a split backward, a microbatch also holds the gradients of the outputs of norms and linear
# layers: in a block of Llama 8B, 264 KiB per token instead of 164.
WAITING = 1.6
STAGES_GATHERED = 3  # torch gathers the next three stages of a pp rank, and frees the others
# kind -> change of the number of microbatches in flight, by their last action
CHANGES = {"F": {"F": 1}, "B": {"F": -1}, "I": {"F": -1, "I": 1}, "W": {"I": -1}}


def count_in_flight(row: list[Action]) -> dict[frozenset[int], Counter[tuple[int, str]]]:
    """Return stages that have gradients -> the most microbatches in flight meanwhile.

    These are by (stage, last action of the microbatch, F or I). After F, a microbatch holds the activations for its
    backward. Between I and W, it holds WAITING times as many bytes. A stage reduces its gradients after its last W.
    """
    to_come = Counter(action.stage for action in row if action.kind in "BW")
    held: Counter[tuple[int, str]] = Counter()
    n_held = 0.0
    most: dict[frozenset[int], float] = {}
    peaks = {}
    with_gradients: frozenset[int] = frozenset()
    for stage, kind, _ in row:
        for last, change in CHANGES[kind].items():
            held[stage, last] += change
            n_held += change * (WAITING if last == "I" else 1)
        if kind in "BW":
            to_come[stage] -= 1
            with_gradients |= {stage}
        if n_held > most.get(with_gradients, -1.0):
            most[with_gradients] = n_held
            peaks[with_gradients] = held.copy()
        if not to_come[stage]:
            with_gradients -= {stage}
    return peaks


@lru_cache(maxsize=4096)
def extrapolate_in_flight(
    schedule: str, pp: int, n_microbatches: int, n_stages_per_rank: int
) -> list[dict[frozenset[int], Counter]]:
    """Return the result of count_in_flight for each pp rank, extrapolated from short orders."""
    total = [defaultdict(Counter) for _ in range(pp)]
    for order, weight in list_samples(schedule, pp, n_microbatches, n_stages_per_rank):
        for in_flight, row in zip(total, order, strict=True):
            for with_gradients, held in count_in_flight(row).items():
                for key, count in held.items():
                    in_flight[with_gradients][key] += count * weight
    return total


def count_gathers(row: list[Action]) -> Counter[int]:
    """Return stage -> how often torch gathers it, if it always holds the next STAGES_GATHERED stages of the row."""
    gathers = Counter()
    later = set()  # the stages that torch holds at the next action
    ahead = []  # all stages from here on, by their first action
    for action in reversed(row):
        ahead = [action.stage, *(stage for stage in ahead if stage != action.stage)]
        now = set(ahead[:STAGES_GATHERED])
        gathers.update(later - now)
        later = now
    gathers.update(later)
    return gathers
