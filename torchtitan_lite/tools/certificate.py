"""What `verify` says: the certificate for people, and the same for programs."""

import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from torchtitan_lite.tools.comparison import Difference, total_update_error
from torchtitan_lite.tools.gradient_trial import FP32_TOLERANCE
from torchtitan_lite.tools.reduction import Reduction
from torchtitan_lite.tools.trial import Trial

LEGEND = "S(0): rows sharded, S(1): columns, _S: rows, in the strides that two sharded dims leave; R: copies, bit-equal"
ALWAYS = "kernels of CUDA, NCCL, sizes, speed and memory: this ran on CPUs, in float32"


@dataclass(frozen=True)
class InBfloat16:
    """Largest gradient error and update error against the float32 oracle, of the layout and of one rank."""

    gradient: float
    gradient_of_one_rank: float
    update: float
    update_of_one_rank: float
    faults: dict[str, str]


def describe(
    config_name: str, reduction: Reduction, trial: Trial, in_bfloat16: InBfloat16 | None, *, verbose: bool
) -> str:
    """The certificate, or what stands in its way."""
    layout = reduction.layout
    lines = [f"{config_name} on {layout.world_size} ranks ({layout}) beside one process, {trial.seconds:.0f} s", ""]
    lines += ["not certified, because it was replaced:"]
    lines += [f"  {change}" for change in reduction.changes]
    lines += [f"  {ALWAYS}", ""]
    if trial.difference is not None:
        lines += describe_measures(trial)
        lines += describe_gradients(trial.difference, verbose=verbose)
    if in_bfloat16 is not None:
        lines += describe_bfloat16(in_bfloat16)
    return "\n".join([*lines, *describe_verdict(trial, in_bfloat16)])


def describe_measures(trial: Trial) -> list[str]:
    return [
        f"{trial.name}, {trial.seconds:.0f} s; relative error, and the largest that is right:",
        *(
            f"  {'ok ' if m.is_right else 'BAD'} {m.what:16} {m.error:>9.1e} {m.bound:>9.1e}  {m.of}"
            for m in trial.measures
        ),
        "",
    ]


def describe_gradients(difference: Difference, *, verbose: bool) -> list[str]:
    """Per kind of parameter, `layers.*.attention.wq.weight`, the worst one; with `verbose` each parameter."""
    kinds = defaultdict(list)
    for fqn in difference.gradient:
        kinds[fqn if verbose else re.sub(r"\.\d+\.", ".*.", fqn)].append(fqn)
    lines = []
    for kind, fqns in kinds.items():
        worst = max(fqns, key=difference.gradient.get)
        count = f"x{len(fqns)}" if len(fqns) > 1 else ""
        mark = "ok " if difference.gradient[worst] <= FP32_TOLERANCE else "BAD"
        error = f"{difference.gradient[worst]:.1e}"
        lines.append(f"  {mark} {kind:34} {count:>4} {error:>9}  {difference.placements[worst]}")
    return ["gradient of each parameter:", *lines, f"  {LEGEND}", ""]


def describe_bfloat16(measured: InBfloat16) -> list[str]:
    return [
        "computing in bfloat16, against float32; at most twice the error of one rank:",
        f"      gradients  {measured.gradient:.1e}, of one rank {measured.gradient_of_one_rank:.1e}",
        f"      updates    {measured.update:.1e}, of one rank {measured.update_of_one_rank:.1e}",
        "",
    ]


def describe_verdict(trial: Trial, in_bfloat16: InBfloat16 | None) -> list[str]:
    if trial.faults:
        lines = ["NOT certified: this layout does not compute the one-process model"]
        lines += [f"  {fault}" for fault in trial.faults.values()]
        if trial.culprit is not None:
            lines += [f"first to differ: {trial.culprit}", f"cause: {trial.culprit.cause}"]
        return lines
    if in_bfloat16 is not None and in_bfloat16.faults:
        return ["NOT certified in bfloat16 (in float32 it is)", *(f"  {f}" for f in in_bfloat16.faults.values())]
    return ["certified: this layout computes the one-process model"]


def report_for_programs(
    config_name: str, reduction: Reduction, trial: Trial, in_bfloat16: InBfloat16 | None
) -> dict[str, object]:
    """The same as plain types. Errors are relative; what is not finite is null."""
    difference = trial.difference
    return {
        "config": config_name,
        "certified": not trial.faults and not (in_bfloat16 and in_bfloat16.faults),
        "world_size": reduction.layout.world_size,
        "degrees": reduction.layout.degrees,
        "reduced": [asdict(change) for change in reduction.changes],
        "tolerance": FP32_TOLERANCE,
        "faults": trial.faults,
        "culprit": asdict(trial.culprit) if trial.culprit else None,
        "measures": None if difference is None else report_measures(difference),
        "parameters": None if difference is None else report_parameters(difference),
        "bfloat16": asdict(in_bfloat16) if in_bfloat16 else None,
        "seconds": round(trial.seconds, 1),
    }


def record_for_runs(report: dict[str, object]) -> dict[str, object]:
    """What a run of this config may say of itself: the short form of a certificate, from the report for programs."""
    degrees = {dim: degree for dim, degree in report["degrees"].items() if degree > 1}
    return {
        "layout": " x ".join(f"{dim} {degree}" for dim, degree in degrees.items()) or "one rank",
        "largest_error": max(parameter["gradient"] for parameter in report["parameters"].values()),
        "reduced": [change["key"] for change in report["reduced"]],
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def report_measures(difference: Difference) -> dict[str, object]:
    return {
        "n_tokens": finite(difference.n_tokens),
        "loss": finite(difference.loss),
        "grad_norm": finite(difference.grad_norm),
        "update": finite(total_update_error(difference)),
    }


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
    """JSON knows no infinity."""
    return number if number < float("inf") else None
