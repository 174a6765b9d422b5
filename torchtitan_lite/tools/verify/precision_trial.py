"""Does a layout round where one process rounds? Trials in the run's own arithmetic: bfloat16, and float8.

The one process (precision_reference.py) computes each rank's part by itself, rounds it where the rank does, and adds
parts in the order of gloo's ring. The only sums in another order are then in fp32, far below one rounding to bfloat16
(up to 4e-3 of a number). Worst of 51 healthy layouts of 1 to 8 ranks, both trials, and what mutants give:

    measure               bound   healthy   mutants     why not zero
    rotary angles         1e-6    0         2e-3, 2     the same function of the same positions, in fp32: it is zero
    block outputs         1e-5    0         8e-5-4e-2   partial products are rounded as the ranks round them: it is zero
    loss                  1e-5    3e-7      1e-4        fp32 sums over tokens, microbatches and ranks
    gradient reduction    0.1     2e-3      0.25-0.5    an fp32 sum in another order may have fewer digits by chance
      split backward      0.7     0.38      0.94        see gradients; without data-parallel ranks nothing is reduced
    gradients             1e-5    6e-8      2e-3-0.9    fp32 sums over microbatches and data-parallel ranks
      split backward      2e-2    5e-3                  torch's runtime adds the weight gradients of microbatches that
                                                        follow each other in the compute dtype: which, the schedule says

Under ep the gradients of experts and routers are rounded in other groups (precision_reference.py), which makes 2.5e-3:
the bound is that of a split backward, and their reduction is not looked at. All routes are given.

"gradient reduction" is the share of a gradient's numbers that bfloat16 holds exactly, less that of one process: a sum
of many bfloat16 numbers has more digits, unless it is rounded again. It tells a sum in bfloat16 from a sum of bfloat16
numbers, also where the bound of gradients is wide. Float8 needs no other bounds: both sides round the same numbers.

Sequences end at position 8,191 or later, where a cast of positions or angles shows. CUDA kernels, NCCL and inductor
round otherwise: that is not seen.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite import build
from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schedule import splits_backward
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.tools.verify.module_outputs import list_microbatches
from torchtitan_lite.tools.verify.one_rank import (
    build_small_run,
    called_before_clipping,
    gather,
    own_rows,
    start_from_reference,
)
from torchtitan_lite.tools.verify.precision_reference import (
    UNDER_CP,
    Calls,
    RoundedOutcome,
    RoundedProcess,
    blocks_noted,
)
from torchtitan_lite.tools.verify.reduction import Reduction, override
from torchtitan_lite.tools.verify.reference import make_batch, relative_error
from torchtitan_lite.tools.verify.slices import Coordinates
from torchtitan_lite.tools.verify.small_runs import choose_float8_sizes, shrink_stages
from torchtitan_lite.tools.verify.step_formulas import draw_routes
from torchtitan_lite.tools.verify.trial import Check, RunRanks, Trial, blame, judge

ORDER_OF_SUMS = 1e-5  # what is right stays below 2e-8; one number that rounds the other way makes 1e-5 to 3e-3
ROUNDED_OFTEN = 2e-2  # a split backward adds gradients of microbatches in the compute dtype; of 16 of them: 5e-3
ANGLES = 1e-6  # of a cosine or sine; in bfloat16 they are off by 2e-3
MORE_DIGITS = 0.1  # by what the share of numbers that bfloat16 holds may exceed that of one process
FEW_DIGITS = 0.7  # the same where microbatches are added in the compute dtype, and data-parallel ranks in float32
LAST_POSITION = 8192  # at least: in bfloat16 positions above 256, and angles above 1 radian, are far off
# Factors of the first and the last row of every weight after a step of the float8 trial. They make a scale of the step
# before too small, and the largest number differ from rank to rank: initial weights are all cut off at one number.
GROWTH = (1.2, 2.0)

MEASURES = {  # measure, in the order of a step -> what was compared, kind of culprit, what is wrong with it
    "rotary angles": (
        "of {n_blocks} blocks, largest difference of a cosine, sine",
        "rotary angles",
        "cosines and sines that enter it are off by up to {:.1e}",
    ),
    "block outputs": (
        "worst of {n_blocks} blocks",
        "module output",
        "its output is off by {:.1e}, more than its own rounding explains",
    ),
    "loss": ("all ranks together", "loss", "every block's output is right, and the loss is off by {:.1e}"),
    "gradient reduction": (
        "share of numbers that bfloat16 holds, too many",
        "gradient reduction",
        "bfloat16 holds {:.0%} more of its numbers than of one process: it is not summed in float32",
    ),
    "gradients": (
        "worst of {n_parameters} parameters",
        "gradient",
        "every block's output is right, and this gradient is off by {:.1e}",
    ),
}

Errors = dict[str, dict[str, float]]  # measure -> block or parameter -> error of one rank in one step
RankErrors = tuple[Coordinates, list[Errors]]  # of one rank in each step


def try_bfloat16(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Make one step in bfloat16. Skipped where the run computes in float32 on every device."""
    if reduction.real.training.mixed_precision_param == "float32":
        return Trial(skipped="the run computes in float32")
    config = override(reduction.config, {"training.mixed_precision_param": "bfloat16"})
    return try_rounding(config, reduction, run_ranks, folder, n_steps=1)


def try_float8(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Make two steps in float8, emulated, in the recipe of the run; between them all weights grow.

    All else is in bfloat16, whatever the run has: fp32 numbers may differ in their last bit with the address of a
    weight in memory (MKL), and a few of those would round to other float8 numbers.
    """
    real = reduction.real
    if not real.model.uses_float8:
        return Trial(skipped="model.converters does not ask for float8")
    keys = {
        "model.converters": real.model.converters,
        "quantize.linear.float8": replace(real.quantize.linear.float8, emulate=True),
        "training.mixed_precision_param": "bfloat16",
        "optimizer.lr": 0.0,  # the weights after a step are given, so that both sides have the same
        "optimizer.weight_decay": 0.0,
        **choose_float8_sizes(reduction),
    }
    return try_rounding(override(reduction.config, keys), reduction, run_ranks, folder, n_steps=2)


def try_rounding(config: Config, reduction: Reduction, run_ranks: RunRanks, folder: Path, *, n_steps: int) -> Trial:
    """Make `n_steps` of `config`, with fewer layers and microbatches, beside one process that rounds alike."""
    if reduction.layout.cp > 1 and config.model.attention not in UNDER_CP:
        why = f"model.attention = {config.model.attention} under cp has no reference: add it to precision_reference.py"
        return Trial(skipped=why, is_missing=True)
    # aot_eager rounds as eager does (measured), and inductor's kernels are not those of a CPU.
    config = override(config, {**shrink_stages(reduction), "compile.enable": False})
    if config.activation_checkpoint.mode == "memory_budget":  # the compiler's
        config = override(config, {"activation_checkpoint.mode": "full"})
    layout = plan_layout(config, resolve_model(config.model), reduction.layout.world_size)
    config = resolve_config(config, layout, "cpu")
    last_position = max(LAST_POSITION, reduction.real.training.seq_len)
    process, outcomes = RoundedProcess(config, layout), []
    for step in range(n_steps):
        outcomes.append(process.compute_gradients(make_late_batch(config, step, last_position)))
        process.scale_rows(*GROWTH)
    path = folder / f"rounded-{n_steps}-steps.pt"
    torch.save(outcomes, path)
    ranks = run_ranks(measure_rounding, layout.world_size, config, str(path), last_position)
    counts = {"n_blocks": len(outcomes[0].calls), "n_parameters": len(outcomes[0].gradients)}
    measures = {measure: of.format(**counts) for measure, (of, _, _) in MEASURES.items()}
    steps = "1 step" if n_steps == 1 else f"{n_steps} steps"
    recipe = f"float8 ({config.quantize.linear.float8.recipe_name}) and " if config.model.uses_float8 else ""
    dtype, seq_len = config.training.mixed_precision_param, config.training.seq_len
    subject = f"{steps} in {recipe}{dtype}, {seq_len} tokens a sequence"
    splits = splits_backward(config.parallelism)
    digits, gradients = (FEW_DIGITS, ROUNDED_OFTEN) if splits else (MORE_DIGITS, ORDER_OF_SUMS)
    if splits and layout.dp * layout.cp == 1:  # nothing is reduced
        digits = 1.0
    bounds = dict(zip(MEASURES, (ANGLES, ORDER_OF_SUMS, ORDER_OF_SUMS, digits, gradients), strict=True))
    return judge(list(list_checks(ranks, outcomes, bounds, layout.ep)), measures, subject)


def list_checks(
    ranks: list[RankErrors], outcomes: list[RoundedOutcome], bounds: dict[str, float], ep: int
) -> Iterator[Check]:
    """Yield all checks: by step, then by measure, then by block or parameter."""
    for step, outcome in enumerate(outcomes):
        for measure, (_, kind, detail) in MEASURES.items():
            names = {"loss": ["sum_losses"], "rotary angles": outcome.calls, "block outputs": outcome.calls}
            for name in names.get(measure, outcome.gradients):
                bound = bounds[measure]
                if ep > 1 and measure.startswith("gradient") and (".experts." in name or ".router." in name):
                    if measure == "gradient reduction":
                        continue
                    bound = ROUNDED_OFTEN
                of_step = [(coordinates, of_steps[step][measure]) for coordinates, of_steps in ranks]
                errors = [(coordinates, found[name]) for coordinates, found in of_step if name in found]
                # What is not a number is infinitely wrong, and so is what no rank has compared.
                worst = max((error if error < math.inf else math.inf for _, error in errors), default=math.inf)
                is_right = [(coordinates, error <= bound) for coordinates, error in errors]
                culprit = blame(kind, name, f"in step {step + 1}, {detail.format(worst)}", is_right)
                yield Check(measure, worst, bound, culprit)


# ---------------------------------------------------------------- one rank


def make_late_batch(config: Config, step: int, last_position: int) -> Batch:
    """Return the batch of a step with the positions of the end of a long sequence, and for experts with routes."""
    batch, args = make_batch(config, step), resolve_model(config.model)
    routes = draw_routes(args, *batch.tokens.shape, step) if args.moe else None
    return replace(batch, positions=batch.positions + last_position - config.training.seq_len, routes=routes)


def measure_rounding(rank: int, world_size: int, config: Config, path: str, last_position: int) -> RankErrors:
    """Worker: build the layout, step it, and compare this rank's numbers with those in `path`. Collective."""
    outcomes: list[RoundedOutcome] = torch.load(path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size)
    following = iter(outcomes[1:])
    run.optimizer.register_step_post_hook(lambda *_: start_from_reference(run, next(following)))
    of_steps = []
    for step, expected in enumerate(outcomes):
        batch = own_rows(run, make_late_batch(run.config, step, last_position))
        gradients: dict[str, Tensor] = {}

        def note_gradients(into: dict[str, Tensor] = gradients) -> None:
            into.update(gather(run, lambda parameter: parameter.grad))

        with blocks_noted(run.parts) as blocks, called_before_clipping(note_gradients):
            if step < len(outcomes) - 1:
                loss = stepping.train_step(run, batch).loss
            else:  # the rest of the last step changes nothing that is compared
                loss = stepping.sum_losses(run, stepping.compute_gradients(run, batch))
                note_gradients()
        right = expected.gradients
        errors: Errors = {
            **compare_blocks(run, blocks, expected),
            "loss": {"sum_losses": relative_error(loss, torch.tensor(expected.loss))},
            "gradient reduction": {
                fqn: find_short_share(gradient) - find_short_share(right[fqn]) for fqn, gradient in gradients.items()
            },
            "gradients": {fqn: relative_error(gradient, right[fqn]) for fqn, gradient in gradients.items()},
        }
        of_steps.append(errors)
    return run.mesh.coordinates(), of_steps


def compare_blocks(run: build.Run, calls: Calls, expected: RoundedOutcome) -> Errors:
    """Return the errors of the rotary angles that enter each block, and of its output."""
    layout, here = run.layout, run.mesh.coordinates()
    ranks = [here[dim] for dim in ("cp", "tp") if layout.degrees[dim] > 1]
    angles, outputs = {}, {}
    first = run.mesh.data_rank * layout.n_microbatches
    for name, noted in calls.items():
        angles[name] = outputs[name] = 0.0
        # A pipeline's first step calls each stage once more, before all others, to learn shapes.
        microbatches = list_microbatches(run.config, layout, name)
        for at, (output, rotation) in zip(microbatches, noted[-layout.n_microbatches :], strict=True):
            right_output, right_rotation = expected.calls[name][first + at]
            outputs[name] = max(outputs[name], relative_error(output, cut(right_output, output, ranks)))
            difference = (rotation - cut(right_rotation, rotation, ranks)).abs().max().item()
            angles[name] = max(angles[name], difference if difference < math.inf else math.inf)
    return {"rotary angles": angles, "block outputs": outputs}


def cut(whole: Tensor, own: Tensor, ranks: list[int]) -> Tensor:
    """Return a rank's piece of `whole`, like `own`: cut by its cp rank, then by its tp rank.

    `ranks`: the coordinates on those of the two dims that are larger than 1.
    """
    longer = [dim for dim in range(whole.dim()) if whole.shape[dim] > own.shape[dim]]
    for dim, rank in zip(longer, ranks, strict=False):  # rotary angles are whole on each tp rank
        whole = whole.chunk(whole.shape[dim] // own.shape[dim], dim)[rank]
    return whole


def find_short_share(gradient: Tensor) -> float:
    """Return the share of the numbers other than 0 that bfloat16 holds. A sum of several needs more digits."""
    numbers = gradient[gradient != 0]
    return (numbers == numbers.bfloat16()).float().mean().item() if len(numbers) else 0.0
