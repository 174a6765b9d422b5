"""Does a layout round where one process rounds? Trials in the run's own arithmetic: bfloat16, and float8.

The one process (precision_reference.py) computes each rank's share by itself and rounds it as the rank does, so that
next to nothing is left to the order of sums, and bounds lie far below one bfloat16 rounding (2e-3 of a number).
TABLE
Legend: n numbers; "worst" over HEALTHY healthy layouts of 1 to 8 ranks, both trials.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite import step as stepping
from torchtitan_lite.components.data import Batch
from torchtitan_lite.config import Config
from torchtitan_lite.float8_plan import BLOCK, uses_float8
from torchtitan_lite.layout import Layout, plan_layout, resolve_config
from torchtitan_lite.pipeline_plan import check_microbatches, name_modules, splits_backward
from torchtitan_lite.sizes import resolve_shape
from torchtitan_lite.tools.comparison import (
    Coordinates,
    build_small_run,
    find_disagreement,
    gather,
    gradients_noted,
    own_rows,
    relative_error,
)
from torchtitan_lite.tools.culprit import Culprit, describe_place
from torchtitan_lite.tools.module_outputs import find_stage, list_forward_order
from torchtitan_lite.tools.oracle import make_batch
from torchtitan_lite.tools.precision_reference import RoundedOutcome, RoundedProcess
from torchtitan_lite.tools.ranks import RankFailure
from torchtitan_lite.tools.reduction import Reduction, override
from torchtitan_lite.tools.traps import start_from_oracle
from torchtitan_lite.tools.trial import Measure, RunRanks, Trial, describe_failure

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
    """One step in bfloat16. Where the run computes in float32 on every device it is skipped."""
    if reduction.real.training.mixed_precision_param == "float32":
        return Trial("bfloat16", [], {}, None, 0.0, skipped="the run computes in float32")
    config = override(reduction.config, {"training.mixed_precision_param": "bfloat16"})
    return try_rounding("bfloat16", config, reduction, run_ranks, folder, n_steps=1)


def try_float8(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Two steps in float8, emulated, in the recipe of the run; between them all weights grow.

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


def shrink(reduction: Reduction) -> dict[str, object]:
    """Keys of a smaller run: rounding shows in one layer a stage, and in two where there are no stages.

    Blocks are not compiled: aot_eager rounds as eager does (measured), and inductor's kernels are not those of a CPU.
    """
    config, layout = reduction.config, reduction.layout
    keys: dict[str, object] = {"compile.enable": False, "model.n_layers": min(2, reduction.shape.n_layers)}
    if config.activation_checkpoint.mode == "memory_budget":  # the compiler's
        keys["activation_checkpoint.mode"] = "full"
    if layout.pp == 1:
        return keys
    n = len(layout.stages)
    stages = [list(name_modules(range(i, i + 1), first=i == 0, last=i == n - 1)) for i in range(n)]
    keys |= {"model.n_layers": n, "parallelism.module_fqns_per_model_part": stages}
    keys["parallelism.pipeline_parallel_layers_per_stage"] = None
    if layout.n_microbatches > n and not check_microbatches(config.parallelism, n, n, n):
        keys["training.local_batch_size"] = n * layout.microbatch_size
        keys["training.global_batch_size"] = n * layout.microbatch_size * layout.dp
    return keys


def choose_float8_sizes(reduction: Reduction) -> dict[str, object]:
    """Sizes like those of the wide trial, in blocks that every tp rank can compute in float8."""
    shape, layout = reduction.shape, reduction.layout
    width = BLOCK * layout.tp
    tokens = BLOCK * layout.tp * (2 * layout.cp if layout.cp > 1 else 1)

    def round_up(size: int, unit: int) -> int:
        return -(-size // unit) * unit

    return {
        "model.head_dim": BLOCK,
        "model.dim": round_up(shape.dim * BLOCK // shape.head_dim, width),
        "model.ffn_dim": round_up(shape.ffn_dim, width),
        "training.seq_len": round_up(reduction.config.training.seq_len, tokens),
    }


def try_rounding(
    name: str, config: Config, reduction: Reduction, run_ranks: RunRanks, folder: Path, *, n_steps: int
) -> Trial:
    """`n_steps` of `config`, with fewer layers and microbatches, beside one process that rounds alike."""
    start = time.monotonic()
    config = override(config, shrink(reduction))
    layout = plan_layout(config, resolve_shape(config.model), reduction.layout.world_size)
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
    return Trial(name, measures, faults, culprit, time.monotonic() - start, subject=describe_subject(config, n_steps))


def describe_subject(config: Config, n_steps: int) -> str:
    """`1 step in bfloat16, 40 tokens up to position 8191`."""
    steps = "1 step" if n_steps == 1 else f"{n_steps} steps"
    recipe = f"float8 ({config.quantize.linear.float8.recipe_name}) and " if uses_float8(config) else ""
    return f"{steps} in {recipe}{config.training.mixed_precision_param}, {config.training.seq_len} tokens a sequence"


def run_rounded_process(config: Config, layout: Layout, last_position: int, n_steps: int) -> list[RoundedOutcome]:
    """What each step has to give. Between steps the rows of every weight grow, the last ones most."""
    process = RoundedProcess(config, layout)
    outcomes = []
    for step in range(n_steps):
        outcomes.append(process.compute_gradients(make_late_batch(config, step, last_position)))
        process.scale_rows(*GROWTH)
    return outcomes


def make_late_batch(config: Config, step: int, last_position: int) -> Batch:
    """The oracle's batch, each row shifted to end where a long sequence ends."""
    training = config.training
    batch = make_batch(
        step,
        n_rows=training.global_batch_size,
        seq_len=training.seq_len,
        vocab_size=resolve_shape(config.model).vocab_size,
        documents=config.model.attention == "document",
    )
    return replace(batch, positions=batch.positions + last_position - training.seq_len)


# ---------------------------------------------------------------- one rank


@dataclass(frozen=True)
class RoundingShare:
    """How far from one process one rank is, in one step."""

    coordinates: Coordinates
    loss: float
    rotary: dict[str, float]  # FQN of a block -> largest difference of a cosine or sine
    output: dict[str, float]  # FQN of a block -> ||y - ref|| / ||ref||, worst microbatch
    gradient: dict[str, float]  # FQN -> ||g - ref|| / ||ref||
    digits: dict[str, float]  # FQN -> share of short numbers, see find_short_share, beyond that of one process


def measure_rounding(rank: int, world_size: int, config: Config, path: str, last_position: int) -> list[RoundingShare]:
    """Worker: builds the layout, steps it, and compares what this rank can see with `path`. Collective."""
    outcomes: list[RoundedOutcome] = torch.load(path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size)
    following = iter(outcomes[1:])
    run.optimizer.register_step_post_hook(lambda *_: start_from_oracle(run, next(following)))
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
    """What enters and leaves the blocks of this rank in all calls inside."""
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
    """Errors of the rotation that enters each block, and of what leaves it."""
    layout, here = run.layout, run.mesh.coordinates()
    ranks = [here[dim] for dim in ("cp", "tp") if layout.degrees[dim] > 1]
    order = list_forward_order(run.config, layout)
    rotary, output = {}, {}
    for name, noted in calls.items():
        # A pipeline's first step calls each stage once more, before all others, to learn shapes.
        pairs = list(zip(order[find_stage(layout, name)], noted[-layout.n_microbatches :], strict=True))
        outputs, rotations = (each[name][run.mesh.data_rank] for each in (expected.outputs, expected.rotations))
        output[name] = max(relative_error(own, cut(outputs[at], own, ranks)) for at, (own, _) in pairs)
        rotary[name] = max(find_largest_difference(own, cut(rotations[at], own, ranks)) for at, (_, own) in pairs)
    return rotary, output


def cut(whole: Tensor, own: Tensor, ranks: list[int]) -> Tensor:
    """A rank's piece of `whole`, like `own`: along the first dim that is cut by its cp rank, then by its tp rank.

    `ranks`: of those two dims of the mesh, of which a dim of size 1 is left out.
    """
    longer = [dim for dim in range(whole.dim()) if whole.shape[dim] > own.shape[dim]]
    for dim, rank in zip(longer, ranks, strict=False):  # rotary angles are whole on each tp rank
        whole = whole.chunk(whole.shape[dim] // own.shape[dim], dim)[rank]
    return whole


def find_largest_difference(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


def find_short_share(gradient: Tensor) -> float:
    """The share of numbers, of those that are not 0, that bfloat16 holds. A sum of several such numbers needs more."""
    numbers = gradient[gradient != 0]
    return (numbers == numbers.bfloat16()).float().mean().item() if len(numbers) else 0.0


# ---------------------------------------------------------------- all ranks


def list_measures(
    shares: list[list[RoundingShare]], outcomes: list[RoundedOutcome], layout: Layout, *, splits: bool
) -> list[Measure]:
    """The lines of a certificate: the worst of all ranks and steps."""

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
    """The first step, the first measure in the order of a step, and of it the first block or parameter."""
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
                    place = describe_place(wrong, len(values))
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
