"""Trials of gradients: does each parameter get the gradient that one process computes? If not: what differs first, why.

The trials wide, deep, long and real width differ in sizes only (reduction.py, small_runs.py). Where a trial finds a
fault it runs again: with every module's output noted, to name the first difference, and once without each known issue
that may apply, to name the cause.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from torchtitan_lite.config.checks import find_refused
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.culprit import name_culprit
from torchtitan_lite.tools.verify.module_outputs import judge_routes, measure_routes, observe_outputs
from torchtitan_lite.tools.verify.one_rank import Prepare, measure_layout, start_from_reference
from torchtitan_lite.tools.verify.ranks import NoAnswer, RankFailure
from torchtitan_lite.tools.verify.reduction import Reduction, override
from torchtitan_lite.tools.verify.reference import load_reference, run_one_process
from torchtitan_lite.tools.verify.small_runs import WIDE, Method, SmallRun
from torchtitan_lite.tools.verify.trial import Culprit, Difference, Measure, RunRanks, Trial, describe_failure, merge

FP32_TOLERANCE = 1e-5  # what is right stays below 1e-6: sums are taken in another order. What is wrong is above 1e-3


def try_wide(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Run the reduced config as it is."""
    return try_layout(reduction.config, reduction.layout.world_size, run_ranks, folder)


def try_small(
    shrink: Callable[[Reduction], SmallRun], reduction: Reduction, run_ranks: RunRanks, folder: Path
) -> Trial:
    """Run the real config as `shrink` makes it small."""
    run = shrink(reduction)
    trial = try_layout(run.config, reduction.layout.world_size, run_ranks, folder, method=run.method)
    return replace(trial, subject=run.subject)


def try_layout(config: Config, world_size: int, run_ranks: RunRanks, folder: Path, *, method: Method = WIDE) -> Trial:
    """Run `config` (reduced, every size given) beside one process. `folder` keeps references for the next trial."""
    reference_path = save_reference(config, folder, method)
    difference, faults, culprit = measure_faults(config, world_size, run_ranks, reference_path)
    measures = [] if difference is None else list(list_measures(difference).values())
    if not faults and has_experts(difference):
        flips = judge_routes(run_ranks(measure_routes, world_size, config, reference_path))
        measures, faults, culprit = measures + flips.measures, flips.faults, flips.culprit
    if faults:
        if culprit is None:
            try:
                outputs = run_ranks(observe_outputs, world_size, config, reference_path)
            except RankFailure:
                outputs = []
            # The first difference may still be small: it is looked for below the bound, but above all rounding.
            culprit = name_culprit(difference, faults, outputs, load_reference(reference_path), FP32_TOLERANCE / 5)
        cause = find_cause(config, world_size, run_ranks, reference_path, culprit)
        culprit = replace(culprit, cause=cause)
    return Trial(measures=measures, faults=faults, culprit=culprit, difference=difference)


def save_reference(config: Config, folder: Path, method: Method = WIDE) -> str:
    """Return a file with the run of one process on model, batch, seed and optimizer of `config`. Made once."""
    training = config.training
    of_batch = (training.global_batch_size, training.seq_len, training.max_norm)
    of_experts = (training.expert_balance_loss, training.expert_bias_rate)
    key = repr((config.model, config.optimizer, of_batch, of_experts, config.debug.seed, method))
    path = folder / f"reference-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
    if not path.exists():
        torch.save(run_one_process(config, method), path)
    return str(path)


def measure_faults(
    config: Config, world_size: int, run_ranks: RunRanks, reference_path: str, **options
) -> tuple[Difference | None, dict[str, str], Culprit | None]:
    """Return difference and faults. Where ranks crash or lose a parameter, that is the fault: the culprit is known.

    Raises NoAnswer, which says nothing about the layout.
    """
    fqns = list(load_reference(reference_path).initial)
    try:
        ranks = run_ranks(measure_layout, world_size, config, reference_path, **options)
    except NoAnswer:
        raise
    except RankFailure as failure:
        crash = describe_failure(failure)
        return None, crash.faults, crash.culprit
    held = {fqn for rank in ranks for fqn in rank.gradients}
    if lost := [fqn for fqn in fqns if fqn not in held]:
        culprit = Culprit("parameters", lost[0], f"no rank holds it; {len(lost)} of {len(fqns)} parameters are lost")
        return None, {"parameters": culprit.detail}, culprit
    difference = merge(ranks, fqns)
    faults = find_faults(difference)
    forgotten = [fqn for fqn in fqns if any(fqn in rank.not_updated for rank in ranks)]
    if forgotten and not faults:  # and no step was made that would have shown it
        detail = f"the optimizer does not hold it; {len(forgotten)} of {len(fqns)} parameters are never updated"
        return difference, {"parameters": detail}, Culprit("parameters", forgotten[0], detail)
    return difference, faults, None


def has_experts(difference: Difference) -> bool:
    return "expert_loads" in difference.errors


def list_measures(difference: Difference, tolerance: float = FP32_TOLERANCE) -> dict[str, Measure]:
    """Return name of a fault -> line of the certificate that shows it."""
    n, errors = len(difference.initial_equal), difference.errors
    n_steps = len(difference.ranks[0].losses)
    steps = "1 step" if n_steps == 1 else f"{n_steps} steps, the first one clipped"
    n_unequal = n - sum(difference.initial_equal.values())
    measures = {
        "initial": Measure("initial weights", n_unequal, 0, f"of {n} not bit-equal"),
        "n_tokens": Measure("counted tokens", errors["n_tokens"], 0, "of the first batch"),
        "loss": Measure("loss", errors["loss"], tolerance, f"{steps}; rows are masked unequally"),
        "gradient": Measure("gradients", max(difference.gradient.values()), tolerance, f"worst of {n} parameters"),
        "grad_norm": Measure("gradient norm", errors["grad_norm"], tolerance, steps),
        "clipping": Measure("clipping", errors["clipping"], tolerance, "worst of all slices of gradients"),
    }
    if difference.weight:
        n_unequal = len({fqn for fqn, _ in difference.unequal_replicas})
        worst, after = max(difference.weight.values()), f"after {n_steps} steps"
        measures |= {
            "weight": Measure("weights", worst, tolerance, f"{after} of SGD"),
            "update": Measure("updates", difference.update, tolerance, "all of them together"),
            "replicas": Measure("copies", n_unequal, 0, f"of {n} not bit-equal on all ranks that hold one"),
        }
    if has_experts(difference):
        loads = torch.stack(difference.ranks[0].expert_loads)
        loads = loads[:, loads.sum((0, 2)) > 0]  # a dense layer has none
        spread = f"{loads.min():.0f} to {loads.max():.0f} tokens an expert; all above is with the routes of one process"
        entropy = errors["router_entropy"]
        measures |= {
            "expert_loads": Measure("expert loads", errors["expert_loads"], 0, spread),
            "router_entropy": Measure("router entropy", entropy, tolerance, "of the scores of all tokens"),
        }
        if difference.weight:
            measures["expert_biases"] = Measure("expert biases", errors["expert_biases"], 0, after)
    return measures


def find_faults(difference: Difference, tolerance: float = FP32_TOLERANCE) -> dict[str, str]:
    """Return the measures that exceed `tolerance` (relative), with the worst. Empty: the layout is right."""
    faults = {}
    for name, measure in list_measures(difference, tolerance).items():
        if measure.is_right:
            continue
        what = name
        if name in ("gradient", "weight"):
            of_parameters = getattr(difference, name)
            what = f"{name} of {max(of_parameters, key=of_parameters.get)}"
        faults[name] = f"{what} is off by {measure.error:.1e}"
    if "initial" in faults:
        unequal = [fqn for fqn, equal in difference.initial_equal.items() if not equal]
        n = len(difference.initial_equal)
        faults["initial"] = f"{len(unequal)} of {n} initial weights differ, {unequal[0]} first"
    if "replicas" in faults:
        fqn, dim = min(difference.unequal_replicas)
        faults["replicas"] = f"{len(difference.unequal_replicas)} replicas differ, {fqn} over {dim} for one"
    return faults


# ---------------------------------------------------------------- known issues


@dataclass(frozen=True)
class KnownIssue:
    """A known way to go wrong, and a probe: the same run without it. It is the cause only if the probe passes."""

    applies: Callable[[Config, Culprit], bool]
    overrides: dict[str, object] = field(default_factory=dict)
    prepare: Prepare | None = None


def find_cause(config: Config, world_size: int, run_ranks: RunRanks, reference_path: str, culprit: Culprit) -> str:
    """Return the first known issue without which the run passes."""
    for cause, issue in KNOWN_ISSUES.items():
        if not issue.applies(config, culprit):
            continue
        try:
            probe = override(config, issue.overrides)
            _, faults, _ = measure_faults(probe, world_size, run_ranks, reference_path, prepare=issue.prepare)
        except (ConfigError, NoAnswer):
            continue
        if not faults or (issue.prepare is not None and set(faults) == {"initial"}):  # compared before `prepare`
            return cause
    return "unknown"


def refusal_applies(key: str) -> Callable[[Config, Culprit], bool]:
    """Return a function: does a refused combination of checks.py apply to a run? A fork may run it all the same."""

    def applies(config: Config, culprit: Culprit) -> bool:
        zero_stage = config.parallelism.zero_stage
        reshards = zero_stage == 3 or config.parallelism.fsdp_reshard_after_forward == "always"
        refused = find_refused(config, resolve_model(config.model), zero_stage=3 if reshards else 1)
        return key in {problem.key for problem in refused}

    return applies


KNOWN_ISSUES = {  # cause -> how to tell
    "the rule of the initial weights alone: with the weights of one process all is right": KnownIssue(
        lambda config, culprit: culprit.kind == "initial weights", prepare=start_from_reference
    ),
    "a split backward with resharding": KnownIssue(
        refusal_applies("parallelism.pipeline_parallel_schedule"),
        {"parallelism.zero_stage": 1, "parallelism.fsdp_reshard_after_forward": "default"},
    ),
    "a split backward with recompute": KnownIssue(
        refusal_applies("activation_checkpoint.mode"), {"activation_checkpoint.mode": "none"}
    ),
    "a split backward with compile": KnownIssue(
        refusal_applies("split backward with compile"), {"compile.enable": False}
    ),
    "the ring, which has no masks, with documents": KnownIssue(
        refusal_applies("attention that the method of context parallel lacks"),
        {"parallelism.context_parallel_rotate_method": "allgather"},
    ),
}
