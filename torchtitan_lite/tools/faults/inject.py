"""Make one rank of a training run meet one fault, once.

    drill  ->  launcher with FAULT in its environment  ->  rank: run_rank below  ->  train.py

run_rank replaces train.py's train_step. On the chosen rank and step the fault happens before the step (AT_STEP) or
inside it (IN_STEP). The mark, a file, then has the time, and keeps a restarted rank from meeting the fault again.
"""

import ctypes
import json
import os
import signal
import threading
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
from torch.distributed.tensor import DTensor, Replicate

import train
from torchtitan_lite.build import Run
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.step import StepResult
from torchtitan_lite.tools import launch

VARIABLE, LAUNCHER = "TORCHTITAN_LITE_FAULT", "TORCHTITAN_LITE_LAUNCHER"  # of the environment: the fault, a pid
SAVES_AFTER_S = 0.05  # kill_saving: from the end of the step


@dataclass(frozen=True)
class Fault:
    kind: str  # a key of AT_STEP or IN_STEP
    rank: int
    step: int  # counted from the start of the process
    seed: int  # chooses the weight and the bit
    mark: str  # path of a file
    snapshots: str  # paths of the folders of the run
    checkpoints: str


# ---------------------------------------------------------------- before a step


def kill(pid: int, number: int = signal.SIGKILL) -> Callable[[Fault, Run], None]:
    return lambda fault, run: os.kill(pid or os.getpid(), number)


def sleep(fault: Fault, run: Run) -> None:
    while True:
        time.sleep(1)


def loop(fault: Fault, run: Run) -> None:
    while True:
        pass


def loop_with_lock(fault: Fault, run: Run) -> None:
    """Loop in C code that never releases Python's lock."""
    ctypes.PyDLL(None).PyRun_SimpleString(b"sum(range(10**18))")


def fail(fault: Fault, run: Run) -> None:
    raise RuntimeError("a fault of the drill")


def make_nan(fault: Fault, run: Run) -> None:
    """Set an element of a weight to NaN."""
    choose_weight(fault, run).view(-1)[0] = float("nan")


def flip_weight(fault: Fault, run: Run) -> None:
    """Flip a bit of the mantissa of an element, in a weight of which other ranks have copies."""
    weight = choose_weight(fault, run).view(-1)
    weight.view(torch.int32)[fault.seed % len(weight)] ^= 1 << fault.seed % 23


def choose_weight(fault: Fault, run: Run) -> torch.Tensor:
    """Return the local shard of a weight. Prefers weights that several ranks hold copies of."""
    parameters = [parameter for parameter in run.parameters.values() if len(parameter.to_local())]
    copied = [parameter for parameter in parameters if has_copies(parameter)] or parameters
    return copied[fault.seed % len(copied)].to_local().detach()


def has_copies(parameter: DTensor) -> bool:
    pairs = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return any(isinstance(placement, Replicate) and size > 1 for placement, size in pairs)


def flip_file_and_die(fault: Fault, run: Run) -> None:
    """Flip a bit in the newest snapshot, or in the newest checkpoint with all snapshots gone, and end the rank."""
    if fault.kind == "flip_snapshot":
        files = sorted(Path(fault.snapshots).glob("*/step-*/rank-*"), key=os.path.getmtime)
    else:
        for path in Path(fault.snapshots).glob("*/step-*"):
            path.rename(path.with_suffix(".tmp"))
        files = sorted(Path(fault.checkpoints).glob("step-*/rank-*"), key=os.path.getmtime)
    with open(files[-1], "r+b") as file:
        file.seek(-1 - fault.seed % 1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << fault.seed % 8]))
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_saving(fault: Fault, run: Run) -> None:
    """Die soon after this step, when every rank saves."""
    run.lr_scheduler.optimizer.register_step_post_hook(
        lambda *_: threading.Timer(SAVES_AFTER_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
    )


AT_STEP = {
    "kill": kill(0),
    "kill_torchrun": lambda fault, run: os.kill(int(os.environ[LAUNCHER]), signal.SIGKILL),
    "stop": kill(0, signal.SIGSTOP),
    "sleep": sleep,
    "loop": loop,
    "loop_with_lock": loop_with_lock,
    "exception": fail,
    "nan": make_nan,
    "flip_weight": flip_weight,
    "flip_snapshot": flip_file_and_die,
    "flip_checkpoint": flip_file_and_die,
    "kill_saving": die_while_saving,
}

# ---------------------------------------------------------------- inside a step


@contextmanager
def change_all_reduce(change: Callable[[Callable, torch.Tensor, object], None]) -> Iterator[None]:
    """Context manager: apply `change` to the first all-reduce of a step."""
    original, calls = dist.all_reduce, []

    def all_reduce(tensor: torch.Tensor, *args, group: dist.ProcessGroup | None = None, **kwargs):
        if dist.get_world_size(group) > 1 and not calls:
            calls.append(tensor)
            return change(original, tensor, group)
        return original(tensor, *args, group=group, **kwargs)

    with patch.object(dist, "all_reduce", all_reduce):
        yield


@contextmanager
def skip_send() -> Iterator[None]:
    """Context manager: leave out the first send of the pipeline."""
    original, skipped = schedules._batch_p2p, []

    def batch_p2p(ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        kept = [op for op in ops if op.op != dist.isend or skipped]
        skipped.extend(op for op in ops if op not in kept)
        return original(kept, desc)

    with patch.object(schedules, "_batch_p2p", batch_p2p):
        yield


IN_STEP = {
    "skip": partial(change_all_reduce, lambda original, tensor, group: None),
    "shape": partial(
        change_all_reduce, lambda original, tensor, group: original(tensor.view(-1)[:1].repeat(2), group=group)
    ),
    "send": skip_send,
}


def run_rank(args: list[str], folder: Path) -> int:
    """Train as one rank."""
    fault, original, n_steps = Fault(**json.loads(os.environ[VARIABLE])), train.train_step, 0

    def train_step(run: Run, batch: Batch, stop_signal: int = 0) -> StepResult:
        nonlocal n_steps
        n_steps += 1
        is_here = fault.rank == dist.get_rank() and n_steps == fault.step and fault.kind != "none"
        if not is_here or Path(fault.mark).exists():
            return original(run, batch, stop_signal)
        Path(fault.mark).write_text(str(time.time()))
        if fault.kind in AT_STEP:
            AT_STEP[fault.kind](fault, run)
            return original(run, batch, stop_signal)
        with IN_STEP[fault.kind]():
            return original(run, batch, stop_signal)

    train.train_step = train_step
    return launch.run_rank(args, folder)
