"""`python -m torchtitan_lite bench NAME`: how fast, as ratios against references measured in the same run.

What each bench compares is said in its own file; how they measure, in rounds.py. The numbers are for reading: a bench
never fails because something was slow.
"""

import argparse
import json
import sys
from collections.abc import Callable
from tempfile import gettempdir

from torchtitan_lite.components.preparation.work_folder import Unfinished
from torchtitan_lite.tools.bench_checkpoint import bench_checkpoint
from torchtitan_lite.tools.bench_data import bench_data
from torchtitan_lite.tools.bench_step import UnequalContenders, bench_step
from torchtitan_lite.tools.rounds import Report, describe, report_for_programs

BENCHES: dict[
    str, tuple[Callable[..., Report], str]
] = {  # name -> (function of n_rounds and n_steps, what it compares)
    "step": (bench_step, "a training step with a hand-written loop, with transformers' Llama, and compiled with eager"),
    "data": (bench_data, "tokenising with tiktoken, reading with plain mapped files, and a batch with a debug step"),
    "checkpoint": (bench_checkpoint, "saving and loading with the speeds of disk and hash; how long a save blocks"),
}


def main(args: list[str]) -> int:
    """Exit status: 0 measured, 1 it failed or the contenders do not compute the same, 2 wrong input."""
    parser = argparse.ArgumentParser("python -m torchtitan_lite bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["benches:", *(f"  {name:10} {compares}" for name, (_, compares) in BENCHES.items())])
    parser.add_argument("bench", choices=BENCHES, metavar="NAME", help="one of " + ", ".join(BENCHES))
    # what is not given, the bench decides
    parser.add_argument(
        "--rounds", dest="n_rounds", type=at_least(3), default=argparse.SUPPRESS, help="turns of each contender"
    )
    parser.add_argument("--steps", dest="n_steps", type=at_least(1), default=argparse.SUPPRESS, help="steps of a turn")
    parser.add_argument("--json", action="store_true", help="print for programs")
    options = vars(parser.parse_args(args))
    measure, _ = BENCHES[options.pop("bench")]
    as_json = options.pop("json")
    try:
        report = measure(**options)
    except (UnequalContenders, Unfinished) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error}: what a bench writes lies in {gettempdir()}, and TMPDIR names another folder", file=sys.stderr)
        return 1
    print(json.dumps(report_for_programs(report)) if as_json else describe(report))
    return 0


def at_least(minimum: int) -> Callable[[str], int]:
    """Type of a command-line argument: a whole number that is not below `minimum`."""

    def read_count(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
        return int(text)

    return read_count
