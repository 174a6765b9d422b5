"""The verdict of `verify`, as text or as JSON."""

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from torchtitan_lite.build import build_on_meta
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.tools.tables import format_table
from torchtitan_lite.tools.verify.coverage import SIZES, Coverage, find_coverage
from torchtitan_lite.tools.verify.plain import has_own_loss
from torchtitan_lite.tools.verify.reduction import Reduction
from torchtitan_lite.tools.verify.trial import Trial

CERTIFIED, WRONG, NOT_FINISHED = "certified", "wrong", "not finished"
OUTSIDE = (
    "the model file and float8 arithmetic, which both sides share; kernels of CUDA and NCCL; real sizes; speed and "
    "memory"
)


@dataclass(frozen=True)
class Certificate:
    """The results of the trials of one config, up to the first trial that found a fault."""

    config_name: str
    reduction: Reduction
    trials: list[Trial]

    @property
    def verdict(self) -> str:
        if self.trials[-1].unfinished:
            return NOT_FINISHED
        return WRONG if self.trials[-1].faults else CERTIFIED

    @cached_property
    def coverage(self) -> Coverage:
        return find_coverage(self.reduction, self.trials)


def describe(certificate: Certificate) -> str:
    """Return the verdict and the measured errors as text."""
    layout, last = certificate.reduction.layout, certificate.trials[-1]
    subject = f"{certificate.config_name} on {layout}, {layout.world_size} ranks"
    if certificate.verdict == CERTIFIED:
        lines = [f"certified: {subject}: this layout computes the one-process model"]
    elif certificate.verdict == WRONG:
        lines = [
            f"wrong: {subject}: this layout does not compute the one-process model (trial {last.name})"
        ]
        lines += [f"first difference: {last.culprit}"]
        lines += [f"  {measure}: {fault}" for measure, fault in last.faults.items()]
    else:
        lines = [f"not finished: {subject}: trial {last.name}: {last.unfinished}"]
    lines += [*describe_coverage(certificate), "", describe_measures(certificate.trials), ""]
    changes = [
        format_change(key, change)
        for key, change in certificate.reduction.changes.items()
        if is_size(key)
    ]
    return "\n".join([*lines, f"sizes in the wide trial: {', '.join(changes)}"])


def describe_coverage(certificate: Certificate) -> list[str]:
    """Return the lines that say what the certificate does not cover."""
    coverage = certificate.coverage
    lines = [f"not covered: {OUTSIDE}. By key:"]
    small = certificate.reduction.config
    if has_own_loss(build_on_meta(small, resolve_model(small.model))):
        lines.insert(0, "loss formula not covered: both sides call the head of the model")
    lines += [f"  {key}: no effect: {reason}" for key, reason in coverage.without_effect.items()]
    lines += [f"  {format_change(key, change)}" for key, change in coverage.not_covered.items()]
    for trial in certificate.trials:
        replaced = [
            format_change(key, change) for key, change in coverage.list_replaced(trial.name).items()
        ]
        if replaced:
            lines.append(f"another value in trial {trial.name}: {', '.join(replaced)}")
    return lines


def is_size(key: str) -> bool:
    """Whether a key of Reduction.changes is a size. Keys without a section are sizes of experts."""
    return key in SIZES or "." not in key


def format_change(key: str, change: tuple[object, object]) -> str:
    asked, ran = (json.dumps(value, default=str) for value in change)
    return f"{key} {shorten(asked)} -> {shorten(ran)}"


def shorten(text: str) -> str:
    """Cut a long value, such as a path, in the middle."""
    return text if len(text) <= 44 else f"{text[:20]}...{text[-20:]}"


def describe_measures(trials: list[Trial]) -> str:
    """Return a table with the worst error of each measure and its bound, by trial."""
    names = dict.fromkeys(measure for trial in trials for measure in trial.measures)
    rows = [("worst error", *(f"{trial.name}, {trial.seconds:.0f} s" for trial in trials))]
    for name in names:
        found = [trial.measures.get(name) for trial in trials]
        rows.append(
            (name, *("" if pair is None else "{:.0e} of {:.0e}".format(*pair) for pair in found))
        )
    return format_table(rows)


def report_for_programs(certificate: Certificate) -> dict[str, object]:
    """Return the certificate in JSON types. An error that is not finite is null."""
    layout, coverage = certificate.reduction.layout, certificate.coverage
    trials = [asdict(replace(trial, ran=())) for trial in certificate.trials]
    for trial in trials:
        del trial["ran"]
        trial["replaced"] = coverage.replaced[trial["name"]]
        for name, (error, bound) in trial["measures"].items():
            trial["measures"][name] = {
                "error": error if error < float("inf") else None,
                "bound": bound,
            }
    return {
        "config": certificate.config_name,
        "verdict": certificate.verdict,
        "certified": certificate.verdict == CERTIFIED,
        "degrees": layout.degrees | ({"ep": layout.ep} if layout.ep else {}),
        "not_covered": coverage.not_covered,
        "without_effect": coverage.without_effect,
        "replaced": certificate.reduction.changes,
        "trials": trials,
    }
