"""`bench`: the table of benches, and the report of one for people and for programs."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from statistics import median
from tempfile import gettempdir

from torchtitan_lite.components.metrics import compute_mfu
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.tools.bench.gpu import bench_gpu
from torchtitan_lite.tools.bench.rounds import BenchFailed, Report
from torchtitan_lite.tools.bench.step import bench_step
from torchtitan_lite.tools.tables import format_table

BENCHES: dict[str, Callable[..., Report]] = {"step": bench_step, "gpu": bench_gpu}
COLUMNS = {  # rate -> title and format in the table
    "mfu_full": ("MFU", ".1%"),  # share of the peak by the data sheet, attention counted in full
    "mfu_causal": ("causal", ".1%"),  # the same with attention's causal half
    "share_of_matmul": ("of matmul", ".1%"),  # as mfu_full, of the speed of a large matmul
    "memory_gib": ("GiB", ".2f"),
}


def main(options: Namespace) -> int:
    """Return the exit status: 0 measured, 1 failed or contenders that compute different things, 2 wrong input."""
    chosen = vars(options)
    bench, as_json = chosen.pop("bench"), chosen.pop("json")
    try:
        report = BENCHES[bench](**chosen)
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


# ---------------------------------------------------------------- reporting


def list_speeds(report: Report) -> dict[str, list[float]]:
    """Return contender -> units per second in each round."""
    units = report.units_per_step
    return {name: [units[name] / seconds for seconds in times_s] for name, times_s in report.step_times_s.items()}


def compare_rounds(report: Report) -> dict[str, list[float]]:
    """Return ratio -> its value in each round, without ratios of absent contenders."""
    speeds = list_speeds(report)
    return {
        ratio: [one_speed / other_speed for one_speed, other_speed in zip(speeds[one], speeds[other], strict=True)]
        for ratio, (one, other) in report.ratio_of.items()
        if one in speeds and other in speeds
    }


def compute_rates(report: Report, name: str) -> dict[str, float | None]:
    """Return the keys of COLUMNS that apply to a contender."""
    rates: dict[str, float | None] = {}
    if name in report.flops_per_token:
        flops, tokens_per_s = report.flops_per_token[name], median(list_speeds(report)[name])
        rates["mfu_full"] = compute_mfu(flops.full, tokens_per_s, report.peak_flops)
        rates["mfu_causal"] = compute_mfu(flops.causal, tokens_per_s, report.peak_flops)
        if name in report.matmul_flops:
            rates["share_of_matmul"] = flops.full * tokens_per_s / report.matmul_flops[name]
    if name in report.memory_gib:
        rates["memory_gib"] = report.memory_gib[name]
    return rates


def report_for_programs(report: Report) -> dict[str, object]:
    """Return what --json prints."""
    compared, speeds = compare_rounds(report), list_speeds(report)
    return {
        **report.setting,
        "ratios": {ratio: median(values) for ratio, values in compared.items()},
        "ratio_of": {ratio: list(report.ratio_of[ratio]) for ratio in compared},
        "contenders": {
            name: {
                f"{report.unit}_per_s": {
                    "median": median(speeds[name]),
                    "min": min(speeds[name]),
                    "max": max(speeds[name]),
                },
                "step_time_s": {"median": median(times_s), "rounds": times_s},
                **compute_rates(report, name),
            }
            for name, times_s in report.step_times_s.items()
        },
        "absent": report.absent,
        "figures": {name: {"median": median(values), "rounds": values} for name, values in report.figures.items()},
    }


def describe(report: Report) -> str:
    """Return the report for people: the setting, a table of contenders, a table of ratios."""
    rates = {name: compute_rates(report, name) for name in report.step_times_s}
    columns = [rate for rate in COLUMNS if any(row.get(rate) is not None for row in rates.values())]
    titles = [COLUMNS[rate][0] for rate in columns]
    contenders = [("contender", f"{report.unit}/s", "lowest - highest", "s/step", *titles)]
    for name, speeds in list_speeds(report).items():
        values = [(rates[name].get(rate), COLUMNS[rate][1]) for rate in columns]
        cells = ["-" if value is None else format(value, form) for value, form in values]
        seconds = f"{median(report.step_times_s[name]):.3f}"
        contenders.append((name, *format_spread(speeds, format_speed), seconds, *cells))
    ratios = [("ratio", "median", "lowest - highest", f"of {report.unit}/s")]
    for ratio, values in compare_rounds(report).items():
        ratios.append((ratio, *format_spread(values, "{:.3f}".format), " / ".join(report.ratio_of[ratio])))
    figures = [("figure", "median", "lowest - highest")] * bool(report.figures)
    figures += [(name, *format_spread(values, "{:.2f}".format)) for name, values in report.figures.items()]
    blocks = [
        format_table([(name, format_setting(value)) for name, value in report.setting.items()]),
        "\n".join([format_table(contenders, "<><>>>>>"), *(f"{n}  absent: {why}" for n, why in report.absent.items())]),
        format_table(ratios, "<><"),
        *[format_table(figures, "<><")] * bool(figures),
    ]
    return "\n\n".join(blocks)


def format_spread(values: list[float], write: Callable[[float], str]) -> tuple[str, str]:
    return write(median(values)), f"{write(min(values))} - {write(max(values))}"


def format_speed(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"


def format_setting(value: object) -> str:
    """Return {"torch": "2.13.0", "transformers": None} as `torch 2.13.0`."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items() if one is not None)
    return str(value)
