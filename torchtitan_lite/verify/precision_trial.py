"""Does a layout round where one process rounds? Trials in the run's own arithmetic: bfloat16, and float8.

The one process (precision_reference.py) computes each rank's share by itself, rounds it where the rank does, and adds
shares in the order of gloo's ring, so that what is left to the order of sums is fp32's, far below one rounding to
bfloat16 (up to 4e-3 of a number). Worst of 51 healthy layouts of 1 to 8 ranks, both trials, and what mutants give:

    measure               bound   healthy   mutants     why not zero
    rotary angles         1e-6    0         2e-3, 2     the same function of the same positions, in fp32: it is zero
    block outputs         1e-5    0         8e-5-4e-2   partial products are rounded as the ranks round them: it is zero
    loss                  1e-5    3e-7      1e-4        fp32 sums over tokens, microbatches and ranks
    gradient reduction    0.1     2e-3      0.25-0.5    an fp32 sum in another order may have fewer digits by chance
      split backward      0.7     0.38      0.94        see gradients; without data-parallel ranks nothing is reduced
    gradients             1e-5    6e-8      2e-3-0.9    fp32 sums over microbatches and data-parallel ranks
      split backward      2e-2    5e-3                  torch's runtime adds the weight gradients of microbatches that
                                                        follow each other in the compute dtype: which, the schedule says

"gradient reduction" is the share of a gradient's numbers that bfloat16 holds, less that of one process: a sum of many
bfloat16 numbers has more digits, unless it is rounded again. It tells a coarse sum from coarse contributions, and sees
one where the bound of gradients is wide. Float8 needs no other bounds: both sides round the same bfloat16 numbers.

Sequences end at position 8,191 or later, where a cast of positions or angles shows. Not seen: what CUDA kernels, NCCL
and inductor round otherwise.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.config.float8_plan import uses_float8
from torchtitan_lite.config.layout import Layout, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.pipeline_plan import splits_backward
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.verify.certificate import Measure, RunRanks, Trial, describe_failure
from torchtitan_lite.verify.culprit import Culprit, describe_ranks
from torchtitan_lite.verify.difference import find_disagreement
from torchtitan_lite.verify.module_outputs import find_stage, list_forward_order
from torchtitan_lite.verify.one_rank import (
    Coordinates,
    build_small_run,
    gather,
    gradients_noted,
    own_rows,
    start_from_reference,
)
from torchtitan_lite.verify.precision_reference import UNDER_CP, RoundedOutcome, RoundedProcess
from torchtitan_lite.verify.ranks import RankFailure
from torchtitan_lite.verify.reduction import Reduction, override
from torchtitan_lite.verify.reference import make_batch_of, relative_error
from torchtitan_lite.verify.small_runs import choose_float8_sizes, shrink_for_precision

ORDER_OF_SUMS = 1e-5  # what is right stays below 2e-8; one number that rounds the other way makes 1e-5 to 3e-3
ROUNDED_OFTEN = 2e-2  # a split backward adds gradients of microbatches in the compute dtype; of 16 of them: 5e-3
ANGLES = 1e-6  # of a cosine or sine; in bfloat16 they are off by 2e-3
MORE_DIGITS = 0.1  # by what the share of numbers that bfloat16 holds may exceed that of one process
FEW_DIGITS = 0.7  # the same where microbatches are added in the compute dtype, and data-parallel ranks in float32
LAST_POSITION = 8192  # at least: in bfloat16 positions above 256, and angles above 1 radian, are far off
# Of the first and the last row of every weight after a step of the float8 trial. A scale of the step before cuts the
# largest numbers off; and each rank's rows have another largest number, while initial weights are cut off at the same.
GROWTH = (1.2, 2.0)


def try_bfloat16(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Make one step in bfloat16. Skipped where the run computes in float32 on every device."""
    if reduction.real.training.mixed_precision_param == "float32":
        return Trial("bfloat16", [], {}, None, 0.0, skipped="the run computes in float32")
    config = override(reduction.config, {"training.mixed_precision_param": "bfloat16"})
    return try_rounding("bfloat16", config, reduction, run_ranks, folder, n_steps=1)


def try_float8(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Make two steps in float8, emulated, in the recipe of the run; between them all weights grow.

    What is not float8 is in bfloat16, whatever the run has: of float32 numbers that differ in their last bit, as they
    do with the place of a weight in memory (MKL), a few would become other float8 numbers.
    """
    real = reduction.real
    if not uses_float8(real):
        return Trial("float8", [], {}, None, 0.0, skipped="model.converters does not ask for float8")
    keys = {
        "model.converters": real.model.converters,
        "quantize.linear.float8": replace(real.quantize.linear.float8, emulate=True),
        "training.mixed_precision_param": "bfloat16",
        "optimizer.lr": 0.0,  # what follows a step is given, so that both sides hold the same weights
        "optimizer.weight_decay": 0.0,
        **choose_float8_sizes(reduction),
    }
    return try_rounding("float8", override(reduction.config, keys), reduction, run_ranks, folder, n_steps=2)


def try_rounding(
    name: str, config: Config, reduction: Reduction, run_ranks: RunRanks, folder: Path, *, n_steps: int
) -> Trial:
    """Make `n_steps` of `config`, with fewer layers and microbatches, beside one process that rounds alike."""
    start = time.monotonic()
    if reduction.layout.cp > 1 and config.model.attention not in UNDER_CP:
        why = f"model.attention = {config.model.attention} under cp has no reference: add it to precision_reference.py"
        return Trial(name, [], {}, None, 0.0, skipped=why, is_missing=True)
    config = override(config, shrink_for_precision(reduction))
    layout = plan_layout(config, resolve_model(config.model), reduction.layout.world_size)
    config = resolve_config(config, layout, "cpu")
    last = max(LAST_POSITION, reduction.real.training.seq_len)
    path = folder / f"rounded-{name}.pt"
    outcomes = run_rounded_process(config, layout, last, n_steps)
    torch.save(outcomes, path)
    try:
        shares = run_ranks(measure_rounding, layout.world_size, config, str(path), last)
    except RankFailure as failure:
        return describe_failure(name, failure, time.monotonic() - start)
    measures = list_measures(shares, outcomes, layout, splits=splits_backward(config.parallelism))
    faults = {m.what: f"{m.what}: {m.error:.1e}, at most {m.bound:.0e} is right" for m in measures if not m.is_right}
    culprit = name_culprit(shares, outcomes, measures) if faults else None
    steps = "1 step" if n_steps == 1 else f"{n_steps} steps"
    recipe = f"float8 ({config.quantize.linear.float8.recipe_name}) and " if uses_float8(config) else ""
    dtype, seq_len = config.training.mixed_precision_param, config.training.seq_len
    subject = f"{steps} in {recipe}{dtype}, {seq_len} tokens a sequence"
    return Trial(name, measures, faults, culprit, time.monotonic() - start, subject=subject)


def run_rounded_process(config: Config, layout: Layout, last_position: int, n_steps: int) -> list[RoundedOutcome]:
    """Return the right numbers of each step. Between steps the rows of every weight grow."""
    process = RoundedProcess(config, layout)
    outcomes = []
    for step in range(n_steps):
        outcomes.append(process.compute_gradients(make_late_batch(config, step, last_position)))
        process.scale_rows(*GROWTH)
    return outcomes


# ---------------------------------------------------------------- one rank


def make_late_batch(config: Config, step: int, last_position: int) -> Batch:
    """Return the batch of a step with the positions of the end of a long sequence."""
    batch = make_batch_of(config, step)
    return replace(batch, positions=batch.positions + last_position - config.training.seq_len)


@dataclass(frozen=True)
class RoundingShare:
    """Difference between one rank and one process, in one step."""

    coordinates: Coordinates
    loss: float
    rotary: dict[str, float]  # FQN of a block -> largest difference of a cosine or sine
    output: dict[str, float]  # FQN of a block -> ||y - ref|| / ||ref||, worst microbatch
    gradient: dict[str, float]  # FQN -> ||g - ref|| / ||ref||
    digits: dict[str, float]  # FQN -> share of short numbers, see find_short_share, beyond that of one process


def measure_rounding(rank: int, world_size: int, config: Config, path: str, last_position: int) -> list[RoundingShare]:
    """Worker: build the layout, step it, and compare what this rank sees with `path`. Collective."""
    outcomes: list[RoundedOutcome] = torch.load(path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size)
    following = iter(outcomes[1:])
    run.optimizer.register_step_post_hook(lambda *_: start_from_reference(run, next(following)))
    shares = []
    for step, expected in enumerate(outcomes):
        batch = own_rows(run, make_late_batch(run.config, step, last_position))
        with blocks_noted(run) as blocks, gradients_noted(run) as gradients:
            if step < len(outcomes) - 1:
                loss = stepping.train_step(run, batch).loss
            else:  # what would follow is not looked at
                loss = stepping.sum_losses(run, stepping.compute_gradients(run, batch))
                gradients = gather(run, lambda parameter: parameter.grad)
        rotary, output = compare_blocks(run, blocks, expected)
        digits = {fqn: find_short_share(g) - find_short_share(expected.gradients[fqn]) for fqn, g in gradients.items()}
        errors = {fqn: relative_error(g, expected.gradients[fqn]) for fqn, g in gradients.items()}
        shares.append(RoundingShare(run.mesh.coordinates(), loss.item(), rotary, output, errors, digits))
    return shares


Calls = dict[str, list[tuple[Tensor, Tensor | None]]]  # FQN of a block -> of each call its output, and the rotation


@contextmanager
def blocks_noted(run: stepping.Run) -> Iterator[Calls]:
    """Context manager: yields inputs and outputs of this rank's blocks in all calls inside."""
    calls: Calls = defaultdict(list)
    hooks = []
    for part in run.parts:
        for layer, block in part.layers.items():

            def note(block, args, output, *, to=calls[f"layers.{layer}"]):
                to.append((output.detach().clone(), args[1].detach().clone()))

            hooks.append(block.register_forward_hook(note))
    yield calls
    for hook in hooks:
        hook.remove()


def compare_blocks(run: stepping.Run, calls: Calls, expected: RoundedOutcome) -> tuple[dict, dict]:
    """Return the errors of the rotation that enters each block, and of its output."""
    layout, here = run.layout, run.mesh.coordinates()
    ranks = [here[dim] for dim in ("cp", "tp") if layout.degrees[dim] > 1]
    order = list_forward_order(run.config, layout)
    rotary, output = {}, {}
    for name, noted in calls.items():
        # A pipeline's first step calls each stage once more, before all others, to learn shapes.
        pairs = list(zip(order[find_stage(layout, name)], noted[-layout.n_microbatches :], strict=True))
        outputs, rotations = (each[name][run.mesh.data_rank] for each in (expected.outputs, expected.rotations))
        output[name] = max(relative_error(own, cut(outputs[at], own, ranks)) for at, (own, _) in pairs)
        rotary[name] = max((own - cut(rotations[at], own, ranks)).abs().max().item() for at, (_, own) in pairs)
    return rotary, output


def cut(whole: Tensor, own: Tensor, ranks: list[int]) -> Tensor:
    """Return a rank's piece of `whole`, like `own`: cut by its cp rank, then by its tp rank.

    `ranks`: of those two dims of the mesh, of which a dim of size 1 is left out.
    """
    longer = [dim for dim in range(whole.dim()) if whole.shape[dim] > own.shape[dim]]
    for dim, rank in zip(longer, ranks, strict=False):  # rotary angles are whole on each tp rank
        whole = whole.chunk(whole.shape[dim] // own.shape[dim], dim)[rank]
    return whole


def find_short_share(gradient: Tensor) -> float:
    """Return the share of the numbers other than 0 that bfloat16 holds. A sum of several needs more digits."""
    numbers = gradient[gradient != 0]
    return (numbers == numbers.bfloat16()).float().mean().item() if len(numbers) else 0.0


# ---------------------------------------------------------------- all ranks


def list_measures(
    shares: list[list[RoundingShare]], outcomes: list[RoundedOutcome], layout: Layout, *, splits: bool
) -> list[Measure]:
    """Return the lines of the certificate: the worst of all ranks and steps."""

    def worst(name: str) -> float:
        return max(max(getattr(share, name).values(), default=0.0) for of_rank in shares for share in of_rank)

    losses = [(s.loss, o.loss) for of_rank in shares for s, o in zip(of_rank, outcomes, strict=True)]
    loss = max(relative_error(torch.tensor(one), torch.tensor(other)) for one, other in losses)
    n_parameters, n_blocks = len(outcomes[0].gradients), len(outcomes[0].outputs)
    gradient_bound, digits_bound = (ROUNDED_OFTEN, FEW_DIGITS) if splits else (ORDER_OF_SUMS, MORE_DIGITS)
    if splits and layout.dp * layout.cp == 1:  # nothing is reduced
        digits_bound = 1.0
    return [
        Measure(
            "rotary angles", worst("rotary"), ANGLES, f"of {n_blocks} blocks, largest difference of a cosine, sine"
        ),
        Measure("block outputs", worst("output"), ORDER_OF_SUMS, f"worst of {n_blocks} blocks"),
        Measure("loss", loss, ORDER_OF_SUMS, "all ranks together"),
        Measure("gradient reduction", worst("digits"), digits_bound, "share of numbers that bfloat16 holds, too many"),
        Measure("gradients", worst("gradient"), gradient_bound, f"worst of {n_parameters} parameters"),
    ]


def name_culprit(shares: list[list[RoundingShare]], outcomes: list[RoundedOutcome], measures: list[Measure]) -> Culprit:
    """Return the first difference: by step, then by measure, then by block or parameter."""
    bounds = {measure.what: measure.bound for measure in measures}
    for step, outcome in enumerate(outcomes):
        of_step = [of_rank[step] for of_rank in shares]
        for what, kind, field, names in (
            ("rotary angles", "rotary angles", "rotary", outcome.outputs),
            ("block outputs", "module output", "output", outcome.outputs),
            ("loss", "loss", "loss", ["sum_losses"]),
            ("gradient reduction", "gradient reduction", "digits", outcome.gradients),
            ("gradients", "gradient", "gradient", outcome.gradients),
        ):
            for name in names:
                if what == "loss":
                    values = [(s.coordinates, abs(s.loss / outcome.loss - 1)) for s in of_step]
                else:
                    values = [(s.coordinates, getattr(s, field)[name]) for s in of_step if name in getattr(s, field)]
                wrong = [coordinates for coordinates, error in values if not error <= bounds[what]]
                if wrong:
                    worst = max(error for _, error in values)
                    place = describe_ranks(wrong, len(values))
                    detail = f"{DETAILS[what].format(worst)}{place}, in step {step + 1}"
                    flags = [(coordinates, float(coordinates in wrong)) for coordinates, _ in values]
                    return Culprit(kind, name, detail, find_disagreement(flags, 0))
    raise AssertionError("a measure is beyond its bound")


DETAILS = {
    "rotary angles": "cosines and sines that enter it are off by up to {:.1e}",
    "block outputs": "its output is off by {:.1e}, more than its own rounding explains",
    "loss": "every block's output is right, and the loss is off by {:.1e}",
    "gradient reduction": "bfloat16 holds {:.0%} more of its numbers than of one process: it is not summed in float32",
    "gradients": "every block's output is right, and this gradient is off by {:.1e}",
}
