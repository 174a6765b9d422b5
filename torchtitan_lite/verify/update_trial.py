"""Does the run's own optimizer make of given gradients what its formulas make of them, on every rank?

    the user's    optimizer, moments_dtype, weight decay, schedule and max_norm, as they are
    compared      learning rates, gradient norm, clipped gradients, moments, updates, copies; then what a step changes
                  whose gradients are not finite on one rank

update_steps.py is one rank's part, step_formulas.py holds the formulas.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from torchtitan_lite import step as stepping
from torchtitan_lite.config.case import Case
from torchtitan_lite.config.checks import find_problems
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.verify.certificate import RunRanks, Trial, describe_failure
from torchtitan_lite.verify.culprit import Culprit
from torchtitan_lite.verify.ranks import RankFailure
from torchtitan_lite.verify.reduction import Reduction
from torchtitan_lite.verify.step_formulas import FORMULAS, LEFT, ROUNDING, compute_rate_factor
from torchtitan_lite.verify.trial_checks import Check, add_gaps, blame, check_values, judge
from torchtitan_lite.verify.update_steps import NORMS, NOT_FINITE, RankUpdates, measure_updates

NAME = "updates"
REMEDY = "add it to verify/step_formulas.py"
# Of gradient norms, clipped gradients, moments and updates. Right code stays below 1e-7; fp32 alone makes 6e-8.
TOLERANCE = 1e-6
RATE_TOLERANCE = 1e-12  # of the peak: rates are Python's floats
LEAST_MAX_NORM, LARGEST_MAX_NORM = 1e-3, 1e3  # fp32 holds the squares of gradients of such norms


def try_updates(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Make four steps of the run from given gradients, and two whose gradients are not finite."""
    start = time.monotonic()
    config = keep_own_optimizer(reduction)
    if why := find_obstacle(config):
        return Trial(NAME, [], {}, None, 0.0, skipped=why, is_missing=True)
    model_class, _ = stepping.MODELS[config.model.name]
    with torch.device("meta"):
        model = model_class(resolve_model(config.model), attention=config.model.attention)
    sizes = {fqn: parameter.numel() for fqn, parameter in model.named_parameters()}
    try:
        ranks = run_ranks(measure_updates, reduction.layout.world_size, config, sizes)
    except RankFailure as failure:
        return describe_failure(NAME, failure, time.monotonic() - start)
    held = {fqn for rank in ranks for _, fqn, _ in rank.gaps}
    if lost := [fqn for fqn in sizes if fqn not in held]:
        culprit = Culprit("parameters", lost[0], "no rank holds it")
        measures = {"parameters": f"of {len(sizes)} that no rank holds"}
        return judge(NAME, [Check("parameters", len(lost), 0, culprit)], measures, start)
    section, max_norm, worst = config.optimizer, config.training.max_norm, f"worst of {len(sizes)} parameters"
    steps = ", ".join(str(step) for step in sorted({step for step, _ in ranks[0].rates}))
    measures = {
        "learning rate": f"of the peak, at steps {steps} of the schedule",
        "gradient norm": f"of {', '.join(f'{norm:g}' for norm in NORMS)} times max_norm {max_norm:g}",
        "clipping": f"gradients that the optimizer gets; {worst}",
        "moments": f"in {section.moments_dtype}; {worst}",
        "update": f"bound: 1e-6, and what fp32 rounds off weights; {worst}",
        "copies": f"of {len(sizes)} parameters: weights or moments not bit-equal on all ranks that hold one",
        "non-finite step": f"of {len(ranks)} ranks step on a gradient of {' or '.join(NOT_FINITE)}, or say so",
    }
    subject = f"{section.name} ({section.implementation}), {len(NORMS)} steps from given gradients and moments"
    return judge(NAME, list(list_checks(ranks, config, list(sizes))), measures, start, subject)


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


def list_checks(ranks: list[RankUpdates], config: Config, fqns: list[str]) -> Iterator[Check]:
    """Yield all checks, in the order of what a step does."""
    peak, max_norm = config.optimizer.lr, config.training.max_norm
    for index, (step, _) in enumerate(ranks[0].rates):
        right = peak * compute_rate_factor(config.lr_scheduler, step)
        values = [
            (rank.coordinates, max(rank.rates[index][1], key=lambda rate, right=right: abs(rate - right)))
            for rank in ranks
        ]
        culprit = Culprit("learning rate", "lr_scheduler", f"the learning rate at step {step} of the schedule")
        yield check_values("learning rate", culprit, values, right, RATE_TOLERANCE, unit=peak or 1.0)
    for index, norm in enumerate(NORMS):
        values = [(rank.coordinates, rank.grad_norms[index]) for rank in ranks]
        culprit = Culprit("gradient norm", "clip_grad_norm", f"the gradient norm in step {index + 1}")
        yield check_values("gradient norm", culprit, values, norm * max_norm, TOLERANCE)
    moments = FORMULAS[config.optimizer.name].moments
    for measure, kinds in {"clipping": ["clipped gradient"], "moments": moments, "update": ["update"]}.items():
        for fqn in fqns:
            for kind in kinds:
                for index in range(len(NORMS)):
                    yield check_tensor(measure, kind, fqn, index, ranks, config)
    yield check_copies(ranks, fqns)
    faults = [(rank.coordinates, rank.finite_faults) for rank in ranks]
    wrong = [of_rank[0] for _, of_rank in faults if of_rank]
    is_right = [(coordinates, not of_rank) for coordinates, of_rank in faults]
    culprit = blame("non-finite step", "step_if_finite", wrong[0] if wrong else "", is_right)
    yield Check("non-finite step", len(wrong), 0, culprit)


def check_tensor(measure: str, kind: str, fqn: str, index: int, ranks: list[RankUpdates], config: Config) -> Check:
    """Check all slices of a tensor together, and name the ranks whose slice is wrong by itself."""
    tolerance = TOLERANCE + (find_coarseness(config, index + 1) if kind == "update" else 0.0)
    held = [(rank.coordinates, rank.gaps[kind, fqn, index]) for rank in ranks if (kind, fqn, index) in rank.gaps]
    error, bound = add_gaps(gap for _, gap in held).relative(tolerance)
    is_right = []
    for coordinates, gap in held:
        own_error, own_bound = gap.relative(tolerance)
        is_right.append((coordinates, own_error <= own_bound))
    name = "clip_grad_norm" if measure == "clipping" else fqn
    detail = f"in step {index + 1} the {kind} of {fqn} is off"
    return Check(measure, error, bound, blame(measure, name, f"{detail} by {error:.1e}", is_right))


def find_coarseness(config: Config, step: int) -> float:
    """Return the extra tolerance of updates from bf16 moments that one compiled kernel moves.

    It computes 1 - beta^step in fp32 on the device, so that this difference is rounded as 1 is.
    """
    section = config.optimizer
    if section.moments_dtype != "bfloat16" or not config.compile.enable:
        return 0.0
    return 2 * ROUNDING * (1 / (1 - section.beta1**step) + 0.5 / (1 - section.beta2**step))


def check_copies(ranks: list[RankUpdates], fqns: list[str]) -> Check:
    """Check the copies of weights and moments on several ranks, after all steps."""
    unequal = set().union(*(rank.unequal_replicas for rank in ranks))
    wrong = {fqn for _, fqn, _ in unequal}
    first = next((fqn for fqn in fqns if fqn in wrong), "")
    kinds = sorted({kind for kind, fqn, _ in unequal if fqn == first})
    dims = sorted({dim for _, fqn, dim in unequal if fqn == first})
    detail = f"copies of its {' and '.join(kinds)} are not bit-equal; {len(wrong)} of {len(fqns)} parameters are wrong"
    return Check("copies", len(wrong), 0, Culprit("replicas", first, detail, dims))
