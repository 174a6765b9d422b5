"""What one rank of a layout computes in the run's own arithmetic, compared with one process that rounds alike.

    each block     the rotary angles that enter it, and its output, microbatch by microbatch: the pieces of this rank
    each weight    its whole gradient, as it is before it is clipped, and how many digits its numbers have

A gradient travels to be whole, as everywhere in `verify`; outputs do not travel.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchtitan_lite import step as stepping
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.verify.comparison import (
    Coordinates,
    build_small_run,
    gather,
    gradients_noted,
    own_rows,
    relative_error,
)
from torchtitan_lite.verify.module_outputs import find_stage, list_forward_order
from torchtitan_lite.verify.precision_reference import RoundedOutcome
from torchtitan_lite.verify.reference import make_batch
from torchtitan_lite.verify.traps import start_from_oracle


def make_late_batch(config: Config, step: int, last_position: int) -> Batch:
    """The oracle's batch, each row shifted to end where a long sequence ends."""
    training = config.training
    batch = make_batch(
        step,
        n_rows=training.global_batch_size,
        seq_len=training.seq_len,
        vocab_size=resolve_model(config.model).vocab_size,
        documents=config.model.attention == "document",
    )
    return replace(batch, positions=batch.positions + last_position - training.seq_len)


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
