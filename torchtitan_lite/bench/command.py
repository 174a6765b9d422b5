"""`bench`: the table of benches. Each file says what it compares; rounds.py measures and prints."""

import json
import sys
from collections.abc import Callable
from tempfile import gettempdir

from torchtitan_lite.bench.gpu import bench_gpu
from torchtitan_lite.bench.io import bench_io
from torchtitan_lite.bench.peers import bench_peers
from torchtitan_lite.bench.rounds import BenchFailed, Report, describe, report_for_programs
from torchtitan_lite.bench.step import bench_step
from torchtitan_lite.config.command_lines import make_bench_parser
from torchtitan_lite.config.messages import ConfigError

BENCHES: dict[str, Callable[..., Report]] = {"step": bench_step, "gpu": bench_gpu, "io": bench_io}


def main(args: list[str]) -> int:
    """Return the exit status: 0 measured, 1 failed or contenders that compute different things, 2 wrong input."""
    options = vars(make_bench_parser().parse_args(args))
    bench, as_json = options.pop("bench"), options.pop("json")
    measure = bench_peers if "peers" in options else BENCHES[bench]
    try:
        report = measure(**options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BenchFailed as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error}: a bench writes to {gettempdir()}; set TMPDIR to another folder", file=sys.stderr)
        return 1
    print(json.dumps(report_for_programs(report)) if as_json else describe(report))
    return 0
