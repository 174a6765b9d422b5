"""What snapshots cost a step: rounds of 20 steps with and 20 steps without them, in turns, in one run.

    PYTHONPATH=.:tests python tests/measure_snapshots.py disabled 30

The arguments are checkpoint.async_mode and the number of rounds. Rank 0 prints medians and quartiles over the rounds.
`blocked` is the time in Snapshots.after_step; `beyond it` is the rest of what a step with snapshots takes longer.
"""

import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import measure_snapshots  # the module that ranks import; as a script, this file is __main__

import train
from torchtitan_lite.faults.hang_watch import HangWatch
from torchtitan_lite.faults.snapshots import Snapshots
from torchtitan_lite.tools import launch

INTERVAL, N_STEPS = 10, 20  # between snapshots; of half a round
periods_s, blocked_s = defaultdict(list), defaultdict(list)  # by half round


class Measured(Snapshots):
    def after_step(self, step: int, parameters: dict, **options: object) -> None:
        began_s, half = time.perf_counter(), (step - 1) // N_STEPS
        if half % 2:
            super().after_step(step, parameters, **options)
        blocked_s[half].append(time.perf_counter() - began_s)


class Clock(HangWatch):
    last_s = 0.0

    def begin(self, step: int) -> None:
        now_s = time.perf_counter()
        if step > 1:
            periods_s[(step - 2) // N_STEPS].append(now_s - self.last_s)
        self.last_s = now_s
        super().begin(step)


def show(name: str, percents: list[float]) -> None:
    low, median, high = statistics.quantiles(percents, n=4)
    print(f"{name:<12} {median:+5.1f} % of a step ({low:+.1f} to {high:+.1f})")


def run_rank(args: list[str], folder: Path) -> int:
    """Train as one rank, and print what was measured."""
    train.Snapshots, train.HangWatch = Measured, Clock
    status = launch.run_rank(args, folder)
    n_rounds = len(blocked_s) // 2 - 1  # the first round warms up
    plain, saved = (
        [statistics.mean(periods_s[2 * n + at]) for n in range(1, n_rounds + 1)] for at in (0, 1)
    )
    blocked = [statistics.mean(blocked_s[2 * n + 1]) for n in range(1, n_rounds + 1)]
    print(f"{n_rounds} rounds: a step without snapshots {1e3 * statistics.median(plain):.0f} ms")
    print(f"a snapshot blocks {1e3 * INTERVAL * statistics.median(blocked):.0f} ms")
    show("longer", [100 * (new / old - 1) for new, old in zip(saved, plain, strict=True)])
    show("blocked", [100 * part / old for part, old in zip(blocked, plain, strict=True)])
    rest = [
        100 * ((new - part) / old - 1) for new, part, old in zip(saved, blocked, plain, strict=True)
    ]
    show("beyond it", rest)
    return status


def main(mode: str, n_rounds: int) -> int:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        args = [
            "--config=debug",
            "--checkpoint.no_enable",
            "--validation.no_enable",
            "--metrics.log_freq=1000",
        ]
        args += [
            f"--training.steps={2 * N_STEPS * (n_rounds + 1) + 1}",
            f"--job.dump_folder={folder}/run",
        ]
        args += [
            f"--checkpoint.local_folder={folder}/snapshots",
            f"--checkpoint.local_interval={INTERVAL}",
        ]
        return launch.main(
            Namespace(config_args=[*args, f"--checkpoint.async_mode={mode}"]),
            measure_snapshots.run_rank,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
