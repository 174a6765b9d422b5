"""The verdict of `verify`, as text or as JSON."""

from dataclasses import asdict, dataclass

from torchtitan_lite.tools.tables import format_table
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


def describe(certificate: Certificate) -> str:
    """Return the verdict and the measured errors as text."""
    layout, last = certificate.reduction.layout, certificate.trials[-1]
    subject = f"{certificate.config_name} on {layout}, {layout.world_size} ranks"
    if certificate.verdict == CERTIFIED:
        lines = [f"certified: {subject}: this layout computes the one-process model"]
    elif certificate.verdict == WRONG:
        lines = [f"wrong: {subject}: this layout does not compute the one-process model (trial {last.name})"]
        lines += [f"first difference: {last.culprit}"]
        lines += [f"  {measure}: {fault}" for measure, fault in last.faults.items()]
    else:
        lines = [f"not finished: {subject}: trial {last.name}: {last.unfinished}"]
    changes = [f"{key.split('.')[-1]} {a} -> {b}" for key, (a, b) in certificate.reduction.changes.items()]
    lines += ["", describe_measures(certificate.trials), "", f"replaced in the wide trial: {', '.join(changes)}"]
    return "\n".join([*lines, f"not covered: {OUTSIDE}"])


def describe_measures(trials: list[Trial]) -> str:
    """Return a table with the worst error of each measure and its bound, by trial."""
    names = dict.fromkeys(measure for trial in trials for measure in trial.measures)
    rows = [("worst error", *(f"{trial.name}, {trial.seconds:.0f} s" for trial in trials))]
    for name in names:
        found = [trial.measures.get(name) for trial in trials]
        rows.append((name, *("" if pair is None else "{:.0e} of {:.0e}".format(*pair) for pair in found)))
    return format_table(rows)


def report_for_programs(certificate: Certificate) -> dict[str, object]:
    """Return the certificate in JSON types. An error that is not finite is null."""
    layout, trials = certificate.reduction.layout, [asdict(trial) for trial in certificate.trials]
    for trial in trials:
        for name, (error, bound) in trial["measures"].items():
            trial["measures"][name] = {"error": error if error < float("inf") else None, "bound": bound}
    return {
        "config": certificate.config_name,
        "verdict": certificate.verdict,
        "certified": certificate.verdict == CERTIFIED,
        "degrees": layout.degrees | ({"ep": layout.ep} if layout.ep else {}),
        "replaced": certificate.reduction.changes,
        "trials": trials,
    }
