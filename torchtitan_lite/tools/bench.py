"""`python -m torchtitan_lite bench NAME`: how fast, as ratios against references measured in the same run.

What each bench compares is said in its own file; how they measure, in rounds.py. The numbers are for reading: a bench
never fails because something was slow.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import gettempdir

from torchtitan_lite.components.preparation.work_folder import Unfinished
from torchtitan_lite.tools.bench_checkpoint import bench_checkpoint
from torchtitan_lite.tools.bench_data import bench_data
from torchtitan_lite.tools.bench_gpu import NoGpu, bench_gpu
from torchtitan_lite.tools.bench_startup import StartFailed, bench_startup
from torchtitan_lite.tools.bench_step import UnequalContenders, bench_step
from torchtitan_lite.tools.rounds import Report, describe, report_for_programs


@dataclass(frozen=True)
class Bench:
    measure: Callable[..., Report]
    compares: str
    options: tuple[str, ...] = ("--rounds", "--steps")  # rows of OPTIONS


BENCHES = {
    "step": Bench(
        bench_step, "a training step with a hand-written loop, with transformers' Llama, and compiled with eager"
    ),
    "data": Bench(
        bench_data, "tokenising with tiktoken, reading with plain mapped files, and a batch with a debug step"
    ),
    "checkpoint": Bench(
        bench_checkpoint, "saving and loading with the speeds of disk and hash; how long a save blocks"
    ),
    "startup": Bench(
        bench_startup,
        "what a user waits for before the first step, compiled cold and warm, with importing torch",
        ("--rounds",),
    ),
    "gpu": Bench(
        bench_gpu,
        "1B, 3B and 8B on one GPU, eager, compiled and in float8, with the device's largest matmuls",
        ("--rounds", "--steps", "--out", "--seconds", "--tiny"),
    ),
}


def main(args: list[str]) -> int:
    """Exit status: 0 measured, 1 it failed or the contenders do not compute the same, 2 wrong input."""
    options = vars(make_parser().parse_args(args))
    bench, as_json = BENCHES[options.pop("bench")], options.pop("json")
    try:
        report = bench.measure(**options)
    except NoGpu as error:
        print(error, file=sys.stderr)
        return 2
    except (UnequalContenders, Unfinished, StartFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error}: what a bench writes lies in {gettempdir()}, and TMPDIR names another folder", file=sys.stderr)
        return 1
    print(json.dumps(report_for_programs(report)) if as_json else describe(report))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """A sub-command for each bench. What is not given, the bench decides."""
    parser = argparse.ArgumentParser("python -m torchtitan_lite bench", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = parser.add_subparsers(dest="bench", metavar="NAME", required=True, title="benches")
    for name, bench in BENCHES.items():
        of_bench = names.add_parser(name, help=bench.compares, description=bench.compares, allow_abbrev=False)
        of_bench.add_argument("--json", action="store_true", help="print for programs")
        for option in bench.options:
            of_bench.add_argument(option, default=argparse.SUPPRESS, **OPTIONS[option])
    return parser


def at_least(minimum: int) -> Callable[[str], int]:
    """Type of a command-line argument: a whole number that is not below `minimum`."""

    def read_count(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {minimum} or more")
        return int(text)

    return read_count


OPTIONS: dict[str, dict[str, object]] = {
    "--rounds": {"dest": "n_rounds", "type": at_least(3), "help": "turns of each contender"},
    "--steps": {"dest": "n_steps", "type": at_least(1), "help": "steps of a turn"},
    "--out": {"metavar": "FILE", "help": "keeps each row as a line of JSON; default: in assets/benchmarks/"},
    "--seconds": {"type": at_least(1), "help": "for the whole table; what does not fit is named"},
    "--tiny": {"action": "store_true", "help": "models that a CPU carries too: its numbers mean nothing"},
}
