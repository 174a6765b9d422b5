"""Does the run's own optimizer make of given gradients what its formulas make of them, on every rank?

    the user's    optimizer, moments_dtype, weight decay, schedule and max_norm, as they are
    compared      learning rates, gradient norm, clipped gradients, moments, updates, copies; then what a step changes
                  whose gradients are not finite on one rank
    order         that of a step; what comes later is a consequence of what came earlier, most likely

update_steps.py is one rank's part, step_formulas.py holds the formulas.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch

from torchtitan_lite import step as stepping
from torchtitan_lite.config.case import Case
from torchtitan_lite.config.checks import find_problems
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.verify.certificate import Measure, RunRanks, Trial, describe_failure
from torchtitan_lite.verify.culprit import Culprit, describe_ranks
from torchtitan_lite.verify.difference import find_disagreement
from torchtitan_lite.verify.one_rank import Coordinates
from torchtitan_lite.verify.ranks import RankFailure
from torchtitan_lite.verify.reduction import Reduction
from torchtitan_lite.verify.step_formulas import FORMULAS, LEFT, ROUNDING, compute_rate_factor
from torchtitan_lite.verify.update_steps import NORMS, NOT_FINITE, Gap, UpdateShare, measure_updates

NAME = "updates"
REMEDY = "add it to verify/step_formulas.py"
# Of gradient norms, clipped gradients, moments and updates. Right code stays below 1e-7; fp32 alone makes 6e-8.
TOLERANCE = 1e-6
RATE_TOLERANCE = 1e-12  # of the peak: rates are Python's floats
LEAST_MAX_NORM, LARGEST_MAX_NORM = 1e-3, 1e3  # fp32 holds the squares of gradients of such norms


@dataclass(frozen=True)
class Finding:
    """One line of the certificate, and its culprit where it is not right."""

    fault: str  # its key in the faults of the trial
    measure: Measure
    culprit: Culprit | None  # None: nothing is wrong


def try_updates(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Make four steps of the run from given gradients, and two whose gradients are not finite."""
    start = time.monotonic()
    config = keep_own_optimizer(reduction)
    if why := find_obstacle(config):
        return Trial(NAME, [], {}, None, 0.0, skipped=why, is_missing=True)
    sizes = count_numbers(config)
    try:
        shares = run_ranks(measure_updates, reduction.layout.world_size, config, sizes)
    except RankFailure as failure:
        return describe_failure(NAME, failure, time.monotonic() - start)
    held = {fqn for share in shares for _, fqn, _ in share.gaps}
    if lost := [fqn for fqn in sizes if fqn not in held]:
        culprit = Culprit("parameters", lost[0], f"no rank holds it; {len(lost)} of {len(sizes)} parameters are lost")
        return Trial(NAME, [], {"parameters": culprit.detail}, culprit, time.monotonic() - start)
    section = config.optimizer
    findings = [
        judge_rates(shares, config),
        judge_norms(shares, config.training.max_norm),
        judge_slices("clipping", ["clipped gradient"], "gradients that the optimizer gets", shares, config, sizes),
        judge_slices("moments", FORMULAS[section.name].moments, f"in {section.moments_dtype}", shares, config, sizes),
        judge_slices("update", ["update"], "bound: 1e-6, and what fp32 rounds off weights", shares, config, sizes),
        judge_copies(shares, sizes),
        judge_not_finite(shares),
    ]
    wrong = [finding for finding in findings if finding.culprit is not None]
    faults = {finding.fault: f"{finding.culprit.name}: {finding.culprit.detail}" for finding in wrong}
    culprit = wrong[0].culprit if wrong else None
    measures = [finding.measure for finding in findings]
    subject = f"{section.name} ({section.implementation}), {len(NORMS)} steps from given gradients and moments"
    return Trial(NAME, measures, faults, culprit, time.monotonic() - start, subject=subject)


def keep_own_optimizer(reduction: Reduction) -> Config:
    """Return the small config with the real optimizer, schedule and clipping; total_steps is resolved."""
    small, real = reduction.config, reduction.real
    max_norm = min(max(real.training.max_norm, LEAST_MAX_NORM), LARGEST_MAX_NORM)
    total_steps = real.lr_scheduler.total_steps or real.training.steps
    return replace(
        small,
        optimizer=real.optimizer,
        lr_scheduler=replace(real.lr_scheduler, total_steps=total_steps),
        training=replace(small.training, max_norm=max_norm),
    )


def find_obstacle(config: Config) -> str:
    """Return why the trial cannot be made; empty where it can."""
    name, decay_type = config.optimizer.name, config.lr_scheduler.decay_type
    if name not in FORMULAS:
        return f"the updates of optimizer.name = {name} have no reference: {REMEDY}"
    if decay_type not in LEFT:
        return f"the rates of lr_scheduler.decay_type = {decay_type} have no reference: {REMEDY}"
    return "; ".join(str(problem) for problem in find_problems("run", Case(config), key="optimizer.moments_dtype"))


def count_numbers(config: Config) -> dict[str, int]:
    """Return the size of each parameter of the whole model, by FQN in its order."""
    model_class, _ = stepping.MODELS[config.model.name]
    with torch.device("meta"):
        model = model_class(resolve_model(config.model), attention=config.model.attention)
    return {fqn: parameter.numel() for fqn, parameter in model.named_parameters()}


# ---------------------------------------------------------------- one line of the certificate each


@dataclass(frozen=True)
class Reading:
    """One number that every rank must have."""

    where: str
    right: float
    unit: float  # in which errors are measured
    of_ranks: list[float]

    def errors(self) -> list[float]:
        return [abs(value - self.right) / self.unit for value in self.of_ranks]


def judge_rates(shares: list[UpdateShare], config: Config) -> Finding:
    """Judge the rate of every parameter group of every rank, before and after each step."""
    peak = config.optimizer.lr
    readings = []
    for index, (step, _) in enumerate(shares[0].rates):
        right = peak * compute_rate_factor(config.lr_scheduler, step)
        of_ranks = [max(share.rates[index][1], key=lambda rate, right=right: abs(rate - right)) for share in shares]
        readings.append(Reading(f"at step {step} of the schedule", right, peak or 1.0, of_ranks))
    steps = ", ".join(str(step) for step in sorted({step for step, _ in shares[0].rates}))
    of = f"of the peak, at steps {steps} of the schedule"
    return judge_readings(Culprit("learning rate", "lr_scheduler", ""), readings, shares, RATE_TOLERANCE, of)


def judge_norms(shares: list[UpdateShare], max_norm: float) -> Finding:
    """Judge the gradient norm of every rank, in each step."""
    readings = [
        Reading(f"in step {index + 1}", norm * max_norm, norm * max_norm, [share.grad_norms[index] for share in shares])
        for index, norm in enumerate(NORMS)
    ]
    of = f"of {', '.join(f'{norm:g}' for norm in NORMS)} times max_norm {max_norm:g}"
    return judge_readings(Culprit("gradient norm", "clip_grad_norm", ""), readings, shares, TOLERANCE, of)


def judge_readings(
    accused: Culprit, readings: list[Reading], shares: list[UpdateShare], tolerance: float, of: str
) -> Finding:
    """Name the first reading that some rank has wrong; `accused` is the culprit, still without details."""
    # What is not a number is infinitely wrong: max would overlook it.
    worst = max(error if error < math.inf else math.inf for reading in readings for error in reading.errors())
    measure, fault = Measure(accused.kind, worst, tolerance, of), accused.kind.replace(" ", "_")
    for reading in readings:
        is_right = [error <= tolerance for error in reading.errors()]
        if not all(is_right):
            value = reading.of_ranks[is_right.index(False)]
            detail = f"{reading.where} the {accused.kind} is {value:.6g} instead of {reading.right:.6g}"
            places = [share.coordinates for share in shares]
            dims = find_disagreement(list(zip(places, reading.of_ranks, strict=True)), tolerance)
            culprit = replace(accused, detail=detail + describe_wrong(places, is_right), mesh_dims=dims)
            return Finding(fault, measure, culprit)
    return Finding(fault, measure, None)


def judge_slices(
    fault: str, kinds: Iterable[str], of: str, shares: list[UpdateShare], config: Config, sizes: dict[str, int]
) -> Finding:
    """Judge all slices of these `kinds` of UpdateShare.gaps, together in one line."""
    verdicts = [
        judge_tensor(kind, fqn, index, shares, config) for fqn in sizes for kind in kinds for index in range(len(NORMS))
    ]
    if not verdicts:  # an optimizer without moments
        return Finding(fault, Measure(fault, 0.0, TOLERANCE, of), None)
    worst = max(verdicts, key=lambda verdict: verdict.excess)
    n_wrong = len({verdict.fqn for verdict in verdicts if verdict.excess > 1})
    of = f"{of}; worst of {len(sizes)} parameters"
    measure = Measure(fault, worst.error, worst.bound, of)
    if worst.excess <= 1:
        return Finding(fault, measure, None)
    first = next(verdict for verdict in verdicts if verdict.excess > 1)
    places, is_right = zip(*first.of_ranks, strict=True)
    detail = f"in step {first.index + 1} its {first.kind} is off by {first.error:.1e}{describe_wrong(places, is_right)}"
    detail += f"; {n_wrong} of {len(sizes)} parameters are wrong, {worst.fqn} most"
    name = "clip_grad_norm" if fault == "clipping" else first.fqn
    dims = find_disagreement(list(zip(places, map(float, is_right), strict=True)), 0.0)
    return Finding(fault, measure, Culprit(fault, name, detail, dims))


@dataclass(frozen=True)
class Verdict:
    """Error of one tensor in one step."""

    kind: str
    fqn: str
    index: int
    error: float
    bound: float
    of_ranks: list[tuple[Coordinates, bool]]  # of those that hold a slice, whether it is right

    @property
    def excess(self) -> float:
        """Return the error in units of its bound: at most 1 is right."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and self.error < math.inf else math.inf


def judge_tensor(kind: str, fqn: str, index: int, shares: list[UpdateShare], config: Config) -> Verdict:
    """Judge all slices of a tensor together, and each by itself."""
    tolerance = TOLERANCE + (find_coarseness(config, index + 1) if kind == "update" else 0.0)
    held = [(share.coordinates, share.gaps[kind, fqn, index]) for share in shares if (kind, fqn, index) in share.gaps]
    of_ranks = []
    for place, gap in held:
        error, bound = gap.relative(tolerance)
        of_ranks.append((place, error <= bound))
    error, bound = reduce(Gap.plus, (gap for _, gap in held)).relative(tolerance)
    return Verdict(kind, fqn, index, error, bound, of_ranks)


def find_coarseness(config: Config, step: int) -> float:
    """Return the extra tolerance of updates from bf16 moments that one compiled kernel moves.

    It computes 1 - beta^step in fp32 on the device, so that this difference is rounded as 1 is.
    """
    section = config.optimizer
    if section.moments_dtype != "bfloat16" or not config.compile.enable:
        return 0.0
    return 2 * ROUNDING * (1 / (1 - section.beta1**step) + 0.5 / (1 - section.beta2**step))


def judge_copies(shares: list[UpdateShare], sizes: dict[str, int]) -> Finding:
    """Judge the copies of weights and moments on several ranks, after all steps."""
    unequal = set().union(*(share.unequal_replicas for share in shares))
    fqns = {fqn for _, fqn, _ in unequal}
    of = f"of {len(sizes)} parameters: weights or moments not bit-equal on all ranks that hold one"
    measure = Measure("copies", len(fqns), 0, of)
    if not fqns:
        return Finding("replicas", measure, None)
    first = next(fqn for fqn in sizes if fqn in fqns)
    kinds = sorted({kind for kind, fqn, _ in unequal if fqn == first})
    dims = sorted({dim for _, fqn, dim in unequal if fqn == first})
    detail = f"copies of its {' and '.join(kinds)} are not bit-equal; {len(fqns)} of {len(sizes)} parameters are wrong"
    return Finding("replicas", measure, Culprit("replicas", first, detail, dims))


def judge_not_finite(shares: list[UpdateShare]) -> Finding:
    """Judge steps that are not finite: they must say so and change nothing; others must be finite."""
    changed = {key for share in shares for keys in share.changed.values() for key in keys}
    is_right = [all(share.finite) and not share.said_finite and not any(share.changed.values()) for share in shares]
    of = f"of {len(shares)} ranks step on a gradient of {' or '.join(NOT_FINITE)} of the last one, or say so"
    measure = Measure("non-finite step", is_right.count(False), 0, of)
    if all(is_right):
        return Finding("non_finite", measure, None)
    wrong = shares[is_right.index(False)]
    if not all(wrong.finite):
        detail = f"step {wrong.finite.index(False) + 1}, whose gradients are finite, was taken for one that is not"
    else:
        value = next(name for name in NOT_FINITE if name in wrong.said_finite or wrong.changed[name])
        said = "is taken for finite" if value in wrong.said_finite else "is seen"
        detail = f"a gradient of {value} on the last rank {said}, and changes {len(changed)} tensors"
    places = [share.coordinates for share in shares]
    dims = find_disagreement(list(zip(places, map(float, is_right), strict=True)), 0.0)
    detail += describe_wrong(places, is_right)
    return Finding("non_finite", measure, Culprit("non-finite step", "step_if_finite", detail, dims))


def describe_wrong(places: Sequence[Coordinates], is_right: Sequence[bool]) -> str:
    """Return on which ranks it is wrong."""
    wrong = [place for place, right in zip(places, is_right, strict=True) if not right]
    # All slices together may be wrong where none is by itself.
    return describe_ranks(wrong, len(places)) if wrong else ""
