"""Runs train.py itself inside a worker of the rank pool, watches what it does, and leaves the process as it was.

    leave the pool's process group   train.py joins one of its own, as under torchrun; the parent holds its store
    execute the file                 anew at each start, so that nothing is left of the start before
    watch three of its names         restore_or_load, train_step, validate: arguments and results
    call main
    undo                             environment, logging, garbage collection

A start in a warm worker takes a second; torchrun takes ten to twenty.
"""

import gc
import io
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.verify.one_rank import cut_slice, own_slice
from torchtitan_lite.verify.train_reference import Expected

TRAIN_PY = REPOSITORY / "train.py"

Place = tuple[int, int]  # step, counted from 1, and row of its global batch
Squares = tuple[float, float]  # of this rank's slice: sums of squares of the difference and of what is expected


@dataclass
class Seen:
    """What one rank was given in one start of train.py, what it computed, and its errors.

    Of lists, the first entry is of the first step after `resumed_step`.
    """

    resumed_step: int = 0
    rows: list[list[Place | None]] = field(default_factory=list)  # where each row is in the data; None: nowhere
    rates: list[list[float]] = field(default_factory=list)  # of the optimizer's groups
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)  # step -> what `validate` returned
    # "loaded", "trained" -> step after which -> "weight", or the name of a moment -> FQN
    states: dict[str, dict[int, dict[str, dict[str, Squares]]]] = field(
        default_factory=lambda: {"loaded": {}, "trained": {}}
    )
    updates: dict[int, Squares] = field(default_factory=dict)  # of all weights, since before the first step of all


def start_train_py(
    rank: int, world_size: int, path: Path, args: list[str], port: int, expected_path: str, own_rows: list[range]
) -> Seen:
    """Worker: run the main of train.py, the file `path`, with `args`. Collective.

    `port`: of a TCPStore of the parent. `own_rows`: of each rank. Raises what train.py raises, and RuntimeError where
    it ends with another status than 0.
    """
    expected: Expected = torch.load(expected_path, weights_only=False, mmap=True)
    # DTensor warns that gathering over two dims takes two steps: it is right, and here it does not matter.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    watch = Watch(expected, own_rows[rank])
    said = io.StringIO()
    dist.destroy_process_group()
    with process_left_as_it_was(), redirect_stdout(said), redirect_stderr(said):
        os.environ.update(make_environment(rank, world_size, port))
        names = {"__name__": "train", "__file__": str(path)}
        exec(compile(read_source(path), str(path), "exec"), names)
        for name in ("restore_or_load", "train_step", "validate"):
            names[name] = getattr(watch, name)(names[name])
        status = names["main"](args)
    if status != 0:
        raise RuntimeError(f"train.py ended with {status}; its log:\n{said.getvalue()[-4000:].strip()}")
    return watch.seen


def read_source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def make_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for the ranks of one host; and no GPU: the reference computes on the CPU."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: no rank makes one
        "TORCHELASTIC_RESTART_COUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }


@contextmanager
def process_left_as_it_was() -> Iterator[None]:
    """Context manager: undo what train.py changes in its process."""
    environment = dict(os.environ)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    gc.freeze()  # what is here stays: train.py's own collection need not look at it
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        logger = logging.getLogger("torchtitan_lite")
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        gc.unfreeze()
        gc.enable()


class Watch:
    """Wraps functions of train.py, and notes into `seen`. No communication."""

    def __init__(self, expected: Expected, own_rows: range):
        self.expected, self.own_rows = expected, own_rows
        self.seen = Seen()
        self.step = 0
        self.steps = [split_rows(batch) for batch in expected.batches]
        self.places = {row: (n, at) for n, rows in enumerate(self.steps, 1) for at, row in enumerate(rows)}

    def restore_or_load(self, original: Callable) -> Callable:
        """Wrap `restore_or_load`: note the weights and moments that the run starts with."""

        def watched(checkpoints, resumed_step, parameters: dict[str, Tensor], optimizer: Optimizer, *args, **options):
            self.step = original(checkpoints, resumed_step, parameters, optimizer, *args, **options)
            self.seen.resumed_step = self.step
            self.seen.states["loaded"][self.step] = self.measure_state(parameters, optimizer)
            return self.step

        return watched

    def train_step(self, original: Callable) -> Callable:
        """Wrap `train_step`: note rows, learning rates, loss, norm; after some steps the weights."""

        def watched(run, batch: Batch):
            self.seen.rows.append(self.find_places(batch))
            self.seen.rates.append([float(group["lr"]) for group in run.optimizer.param_groups])
            result = original(run, batch)
            self.step += 1
            self.seen.losses.append(result.loss.item())
            self.seen.grad_norms.append(result.grad_norm.item())
            if self.step in self.expected.states:
                self.seen.states["trained"][self.step] = self.measure_state(run.parameters, run.optimizer)
                self.seen.updates[self.step] = self.measure_update(run.parameters)
            return result

        return watched

    def validate(self, original: Callable) -> Callable:
        """Wrap `validate`: note what it returns."""

        def watched(*args):
            self.seen.validation[self.step] = original(*args)
            return self.seen.validation[self.step]

        return watched

    def find_places(self, batch: Batch) -> list[Place | None]:
        """Return where each row of a batch is in the data; of several places, the likeliest.

        That is this rank's share of the step, or of another step, then any row of the step, then any row.
        """
        rows = split_rows(batch)
        own = slice(self.own_rows.start, self.own_rows.stop)
        steps = dict(enumerate(self.steps, 1))
        this_step = steps.get(self.step + 1, [])
        for number, of_step in ((self.step + 1, this_step), *steps.items()):
            if rows == of_step[own]:
                return [(number, at) for at in self.own_rows]
        in_this_step = {row: (self.step + 1, at) for at, row in enumerate(this_step)}
        return [in_this_step.get(row, self.places.get(row)) for row in rows]

    def measure_state(self, parameters: dict[str, Tensor], optimizer: Optimizer) -> dict[str, dict[str, Squares]]:
        """Compare this rank's slices of weights and moments with those of one process after the same step."""
        squares = {}
        for name, full_tensors in self.expected.states.get(self.step, {}).items():
            moments = {fqn: optimizer.state[parameter].get(name) for fqn, parameter in parameters.items()}
            own = parameters if name == "weight" else moments
            squares[name] = {fqn: measure_slice(tensor, full_tensors[fqn]) for fqn, tensor in own.items()}
        return squares

    def measure_update(self, parameters: dict[str, Tensor]) -> Squares:
        """Compare the update of all weights together with that of one process.

        Left out is what fp32 rounds off a weight: it is rounded twice in each step, each time by at most 2^-24 of it.
        A norm weight of 1 hardly moves in comparison.
        """
        wrong = whole = 0.0
        now, initial = self.expected.states[self.step]["weight"], self.expected.states[0]["weight"]
        for fqn, parameter in parameters.items():
            wrong += measure_slice(parameter, now[fqn], roundings=2 * self.step)[0]
            whole += measure_slice(parameter, now[fqn] - initial[fqn])[1]
        return wrong, whole


@torch.no_grad()
def measure_slice(tensor: Tensor | None, full: Tensor, *, roundings: int = 0) -> Squares:
    """Compare what this rank holds of a tensor with the same slice of a full one. No communication.

    `roundings`: how often every number of it may have been rounded to fp32 otherwise.
    """
    if tensor is None:  # a moment that was not made
        return math.inf, 0.0
    own, right = own_slice(tensor).double(), cut_slice(full, tensor).double()
    difference = (own - right).abs() - roundings * 2**-24 * right.abs()
    return difference.clamp(min=0).square().sum().item(), right.square().sum().item()


def split_rows(batch: Batch) -> list[bytes]:
    """Return each row of a batch, with targets, positions and documents, as a key."""
    fields = torch.stack(list(vars(batch).values()), dim=1).contiguous()  # (B, 4, S)
    return [bytes(row.flatten().view(torch.uint8).tolist()) for row in fields]
