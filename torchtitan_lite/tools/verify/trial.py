"""Run one trial: the steps of a reduced config on all ranks of its layout. Find the first error above its bound."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import torch

from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.measures import Coordinates, Key, Seen
from torchtitan_lite.tools.verify.plain import Inputs, PlainStep, run_plainly
from torchtitan_lite.tools.verify.rank import compare_steps
from torchtitan_lite.tools.verify.ranks import NoAnswer, RankFailure

RunRanks = Callable[..., list]  # (worker, world_size, *args) -> one result per rank

# Errors of correct layouts: gradients 2e-6, with twelve MoE layers 8e-6; state 2e-7, updates 4e-8.
SUMS = 1e-5  # sums in another order
SAME = 5e-6  # the same numbers rounded differently
EXACT = 0.0
ROUNDINGS = 10.0  # largest error of a gradient of a norm or bias, in errors of one process
BOUNDS = {  # measure, in the order of a step -> largest error of a correct layout
    "initial weights": EXACT,
    "counted tokens": EXACT,
    "learning rate": 1e-12,
    "packing": 1.0,  # by ZeRO++, in units of the bound
    "rotary angles": 1e-6,
    "loss": SUMS,
    "reduced in float32": EXACT,
    "gradients": 2 * SUMS,
    "expert loads": EXACT,
    "gradient norm": SUMS,
    "finite flag": EXACT,
    "state": SAME,
    "updates": SUMS,  # Muon amplifies the rounding of a gradient: see newton_schulz
    "expert biases": 1e-7,
    "copies": EXACT,
    "schedule": EXACT,
    "scales": EXACT,
    "sum of microbatches": SUMS,
}
# A wrong module can cause an error of these measures.
OF_FORWARD = ("counted tokens", "loss", "gradients", "expert loads")
OUTPUT = (
    2e-6  # bound of the output of a module: larger than rounding, smaller than that of gradients
)


@dataclass(frozen=True)
class Culprit:
    """The first difference."""

    kind: str
    name: str  # of a parameter, a module or a function
    detail: str
    dims: tuple[str, ...] = ()  # mesh dims along which a correct and a wrong rank are neighbors

    def __str__(self) -> str:
        text = f"{self.kind}: {self.name}, {self.detail}"
        if self.dims:
            text += f"; correct and wrong ranks differ along {', '.join(self.dims)}"
        return text


@dataclass(frozen=True)
class Trial:
    """The result of a trial."""

    name: str
    measures: dict[str, tuple[float, float]] = field(default_factory=dict)  # worst error, bound
    faults: dict[str, str] = field(default_factory=dict)  # measure -> text, in the order of a step
    culprit: Culprit | None = None
    unfinished: str = ""  # reason why ranks did not answer
    seconds: float = 0.0
    ran: tuple[Config, ...] = ()  # configs of the layouts that ran


def try_layout(
    name: str, config: Config, world_size: int, run_ranks: RunRanks, folder: Path, inputs: Inputs
) -> Trial:
    """Run a reduced config on `world_size` ranks, and compare it with the plain loop."""
    steps = run_plainly(config, inputs)
    path = folder / f"{name}.pt"
    torch.save([replace(steps[0], outputs={}), *steps[1:]], path)
    ranks = run_ranks(compare_steps, world_size, config, str(path))

    def choose_bound(key: Key) -> float | None:
        step, measure, fqn = key
        bound = BOUNDS.get(measure)
        if measure == "gradients":
            bound = max(bound, ROUNDINGS * steps[step].rounding.get(fqn, 0.0))
        return bound

    trial = judge(name, ranks, steps, choose_bound)
    if next(iter(trial.faults), "") in OF_FORWARD:
        torch.save(steps[:1], path)
        ranks = run_ranks(compare_steps, world_size, config, str(path))
        keys = [(0, "module output", module) for module in steps[0].outputs]
        of_modules = find_worst(name, ranks, dict.fromkeys(keys, OUTPUT))
        faults = of_modules.faults | trial.faults
        trial = replace(trial, faults=faults, culprit=of_modules.culprit or trial.culprit)
    return replace(trial, ran=(config,))


def make_trial(name: str, call: Callable[[], Trial]) -> Trial:
    """Run a trial and time it. An exception on a rank is a result, too."""
    start = time.monotonic()
    try:
        trial = call()
    except NoAnswer as failure:
        trial = Trial(name, unfinished=str(failure))
    except RankFailure as failure:
        last = str(failure).strip().splitlines()[-1][:300]
        trial = Trial(name, faults={"crash": last}, culprit=Culprit("crash", name, last))
    return replace(trial, seconds=time.monotonic() - start)


def judge(
    name: str,
    ranks: list[Seen],
    steps: list[PlainStep],
    choose_bound: Callable[[Key], float | None],
) -> Trial:
    """Return the worst error of each measure that has a bound. The culprit is the first fault in a step."""
    held = set().union(*(rank.held for rank in ranks))
    for fqn in steps[0].gradients:
        if fqn not in held:
            ranks[0].note(0, "initial weights", fqn, math.inf)
    order = list(BOUNDS)
    bounds = {}
    for rank in reversed(ranks):  # backward begins in the last stage
        for key in rank.errors:
            bound = choose_bound(key)
            if bound is not None:
                bounds[key] = bound
    in_order = sorted(bounds, key=lambda key: (key[0], order.index(key[1])))
    return find_worst(name, ranks, {key: bounds[key] for key in in_order})


def find_worst(name: str, ranks: list[Seen], bounds: dict[Key, float]) -> Trial:
    """Return the worst error of each measure. `bounds` are in the order of a step; keys may have no error."""
    measures: dict[str, tuple[float, float]] = {}
    faults: dict[str, str] = {}
    culprit = None
    for key, bound in bounds.items():
        step, kind, what = key
        errors = [(rank.coordinates, rank.errors[key]) for rank in ranks if key in rank.errors]
        if not errors:
            continue
        worst = max(error for _, error in errors)
        if worst >= measures.get(kind, (0.0, bound))[0]:
            measures[kind] = (worst, bound)
        if worst > bound and kind not in faults:
            found = blame(kind, what, f"off by {worst:.1e} in step {step + 1}", errors, bound)
            faults[kind] = str(found)
            culprit = culprit or found
    return Trial(name, measures, faults, culprit)


def blame(
    kind: str,
    name: str,
    detail: str,
    errors: Iterable[tuple[Coordinates, float]],
    bound: float,
) -> Culprit:
    """Describe how many ranks are wrong, and along which mesh dims a correct and a wrong rank are neighbors."""
    is_wrong = [error > bound for _, error in errors]
    dims = set()
    for (here, one), (there, other) in combinations(errors, 2):
        apart = [dim for dim in here if here[dim] != there[dim]]
        if len(apart) == 1 and (one > bound) != (other > bound):
            dims.add(apart[0])
    detail += f" on {sum(is_wrong)} of the {len(is_wrong)} ranks that compared it"
    return Culprit(kind, name, detail, tuple(sorted(dims)))
