"""`bench`: the table of benches. Each says in its own file what it compares; how they measure is in rounds.py."""

import json
import sys
from collections.abc import Callable
from tempfile import gettempdir

from torchtitan_lite.bench.checkpoint import bench_checkpoint
from torchtitan_lite.bench.data import bench_data
from torchtitan_lite.bench.gpu import NoGpu, bench_gpu
from torchtitan_lite.bench.rounds import Report, describe, report_for_programs
from torchtitan_lite.bench.startup import StartFailed, bench_startup
from torchtitan_lite.bench.step import UnequalContenders, bench_step
from torchtitan_lite.config.command_lines import make_bench_parser
from torchtitan_lite.data.prepare import Unfinished

BENCHES: dict[str, Callable[..., Report]] = {
    "step": bench_step,
    "data": bench_data,
    "checkpoint": bench_checkpoint,
    "startup": bench_startup,
    "gpu": bench_gpu,
}


def main(args: list[str]) -> int:
    """Exit status: 0 measured, 1 it failed or the contenders do not compute the same, 2 wrong input."""
    options = vars(make_bench_parser().parse_args(args))
    measure, as_json = BENCHES[options.pop("bench")], options.pop("json")
    try:
        report = measure(**options)
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
