"""Inject one fault, once, into one rank of a training run. The faults are functions of this file (drill.MESSAGES).

    drill  ->  launcher with a fault in its environment  ->  rank: replace_step below, then train.py

On the chosen rank, the fault happens just before the chosen step, with two exceptions. `kill` ends the rank after a
delay of up to 0.2 s, and `kill_saving` ends the rank after the step. An empty file marks the time of the fault. If this
file exists, a restarted rank does not inject the fault again.
"""

import itertools
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import train
from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.format import name_file
from torchtitan_lite.dtensor import count_replicas, local_shard
from torchtitan_lite.dump_folder import HANG
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.step import StepResult
from torchtitan_lite.tools.faults.drill import HANG_S, LAUNCHER, MARK, Fault


def die_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def kill(fault: Fault, run: Run) -> None:
    die_after(fault.seed % 200 / 1000)


def kill_torchrun(fault: Fault, run: Run) -> None:
    os.kill(int(os.environ[LAUNCHER]), signal.SIGKILL)


def kill_saving(fault: Fault, run: Run) -> None:
    """Kill this rank 0.05 s after this step's optimizer update. At this time, all ranks are saving."""
    run.optimizer.register_step_post_hook(lambda *_: die_after(0.05))


def stop(fault: Fault, run: Run) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop(fault: Fault, run: Run) -> None:
    while True:
        pass


def extra(fault: Fault, run: Run) -> None:
    dist.all_reduce(torch.ones(3))


def shape(fault: Fault, run: Run) -> None:
    """Add 64 elements to this rank's next all-reduce with another rank."""
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if dist.get_world_size(options.get("group")) > 1:
            dist.all_reduce = original
            tensor = torch.cat([tensor.flatten(), tensor.new_zeros(64)])
        return original(tensor, *args, **options)

    dist.all_reduce = all_reduce


def no_send(fault: Fault, run: Run) -> None:
    """Skip this rank's next send in the pipeline."""
    for stage in getattr(run.schedule, "_stages", None) or [run.schedule._stage]:
        for kind in ("get_fwd_send_ops", "get_bwd_send_ops"):
            leave_out_once(stage, kind)


def leave_out_once(stage: Any, name: str) -> None:
    original = getattr(stage, name)

    def send_nothing(microbatch: int) -> list:
        setattr(stage, name, original if original(microbatch) else send_nothing)
        return []

    setattr(stage, name, send_nothing)


def nan(fault: Fault, run: Run) -> None:
    choose_faulty_weight(fault, run)[0] = float("nan")


def flip_weight(fault: Fault, run: Run) -> None:
    """Flip a bit of the mantissa of an element."""
    weight = choose_faulty_weight(fault, run)
    weight.view(torch.int32)[fault.seed % len(weight)] ^= 1 << fault.seed % 23


def choose_faulty_weight(fault: Fault, run: Run) -> torch.Tensor:
    """Return the local shard of a weight, flattened. Prefer a weight with copies on several ranks."""
    own = [parameter for parameter in run.parameters.values() if local_shard(parameter).numel()]
    copied = [parameter for parameter in own if count_replicas(parameter) > 1]
    if not copied:
        copied = own
    return local_shard(copied[fault.seed % len(copied)]).detach().view(-1)


def flip_snapshot(fault: Fault, run: Run) -> None:
    flip_newest_and_die(fault, Path(run.config.checkpoint.local_folder))


def flip_checkpoint(fault: Fault, run: Run) -> None:
    """Damage the newest checkpoint, and delete all snapshots."""
    for snapshots in Path(run.config.checkpoint.local_folder).iterdir():
        shutil.rmtree(snapshots)
    flip_newest_and_die(fault, Path(fault.folder))


def disk_full(fault: Fault, run: Run) -> None:
    """Limit the size of new files to half of this rank's file in the newest checkpoint."""
    newest = find_newest(Path(fault.folder)).with_name(name_file(fault.rank))
    limit = newest.stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def records_full(fault: Fault, run: Run) -> None:
    """Make all further writes to metrics.jsonl and log.txt by this process fail, as on a full disk."""
    records = [Path(fault.folder, name) for name in ("metrics.jsonl", "log.txt")]
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.resolve() in records:
            with open("/dev/full", "w") as full:
                os.dup2(full.fileno(), int(descriptor.name))


def traces_full(fault: Fault, run: Run) -> None:
    """Create a file in place of the traces folder, so that no trace can be written."""
    Path(fault.folder, run.config.profiling.save_traces_folder).touch()


def hangs_full(fault: Fault, run: Run) -> None:
    """Create a file in place of the folder for hang reports, and sleep so long that the step hangs."""
    Path(fault.folder, HANG).touch()
    time.sleep(HANG_S + 3)


def find_newest(folder: Path) -> Path:
    return max(folder.rglob("step-*/rank-*"), key=os.path.getmtime)


def flip_newest_and_die(fault: Fault, folder: Path) -> None:
    """Flip a bit in the newest file of a checkpoint or snapshot, and end the rank."""
    newest = find_newest(folder)
    content = bytearray(newest.read_bytes())
    content[-1 - fault.seed % 1000] ^= 1 << fault.seed % 8
    newest.write_bytes(content)
    die_after(0)


def replace_step(fault: Fault) -> None:
    """Make train.py inject the fault on the chosen rank, before the chosen step."""
    original = train.train_step
    mark = Path(fault.folder, MARK)
    steps = itertools.count(1)

    def train_step(run: Run, batch: Batch, *options: Any) -> StepResult:
        is_due = next(steps) == fault.step and fault.rank == dist.get_rank()
        if is_due and not mark.exists():
            mark.touch()
            globals()[fault.kind](fault, run)
        return original(run, batch, *options)

    train.train_step = train_step
