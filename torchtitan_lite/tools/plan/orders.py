"""Pipeline schedules: list the actions that each pp rank runs in one step, in order. No torch.

    GPipe, 2 microbatches     pp rank 0: 0F0 0F1 0B0 0B1        pp rank 1: 1F0 1F1 1B0 1B1

F is a forward, B a backward. Some schedules split B into I (gradients of inputs) and W (gradients of weights).
tests/tools/test_orders.py compares each order with torch.distributed.pipelining, action by action.

Sources, arXiv: GPipe 1811.06965; 1F1B 2104.04473; LoopedBFS 2211.05953; zero bubble 2401.10241; DualPipe 2412.19437.
"""

from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache, partial

from torchtitan_lite.tools.plan.actions import Action

Order = list[list[Action]]  # the actions of each pp rank in one step


@lru_cache(maxsize=1024)
def list_order(schedule: str, pp: int, n_microbatches: int, n_stages_per_rank: int) -> Order:
    """Return the order of a schedule. If pp is 1: forward and backward of each microbatch in turn."""
    if pp == 1:
        return [
            [Action(0, kind, microbatch) for microbatch in range(n_microbatches) for kind in "FB"]
        ]
    return [ORDERS[schedule](rank, pp, n_microbatches, n_stages_per_rank) for rank in range(pp)]


def fill_and_drain(rank: int, pp: int, n_microbatches: int, n_stages_per_rank: int) -> list[Action]:
    """GPipe, or LoopedBFS with several stages per rank: all forwards, then all backwards, stage by stage."""
    stages, microbatches = range(rank, pp * n_stages_per_rank, pp), range(n_microbatches)
    # Backward starts with the last microbatch in LoopedBFS, and with the first in GPipe.
    backwards = microbatches if n_stages_per_rank == 1 else microbatches[::-1]
    row = [Action(stage, "F", microbatch) for stage in stages for microbatch in microbatches]
    return row + [
        Action(stage, "B", microbatch) for stage in reversed(stages) for microbatch in backwards
    ]


def interleave(
    rank: int,
    pp: int,
    n_microbatches: int,
    n_stages_per_rank: int,
    *,
    hops: int,
    splits_backward: bool = False,
) -> list[Action]:
    """Interleaved1F1B: forwards fill the pipeline, then forwards and backwards alternate. Microbatches run in rounds.

    `hops`: additional warm-up forwards per pp rank after this one. 1F1B has one stage per rank and `hops` = 1. If the
    backward is split (InterleavedZeroBubble), each W runs `rank` backwards after its I.
    """
    stages = range(rank, pp * n_stages_per_rank, pp)
    size = (
        n_microbatches // max(1, n_microbatches // pp) if n_stages_per_rank > 1 else n_microbatches
    )
    rounds = [range(start, start + size) for start in range(0, n_microbatches, size)]
    forwards = [
        Action(stage, "F", microbatch) for each in rounds for stage in stages for microbatch in each
    ]
    done = [
        (stage, microbatch) for each in rounds for stage in reversed(stages) for microbatch in each
    ]
    backwards = [
        Action(stage, "I" if splits_backward else "B", microbatch) for stage, microbatch in done
    ]
    weights = (
        [Action(stage, "W", microbatch) for stage, microbatch in done] if splits_backward else []
    )
    n_warm_up = min((n_stages_per_rank - 1) * size + hops * (pp - 1 - rank), len(forwards))
    row = forwards[:n_warm_up]
    for at, backward in enumerate(backwards):
        row += [*forwards[n_warm_up + at : n_warm_up + at + 1], backward]
        row += weights[at - rank : at - rank + 1] if at >= rank else []
    return row + weights[max(0, len(weights) - rank) :]


def zero_bubble_v(rank: int, pp: int, n_microbatches: int, n_stages_per_rank: int) -> list[Action]:
    """ZBVZeroBubble: a rank holds stages `rank` and 2*pp - 1 - rank, the two arms of a V."""
    first, second = rank, 2 * pp - 1 - rank
    count: Counter[tuple[int, str]] = Counter()
    row: list[Action] = []

    def add(stage: int, kinds: str, times: int = 1) -> None:
        for kind in kinds * times:
            row.append(Action(stage, kind, count[stage, kind]))
            count[stage, kind] += 1

    n_filling = max(
        2 * pp - 1, n_microbatches
    )  # minimum of the pattern; extra microbatches are dropped at the end
    add(first, "F", 2 * (pp - rank) - 1)
    for _ in range(rank):
        add(second, "F")
        add(first, "F")
    add(second, "FIW", pp - rank)
    while count[second, "F"] < count[first, "F"] or count[first, "F"] < n_filling:
        add(first, "F" * (count[first, "F"] < n_filling) + "IW")
        add(second, "FIW")
    for _ in range(rank):
        add(first, "I")
        add(second, "I")
    add(first, "IW", pp - rank)
    for stage in (second, first):
        add(stage, "W", count[stage, "I"] - count[stage, "W"])
    return [action for action in row if action.microbatch < n_microbatches]


def dual_pipe_v(rank: int, pp: int, n_microbatches: int, n_stages_per_rank: int) -> list[Action]:
    """DualPipeV: a rank holds two arms of a V, as in ZBV. Forwards of one arm alternate with backwards of the other."""
    first, second = rank, 2 * pp - 1 - rank
    count: Counter[tuple[int, bool]] = Counter()
    waiting: deque[tuple[int, int]] = (
        deque()
    )  # (stage, microbatch) of gradients of weights to be computed
    row: list[Action] = []

    def add(*pairs: tuple[int, str], times: int = 1) -> None:
        for stage, kind in pairs * times:
            if kind == "W":
                if waiting:
                    row.append(Action(waiting[0][0], "W", waiting.popleft()[1]))
                continue
            microbatch = count[stage, kind == "F"]
            row.append(Action(stage, kind, microbatch))
            count[stage, kind == "F"] += 1
            waiting.extend([(stage, microbatch)] * (kind == "I"))

    half = (rank + 1) // 2  # the second half of the last backwards is split
    add((first, "F"), times=2 * (pp - rank - 1))
    add((first, "F"), (second, "F"), times=rank + 1)
    add((second, "I"), (second, "W"), (second, "F"), times=pp - rank - 1)
    add(
        (first, "F"),
        (second, "B"),
        (second, "F"),
        (first, "B"),
        times=n_microbatches - 2 * pp + rank + 1,
    )
    add((second, "B"), (second, "F"), (first, "B"), times=pp - rank - 1)
    for at in range(rank + 1):
        add(
            (second, "I" if at > half or (at == half and rank % 2) else "B"),
            (first, "I" if at >= half else "B"),
        )
    add((first, "W"), (first, "I"), times=pp - rank - 1)
    add((first, "W"), times=rank + 1)
    return row


ORDERS: dict[str, Callable[..., list[Action]]] = {  # names as in torch
    "GPipe": fill_and_drain,
    "1F1B": partial(interleave, hops=1),
    "Interleaved1F1B": partial(interleave, hops=2),
    "LoopedBFS": fill_and_drain,
    "InterleavedZeroBubble": partial(interleave, hops=1, splits_backward=True),
    "ZBVZeroBubble": zero_bubble_v,
    "DualPipeV": dual_pipe_v,
}
