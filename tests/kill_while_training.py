"""Start ./run_train.sh as users do, kill one of its ranks with SIGKILL, and compare what two runs leave."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from checkpoints import assemble, list_differing

from torchtitan_lite.config.reader import REPOSITORY

MARK = "RUN_UNDER_TEST"  # variable in the environment of every process of a run: its dump folder


def launch(dump_folder: Path, cache: Path, *keys: str, n_ranks: int, **environment: str) -> subprocess.Popen:
    """./run_train.sh as users start it. torchrun takes the shell's place, so its pid is the one returned."""
    command = [str(REPOSITORY / "run_train.sh"), "--config", "debug", "--job.dump_folder", str(dump_folder)]
    command += ["--training.cache_folder", str(cache), *keys]
    environment = {**os.environ, MARK: str(dump_folder), "NGPU": str(n_ranks), "PYTHON": sys.executable, **environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_rank(process: subprocess.Popen, victim: int, *, after_step: int, delay_s: float = 0.0) -> None:
    """SIGKILL for one rank, once that step was logged."""
    for line in process.stdout:
        if f"step {after_step:2}/" in line:
            time.sleep(delay_s)
            os.kill(list_ranks(process)[victim], signal.SIGKILL)
            return
    raise AssertionError(f"the run ended before step {after_step}")


def list_ranks(launcher: subprocess.Popen) -> list[int]:
    """Pids of the ranks, by rank: forks of a process that the launcher has started."""
    return [rank for child in list_children(launcher.pid) for rank in list_children(child)]


def list_children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


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
