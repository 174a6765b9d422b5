"""What one trial of `verify` says: how far the layout is from the reference, what is wrong, and what is wrong first.

gradient_trial.py     wide, deep, long, real width    gradients, norm, updates by SGD beside one process
update_trial.py       updates                         the run's own optimizer, from given gradients
train_trial.py        train.py                        rows, learning rates, validation, save and resume
precision_trial.py    bfloat16, float8                the run's own arithmetic
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.verify.comparison import Difference
from torchtitan_lite.verify.culprit import Culprit, name_crash
from torchtitan_lite.verify.ranks import NoAnswer, RankFailure, RankTimeout

RunRanks = Callable[..., list]  # (worker, world_size, *args) -> one result per rank: RankPool.run, or one around it

WHAT_TO_DO = (
    "On a slow machine give them more time, with --timeout; ranks that are at different places in the code may wait "
    "for each other, and then no time is enough"
)


@dataclass(frozen=True)
class Measure:
    """One line of a certificate."""

    what: str
    error: float  # relative, unless `of` says otherwise
    bound: float  # the largest error that is right
    of: str  # what was compared, and how much of it

    @property
    def is_right(self) -> bool:
        return self.error <= self.bound  # what is not a number is wrong


@dataclass(frozen=True)
class Trial:
    """What came out of one trial."""

    name: str
    measures: list[Measure]  # empty where a rank crashed
    faults: dict[str, str]  # measure -> what is wrong; empty: nothing is
    culprit: Culprit | None  # what is wrong first
    seconds: float
    difference: Difference | None = None  # of trials that compare gradients
    finished: bool = True  # False: ranks were killed or did not answer in time, so nothing is known
    subject: str = ""  # what it looks at, in sizes: "12 layers of dim 16"
    skipped: str = ""  # why it was not made, where it was not
    is_missing: bool = False  # skipped although the run needs it: the certificate is one in part


def describe_failure(name: str, failure: RankFailure, seconds: float) -> Trial:
    """A trial in which a rank raised, was killed, or did not answer in time."""
    if isinstance(failure, NoAnswer):
        remedy = f". {WHAT_TO_DO}" if isinstance(failure, RankTimeout) else ""
        return Trial(name, [], {"no answer": f"{failure}{remedy}"}, None, seconds, finished=False)
    culprit = name_crash(str(failure))
    return Trial(name, [], {"crash": f"{culprit.name}: {culprit.detail}"}, culprit, seconds)
