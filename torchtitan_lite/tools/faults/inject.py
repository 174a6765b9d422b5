"""Start a training run in which one rank meets one fault, once. `drill` starts this module in a process of its own.

    python -m torchtitan_lite.tools.faults.inject '{"kind": "stop", "rank": 3, "step": 4, ...}' --config debug ...

    launcher  ->  rank: run_rank below  ->  train.py, with train_step replaced by `FaultyStep`
                                            step 4 on rank 3: the fault, if its mark does not exist yet

The mark, a file, has the time of the fault, and keeps a restarted rank from meeting it again.
"""

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

import train
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.tools import launch

VARIABLE = "TORCHTITAN_LITE_FAULT"


@dataclass(frozen=True)
class Fault:
    kind: str  # a row of FAULTS
    rank: int
    step: int
    seed: int  # of what else is drawn: the weight, the collective
    mark: str  # path of a file

    def draw(self, n: int) -> int:
        return self.seed % n


def sleep(fault: Fault) -> None:
    while True:
        time.sleep(1)


def loop(fault: Fault) -> None:
    while True:
        pass


def loop_with_lock(fault: Fault) -> None:
    """Sort forever in C, which never releases Python's lock."""
    ctypes.PyDLL(None).PyRun_SimpleString(b"sum(range(10**18))")


def fail(fault: Fault) -> None:
    raise RuntimeError("a fault of the drill")


def kill_launcher(fault: Fault) -> None:
    os.kill(int(os.environ["DRILL_LAUNCHER"]), signal.SIGKILL)


def kill_soon(fault: Fault) -> None:
    """Die during the save that follows the step."""
    if os.fork() == 0:
        time.sleep(0.05)


AT_STEP = {  # kind -> what happens before the step
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "kill_torchrun": kill_launcher,
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": sleep,
    "loop": loop,
    "loop_with_lock": loop_with_lock,
    "exception": fail,
}


def flip_weight_bit(fault: Fault, run: train.build_run) -> None: ...


@contextmanager
def change_all_reduce(fault: Fault, change: Callable) -> Iterator[None]:
    """Context manager: apply `change` to the first all-reduce of a step."""
    original, calls = dist.all_reduce, []

    def all_reduce(tensor: torch.Tensor, *args, group: dist.ProcessGroup | None = None, **kwargs):
        if dist.get_world_size(group) > 1:
            calls.append(tensor)
            if len(calls) == 1:
                return change(original, tensor, group)
        return original(tensor, *args, group=group, **kwargs)

    with patch.object(dist, "all_reduce", all_reduce):
        yield


def skip(original: Callable, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    pass


def widen(original: Callable, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    original(tensor.flatten()[:1].repeat(2), group=group)


@contextmanager
def skip_send(fault: Fault) -> Iterator[None]:
    original, sends = schedules._batch_p2p, []

    def batch_p2p(ops, desc=None):
        sends.extend(op for op in ops if op.op == dist.isend)
        if len(sends) > fault.draw(2) and sends is not None and not batch_p2p.is_done:
            batch_p2p.is_done = True
            ops = [op for op in ops if op.op != dist.isend]
        return original(ops, desc)

    batch_p2p.is_done = False
    with patch.object(schedules, "_batch_p2p", batch_p2p):
        yield


IN_STEP = {
    "skip": partial(change_all_reduce, change=skip),
    "shape": partial(change_all_reduce, change=widen),
    "send": skip_send,
}


def run_rank(args: list[str], folder: Path) -> int:
    """Train as one rank. The variable FAULT in the environment describes the fault."""
    fault, original, n_steps = Fault(**json.loads(os.environ[VARIABLE])), train.train_step, 0

    def train_step(run, batch: Batch, stop_signal: int = 0):
        nonlocal n_steps
        n_steps += 1
        if fault.rank != dist.get_rank() or n_steps != fault.step or Path(fault.mark).exists():
            return original(run, batch, stop_signal)
        Path(fault.mark).write_text(str(time.time()))
        if fault.kind in AT_STEP:
            AT_STEP[fault.kind](fault)
            return original(run, batch, stop_signal)
        with IN_STEP[fault.kind](fault):
            return original(run, batch, stop_signal)

    train.train_step = train_step
    return launch.run_rank(args, folder)
