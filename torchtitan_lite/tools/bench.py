"""`bench`: the table of benches. Each says in its own file what it compares; how they measure is in rounds.py."""

import json
import sys
from collections.abc import Callable
from tempfile import gettempdir

from torchtitan_lite.command_lines import make_bench_parser
from torchtitan_lite.components.preparation.work_folder import Unfinished
from torchtitan_lite.tools.bench_checkpoint import bench_checkpoint
from torchtitan_lite.tools.bench_data import bench_data
from torchtitan_lite.tools.bench_gpu import NoGpu, bench_gpu
from torchtitan_lite.tools.bench_startup import StartFailed, bench_startup
from torchtitan_lite.tools.bench_step import UnequalContenders, bench_step
from torchtitan_lite.tools.rounds import Report, describe, report_for_programs

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
