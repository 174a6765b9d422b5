"""Kills ranks with SIGKILL at random instants and looks at what they leave: `tests/kill_while_saving.py --times 100`.

    saving    two ranks save as fast as they can, between the steps or beside them; one rank dies, or both
    deleting  the same, and only one checkpoint is kept, so that there is always one being deleted
    resuming  two ranks train a small model and save every second step; both die, and new ones resume, until the end

After every kill each checkpoint that has its final name must be whole and hold what was saved, and the newest must be
no older than the newest before. The final state of a run that died on the way must be that of one that did not, bit
for bit. Prints the score; the suite runs a short version.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where it is run as a script

import compare
from checkpoints import FINGERPRINT, list_differing, make_saver, train, whole_state
from layouts import ADAMW

from torchtitan_lite.checkpoint.load import resume
from torchtitan_lite.checkpoint.manifest import find_steps
from torchtitan_lite.checkpoint.one_process import open_checkpoint
from torchtitan_lite.checkpoint.save import CheckpointSaver
from torchtitan_lite.checkpoint.state import name_tensors
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.verify.ranks import RankFailure, RankPool

N_RANKS = 2
ROWS = 2048  # 16 tensors of this many rows of 32 make 4 MB: a save takes some tens of milliseconds
LONGEST_LIFE_S = 0.6  # from the first save on: a dozen of them
TRAINED_STEPS = 8


@dataclass
class Score:
    kills: int = 0
    while_unfinished: int = 0  # that left a save or a deletion half done
    wrong: int = 0
    what: str = ""  # the first thing that was wrong

    def fail(self, what: str) -> None:
        self.wrong += 1
        self.what = self.what or what

    def __str__(self) -> str:
        verdict = f"{self.wrong} WRONG: {self.what}" if self.wrong else "all whole"
        return f"{self.kills} kills, {self.while_unfinished} in the middle of a save or a deletion: {verdict}"


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    return {f"model.{n}": torch.full((ROWS, 32), float(step + n)) + torch.arange(32) / 64 for n in range(16)}


def tell_pid(folder: str, rank: int) -> None:
    """The name appears with its content."""
    unfinished = Path(folder) / f"new-pid-{rank}"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(Path(folder) / f"pid-{rank}")


def save_for_ever(rank: int, world_size: int, folder: str, mode: str, keep_latest_k: int) -> None:
    """Worker: until it is killed, which is after its first save at the earliest."""
    section = Checkpoint(enable=True, async_mode=mode, keep_latest_k=keep_latest_k)
    checkpoints = Path(folder) / "checkpoint"
    tensors = make_tensors(0)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    of_saver = {
        "fingerprint": FINGERPRINT,
        "run": {},
        "group": dist.new_group(backend="gloo"),
        "device": torch.device("cpu"),
    }
    step = max(find_steps(checkpoints), default=0)
    dist.barrier()  # before anything is swept or saved
    with CheckpointSaver(checkpoints, section, optimizer, **of_saver) as saver:
        while True:
            step += 1
            if saver.staging:
                saver.staging.wait()  # as an optimizer does
            for name, tensor in make_tensors(step).items():
                tensors[name].copy_(tensor)
            saver.save(step, tensors)
            tell_pid(folder, rank)


def kill_some(
    pool: RankPool, folder: Path, worker, args: tuple, chosen: random.Random, victims: list[int], longest_life_s: float
) -> bool:
    """Runs `worker` on the ranks and kills the victims at a random instant after they began. False: they were done."""
    for path in folder.glob("pid-*"):
        path.unlink()
    finished, killed = threading.Event(), threading.Event()
    failures: list[RankFailure] = []

    def run() -> None:
        try:
            pool.run(worker, N_RANKS, str(folder), *args, timeout_s=60)
            finished.set()
        except RankFailure as failure:
            if not killed.is_set():
                failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    while len(list(folder.glob("pid-*"))) < N_RANKS:
        assert thread.is_alive(), "the ranks ended before they began"
        time.sleep(0.01)
    pids = [int((folder / f"pid-{rank}").read_text()) for rank in victims]
    time.sleep(chosen.uniform(0, longest_life_s))
    if thread.is_alive():
        killed.set()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    thread.join()
    if failures:  # of its own, before anybody was killed
        raise failures[0]
    return not finished.is_set()


def inspect(checkpoints: Path, newest_before: int, score: Score) -> int:
    """Reads and verifies everything that is there. Returns the newest step."""
    score.while_unfinished += any(checkpoints.glob("*.tmp"))
    steps = find_steps(checkpoints)
    if max(steps, default=0) < newest_before:
        score.fail(f"step {newest_before} was there, and now there are {steps}")
    for step in steps:
        try:
            with open_checkpoint(checkpoints / f"step-{step}") as checkpoint:
                for name, tensor in make_tensors(step).items():
                    if not torch.equal(checkpoint.read(name), tensor):
                        score.fail(f"step {step} holds another {name}")
        except RuntimeError as error:
            score.fail(str(error))
    return max(steps, default=0)


def kill_savers(pool: RankPool, times: int, *, keep_latest_k: int, seed: int) -> Score:
    """Sync and async, one rank and all, in turn; each save goes on where the killed one left the folder."""
    score, chosen = Score(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        newest = 0
        for number in range(times):
            mode = ("disabled", "async")[number % 2]
            victims = [chosen.randrange(N_RANKS)] if number // 2 % 2 else list(range(N_RANKS))
            kill_some(pool, Path(folder), save_for_ever, (mode, keep_latest_k), chosen, victims, LONGEST_LIFE_S)
            score.kills += 1
            newest = inspect(Path(folder) / "checkpoint", newest, score)
        if newest < times:
            score.fail(f"only {newest} checkpoints were ever committed")
    return score


def train_to_the_end(rank: int, world_size: int, folder: str, mode: str) -> dict[str, torch.Tensor]:
    """Worker: from the newest checkpoint, if there is one, to the last step. The whole state then."""
    run = compare.build_table_run(world_size, ADAMW)
    checkpoints = Path(folder) / "checkpoint"
    section = Checkpoint(enable=True, async_mode=mode, keep_latest_k=2)
    begun_at, group = 0, dist.new_group(backend="gloo")
    dist.barrier()
    if find_steps(checkpoints):
        state = (run.parameters, run.optimizer, run.lr_scheduler)
        begun_at = resume(checkpoints, None, *state, section=section, fingerprint=FINGERPRINT, group=group)
    tell_pid(folder, rank)
    with make_saver(run, str(checkpoints), section) as saver:
        for step in range(begun_at + 1, TRAINED_STEPS + 1):
            train(run, range(step, step + 1))
            saver.check()
            if step % 2 == 0:
                saver.save(step, name_tensors(run.parameters, run.optimizer))
    return whole_state(run)


def kill_trainers(pool: RankPool, n_seeds: int, *, seed: int) -> Score:
    """Each run is killed once at a random instant, and resumed."""
    score, chosen = Score(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        expected, _ = pool.run(train_to_the_end, N_RANKS, folder, "disabled")
    for number in range(n_seeds):
        with tempfile.TemporaryDirectory(prefix="kill-") as folder:
            mode = ("disabled", "async")[number % 2]
            if kill_some(pool, Path(folder), train_to_the_end, (mode,), chosen, list(range(N_RANKS)), 1.0):
                score.kills += 1
            score.while_unfinished += any(Path(folder).glob("checkpoint/*.tmp"))
            state, _ = pool.run(train_to_the_end, N_RANKS, folder, mode)
            if differing := list_differing(state, expected):
                score.fail(f"after seed {number}, {differing[0]} differs")
    return score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100, help="kills while saving; a fifth of it while deleting")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with RankPool(N_RANKS) as pool:
        scores = {
            "saving": kill_savers(pool, options.times, keep_latest_k=3, seed=options.seed),
            "deleting": kill_savers(pool, options.times // 5, keep_latest_k=1, seed=options.seed + 1),
            "resuming": kill_trainers(pool, options.times // 10, seed=options.seed + 2),
        }
    for name, score in scores.items():
        print(f"{name:9} {score}")
    return int(any(score.wrong for score in scores.values()))


if __name__ == "__main__":
    sys.exit(main())
