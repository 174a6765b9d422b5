"""Kill ranks with SIGKILL at random instants, and inspect what they leave: test_checkpoint_faults.py says how often.

    saving    two ranks save as fast as they can, between the steps or beside them; one rank dies, or both
    deleting  the same, and only one checkpoint is kept, so that there is always one being deleted

After every kill each checkpoint that has its final name must be whole and hold what was saved, and the newest must be
no older than the newest before. warm_start.py kills runs, resumes them and compares their ends.
"""

import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints import make_saver, read_tensors

from torchtitan_lite.checkpoint.manifest import find_steps
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.tools.verify.ranks import RankFailure, RankPool

N_RANKS = 2
ROWS = 2048  # 16 tensors of this many rows of 32 make 4 MB: a save takes some tens of milliseconds
LONGEST_LIFE_S = 0.6  # from the first save on: a dozen of them


@dataclass
class Score:
    kills: int = 0
    while_unfinished: int = 0  # kills that left a save or a deletion half done
    wrong: list[str] = field(default_factory=list)


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    return {f"model.{n}": torch.full((ROWS, 32), float(step + n)) + torch.arange(32) / 64 for n in range(16)}


def tell_pid(folder: str, rank: int) -> None:
    """Write the pid of a rank. The file appears with its content."""
    unfinished = Path(folder) / f"new-pid-{rank}"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(Path(folder) / f"pid-{rank}")


def save_for_ever(rank: int, world_size: int, folder: str, mode: str, keep_latest_k: int) -> None:
    """Worker: save until it is killed, which is after its first save at the earliest."""
    checkpoints, tensors = Path(folder) / "checkpoint", make_tensors(0)
    step = max(find_steps(checkpoints), default=0)
    dist.barrier()  # before anything is swept or saved
    with make_saver(checkpoints, Checkpoint(enable=True, async_mode=mode, keep_latest_k=keep_latest_k)) as saver:
        while True:
            step += 1
            if saver.stager:
                saver.stager.synchronize_staging()  # as an optimizer does
            for name, tensor in make_tensors(step).items():
                tensors[name].copy_(tensor)
            saver.save(step, tensors)
            tell_pid(folder, rank)


def kill_some(pool: RankPool, folder: Path, args: tuple, chosen: random.Random, victims: list[int]) -> None:
    """Run the savers, and kill the victims at a random instant after they began."""
    for path in folder.glob("pid-*"):
        path.unlink()
    failures: list[RankFailure] = []

    def run() -> None:
        try:
            pool.run(save_for_ever, N_RANKS, str(folder), *args, timeout_s=60)
        except RankFailure as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    while len(list(folder.glob("pid-*"))) < N_RANKS:
        assert thread.is_alive(), f"the ranks ended before they began: {failures}"
        time.sleep(0.01)
    time.sleep(chosen.uniform(0, LONGEST_LIFE_S))
    assert thread.is_alive(), f"the ranks ended before anybody was killed: {failures}"
    for rank in victims:
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
    thread.join()


def inspect(checkpoints: Path, newest_before: int, score: Score) -> int:
    """Read and verify every checkpoint. Return the newest step."""
    score.while_unfinished += any(checkpoints.glob("*.tmp"))
    steps = find_steps(checkpoints)
    if max(steps, default=0) < newest_before:
        score.wrong.append(f"step {newest_before} was there, and now there are {steps}")
    for step in steps:
        try:
            saved = read_tensors(checkpoints / f"step-{step}")
            for name, tensor in make_tensors(step).items():
                if not torch.equal(saved[name], tensor):
                    score.wrong.append(f"step {step} holds another {name}")
        except RuntimeError as error:
            score.wrong.append(str(error))
    return max(steps, default=0)


def kill_savers(pool: RankPool, times: int, *, keep_latest_k: int, seed: int) -> Score:
    """Kill synchronous and asynchronous savers, one rank and all, in turn. All save into one folder."""
    score, chosen = Score(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        newest = 0
        for number in range(times):
            mode = ("disabled", "async")[number % 2]
            victims = [chosen.randrange(N_RANKS)] if number // 2 % 2 else list(range(N_RANKS))
            kill_some(pool, Path(folder), (mode, keep_latest_k), chosen, victims)
            score.kills += 1
            newest = inspect(Path(folder) / "checkpoint", newest, score)
        if newest < times:
            score.wrong.append(f"only {newest} checkpoints were ever committed")
    return score
