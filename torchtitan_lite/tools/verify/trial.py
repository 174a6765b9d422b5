"""Run one trial: train a reduced config for a few steps on all ranks of its layout, and find the first error above its
bound.

In bfloat16 and float8, the trial checks that the ranks of a layout round the same tensors as a single rank. The single
rank runs the same microbatches one by one, rounds the gradients of each microbatch, and adds them in float32.

    dp, pp    only change the order of float32 sums, so results can differ from one rank by up to 1e-5
    tp, cp    also add partial products in bfloat16; errors are measured against the plain loop in float32, and may be
              twice the errors of one rank

The trial also checks that rotary angles and FSDP's reductions use float32, and that a gradient is the sum over its
microbatches (rank.py).
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

from torchtitan_lite.config.float8 import SKIP_SMALL
from torchtitan_lite.config.messages import UserError, join_lines
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.tools.plan.dry_run import describe_crash, find_place
from torchtitan_lite.tools.verify.derived_configs import leave_out_compiler, put_on_one_rank
from torchtitan_lite.tools.verify.errors import (
    ROUNDING,
    Coordinates,
    Key,
    Seen,
    relative_error,
)
from torchtitan_lite.tools.verify.plain import PlainModel, PlainStep, run_plainly
from torchtitan_lite.tools.verify.rank import compare_steps
from torchtitan_lite.tools.verify.ranks import NoAnswer, RankFailure
from torchtitan_lite.tools.verify.reduction import Reduction, override
from torchtitan_lite.tools.verify.witnesses import Acted, merge

RunRanks = Callable[..., list]  # (worker, world_size, *args) -> one result per rank
# relative changes of the results if one process repeats the steps with weights that are perturbed by a rounding error
Noise = dict[Key, float]

# Correct layouts have errors of 2e-6 in gradients (8e-6 with twelve MoE layers), 2e-7 in optimizer state, and 4e-8 in
# updates.
SUMS = 1e-5  # bound for sums whose terms are added in a different order than in the plain loop
SAME = 5e-6  # bound for elementwise results that differ only in rounding
EXACT = 0.0
# If the terms of a sum cancel, its relative error is large. Therefore an error above the bound is accepted if rounding
# errors in the weights of one process change the same sum by at least a tenth of this error.
NOISE = 10.0
N_ROUNDINGS = 5  # random roundings of the weights
OF_SUMS = ("gradients", "saved tensor")  # measures of sums whose terms may cancel
BOUNDS = {  # measure -> largest error of a correct layout; in the order in which a step computes the measures
    "initial weights": EXACT,
    "counted tokens": EXACT,
    "learning rate": 1e-12,
    "packing": 1.0,  # rounding errors of ZeRO++, in units of half an integer step
    "rotary angles": 1e-6,
    "module output": 2e-6,  # larger than rounding errors, smaller than the bound for gradients
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
    # Only the trial named `train.py` updates weights with the gradients of the layout. All other trials replace these
    # gradients with the gradients of the plain loop. In the trial `train.py`, rounding differences therefore grow from
    # step to step, but errors caused by faults grow far more.
    "lr": 1e-12,
    "tokens": EXACT,
    "grad_norm": 1e-3,
    "val_loss": SUMS,
    "val_bits_per_byte": SUMS,
    "router_entropy": SUMS,
    # the error of correct layouts is at most 1.2e-4; optimizer state rounded to bfloat16 causes an error of 1.4e-3
    "saved tensor": 5e-4,
}
# quantities that change if a module computes wrong values
OF_FORWARD = ("counted tokens", "module output", "loss", "gradients", "expert loads")
NOT_FINISHED = "not finished"


@dataclass(frozen=True)
class Culprit:
    """The first error of a measure above its bound, or a crash."""

    kind: str
    name: str  # name of a parameter, a module or a function
    text: str
    dims: tuple[str, ...] = ()  # mesh dims along which a wrong rank has a correct neighbor


@dataclass(frozen=True)
class Trial:
    """The result of a trial."""

    name: str
    measures: dict[str, tuple[float, float]] = field(default_factory=dict)  # worst error, bound
    # measure -> first error above its bound, in the order of steps and measures
    faults: dict[str, Culprit] = field(default_factory=dict)
    seconds: float = 0.0
    # for each layout that ran: its config, and which keys had an effect
    ran: tuple[tuple[Config, Acted], ...] = ()
    # parameters whose gradients consist of rounding errors in every step, so a wrong gradient would not be detected
    unjudged: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()  # keys whose code is used by both the plain loop and the layout

    @property
    def culprit(self) -> Culprit | None:
        return next(iter(self.faults.values()), None)


def try_layout(
    name: str, config: Config, world_size: int, run_ranks: RunRanks, folder: Path, n_steps: int
) -> Trial:
    """Run a reduced config on `world_size` ranks, and compare it with the plain loop."""
    steps = run_plainly(config, n_steps)
    run_layout = partial(repeat_steps, config, world_size, run_ranks, folder / f"{name}.pt")
    find_noise = partial(measure_noise, config, steps)
    ranks = run_layout(steps)
    trial = judge(name, ranks, find_noise)
    if trial.culprit and trial.culprit.kind in OF_FORWARD:
        again = run_layout(steps, compares_outputs=True)
        trial = judge(name, again, find_noise, modules=steps[0].outputs)
    return describe_run(trial, config, steps, ranks)


def repeat_steps(
    config: Config,
    world_size: int,
    run_ranks: RunRanks,
    path: Path,
    steps: list[PlainStep],
    *,
    compares_outputs: bool = False,
) -> list[Seen]:
    """Write steps of the plain loop to the file `path`, and repeat them on ranks that read this file."""
    if not compares_outputs:
        steps = [replace(step, outputs={}) for step in steps]
    torch.save(steps, path)
    return run_ranks(compare_steps, world_size, config, str(path))


def describe_run(trial: Trial, config: Config, steps: list[PlainStep], ranks: list[Seen]) -> Trial:
    """Add to a trial the config that ran, the keys that had an effect, and the keys whose code both sides share."""
    ran = with_value(config, "training.max_norm", round(steps[0].max_norm, 3))
    acted = merge(rank.acted for rank in ranks)
    return replace(trial, ran=((ran, acted),), shared=tuple(steps[0].shared))


def make_trial(name: str, call: Callable[[], Trial]) -> Trial:
    """Run a trial and time it. An exception on a rank, or in the model of the plain loop, is recorded as a fault."""
    start = time.monotonic()
    try:
        trial = call()
    except RankFailure as failure:
        kind = NOT_FINISHED if isinstance(failure, NoAnswer) else "crash"
        # the error begins at the last line that is not indented
        *_, error = re.split(r"^(?=\S)", str(failure), flags=re.MULTILINE)
        what = f"{kind}: {join_lines(error)}{find_place(str(failure))}"
        trial = Trial(name, faults={kind: Culprit(kind, name, what)})
    except UserError:
        raise
    except Exception as error:
        culprit = Culprit("crash", name, f"crash in one process: {describe_crash(error)}")
        trial = Trial(name, faults={"crash": culprit})
    return replace(trial, seconds=time.monotonic() - start)


def judge(
    trial_name: str,
    ranks: list[Seen],
    find_noise: Callable[[], Noise],
    choose_bound: Callable[[Key], float | None] = lambda key: BOUNDS[key[1]],
    modules: Iterable[str] = (),
) -> Trial:
    """For each measure, return the largest error relative to its bound, and the first fault.

    Faults are sorted by step, measure and name. `modules` lists the module names in the order of forward. Names of
    parameters and functions stay in the order in which a rank recorded them. `find_noise` is called only if a sum
    exceeds its bound.
    """
    find_noise = cache(find_noise)
    keys: dict[Key, None] = {}
    for rank in reversed(ranks):  # backward begins in the last stage
        keys |= dict.fromkeys(rank.errors)
    order = list(BOUNDS)
    places = {module: place for place, module in enumerate(modules)}
    measures: dict[str, tuple[float, float]] = {}
    faults: dict[str, Culprit] = {}
    least: dict[str, float] = {}  # name of a sum -> its smallest bound
    for key in sorted(keys, key=lambda key: (key[0], order.index(key[1]), places.get(key[2], 0))):
        _, measure, name = key
        bound = choose_bound(key)
        if bound is None:
            continue
        errors = [(rank.coordinates, rank.errors[key]) for rank in ranks if key in rank.errors]
        worst = max(error for _, error in errors)
        if measure in OF_SUMS:
            if worst > bound:
                bound = max(bound, NOISE * find_noise()[key])
            least[name] = min(bound, least.get(name, bound))
        before, its_bound = measures.get(measure, (0.0, bound))
        if worst * its_bound >= before * bound:  # closer to its bound
            measures[measure] = (worst, bound)
        if worst > bound and measure not in faults:
            faults[measure] = blame(key, errors, bound)
    unjudged = tuple(name for name, bound in least.items() if bound >= 1)
    return Trial(trial_name, measures, faults, unjudged=unjudged)


def blame(key: Key, errors: list[tuple[Coordinates, float]], bound: float) -> Culprit:
    """Describe an error, how many ranks have it, and the mesh dims along which correct and wrong ranks differ."""
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


# ---------------------------------------------------------------- bfloat16 and float8

# Precision -> number of steps, minimum bound, and size of weight perturbations (a quarter of the rounding error). If a
# gradient exceeds its bound, the trial measures how much such perturbations change the gradient. A bound has a minimum,
# because the errors of one rank may cancel in its loss or in the gradient of a scalar. A layout with tp or cp rounds
# these values one more time, by 2**-9 in bfloat16.
PRECISIONS = {"bfloat16": (2, 4e-3, 2**-11), "float8": (3, 1e-2, 2**-6)}
# With ep, a matmul of an expert has rows from several ranks, so the weight gradient of this expert sums the rows in a
# different order than on one rank. One rank adds the two gradients of a tied matrix in the compute dtype, but pipeline
# stages add them in float32.
ROUNDED_OFTEN = 2e-2
# not compared in these trials, because they are computed from gradients of the plain loop
NOT_JUDGED = ("gradient norm", "state", "updates")


def try_precision(name: str, reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Run the layout in the precision `name`: "bfloat16" or "float8"."""
    n_steps, least, rounding = PRECISIONS[name]
    layout = reduction.layout
    config = make_config(reduction, float8=name == "float8")
    precompute = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    alone = override(put_on_one_rank(config, layout.microbatch_size), {precompute: False})
    steps = run_plainly(config, n_steps)
    path = folder / f"{name}.pt"
    (one,) = repeat_steps(alone, 1, run_ranks, path, steps)
    reference = steps
    is_exact = layout.tp == layout.cp == 1
    if is_exact:
        reference = [replace(step, **own) for step, own in zip(steps, one.results, strict=True)]
    ranks = repeat_steps(config, layout.world_size, run_ranks, path, reference)

    def choose_bound(key: Key) -> float | None:
        _, measure, fqn = key
        if measure in NOT_JUDGED:
            return None
        if measure not in ("loss", "gradients"):
            return BOUNDS[measure]
        if not is_exact:
            return 2 * one.errors[key] + least
        is_tied = layout.tied and fqn == "tok_embeddings.weight"
        is_of_experts = layout.ep > 1 and ".feed_forward." in fqn
        return ROUNDED_OFTEN if is_tied or is_of_experts else SUMS

    find_noise = partial(measure_noise, config, steps, ROUNDING if is_exact else rounding)
    return describe_run(judge(name, ranks, find_noise, choose_bound), config, steps, ranks)


def make_config(reduction: Reduction, *, float8: bool) -> Config:
    keys: dict[str, object] = {
        "training.mixed_precision_param": "bfloat16",
        # compare_with_halves would count the auxiliary losses twice, once per half
        "training.expert_balance_loss": 0.0,
        "training.router_z_loss": 0.0,
    }
    if float8:
        section = reduction.real.quantize.linear.float8
        filters = [fqn for fqn in section.filter_fqns if fqn != SKIP_SMALL]
        keys["model.converters"] = reduction.real.model.converters
        keys["quantize.linear.float8"] = replace(section, emulate=True, filter_fqns=filters)
    return override(leave_out_compiler(reduction.config), keys)


# ---------------------------------------------------------------- noise


@torch.no_grad()
def round_differently(
    part: nn.Module, generator: torch.Generator, rounding: float = ROUNDING
) -> None:
    for parameter in part.parameters():
        parameter *= 1 + rounding * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def measure_noise(config: Config, steps: list[PlainStep], rounding: float = ROUNDING) -> Noise:
    """Measure how much gradients change if weights are perturbed by a rounding error. Sums whose terms cancel change a
    lot."""
    plain = PlainModel(config)
    generator = torch.Generator().manual_seed(0)
    seen = Seen({})
    for seen.step, step in enumerate(steps):
        for _ in range(N_ROUNDINGS):
            plain.model.load_state_dict(step.weights)
            round_differently(plain.model, generator, rounding)
            with torch.enable_grad():
                _, gradients = plain.backward(step.batch)
            for fqn, gradient in gradients.items():
                seen.note("gradients", fqn, relative_error(gradient, step.gradients[fqn]))
    return seen.errors
