"""List the actions of each pp rank in one step of a pipeline schedule, and count microbatches in flight. No torch.

    GPipe, 2 microbatches     pp rank 0: 0F0 0F1 0B0 0B1        pp rank 1: 1F0 1F1 1B0 1B1

1F0 is the forward (F) of microbatch 0 in stage 1. B is a backward. Some schedules split B into I (gradients of inputs)
and W (gradients of weights). tests/tools/test_orders.py compares each order with torch.distributed.pipelining, action
by action.

Sources, arXiv: GPipe 1811.06965; 1F1B 2104.04473; LoopedBFS 2211.05953; zero bubble 2401.10241; DualPipe 2412.19437.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import NamedTuple


class Action(NamedTuple):
    """One action of a pp rank: `0F3` is stage 0, forward, microbatch 3."""

    stage: int
    kind: str  # F forward; B backward, or its halves I (gradients of inputs) and W (of weights)
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = list[list[Action]]  # the actions of each pp rank in one step
# kind of an action -> halves of a backward that it completes
HALVES = {"F": "F", "B": "IW", "I": "I", "W": "W"}


class Pipeline(NamedTuple):
    """The schedule and the sizes that determine the order of the actions in a step."""

    schedule: str
    pp: int
    n_microbatches: int
    n_stages_per_rank: int

    @property
    def round_size(self) -> int:
        """Number of microbatches in a round of an interleaved schedule."""
        return self.n_microbatches // max(1, self.n_microbatches // self.pp)

    def stages_of(self, rank: int) -> range:
        """Return the stages of a pp rank in all schedules except V schedules."""
        return range(rank, self.pp * self.n_stages_per_rank, self.pp)


def list_row(pipeline: Pipeline, rank: int) -> list[Action]:
    """Return the actions of one pp rank. If pp is 1, the actions are forward and backward of each microbatch in
    turn."""
    return ORDERS["1F1B" if pipeline.pp == 1 else pipeline.schedule](pipeline, rank)


def list_order(pipeline: Pipeline) -> Order:
    return [list_row(pipeline, rank) for rank in range(pipeline.pp)]


def shorten(pipeline: Pipeline) -> list[tuple[Pipeline, int]]:
    """Return pipelines with fewer microbatches, and their weights, to replace a long pipeline.

    The step time of the long pipeline, and its number of microbatches in flight, are weighted sums of the values of the
    short pipelines. In a full pipeline, each round of microbatches adds the same amount to these quantities. So such a
    quantity f of m microbatches is f(m) = f(a) + k * (f(a + round) - f(a)), with a = m - k * round. A pipeline of at
    most four rounds is not shortened.
    """
    size = pipeline.round_size
    n_skipped = pipeline.n_microbatches // size - 3
    if n_skipped <= 1:
        return [(pipeline, 1)]
    short = pipeline.n_microbatches - n_skipped * size
    return [
        (pipeline._replace(n_microbatches=short), 1 - n_skipped),
        (pipeline._replace(n_microbatches=short + size), n_skipped),
    ]


def run_stages(stages: Sequence[int], kind: str, microbatches: Sequence[int]) -> list[Action]:
    """Run all microbatches through each stage in turn."""
    pairs = product(stages, microbatches)
    return [Action(stage, kind, microbatch) for stage, microbatch in pairs]


def fill_and_drain(pipeline: Pipeline, rank: int) -> list[Action]:
    """List GPipe, or LoopedBFS with several stages per rank: all forwards, then all backwards, stage by stage."""
    stages = pipeline.stages_of(rank)
    microbatches = range(pipeline.n_microbatches)
    # Backward starts with the last microbatch in LoopedBFS, and with the first microbatch in GPipe.
    backwards = microbatches[::-1] if len(stages) > 1 else microbatches
    return run_stages(stages, "F", microbatches) + run_stages(stages[::-1], "B", backwards)


def interleave(
    pipeline: Pipeline, rank: int, *, hops: int, splits_backward: bool = False
) -> list[Action]:
    """List Interleaved1F1B: forwards fill the pipeline, then forwards and backwards alternate.

    Microbatches run in rounds. A rank starts with `hops` additional forwards for each later pp rank. 1F1B has one stage
    per rank and `hops` = 1. If the backward is split (InterleavedZeroBubble), each W is delayed by `rank` backwards
    after its I.
    """
    size = pipeline.round_size
    stages = pipeline.stages_of(rank)
    microbatches = range(pipeline.n_microbatches)
    forwards = []
    backwards = []
    for start in microbatches[::size]:
        one_round = microbatches[start : start + size]
        forwards += run_stages(stages, "F", one_round)
        backwards += run_stages(stages[::-1], "I" if splits_backward else "B", one_round)
    n_warm_up = (len(stages) - 1) * size + hops * (pipeline.pp - 1 - rank)
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


def run_steps(rank: int, pp: int, steps: str) -> list[Action]:
    """Return the actions of steps such as "aF bI bW". a and b are this rank's stages in the two arms of a V.

    Each step names a stage and a kind of action, and runs the next microbatch of this stage and kind.
    """
    stages = {"a": rank, "b": 2 * pp - 1 - rank}
    # (stage of this rank: "a" or "b", kind of action) -> number of microbatches done
    n_done: Counter[tuple[str, str]] = Counter()
    row = []
    for arm, kind in steps.split():
        halves = HALVES[kind]
        row.append(Action(stages[arm], kind, n_done[arm, halves[0]]))
        for half in halves:
            n_done[arm, half] += 1
    return row


def zero_bubble_v(pipeline: Pipeline, rank: int) -> list[Action]:
    """List ZBVZeroBubble: forwards fill both arms, then F, I and W alternate, then I runs before the remaining W."""
    _, pp, n_microbatches, _ = pipeline
    n_after = pp - rank - 1  # ranks after this one
    # The pattern needs at least 2 * pp - 1 microbatches. If the step has fewer microbatches, the actions of the
    # additional ones are removed at the end.
    n_filling = max(2 * pp - 1, n_microbatches)
    steps = "aF " * (2 * n_after + 1)
    steps += "bF aF " * rank
    steps += "bF bI bW " * (n_after + 1)
    steps += "aF aI aW bF bI bW " * (n_filling - pp - n_after)
    steps += "aI aW bF bI bW " * n_after
    steps += "aI bI " * rank
    steps += "aI aW " * (n_after + 1)
    steps += "bW " * rank
    steps += "aW " * rank
    row = run_steps(rank, pp, steps)
    return [action for action in row if action.microbatch < n_microbatches]


def dual_pipe_v(pipeline: Pipeline, rank: int) -> list[Action]:
    """List DualPipeV: forwards of one arm alternate with backwards of the other arm. The last backwards are split."""
    _, pp, n_microbatches, _ = pipeline
    n_after = pp - rank - 1  # ranks after this one
    steps = "aF aF " * n_after
    steps += "aF bF " * (rank + 1)
    steps += "bI bW bF " * n_after
    steps += "aF bB bF aB " * (n_microbatches - pp - n_after)
    steps += "bB bF aB " * n_after
    last = "ba" * (rank + 1)
    for arm in last[: rank + 1]:
        steps += f"{arm}B "
    split = last[rank + 1 :]
    for arm in split:
        steps += f"{arm}I "
    weights = split + "a" * n_after  # W actions run in the order of the I actions
    for arm in weights[:n_after]:
        steps += f"{arm}W aI "
    for arm in weights[n_after:]:
        steps += f"{arm}W "
    return run_steps(rank, pp, steps)


ORDERS: dict[str, Callable[..., list[Action]]] = {  # names as in torch
    "GPipe": fill_and_drain,
    "1F1B": partial(interleave, hops=1),
    "Interleaved1F1B": partial(interleave, hops=2),
    "LoopedBFS": fill_and_drain,
    "InterleavedZeroBubble": partial(interleave, hops=1, splits_backward=True),
    "ZBVZeroBubble": zero_bubble_v,
    "DualPipeV": dual_pipe_v,
}

# ---------------------------------------------------------------- microbatches in flight, and unsharded stages
#
# 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1      two stages, two microbatches
#         |       |   |           |
#         |       |   |           `-- stage 0 reduces its gradients
#         |       |   `-- stage 2 reduces its gradients
#         |       `-- stage 2 has gradients
#         `-- 4 microbatches in flight at most

# Maps a set of stages to the microbatches in flight (stage -> tenths of a microbatch). The numbers are for the time at
# which exactly these stages have gradients and the number of microbatches in flight is largest.
InFlight = dict[frozenset[int], Counter[int]]
STAGES_GATHERED = 3  # torch unshards the next three stages of a pp rank, and reshards the others
# Kind of an action -> tenths of a microbatch that the action adds to the microbatches in flight. Between the two halves
# of a split backward, a microbatch counts 1.6 times, because it also holds the gradients of the outputs of norms and
# linear layers. Between the halves, a block of Llama 8B holds 264 KiB per token of a microbatch, and 164 KiB before.
TENTHS = {"F": 10, "B": -10, "I": 6, "W": -16}


def count_in_flight(row: list[Action]) -> InFlight:
    """Return how many microbatches are in flight on a pp rank, in tenths, at each possible peak of memory.

    The activations of a microbatch are live from its F to its last backward. A stage reduces its gradients after its
    last B or W.
    """
    to_come = Counter(action.stage for action in row if action.kind in "BW")
    held: Counter[int] = Counter()
    peaks = {}
    with_gradients: frozenset[int] = frozenset()
    for stage, kind, _ in row:
        held[stage] += TENTHS[kind]
        if kind in "BW":
            to_come[stage] -= 1
            with_gradients |= {stage}
        if with_gradients not in peaks or held.total() > peaks[with_gradients].total():
            peaks[with_gradients] = held.copy()
        if not to_come[stage]:
            with_gradients -= {stage}
    return peaks


@cache
def extrapolate_in_flight(pipeline: Pipeline, rank: int) -> InFlight:
    """Return the result of count_in_flight for one pp rank, extrapolated from short pipelines."""
    total = defaultdict(Counter)
    for short, weight in shorten(pipeline):
        for with_gradients, held in count_in_flight(list_row(short, rank)).items():
            for key, count in held.items():
                total[with_gradients][key] += count * weight
    return total


def count_gathers(row: list[Action]) -> Counter[int]:
    """Return a dict mapping each stage to the number of its all-gathers, assuming that torch keeps the next
    STAGES_GATHERED stages unsharded."""
    gathers = Counter()
    later = set()  # the stages that torch keeps unsharded at the next action
    ahead = []  # the stages of later actions without repeats; the stage of the next action is first
    for action in reversed(row):
        ahead = [action.stage, *(stage for stage in ahead if stage != action.stage)]
        now = set(ahead[:STAGES_GATHERED])
        gathers.update(later - now)
        later = now
    gathers.update(later)
    return gathers
