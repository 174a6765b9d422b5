"""`python -m torchtitan_lite bench NAME`: how fast, as ratios against references measured in the same run.

What each bench compares is said in its own file; how they measure, in rounds.py. The numbers are for reading: a bench
never fails because something was slow.
"""

import argparse
import json
import sys
from collections.abc import Callable

from torchtitan_lite.tools.bench_checkpoint import bench_checkpoint
from torchtitan_lite.tools.bench_step import UnequalContenders, bench_step
from torchtitan_lite.tools.rounds import Report, describe, report_for_programs

BENCHES: dict[
    str, tuple[Callable[..., Report], str]
] = {  # name -> (function of n_rounds and n_steps, what it compares)
    "step": (bench_step, "a training step with a hand-written loop, with transformers' Llama, and compiled with eager"),
    "checkpoint": (bench_checkpoint, "saving and loading with the speeds of disk and hash; how long a save blocks"),
}


def main(args: list[str]) -> int:
    """Exit status: 0 measured, 1 the contenders do not compute the same, 2 wrong input."""
    parser = argparse.ArgumentParser("python -m torchtitan_lite bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["benches:", *(f"  {name:10} {compares}" for name, (_, compares) in BENCHES.items())])
    parser.add_argument("bench", choices=BENCHES, metavar="NAME", help="one of " + ", ".join(BENCHES))
    parser.add_argument("--rounds", type=at_least(3), default=5, help="turns of each contender (%(default)s)")
    parser.add_argument("--steps", type=at_least(1), default=5, help="steps of a turn (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print for programs")
    options = parser.parse_args(args)
    measure, _ = BENCHES[options.bench]
    try:
        report = measure(n_rounds=options.rounds, n_steps=options.steps)
    except UnequalContenders as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(report_for_programs(report)) if options.json else describe(report))
    return 0


def at_least(minimum: int) -> Callable[[str], int]:
    """Type of a command-line argument: a whole number that is not below `minimum`."""

    def read_count(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
        return int(text)

    return read_count
