"""Kills a rank of a real run with SIGKILL at a random step and resumes it: `tests/kill_while_training.py --seeds 10`.

    unbroken    ./run_train.sh with this seed, to its last step
    killed      the same until one rank dies; then torchrun starts all ranks anew, or the user the whole command

The seed is the run's own, too, and chooses step, rank and instant; layouts, ways to save and ways to go on take turns.
Both runs must have logged the same losses, and the last checkpoints of both must hold the same bits. Prints the score.
The suite runs one such kill, in test_train.py.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where it is run as a script

from checkpoints import assemble, list_differing

from torchtitan_lite.config.reader import REPOSITORY

STEPS = 24
KEYS = [
    f"--training.steps={STEPS}",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    "--metrics.log_freq=1",
    "--checkpoint.enable",
    "--checkpoint.interval=3",
    "--job.no_overwrite",
]
LAYOUTS = {
    "dp2": ["--training.local_batch_size=4"],
    "tp2": ["--training.local_batch_size=8", "--parallelism.tensor_parallel_degree=2"],
    "pp2": ["--training.local_batch_size=8", "--parallelism.pipeline_parallel_degree=2"],
}
LATEST_STEP, LONGEST_DELAY_S = 16, 0.2  # of a kill: some steps and a save later, but well before the end


def launch(dump_folder: Path, cache: Path, *keys: str, n_ranks: int, **environment: str) -> subprocess.Popen:
    """./run_train.sh as users start it. torchrun takes the shell's place, so its pid is the one returned."""
    command = [str(REPOSITORY / "run_train.sh"), "--config", "debug", "--job.dump_folder", str(dump_folder)]
    command += ["--training.cache_folder", str(cache), *keys]
    environment = {**os.environ, "NGPU": str(n_ranks), "PYTHON": sys.executable, **environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_rank(process: subprocess.Popen, victim: int, *, after_step: int, delay_s: float = 0.0) -> None:
    """SIGKILL for one rank, once that step was logged."""
    for line in process.stdout:
        if f"step {after_step:2}/" in line:
            time.sleep(delay_s)
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(ranks[victim]), signal.SIGKILL)
            return
    raise AssertionError(f"the run ended before step {after_step}")


def finish(process: subprocess.Popen, *, must_succeed: bool = True) -> str:
    """What the run still prints, when it has ended."""
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks before itself
        process.wait()
        raise
    assert process.returncode == 0 or not must_succeed, output
    return output


def read_losses(dump_folder: Path, name: str = "loss") -> dict[int, float]:
    """Step -> its loss, or another number that was measured."""
    lines = [json.loads(line) for line in (dump_folder / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines), "a step was logged twice"
    return {line["step"]: line[name] for line in lines if line[name] is not None}


def list_differences(one: Path, other: Path, step: int) -> list[str]:
    """What differs between two runs at their last step: tensors by name, and losses by step."""
    states = [assemble(folder / "checkpoint" / f"step-{step}") for folder in (one, other)]
    losses, expected = read_losses(one), read_losses(other)
    steps = sorted(losses.keys() | expected.keys())
    return [*list_differing(*states), *(f"loss of step {s}" for s in steps if losses.get(s) != expected.get(s))]


def kill_and_resume(seed: int, folder: Path, cache: Path) -> tuple[str, list[str]]:
    """One unbroken run and one that is killed. What was done, and what differs in the end."""
    chosen = random.Random(seed)
    name = list(LAYOUTS)[seed % len(LAYOUTS)]
    mode, by_torchrun = ("disabled", "async")[seed % 2], seed // 2 % 2 == 0
    keys = [*KEYS, *LAYOUTS[name], f"--debug.seed={seed}", f"--checkpoint.async_mode={mode}"]
    finish(launch(folder / "unbroken", cache, *keys, n_ranks=2))

    after_step, victim, delay_s = (
        chosen.randint(1, LATEST_STEP),
        chosen.randrange(2),
        chosen.uniform(0, LONGEST_DELAY_S),
    )
    process = launch(folder / "killed", cache, *keys, n_ranks=2, MAX_RESTARTS=str(int(by_torchrun)))
    kill_rank(process, victim, after_step=after_step, delay_s=delay_s)
    output, by = finish(process, must_succeed=False), "torchrun"
    if process.returncode:  # also where torchrun itself does not survive the death of a rank
        output, by = finish(launch(folder / "killed", cache, *keys, n_ranks=2)), "hand"
    resumed = next((line.split(",")[0].split("/")[-1] for line in output.splitlines() if "resumed from" in line), "0")
    done = f"{name}, {mode}: rank {victim} killed {delay_s:.2f} s after step {after_step}, by {by} from {resumed}"
    return done, list_differences(folder / "killed", folder / "unbroken", STEPS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="seeds 0 to N - 1 (%(default)s)")
    options = parser.parse_args()
    n_equal = 0
    with tempfile.TemporaryDirectory(prefix="kill-") as scratch:
        for seed in range(options.seeds):
            done, differing = kill_and_resume(seed, Path(scratch) / str(seed), Path(scratch) / "cache")
            n_equal += not differing
            print(f"seed {seed}: {done}: {', '.join(differing[:3]) or 'bit-equal'}", flush=True)
    print(f"{n_equal} of {options.seeds} runs ended bit-equal to the unbroken ones")
    return int(n_equal < options.seeds)


if __name__ == "__main__":
    sys.exit(main())
