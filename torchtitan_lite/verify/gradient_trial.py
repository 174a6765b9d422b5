"""Trials of gradients: does each parameter get the gradient that one process computes? If not: what differs first, why.

    wide         the layout with a few wide layers: whole tensors, and two steps of SGD
    deep         many narrow layers
    long         long sequences, many documents, far positions
    real width   matrices as large as the real ones, as far as memory and time allow

Where a trial finds a fault it runs again: with every module's output noted, to name the first difference, and once
without each known issue that may apply, to name the cause.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from torchtitan_lite.config.case import Case
from torchtitan_lite.config.checks import REFUSED
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.verify.certificate import Measure, RunRanks, Trial, describe_failure
from torchtitan_lite.verify.culprit import Culprit, name_crash, name_culprit
from torchtitan_lite.verify.difference import Difference, find_faults, merge
from torchtitan_lite.verify.module_outputs import observe_outputs
from torchtitan_lite.verify.one_rank import Prepare, measure_layout, start_from_reference
from torchtitan_lite.verify.ranks import NoAnswer, RankFailure
from torchtitan_lite.verify.reduction import Reduction, override
from torchtitan_lite.verify.reference import load_reference, run_one_process
from torchtitan_lite.verify.route_flips import judge_routes, measure_routes
from torchtitan_lite.verify.small_runs import WIDE, Method, SmallRun

FP32_TOLERANCE = 1e-5  # what is right stays below 1e-6: sums are taken in another order. What is wrong is above 1e-3


def try_wide(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Run the reduced config as it is."""
    return try_layout(reduction.config, reduction.layout.world_size, run_ranks, folder)


def try_small(
    name: str, shrink: Callable[[Reduction], SmallRun], reduction: Reduction, run_ranks: RunRanks, folder: Path
) -> Trial:
    """Run the real config as `shrink` makes it small."""
    run = shrink(reduction)
    options = {"name": name, "method": run.method, "subject": run.subject}
    return try_layout(run.config, reduction.layout.world_size, run_ranks, folder, **options)


def try_layout(
    config: Config,
    world_size: int,
    run_ranks: RunRanks,
    folder: Path,
    *,
    name: str = "wide",
    method: Method = WIDE,
    subject: str = "",
    find_culprit: bool = True,
) -> Trial:
    """Run `config` (reduced, every size given) beside one process. `folder` keeps references for the next trial."""
    start = time.monotonic()
    reference_path = save_reference(config, folder, method)
    try:
        difference, faults, culprit = measure_faults(config, world_size, run_ranks, reference_path)
        flips = None
        if not faults and difference.has_experts:
            flips = judge_routes(run_ranks(measure_routes, world_size, config, reference_path))
            faults = {"routes": flips.fault} if flips.fault else {}
            culprit = flips.culprit if faults else None
    except RankFailure as failure:  # no answer; or a crash of the pass that chooses its routes
        return describe_failure(name, failure, time.monotonic() - start)
    if faults and find_culprit:
        if culprit is None:
            try:
                outputs = run_ranks(observe_outputs, world_size, config, reference_path)
            except RankFailure:
                outputs = []
            # The first difference may still be small: it is looked for below the bound, but above all rounding.
            culprit = name_culprit(difference, faults, outputs, load_reference(reference_path), FP32_TOLERANCE / 5)
        cause = find_cause(config, world_size, run_ranks, reference_path, culprit)
        culprit = replace(culprit, cause=cause)
    measures = [] if difference is None else list_measures(difference)
    measures += [flips.measure] if flips else []
    return Trial(name, measures, faults, culprit, time.monotonic() - start, difference, subject=subject)


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
        culprit = name_crash(str(failure))
        return None, {"crash": f"{culprit.name}: {culprit.detail}"}, culprit
    held = {fqn for rank in ranks for fqn in rank.gradients}
    if lost := [fqn for fqn in fqns if fqn not in held]:
        culprit = Culprit("parameters", lost[0], f"no rank holds it; {len(lost)} of {len(fqns)} parameters are lost")
        return None, {"parameters": culprit.detail}, culprit
    difference = merge(ranks, fqns)
    return difference, find_faults(difference, FP32_TOLERANCE), None


def list_measures(difference: Difference) -> list[Measure]:
    """Return the lines of the certificate."""
    n = len(difference.initial_equal)
    n_steps = len(difference.ranks[0].losses)
    steps = "1 step" if n_steps == 1 else f"{n_steps} steps, the first one clipped"
    measures = [
        Measure("initial weights", n - sum(difference.initial_equal.values()), 0, f"of {n} not bit-equal"),
        Measure("counted tokens", difference.n_tokens, 0, "of the first batch"),
        Measure("loss", difference.loss, FP32_TOLERANCE, f"{steps}; rows are masked unequally"),
        Measure("gradients", max(difference.gradient.values()), FP32_TOLERANCE, f"worst of {n} parameters"),
        Measure("gradient norm", difference.grad_norm, FP32_TOLERANCE, steps),
        Measure("clipping", difference.clipping, FP32_TOLERANCE, "worst of all slices of gradients"),
    ]
    if difference.weight:
        n_unequal = len({fqn for fqn, _ in difference.unequal_replicas})
        measures += [
            Measure("weights", max(difference.weight.values()), FP32_TOLERANCE, f"after {n_steps} steps of SGD"),
            Measure("updates", difference.update, FP32_TOLERANCE, "all of them together"),
            Measure("copies", n_unequal, 0, f"of {n} not bit-equal on all ranks that hold one"),
        ]
    if difference.has_experts:
        loads = torch.stack(difference.ranks[0].expert_loads)
        loads = loads[:, loads.sum((0, 2)) > 0]  # a dense layer has none
        spread = f"{loads.min():.0f} to {loads.max():.0f} tokens an expert; all above is with the routes of one process"
        measures += [
            Measure("expert loads", difference.expert_loads, 0, spread),
            Measure("router entropy", difference.router_entropy, FP32_TOLERANCE, "of the scores of all tokens"),
        ]
    if difference.has_experts and difference.weight:
        measures.append(Measure("expert biases", difference.expert_biases, 0, f"after {n_steps} steps"))
    return measures


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


def refusal_applies(name: str) -> Callable[[Config, Culprit], bool]:
    """Return a function: does a refused combination of checks.py apply to a run? A fork may run it all the same."""

    def applies(config: Config, culprit: Culprit) -> bool:
        zero_stage = config.parallelism.zero_stage
        reshards = zero_stage == 3 or config.parallelism.fsdp_reshard_after_forward == "always"
        case = Case(config, resolve_model(config.model), zero_stage=3 if reshards else 1)
        return bool(REFUSED[name].applies(case))

    return applies


KNOWN_ISSUES = {  # cause -> how to tell
    "the rule of the initial weights alone: with the weights of one process all is right": KnownIssue(
        lambda config, culprit: culprit.kind == "initial weights", prepare=start_from_reference
    ),
    "a split backward with resharding": KnownIssue(
        refusal_applies("split backward with resharding"),
        {"parallelism.zero_stage": 1, "parallelism.fsdp_reshard_after_forward": "default"},
    ),
    "a split backward with per-op recompute": KnownIssue(
        refusal_applies("split backward with per-op recompute"), {"activation_checkpoint.mode": "none"}
    ),
    "a split backward with compile": KnownIssue(
        refusal_applies("split backward with compile"), {"compile.enable": False}
    ),
    "the ring, which has no masks, with documents": KnownIssue(
        refusal_applies("attention that the method of context parallel lacks"),
        {"parallelism.context_parallel_rotate_method": "allgather"},
    ),
}
