"""Run train.py itself inside a worker of the rank pool, record what it does, and leave the process as it was.

    leave the pool's process group   train.py joins one of its own, as under torchrun; the parent holds its store
    execute the file                 anew at each start, so that nothing is left of the start before
    wrap three of its names          restore_or_load, train_step, validate: arguments and results are recorded
    call main
    undo                             environment, logging, garbage collection

A start in a warm worker takes a second; torchrun takes ten to twenty.
"""

import gc
import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite import REPOSITORY
from torchtitan_lite.build import Run
from torchtitan_lite.components.shutdown import StopRequest
from torchtitan_lite.config.flavors import FLAVORS, ModelArgs
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.step import StepResult
from torchtitan_lite.tools.verify.one_rank import list_rates
from torchtitan_lite.tools.verify.slices import Gap, measure_slice
from torchtitan_lite.tools.verify.train_reference import Expected

TRAIN_PY = REPOSITORY / "train.py"

RowNumber = tuple[int, int]  # step, counted from 1, and row of its global batch
StateGaps = dict[str, dict[str, Gap]]  # "weight", or the name of a moment -> FQN -> of this rank's slice


@dataclass
class RankRecord:
    """Inputs, results and errors of one rank in one start of train.py.

    Of lists, the first entry is of the first step after `resumed_step`.
    """

    resumed_step: int = 0
    rows: list[list[RowNumber | None]] = field(default_factory=list)  # where each row is in the data; None: nowhere
    rates: list[list[float]] = field(default_factory=list)  # of the optimizer's groups
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    validation: dict[int, dict[str, float]] = field(default_factory=dict)  # step -> what `validate` returned
    loaded: StateGaps = field(default_factory=dict)
    trained: list[StateGaps] = field(default_factory=list)
    updates: list[Gap] = field(default_factory=list)  # of all weights, since before the first step of all


def start_train_py(
    rank: int,
    world_size: int,
    path: Path,
    args: list[str],
    port: int,
    expected_path: str,
    own_rows: list[range],
    flavors: dict[str, ModelArgs],
) -> RankRecord:
    """Worker: run the main of train.py, the file `path`, with `args`. Collective.

    `port`: of a TCPStore of the parent. `own_rows`: of each rank. `flavors`: added to FLAVORS. Raises what train.py
    raises, and RuntimeError if it ends with another status than 0.
    """
    expected: Expected = torch.load(expected_path, weights_only=False, mmap=True)
    recorder = Recorder(expected, own_rows[rank])
    log = io.StringIO()
    dist.destroy_process_group()
    with process_left_as_it_was(), patch.dict(FLAVORS, flavors), redirect_stdout(log), redirect_stderr(log):
        os.environ.update(make_environment(rank, world_size, port))
        names = {"__name__": "train", "__file__": str(path)}
        exec(compile(read_source(path), str(path), "exec"), names)
        for name in ("restore_or_load", "train_step", "validate"):
            names[name] = partial(getattr(recorder, name), names[name])
        status = names["main"](args, StopRequest())
    if status != 0:
        raise RuntimeError(f"train.py ended with {status}; its log:\n{log.getvalue()[-4000:].strip()}")
    return recorder.record


def read_source(path: Path) -> str:
    """Return the text of a file. A test may edit it."""
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
    gc.freeze()  # train.py's own collection need not look at objects that were here before
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


class Recorder:
    """Call functions of train.py, and record their arguments and results. No communication."""

    def __init__(self, expected: Expected, own_rows: range):
        self.expected, self.own_rows = expected, own_rows
        self.record = RankRecord()
        self.step = 0
        self.steps = {step: split_rows(batch) for step, batch in enumerate(expected.batches, 1)}
        self.numbers = {row: (step, at) for step, rows in self.steps.items() for at, row in enumerate(rows)}

    def restore_or_load(
        self, original: Callable, checkpoints, resumed_step, parameters: dict[str, Tensor], optimizer, *args, **options
    ) -> int:
        """Record the weights and moments with which the run starts."""
        self.step = original(checkpoints, resumed_step, parameters, optimizer, *args, **options)
        self.record.resumed_step = self.step
        self.record.loaded = self.measure_state(parameters, optimizer)
        return self.step

    def train_step(self, original: Callable, run: Run, batch: Batch, *stop: int) -> StepResult:
        """Record rows, learning rates, loss, norm, and the errors of weights and moments."""
        self.record.rows.append(self.find_rows(batch))
        self.record.rates.append(list_rates(run.optimizer))
        if self.expected.experts:  # a top-k would turn the last bit of a score into another expert
            rows = slice(self.own_rows.start, self.own_rows.stop)
            batch = replace(batch, routes=self.expected.experts.routes[self.step][rows])
        result = original(run, batch, *stop)
        self.step += 1
        self.record.losses.append(result.loss.item())
        self.record.grad_norms.append(result.grad_norm.item())
        if self.step < len(self.expected.states):
            self.record.trained.append(self.measure_state(run.saved, run.optimizer))
            self.record.updates.append(self.measure_update(run.parameters))
        return result

    def validate(self, original: Callable, *args) -> dict[str, float] | None:
        """Record the result."""
        if validation := original(*args):
            self.record.validation[self.step] = validation
        return validation

    def find_rows(self, batch: Batch) -> list[RowNumber | None]:
        """Return where each row of a batch is in the data; of several possible answers, the likeliest.

        That is this rank's rows of this step, or of another step, then any row of this step, then any row.
        """
        rows, step = split_rows(batch), self.step + 1
        own = slice(self.own_rows.start, self.own_rows.stop)
        for number in (step, *self.steps):
            if rows == self.steps.get(number, [])[own]:
                return [(number, at) for at in self.own_rows]
        in_this_step = {row: (step, at) for at, row in enumerate(self.steps.get(step, []))}
        return [in_this_step.get(row, self.numbers.get(row)) for row in rows]

    def measure_state(self, parameters: dict[str, Tensor], optimizer: Optimizer) -> StateGaps:
        """Compare this rank's slices of weights and moments with those of one process after the same step."""
        gaps: StateGaps = {}
        for name, full_tensors in self.expected.states[self.step].items():
            own = {fqn: tensor for fqn, tensor in parameters.items() if fqn in full_tensors}
            if name != "weight":
                own = {fqn: optimizer.state[parameter].get(name) for fqn, parameter in own.items()}
            gaps[name] = {fqn: measure_slice(tensor, full_tensors[fqn]) for fqn, tensor in own.items()}
        return gaps

    def measure_update(self, parameters: dict[str, Tensor]) -> Gap:
        """Compare the update of all weights together with that of one process.

        Left out is what fp32 rounds off a weight: it is rounded twice in each step, each time by at most 2^-24 of it.
        A norm weight of 1 hardly moves in comparison.
        """
        wrong = whole = 0.0
        now, initial = self.expected.states[self.step]["weight"], self.expected.states[0]["weight"]
        for fqn, parameter in parameters.items():
            wrong += measure_slice(parameter, now[fqn], roundings=2 * self.step).error
            whole += measure_slice(parameter, now[fqn] - initial[fqn]).reference
        return Gap(wrong, whole)


def split_rows(batch: Batch) -> list[bytes]:
    """Return each row of a batch, with targets, positions and documents, as a key."""
    fields = torch.stack([batch.tokens, batch.targets, batch.positions, batch.doc_ids], dim=1)  # (B, 4, S)
    return [bytes(row.flatten().view(torch.uint8).tolist()) for row in fields]
