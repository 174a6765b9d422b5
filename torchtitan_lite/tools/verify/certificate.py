"""The verdict of `verify`, for people and for programs. README.md says what each verdict means."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod

from torchtitan_lite.tools.tables import format_table
from torchtitan_lite.tools.verify.degrees import AUTOMATIC
from torchtitan_lite.tools.verify.reduction import Reduction
from torchtitan_lite.tools.verify.trial import Difference, Measure, Trial

CERTIFIED, CERTIFIED_IN_PART, IN_PART = "certified", "certified in part", "in part"
WRONG, NOT_FINISHED = "wrong", "not finished"
EXIT_STATUS = {CERTIFIED: 0, CERTIFIED_IN_PART: 3, IN_PART: 3, WRONG: 1, NOT_FINISHED: 4}
LEGEND = "S(0): rows sharded, S(1): columns, _S: rows, in the strides that two sharded dims leave; R: copies, bit-equal"
OUTSIDE = [
    "the model file, which both sides share: the tests compare it with transformers",
    "the arithmetic of float8 (model/float8_linear.py), which both sides share too",
    "kernels of CUDA and collectives of NCCL: this ran on CPUs",
    "data, seed, speed and memory",
]


@dataclass(frozen=True)
class Certificate:
    """Results of all trials of one config."""

    config_name: str
    reduction: Reduction
    trials: list[Trial]  # as far as they were made

    @property
    def verdict(self) -> str:
        if not all(trial.finished for trial in self.trials):
            return NOT_FINISHED
        if any(trial.faults for trial in self.trials):
            return WRONG
        if self.reduction.degrees.given_up:
            return IN_PART
        return CERTIFIED_IN_PART if any(trial.is_missing for trial in self.trials) else CERTIFIED


def describe(certificate: Certificate, *, verbose: bool) -> str:
    """Return the verdict for people, with all measures."""
    reduction = certificate.reduction
    lines = [f"{certificate.config_name} on {reduction.layout.world_size} ranks: {reduction.degrees}", ""]
    for trial in certificate.trials:
        lines += describe_trial(trial)
        if trial.name == "wide" and trial.difference is not None:
            bound = next(measure.bound for measure in trial.measures if measure.what == "gradients")
            lines += describe_gradients(trial.difference, bound, verbose=verbose)
    lines += ["replaced in the wide trial; what another trial has covered, it says:"]
    lines += [f"  {change}" for change in reduction.changes]
    lines += ["outside:", *(f"  {what}" for what in OUTSIDE), ""]
    return "\n".join([*lines, *describe_verdict(certificate)])


def describe_trial(trial: Trial) -> list[str]:
    """Return the lines of a trial: each measure with its bound."""
    if trial.skipped:
        return [f"{trial.name}: not made, {trial.skipped}", ""]
    title = f"{trial.name}, {trial.seconds:.0f} s{': ' * bool(trial.subject)}{trial.subject}"
    rows = [(show_mark(m.error, m.bound), m.what, f"{m.error:.1e}", f"<= {m.bound:.0e}", m.of) for m in trial.measures]
    return [title, *([format_table(rows, "<<>")] if rows else []), ""]


def describe_gradients(difference: Difference, bound: float, *, verbose: bool) -> list[str]:
    """Return a line per kind of parameter, `layers.*.attention.wq.weight`: the worst; with `verbose` all."""
    rows = []
    for kind, fqns in group_by_kind(difference.gradient, verbose=verbose).items():
        worst = max(fqns, key=difference.gradient.get)
        error = difference.gradient[worst]
        n_alike = f"x{len(fqns)}" if len(fqns) > 1 else ""
        rows.append((show_mark(error, bound), kind, n_alike, f"{error:.1e}", difference.placements[worst]))
    return ["gradient of each parameter:", format_table(rows, "<<>>"), f"  {LEGEND}", ""]


def group_by_kind(fqns: Iterable[str], *, verbose: bool) -> dict[str, list[str]]:
    """Return kind of a parameter -> FQNs; with `verbose` each is one by itself."""
    kinds = defaultdict(list)
    for fqn in fqns:
        kinds[fqn if verbose else re.sub(r"\.\d+\.", ".*.", fqn)].append(fqn)
    return kinds


def show_mark(error: float, bound: float) -> str:
    return "  ok" if error <= bound else "  BAD"


def describe_verdict(certificate: Certificate) -> list[str]:
    """Return the verdict, what it is for, and what is missing for a better one."""
    verdict, degrees = certificate.verdict, certificate.reduction.degrees
    last = certificate.trials[-1]
    if verdict == NOT_FINISHED:
        return [f"not finished: in trial {last.name}, {last.faults['no answer']}"]
    if verdict == WRONG:
        lines = [f"wrong: this layout does not compute the one-process model (trial {last.name})"]
        lines += [f"  {fault}" for fault in last.faults.values()]
        if last.culprit is not None:
            lines += [f"first to differ: {last.culprit}", f"cause: {last.culprit.cause}"]
        return lines
    if verdict == IN_PART:
        missing = " and ".join(f"{dim} {degrees.reduced[dim]}" for dim in degrees.given_up)
        n_ranks = degrees.least_ranks
        remedy = (
            f"--ranks {n_ranks} would try every dim" if n_ranks <= 16 else f"all of them would take {n_ranks} ranks"
        )
        return [
            f"in part: right as {degrees.mesh}, but {missing} could not be tried on so few ranks.",
            f"  There is no certificate of this layout; {remedy}",
        ]
    lines = [f"{verdict} for {degrees}: this layout computes the one-process model"]
    lines += [f"  {trial.name} is missing: {trial.skipped}" for trial in certificate.trials if trial.is_missing]
    if degrees.asked["dp_shard"] == AUTOMATIC and degrees.tried["dp_shard"] == 1:
        n_ranks = 2 * prod(degrees.tried.values())
        lines.append("  dp_shard is automatic, and no rank was left for it: runs that shard over it are not covered.")
        lines.append(
            f"  --ranks {n_ranks} would try dp_shard2" if n_ranks <= 16 else "  Give smaller degrees to try it"
        )
    return lines


def report_for_programs(certificate: Certificate) -> dict[str, object]:
    """Return the certificate as plain types. Errors are relative; what is not finite is null."""
    reduction, degrees = certificate.reduction, certificate.reduction.degrees
    wide = next((trial.difference for trial in certificate.trials if trial.name == "wide"), None)
    last = certificate.trials[-1]
    return {
        "config": certificate.config_name,
        "verdict": certificate.verdict,
        "certified": certificate.verdict == CERTIFIED,
        "world_size": reduction.layout.world_size,
        "degrees": reduction.layout.degrees,
        "asked": {dim: "automatic" if degree == AUTOMATIC else degree for dim, degree in degrees.asked.items()},
        "reduced_degrees": degrees.reduced,
        "given_up": degrees.given_up,
        "reduced": [asdict(change) for change in reduction.changes],
        "outside": OUTSIDE,
        "trials": [report_trial(trial) for trial in certificate.trials],
        "faults": last.faults,
        "culprit": asdict(last.culprit) if last.culprit else None,
        "parameters": None if wide is None else report_parameters(wide),
        "seconds": round(sum(trial.seconds for trial in certificate.trials), 1),
    }


def report_trial(trial: Trial) -> dict[str, object]:
    return {
        "name": trial.name,
        "subject": trial.subject,
        "measures": [report_measure(measure) for measure in trial.measures],
        "faults": trial.faults,
        "skipped": trial.skipped or None,
        "seconds": round(trial.seconds, 1),
    }


def report_measure(measure: Measure) -> dict[str, object]:
    return {**asdict(measure), "error": finite(measure.error), "right": measure.is_right}


def report_parameters(difference: Difference) -> dict[str, dict[str, object]]:
    return {
        fqn: {
            "initial_equal": equal,
            "gradient": finite(difference.gradient[fqn]),
            "weight": finite(difference.weight[fqn]),
            "placement": difference.placements[fqn],
            "copies_unequal_over": sorted(dim for name, dim in difference.unequal_replicas if name == fqn),
        }
        for fqn, equal in difference.initial_equal.items()
    }


def finite(number: float) -> float | None:
    """Return None for infinity, which JSON does not have."""
    return number if number < float("inf") else None
