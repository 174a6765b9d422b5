"""What the ranks have found, put together: errors of whole tensors, checks, the culprit, and the result of a trial.

    slice    squared errors of what one rank holds: those of several ranks can be added, so that no tensor is gathered
    check    one comparison over all ranks: an error, the largest error that is right, and the culprit to name
    trial    for each measure its worst check; the culprit is that of the first check that fails

Checks are listed in the order of a step, because an error is most likely a consequence of the errors before it.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from torchtitan_lite.parallel.tensor_parallel import MissingFromPlan
from torchtitan_lite.tools.verify.one_rank import RankResult
from torchtitan_lite.tools.verify.ranks import NoAnswer, RankFailure, RankTimeout
from torchtitan_lite.tools.verify.slices import Coordinates, Gap, join_slices

RunRanks = Callable[..., list]  # (worker, world_size, *args) -> one result per rank: RankPool.run, or one around it

WHAT_TO_DO = (
    "On a slow machine give them more time, with --timeout; ranks that are at different places in the code may wait "
    "for each other, and then no time is enough"
)


# ---------------------------------------------------------------- the result


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
class Culprit:
    """The first difference. `name` is a module, a parameter, or what is exchanged."""

    kind: str  # initial weights, pieces, positions, documents, counted tokens, microbatches, module output, ...
    name: str
    detail: str
    mesh_dims: list[str] = field(default_factory=list)  # along which ranks disagree: where the exchange is at fault
    cause: str = "unknown"  # or the trap whose removal repairs it

    def __str__(self) -> str:
        along = f"; ranks along {', '.join(self.mesh_dims)} disagree" if self.mesh_dims else ""
        return f"{self.kind}: {self.name}, {self.detail}{along}"


@dataclass(frozen=True)
class Difference:
    """Difference between a layout and the reference: for each measure the worst of all ranks."""

    initial_equal: dict[str, bool]  # by FQN, as in RankResult
    placements: dict[str, str]
    unequal_replicas: set[tuple[str, str]]
    gradient: dict[str, float]  # FQN -> relative error
    weight: dict[str, float]  # the same after the last step; empty without updates
    update: float  # of the updates of all weights together; 0 without updates
    errors: dict[str, float]  # as in RankResult
    ranks: list[RankResult]  # what it was merged from
    gradients_of_ranks: list[dict[str, Gap]]  # by rank and FQN: of the whole that the rank's slice belongs to


@dataclass(frozen=True)
class Trial:
    """Result of one trial; `make_trial` adds its name and time."""

    name: str = ""
    measures: list[Measure] = field(default_factory=list)  # empty where a rank crashed
    faults: dict[str, str] = field(default_factory=dict)  # measure -> what is wrong; empty: nothing is
    culprit: Culprit | None = None  # what is wrong first
    seconds: float = 0.0
    difference: Difference | None = None  # of trials that compare gradients
    finished: bool = True  # False: ranks were killed or did not answer in time, so nothing is known
    subject: str = ""  # what it looks at, in sizes: "12 layers of dim 16"
    skipped: str = ""  # why it was not made, where it was not
    is_missing: bool = False  # skipped although the run needs it: the certificate is one in part


def make_trial(name: str, make: Callable[..., Trial], *args, **options) -> Trial:
    """Call `make`. Ranks that raise, are killed, or do not answer in time are a result too."""
    start = time.monotonic()
    try:
        trial = make(*args, **options)
    except RankFailure as failure:
        trial = describe_failure(failure)
    return replace(trial, name=name, seconds=time.monotonic() - start)


def describe_failure(failure: RankFailure) -> Trial:
    if isinstance(failure, NoAnswer):
        remedy = f". {WHAT_TO_DO}" if isinstance(failure, RankTimeout) else ""
        return Trial(faults={"no answer": f"{failure}{remedy}"}, finished=False)
    culprit = name_crash(str(failure))
    return Trial(faults={"crash": f"{culprit.name}: {culprit.detail}"}, culprit=culprit)


def name_crash(text: str) -> Culprit:
    """Return the culprit of a rank that raised or died: the last line of its traceback."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    last = lines[-1].strip()
    if match := re.match(rf"(\S+\.)?{MissingFromPlan.__name__}: (?P<fqn>\S+) (?P<why>.*)", last):
        return Culprit("placement", match["fqn"], match["why"])
    return Culprit("crash", lines[0].split(":")[0], last)


# ---------------------------------------------------------------- whole tensors


def merge(ranks: list[RankResult], fqns: Collection[str]) -> Difference:
    """Return the worst of all ranks. Every parameter of the model, `fqns`, must have been seen by some rank."""

    def worst(of_ranks: list[dict], choose: Callable = max) -> dict:
        values = defaultdict(list)
        for of_rank in of_ranks:
            for fqn, value in of_rank.items():
                values[fqn].append(value)
        missing = sorted(values.keys() ^ set(fqns))
        assert not missing, f"parameters not compared: {missing}"
        return {fqn: choose(values[fqn]) for fqn in fqns}

    def worst_tensors(joined: list[dict[str, Gap]]) -> dict[str, Gap]:
        return worst(joined, lambda tensors: max(tensors, key=lambda tensor: tensor.relative_error))

    gradients = join_slices([rank.gradients for rank in ranks])
    weights, update = {}, 0.0
    if ranks[0].weights:
        weights = worst_tensors(join_slices([rank.weights for rank in ranks]))
        # Of all together: per parameter, a norm weight near 1 would only show its rounding.
        whole = sum(worst([rank.squared_updates for rank in ranks]).values())
        update = math.sqrt(sum(weight.error for weight in weights.values()) / whole)
    return Difference(
        initial_equal=worst([rank.initial_equal for rank in ranks], all),
        placements=worst([rank.placements for rank in ranks]),
        unequal_replicas=set().union(*(rank.unequal_replicas for rank in ranks)),
        gradient={fqn: tensor.relative_error for fqn, tensor in worst_tensors(gradients).items()},
        weight={fqn: tensor.relative_error for fqn, tensor in weights.items()},
        update=update,
        errors={name: max(rank.errors[name] for rank in ranks) for name in ranks[0].errors},
        ranks=ranks,
        gradients_of_ranks=gradients,
    )


# ---------------------------------------------------------------- which ranks are wrong


def find_disagreement(values: Sequence[tuple[Coordinates, float]], tolerance: float) -> list[str]:
    """Return the mesh dims along which ranks disagree: neighbors on that dim alone hold different values."""
    dims = set()
    for (here, one), (there, other) in combinations(values, 2):
        apart = [dim for dim in here if here[dim] != there[dim]]
        if len(apart) == 1 and not math.isclose(one, other, rel_tol=tolerance):
            dims.add(apart[0])
    return [dim for dim in (values[0][0] if values else ()) if dim in dims]


def describe_ranks(wrong: Sequence[Coordinates], n_holders: int) -> str:
    """Return the coordinates that all wrong ranks share; or that all ranks are wrong."""
    if len(wrong) == n_holders:
        return " on every rank that holds it"
    common = [f"{dim} {at}" for dim, at in wrong[0].items() if all(other[dim] == at for other in wrong)]
    return f" on {len(wrong)} of {n_holders} ranks that hold it, all at {', '.join(common) or 'no common coordinate'}"


def blame(kind: str, name: str, detail: str, is_right: Sequence[tuple[Coordinates, bool]]) -> Culprit:
    """Return a culprit with the ranks that are wrong, and the mesh dims along which right and wrong are neighbors."""
    wrong = [coordinates for coordinates, right in is_right if not right]
    # All slices together may be wrong where none is by itself.
    detail += describe_ranks(wrong, len(is_right)) if wrong else ""
    return Culprit(kind, name, detail, find_disagreement(is_right, 0.0))


# ---------------------------------------------------------------- checks


@dataclass(frozen=True)
class Check:
    """One comparison; `culprit` is to blame if `error` is beyond `bound`."""

    measure: str
    error: float
    bound: float
    culprit: Culprit

    @property
    def excess(self) -> float:
        """Return the error in units of its bound: at most 1 is right. What is not a number is infinitely wrong."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and self.error < math.inf else math.inf


def check_values(
    measure: str,
    culprit: Culprit,
    of_ranks: Sequence[tuple[Coordinates, Sequence[float]]],
    expected: float,
    bound: float,
    unit: float | None = None,
) -> Check:
    """Check one number that every rank must have, in one place or several. `culprit.detail` says which one.

    Errors are in units of `unit`, by default of `expected`.
    """
    values = [(coordinates, max(own, key=lambda value: abs(value - expected))) for coordinates, own in of_ranks]
    errors = [abs(value - expected) / (unit or abs(expected)) for _, value in values]
    errors = [error if error < math.inf else math.inf for error in errors]
    worst = max(errors)
    wrong = [coordinates for (coordinates, _), error in zip(values, errors, strict=True) if error > bound]
    detail = f"{culprit.detail} is {values[errors.index(worst)][1]:.9g} instead of {expected:.9g}"
    if wrong:
        detail += describe_ranks(wrong, len(values))
    return Check(measure, worst, bound, replace(culprit, detail=detail, mesh_dims=find_disagreement(values, bound)))


def judge(checks: Sequence[Check], measures: dict[str, str], subject: str = "") -> Trial:
    """Return the trial. `measures`: name -> what was compared; those without a check are left out."""
    lines, faults = [], {}
    for measure, of in measures.items():
        of_measure = [check for check in checks if check.measure == measure]
        if not of_measure:
            continue
        worst = max(of_measure, key=lambda check: check.excess)
        lines.append(Measure(measure, worst.error, worst.bound, of))
        if wrong := [check.culprit for check in of_measure if check.excess > 1]:
            faults[measure] = f"{wrong[0].name}: {wrong[0].detail}"
            if len(of_measure) > 1:
                faults[measure] += f"; {len(wrong)} of {len(of_measure)} checks of this measure fail"
    culprit = next((check.culprit for check in checks if check.excess > 1), None)
    return Trial(measures=lines, faults=faults, culprit=culprit, subject=subject)
