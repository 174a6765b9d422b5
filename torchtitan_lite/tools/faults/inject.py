"""Make one rank of a training run meet one fault, once.

    drill  ->  launcher with a fault in its environment  ->  rank: run_rank below  ->  train.py

run_rank replaces train.py's train_step. On the chosen rank, the fault happens just before the chosen step; kill, within
0.2 s after that; kill_saving, after the step. A mark, a file with the time, keeps a restarted rank from a second fault.
"""

import json
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import train
from torchtitan_lite.build import Run
from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.components.optim import count_copies
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.step import StepResult
from torchtitan_lite.tools import launch

VARIABLE, LAUNCHER = "TORCHTITAN_LITE_FAULT", "TORCHTITAN_LITE_LAUNCHER"  # of the environment: the fault, a pid
HANG = r"HANG in step \d+, \S+ s after it began\. rank {rank} .*?Its process is (\d+)"


@dataclass
class Fault:
    """A fault, and what became of it: a row of the score card."""

    kind: str  # see find_fault
    seed: int  # also chooses the weight and the bit
    rank: int
    step: int  # counted from the start of the process
    folder: str  # dump folder of the run
    found_s: float | None = None  # seconds until the output names the fault; None: never
    back_s: float | None = None  # seconds until a restarted run logs a step
    steps_lost: int | None = None  # finished steps that were trained again
    is_equal: bool = False  # the run ended with the weights and optimizer state of the undisturbed run, bit by bit

    @property
    def mark(self) -> Path:
        return Path(self.folder) / "fault.txt"


def die_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def kill_saving(fault: Fault, run: Run) -> None:
    """Die 0.05 s after the update of this step, when every rank saves."""
    run.optimizer.register_step_post_hook(lambda *_: die_after(0.05))


def loop(fault: Fault, run: Run) -> None:
    while True:
        pass


def fail(fault: Fault, run: Run) -> None:
    raise RuntimeError("a fault of the drill")


def make_nan(fault: Fault, run: Run) -> None:
    choose_weight(fault, run)[0] = float("nan")


def flip_weight(fault: Fault, run: Run) -> None:
    """Flip a bit of the mantissa of an element."""
    weight = choose_weight(fault, run)
    weight.view(torch.int32)[fault.seed % len(weight)] ^= 1 << fault.seed % 23


def choose_weight(fault: Fault, run: Run) -> torch.Tensor:
    """Return the local shard of a weight, flat. Prefers weights that several ranks hold copies of."""
    parameters = [parameter for parameter in run.parameters.values() if local_tensor(parameter).numel()]
    copied = [parameter for parameter in parameters if count_copies(parameter) > 1] or parameters
    return local_tensor(copied[fault.seed % len(copied)]).detach().view(-1)


def flip_snapshot(fault: Fault, run: Run) -> None:
    flip_file_and_die(fault, list(Path(run.config.checkpoint.local_folder).glob("*/step-*/rank-*")))


def flip_checkpoint(fault: Fault, run: Run) -> None:
    """Damage the newest checkpoint, and hide all snapshots."""
    for path in Path(run.config.checkpoint.local_folder).glob("*/step-*"):
        path.rename(path.with_suffix(".tmp"))
    flip_file_and_die(fault, list(Path(fault.folder).glob("checkpoint/step-*/rank-*")))


def flip_file_and_die(fault: Fault, files: list[Path]) -> None:
    """Flip a bit in the newest file, and end the rank."""
    newest = max(files, key=os.path.getmtime)
    content = bytearray(newest.read_bytes())
    content[-1 - fault.seed % 1000] ^= 1 << fault.seed % 8
    newest.write_bytes(content)
    die_after(0)


DEAD = r"exitcode: {status}\) local_rank: {rank} "  # in torchrun's report
FAULTS = {  # kind -> function, and what names the fault in the output; {rank} is the rank that met it
    "kill": (lambda fault, run: die_after(fault.seed % 200 / 1000), DEAD.replace("{status}", "-9")),
    "kill_saving": (kill_saving, DEAD.replace("{status}", "-9")),
    "kill_torchrun": (lambda fault, run: os.kill(int(os.environ[LAUNCHER]), signal.SIGKILL), "torchrun was killed"),
    "exception": (fail, DEAD.replace("{status}", "1")),
    "nan": (make_nan, r"weight \S+ on rank {rank} .*was not finite"),
    "flip_weight": (flip_weight, r"silent damage: (rank {rank} |no majority tells .*\b{rank}\b.* has a wrong)"),
    "flip_snapshot": (flip_snapshot, "DAMAGED SNAPSHOT"),
    "flip_checkpoint": (flip_checkpoint, "DAMAGED CHECKPOINT"),
    "stop": (lambda fault, run: os.kill(os.getpid(), signal.SIGSTOP), HANG),
    "loop": (loop, HANG),
}


def find_fault(kind: str) -> tuple[Callable[[Fault, Run], None], str]:
    """Return a row of FAULTS. Another kind, such as "my_faults:sleep", is a function that makes a rank hang."""
    if kind not in FAULTS and ":" not in kind:
        raise UserError(f"There is no fault {kind!r}. Use {', '.join(FAULTS)}.")
    return FAULTS.get(kind) or (pkgutil.resolve_name(kind), HANG)


def run_rank(args: list[str], folder: Path) -> int:
    """Train as one rank. torchrun calls it with the options of the run and the folder of the launch."""
    fault, original, n_steps = Fault(**json.loads(os.environ[VARIABLE])), train.train_step, 0

    def train_step(run: Run, batch: Batch, stop_signal: int = 0) -> StepResult:
        nonlocal n_steps
        n_steps += 1
        if fault.rank == dist.get_rank() and n_steps == fault.step and not fault.mark.exists():
            fault.mark.write_text(str(time.time()))
            find_fault(fault.kind)[0](fault, run)
        return original(run, batch, stop_signal)

    train.train_step = train_step
    return launch.run_rank(args, folder)
