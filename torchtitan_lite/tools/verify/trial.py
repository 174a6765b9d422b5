"""Run one trial: the steps of a reduced config on all ranks of its layout. Find the first error above its bound."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from traceback import extract_tb

import torch

from torchtitan_lite import PACKAGE
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.tools.verify.measures import Coordinates, Key, Seen
from torchtitan_lite.tools.verify.plain import run_plainly
from torchtitan_lite.tools.verify.rank import compare_steps
from torchtitan_lite.tools.verify.ranks import NoAnswer, RankFailure
from torchtitan_lite.tools.verify.witnesses import Acted, merge

RunRanks = Callable[..., list]  # (worker, world_size, *args) -> one result per rank

# Errors of correct layouts: gradients 2e-6, with twelve MoE layers 8e-6; state 2e-7, updates 4e-8.
SUMS = 1e-5  # sums in another order
SAME = 5e-6  # the same numbers rounded differently
EXACT = 0.0
# Gradients of norms and biases are sums over all tokens, whose terms may cancel: 1.2e-5 seen in twelve MoE layers.
CANCELLING = 3e-4
BOUNDS = {  # measure, in the order of a step -> largest error of a correct layout
    "initial weights": EXACT,
    "counted tokens": EXACT,
    "learning rate": 1e-12,
    "packing": 1.0,  # by ZeRO++, in half steps of the integers
    "rotary angles": 1e-6,
    "module output": 2e-6,  # larger than rounding, smaller than the bound of gradients
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
    # trial train.py: gradients are not replaced, so several steps amplify rounding, and faults far more
    "lr": 1e-12,
    "tokens": EXACT,
    "grad_norm": 1e-3,
    "val_loss": SUMS,
    "val_bits_per_byte": SUMS,
    "router_entropy": SUMS,
    "saved tensor": 5e-4,  # 1.2e-4 seen; a state rounded to bfloat16 is off by 1.4e-3
    "saved bfloat16 tensor": 1e-2,  # a few elements are rounded to a neighbor
}
# A wrong module can cause an error of these measures.
OF_FORWARD = ("counted tokens", "module output", "loss", "gradients", "expert loads")
NOT_FINISHED = "not finished"


@dataclass(frozen=True)
class Culprit:
    """The first difference of a measure."""

    kind: str
    name: str  # of a parameter, a module or a function
    text: str
    dims: tuple[str, ...] = ()  # mesh dims along which a correct and a wrong rank are neighbors


@dataclass(frozen=True)
class Trial:
    """The result of a trial."""

    name: str
    measures: dict[str, tuple[float, float]] = field(default_factory=dict)  # worst error, bound
    faults: dict[str, Culprit] = field(default_factory=dict)  # by measure, in the order of a step
    seconds: float = 0.0
    ran: tuple[
        tuple[Config, Acted], ...
    ] = ()  # config of each layout that ran, and which keys acted

    @property
    def culprit(self) -> Culprit | None:
        return next(iter(self.faults.values()), None)


def try_layout(
    name: str, config: Config, world_size: int, run_ranks: RunRanks, folder: Path, n_steps: int
) -> Trial:
    """Run a reduced config on `world_size` ranks, and compare it with the plain loop.

    A single step is not profiled: the step of the deep trial is so long that profiling would take most of the time.
    """
    steps = run_plainly(config, n_steps)
    is_profiled = n_steps > 1
    gradients = steps[0].gradients

    def choose_bound(key: Key) -> float:
        _, measure, fqn = key
        if measure == "gradients" and gradients[fqn].dim() == 1:
            return CANCELLING
        return BOUNDS[measure]

    path = folder / f"{name}.pt"
    torch.save([replace(step, outputs={}) for step in steps], path)
    ranks = run_ranks(compare_steps, world_size, config, str(path), is_profiled=is_profiled)
    trial = judge(name, ranks, choose_bound)
    ran = with_value(config, "training.max_norm", round(steps[0].max_norm, 3))
    acted = merge(rank.acted for rank in ranks)
    if steps[0].has_own_loss:
        acted["training.loss"] = False
    if trial.culprit and trial.culprit.kind in OF_FORWARD:
        torch.save(steps, path)
        ranks = run_ranks(compare_steps, world_size, config, str(path))
        trial = judge(name, ranks, choose_bound, steps[0].outputs)
    return replace(trial, ran=((ran, acted),))


def make_trial(name: str, call: Callable[[], Trial]) -> Trial:
    """Run a trial and time it. An exception on a rank, or of the model in the plain loop, is a result, too."""
    start = time.monotonic()
    try:
        trial = call()
    except RankFailure as failure:
        kind = NOT_FINISHED if isinstance(failure, NoAnswer) else "crash"
        last = str(failure).strip().splitlines()[-1][:300]
        trial = Trial(name, faults={kind: Culprit(kind, name, f"{kind}: {last}")})
    except UserError:
        raise
    except Exception as error:
        frames = extract_tb(error.__traceback__)
        *_, frame = [found for found in frames if found.filename.startswith(str(PACKAGE))]
        place = f"{frame.filename.removeprefix(str(PACKAGE))}, line {frame.lineno}"
        text = f"crash in one process: {type(error).__name__}: {error} ({place})"
        trial = Trial(name, faults={"crash": Culprit("crash", name, text)})
    return replace(trial, seconds=time.monotonic() - start)


def judge(
    name: str,
    ranks: list[Seen],
    choose_bound: Callable[[Key], float | None],
    modules: Iterable[str] = (),
) -> Trial:
    """Return the error of each measure that is nearest to its bound, and its first fault in the order of the steps.

    `modules` are in forward order. Names of other kinds are in the order in which a rank noted them.
    """
    keys: dict[Key, None] = {}
    for rank in reversed(ranks):  # backward begins in the last stage
        keys |= dict.fromkeys(rank.errors)
    order = list(BOUNDS)
    places = {module: place for place, module in enumerate(modules)}
    measures: dict[str, tuple[float, float]] = {}
    faults: dict[str, Culprit] = {}
    for key in sorted(keys, key=lambda key: (key[0], order.index(key[1]), places.get(key[2], 0))):
        _, measure, _ = key
        bound = choose_bound(key)
        if bound is None:
            continue
        errors = [(rank.coordinates, rank.errors[key]) for rank in ranks if key in rank.errors]
        worst = max(error for _, error in errors)
        before, its_bound = measures.get(measure, (0.0, bound))
        if worst * its_bound >= before * bound:  # nearer to its bound
            measures[measure] = (worst, bound)
        if worst > bound and measure not in faults:
            faults[measure] = blame(key, errors, bound)
    return Trial(name, measures, faults)


def blame(key: Key, errors: list[tuple[Coordinates, float]], bound: float) -> Culprit:
    """Describe how many ranks are wrong, and along which mesh dims a correct and a wrong rank are neighbors."""
    step, measure, name = key
    worst = max(error for _, error in errors)
    n_wrong = sum(error > bound for _, error in errors)
    dims = set()
    for (here, one), (there, other) in combinations(errors, 2):
        apart = [dim for dim in here if here[dim] != there[dim]]
        if len(apart) == 1 and (one > bound) != (other > bound):
            dims.add(apart[0])
    text = f"{measure}: {name}, off by {worst:.1e} in step {step + 1}"
    text += f" on {n_wrong} of the {len(errors)} ranks that compared it"
    if dims:
        text += f"; correct and wrong ranks differ along {', '.join(sorted(dims))}"
    return Culprit(measure, name, text, tuple(sorted(dims)))
