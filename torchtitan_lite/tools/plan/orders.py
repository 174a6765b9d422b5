"""Pipeline schedules: list the actions that each pp rank runs in one step, in order. No torch.

    GPipe, 2 microbatches     pp rank 0: 0F0 0F1 0B0 0B1        pp rank 1: 1F0 1F1 1B0 1B1

F is a forward, B a backward. Some schedules split B into I (gradients of inputs) and W (gradients of weights).
tests/tools/test_orders.py compares each order with torch.distributed.pipelining, action by action.

Sources, arXiv: GPipe 1811.06965; 1F1B 2104.04473; LoopedBFS 2211.05953; zero bubble 2401.10241; DualPipe 2412.19437.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product

from torchtitan_lite.tools.plan.actions import HALVES, Action, Order


@lru_cache(maxsize=1024)
def list_order(schedule: str, pp: int, n_microbatches: int, n_stages_per_rank: int) -> Order:
    """Return the order of a schedule. If pp is 1: forward and backward of each microbatch in turn."""
    list_row = ORDERS["1F1B" if pp == 1 else schedule]
    return [list_row(rank, pp, n_microbatches, n_stages_per_rank) for rank in range(pp)]


def run_stages(stages: Sequence[int], kind: str, microbatches: Sequence[int]) -> list[Action]:
    """Run all microbatches through each stage in turn."""
    pairs = product(stages, microbatches)
    return [Action(stage, kind, microbatch) for stage, microbatch in pairs]


def fill_and_drain(rank: int, pp: int, n_microbatches: int, n_stages_per_rank: int) -> list[Action]:
    """GPipe, or LoopedBFS with several stages per rank: all forwards, then all backwards, stage by stage."""
    stages = range(rank, pp * n_stages_per_rank, pp)
    microbatches = range(n_microbatches)
    # Backward starts with the last microbatch in LoopedBFS, and with the first in GPipe.
    backwards = microbatches[::-1] if len(stages) > 1 else microbatches
    return run_stages(stages, "F", microbatches) + run_stages(stages[::-1], "B", backwards)


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
    size = n_microbatches // max(1, n_microbatches // pp)
    forwards = []
    backwards = []
    for start in range(0, n_microbatches, size):
        one_round = range(n_microbatches)[start : start + size]
        forwards += run_stages(stages, "F", one_round)
        backwards += run_stages(stages[::-1], "I" if splits_backward else "B", one_round)
    n_warm_up = (n_stages_per_rank - 1) * size + hops * (pp - 1 - rank)
    row = forwards[:n_warm_up]
    weights: deque[Action] = deque()
    for at, backward in enumerate(backwards, n_warm_up):
        row += forwards[at : at + 1]
        row.append(backward)
        if splits_backward:
            weights.append(backward._replace(kind="W"))
        if len(weights) > rank:
            row.append(weights.popleft())
    return [*row, *weights]


class VRow:
    """The row of a rank that holds the stages `first` and `second`, the two arms of a V."""

    def __init__(self, rank: int, pp: int):
        self.first = rank
        self.second = 2 * pp - 1 - rank
        self.actions: list[Action] = []
        self.count: Counter[tuple[int, str]] = Counter()  # by stage and half

    def add(self, stage: int, kinds: str) -> None:
        """Append actions of a stage, each on the next microbatch."""
        for kind in kinds:
            halves = HALVES[kind]
            self.actions.append(Action(stage, kind, self.count[stage, halves[0]]))
            for half in halves:
                self.count[stage, half] += 1


def zero_bubble_v(rank: int, pp: int, n_microbatches: int, n_stages_per_rank: int) -> list[Action]:
    """ZBVZeroBubble: forwards fill both arms, then F, I and W alternate, then I runs before the remaining W."""
    row = VRow(rank, pp)
    first, second = row.first, row.second
    # Minimum of the pattern. Extra microbatches are dropped at the end.
    n_filling = max(2 * pp - 1, n_microbatches)
    row.add(first, "F" * (2 * (pp - rank) - 1))
    for _ in range(rank):
        row.add(second, "F")
        row.add(first, "F")
    row.add(second, "FIW" * (pp - rank))
    for _ in range(n_filling - pp):
        if row.count[first, "F"] < n_filling:
            row.add(first, "F")
        row.add(first, "IW")
        row.add(second, "FIW")
    for _ in range(rank):
        row.add(first, "I")
        row.add(second, "I")
    row.add(first, "IW" * (pp - rank))
    row.add(second, "W" * rank)
    row.add(first, "W" * rank)
    return [action for action in row.actions if action.microbatch < n_microbatches]


def dual_pipe_v(rank: int, pp: int, n_microbatches: int, n_stages_per_rank: int) -> list[Action]:
    """DualPipeV: forwards of one arm alternate with backwards of the other. The last backwards are split."""
    row = VRow(rank, pp)
    first, second = row.first, row.second
    n_after = pp - rank - 1  # ranks after this one
    row.add(first, "FF" * n_after)
    for _ in range(rank + 1):
        row.add(first, "F")
        row.add(second, "F")
    row.add(second, "IWF" * n_after)
    for _ in range(n_microbatches - pp - n_after):
        row.add(first, "F")
        row.add(second, "BF")
        row.add(first, "B")
    for _ in range(n_after):
        row.add(second, "BF")
        row.add(first, "B")
    last = [second, first] * (rank + 1)
    for stage in last[: rank + 1]:
        row.add(stage, "B")
    split = last[rank + 1 :]
    for stage in split:
        row.add(stage, "I")
    weights = split + [first] * n_after  # in the order of their I
    for stage in weights[:n_after]:
        row.add(stage, "W")
        row.add(first, "I")
    for stage in weights[n_after:]:
        row.add(stage, "W")
    return row.actions


ORDERS: dict[str, Callable[..., list[Action]]] = {  # names as in torch
    "GPipe": fill_and_drain,
    "1F1B": partial(interleave, hops=1),
    "Interleaved1F1B": partial(interleave, hops=2),
    "LoopedBFS": fill_and_drain,
    "InterleavedZeroBubble": partial(interleave, hops=1, splits_backward=True),
    "ZBVZeroBubble": zero_bubble_v,
    "DualPipeV": dual_pipe_v,
}
