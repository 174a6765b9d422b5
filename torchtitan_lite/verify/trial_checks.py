"""Checks of a run: what the trials of updates, of train.py and of the run's own precision have in common.

    gap      squared norms of a slice: those of several ranks can be added, so that no tensor is gathered
    check    one comparison over all ranks: an error, the largest error that is right, and the culprit to name
    trial    for each measure its worst check; the culprit is that of the first check that fails

Checks are listed in the order of a step, because an error is most likely a consequence of the errors before it.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchtitan_lite.verify.certificate import Measure, Trial
from torchtitan_lite.verify.culprit import Culprit, describe_ranks
from torchtitan_lite.verify.difference import find_disagreement
from torchtitan_lite.verify.one_rank import Coordinates


class Gap(NamedTuple):
    """Squared norms of the numbers in one slice of a tensor, or in several slices."""

    error: float  # of value - reference
    reference: float
    rounding: float = 0.0  # of what fp32 alone may do

    def relative(self, tolerance: float) -> tuple[float, float]:
        """Return error and bound, in units of the reference's norm, or absolute where that is zero."""
        scale = math.sqrt(self.reference) or 1.0
        allowed = tolerance * math.sqrt(self.reference) + math.sqrt(self.rounding)
        return math.sqrt(self.error) / scale, allowed / scale


def add_gaps(gaps: Iterable[Gap]) -> Gap:
    """Return the squared norms of slices together: infinitely wrong where no rank holds one."""
    columns = list(zip(*gaps, strict=True))
    return Gap(*map(sum, columns)) if columns else Gap(math.inf, 0.0)


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
    values: Sequence[tuple[Coordinates, float]],
    expected: float,
    bound: float,
    unit: float | None = None,
) -> Check:
    """Check one number that every rank must have. `culprit.detail` says which one.

    Errors are in units of `unit`, by default of `expected`.
    """
    errors = [abs(value - expected) / (unit or abs(expected)) for _, value in values]
    errors = [error if error < math.inf else math.inf for error in errors]
    worst = max(errors)
    wrong = [coordinates for (coordinates, _), error in zip(values, errors, strict=True) if error > bound]
    detail = f"{culprit.detail} is {values[errors.index(worst)][1]:.9g} instead of {expected:.9g}"
    if wrong:
        detail += describe_ranks(wrong, len(values))
    dims = find_disagreement(list(values), bound)
    return Check(measure, worst, bound, replace(culprit, detail=detail, mesh_dims=dims))


def blame(kind: str, name: str, detail: str, is_right: Sequence[tuple[Coordinates, bool]]) -> Culprit:
    """Return a culprit with the ranks that are wrong, and the mesh dims along which right and wrong are neighbours."""
    wrong = [coordinates for coordinates, right in is_right if not right]
    dims = find_disagreement([(coordinates, float(right)) for coordinates, right in is_right], 0.0)
    # All slices together may be wrong where none is by itself.
    return Culprit(kind, name, detail + (describe_ranks(wrong, len(is_right)) if wrong else ""), dims)


def judge(name: str, checks: Sequence[Check], measures: dict[str, str], start: float, subject: str = "") -> Trial:
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
    return Trial(name, lines, faults, culprit, time.monotonic() - start, subject=subject)
