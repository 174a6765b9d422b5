"""Run one trial: the steps of a reduced config on all ranks of its layout. Find the first error above its bound."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import torch

from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.modules import compare_outputs, watch_plainly
from torchtitan_lite.tools.verify.plain import Inputs, PlainStep, run_plainly
from torchtitan_lite.tools.verify.rank import Coordinates, Seen, compare_steps
from torchtitan_lite.tools.verify.ranks import NoAnswer, RankFailure

RunRanks = Callable[..., list]  # (worker, world_size, *args) -> one result per rank

# Errors of correct layouts: gradients 2e-6, with twelve MoE layers 8e-6; state 2e-7, updates 4e-8.
SUMS, SAME, EXACT = (
    1e-5,
    5e-6,
    0.0,
)  # sums in another order; the same numbers rounded differently; bit-equal
ROUNDINGS = 10.0  # largest error of a gradient of a norm or bias, in errors of one process
BOUNDS = {  # measure, in the order of a step -> largest error of a correct layout
    "initial weights": EXACT,
    "counted tokens": EXACT,
    "learning rate": 1e-12,
    "packing": 1.0,  # by ZeRO++, in units of the bound
    "loss": SUMS,
    "gradients": 2 * SUMS,
    "expert loads": EXACT,
    "gradient norm": SUMS,
    "finite flag": EXACT,
    "state": SAME,
    "updates": SUMS,  # Muon amplifies the rounding of a gradient: see newton_schulz
    "expert biases": 1e-7,
    "copies": EXACT,
    "schedule": EXACT,
}
OF_FORWARD = (
    "counted tokens",
    "loss",
    "gradients",
    "expert loads",
)  # errors that a wrong module can cause


@dataclass(frozen=True)
class Culprit:
    """The first difference."""

    kind: str
    name: str  # of a parameter, a module or a function
    detail: str
    dims: list[str] = field(
        default_factory=list
    )  # mesh dims along which a correct and a wrong rank are neighbors

    def __str__(self) -> str:
        along = (
            f"; correct and wrong ranks differ along {', '.join(self.dims)}" if self.dims else ""
        )
        return f"{self.kind}: {self.name}, {self.detail}{along}"


@dataclass(frozen=True)
class Trial:
    """The result of a trial."""

    name: str
    measures: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # measure -> worst error, bound
    faults: dict[str, str] = field(
        default_factory=dict
    )  # measure -> description, in the order of a step
    culprit: Culprit | None = None
    unfinished: str = ""  # reason why ranks did not answer
    seconds: float = 0.0
    ran: tuple[Config, ...] = ()  # configs of the layouts that ran


def try_layout(
    name: str, config: Config, world_size: int, run_ranks: RunRanks, folder: Path, inputs: Inputs
) -> Trial:
    """Run a reduced config on `world_size` ranks, and compare it with the plain loop."""
    path = folder / f"{name}.pt"
    steps = run_plainly(config, inputs)
    torch.save(steps, path)
    trial = judge(name, run_ranks(compare_steps, world_size, config, str(path)), steps)
    if next(iter(trial.faults), "") in OF_FORWARD:
        torch.save((steps[0], watch_plainly(config, steps[0])), path)
        module = name_module(run_ranks(compare_outputs, world_size, config, str(path)))
        trial = replace(trial, culprit=module or trial.culprit)
    return replace(trial, ran=(config,))


def make_trial(name: str, call: Callable[[], Trial]) -> Trial:
    """Run a trial and time it. An exception on a rank is a result, too."""
    start = time.monotonic()
    try:
        trial = call()
    except NoAnswer as failure:
        trial = Trial(name, unfinished=str(failure))
    except RankFailure as failure:
        first, *_, last = ["a rank", *str(failure).strip().splitlines()]
        culprit = Culprit("crash", name, last[:300])
        trial = Trial(name, faults={"crash": f"{first}: {last[:300]}"}, culprit=culprit)
    return replace(trial, seconds=time.monotonic() - start)


def judge(name: str, ranks: list[Seen], steps: list[PlainStep]) -> Trial:
    """Return the worst error of each measure. The culprit is the first error above its bound, in the order of a step.

    A gradient that one process computes less exactly has a larger bound, see measure_rounding.
    """
    fqns = list(steps[0].gradients)  # in backward order
    if lost := [fqn for fqn in fqns if not any(fqn in rank.held for rank in ranks)]:
        culprit = Culprit(
            "parameters", lost[0], f"no rank holds it; {len(lost)} of {len(fqns)} are missing"
        )
        return Trial(name, faults={"parameters": culprit.detail}, culprit=culprit)
    order, backward = list(BOUNDS), {fqn: place for place, fqn in enumerate(fqns)}

    def place(key: tuple[int, str, str]) -> tuple:
        step, measure, what = key
        at = backward.get(what.partition(" ")[0], 0)  # "norm.weight (exp_avg)"
        return step, order.index(measure), -at if measure == "initial weights" else at, what

    keys = sorted({key for rank in ranks for key in rank.errors}, key=place)
    bounds = {}
    for step, measure, what in keys:
        bound = BOUNDS[measure]
        if measure == "gradients":
            bound = max(bound, ROUNDINGS * steps[step].rounding.get(what, 0.0))
        bounds[step, measure, what] = bound
    return find_worst(name, ranks, bounds)


def find_worst(name: str, ranks: list[Seen], bounds: dict[tuple[int, str, str], float]) -> Trial:
    """Return the worst error of each measure. `bounds`: (step, measure, name) -> bound, in the order of a step."""
    measures: dict[str, tuple[float, float]] = {}
    faults: dict[str, str] = {}
    first = None
    for key, bound in bounds.items():
        step, kind, what = key
        errors = [(rank.coordinates, rank.errors[key]) for rank in ranks if key in rank.errors]
        worst = max((error for _, error in errors), default=float("inf"))
        measures[kind] = max(
            measures.get(kind, (0.0, bound)), (worst, bound), key=lambda m: m[0] / (m[1] or 1e-9)
        )
        if worst > bound:
            culprit = blame(kind, what, f"off by {worst:.1e} in step {step + 1}", errors, bound)
            faults.setdefault(kind, str(culprit))
            first = first or culprit
    return Trial(name, measures, faults, first)


def name_module(ranks: list[Seen]) -> Culprit | None:
    """Return the first module in forward order that misses a microbatch or has a wrong output."""
    largest = {
        "microbatches": EXACT,
        "module output": 2e-6,
    }  # larger than rounding, smaller than BOUNDS["gradients"]
    keys = dict.fromkeys(key for rank in ranks for key in rank.errors)
    return find_worst(
        "", ranks, {key: largest[kind] for kind in largest for key in keys if key[1] == kind}
    ).culprit


def blame(
    kind: str, name: str, detail: str, errors: list[tuple[Coordinates, float]], bound: float
) -> Culprit:
    """Describe which ranks are wrong, and along which mesh dims a correct and a wrong rank are neighbors."""
    wrong = [at for at, error in errors if error > bound]
    dims = set()
    for (here, one), (there, other) in combinations(errors, 2):
        apart = [dim for dim in here if here[dim] != there[dim]]
        if len(apart) == 1 and (one > bound) != (other > bound):
            dims.add(apart[0])
    where = " on every rank that holds it"
    if 0 < len(wrong) < len(errors):
        common = [
            f"{dim} {at}" for dim, at in wrong[0].items() if all(each[dim] == at for each in wrong)
        ]
        where = f" on {len(wrong)} of {len(errors)} ranks, all at {', '.join(common) or 'no common place'}"
    return Culprit(kind, name, detail + where, sorted(dims))
