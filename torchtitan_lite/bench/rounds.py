"""Measure in rounds: contenders take turns in one process, so only neighbours in time are compared.

    round 1    trainer       bare_loop     transformers  compiled        a turn: n_steps, timed as one
    round 2    bare_loop     transformers  compiled      trainer         another one is first
    ratio      the median, over the rounds, of (speed of one / speed of the other, both of that round)

A speed depends on the machine more than on the code, and on a shared machine it drifts. The ratio of neighbours does
not, and a median ignores the round in which somebody else was busy.
"""

import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import torch

from torchtitan_lite.components.metrics import compute_mfu
from torchtitan_lite.config.flavors import FlopsPerToken
from torchtitan_lite.config.hardware import detect_machine, list_gpus, select_visible
from torchtitan_lite.config.messages import format_table

CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu")  # as nvidia-smi calls them


class BenchFailed(Exception):
    """A bench without a result, or contenders that do not compute the same."""


@dataclass(frozen=True)
class Report:
    """The result of a bench."""

    setting: dict[str, object]  # what ran, on what, with which versions, when
    unit: str  # of the counted work: "tokens"
    units_per_step: dict[str, int]  # contender -> work of its step
    step_times_s: dict[str, list[float]]  # contender -> seconds per step in each round
    absent: dict[str, str]  # contender -> why it did not run
    ratio_of: dict[str, tuple[str, str]]  # ratio -> (contender, the one it is divided by): above 1, the first is faster
    figures: dict[str, list[float]] = field(default_factory=dict)  # numbers without contenders, one a round
    flops_per_token: dict[str, FlopsPerToken] = field(default_factory=dict)  # of contenders that train
    peak_flops: float | None = None  # of the device by its data sheet, FLOP/s; None: unknown, as for a CPU
    matmul_flops: dict[str, float] = field(default_factory=dict)  # contender -> measured beside it, FLOP/s
    memory_gib: dict[str, float] = field(default_factory=dict)  # contender -> as the bench defines it


COLUMNS = {  # rate -> title and format in the table
    "mfu_full": ("MFU", ".1%"),  # share of the peak by the data sheet, attention counted in full
    "mfu_causal": ("causal", ".1%"),  # the same with attention's causal half
    "share_of_matmul": ("of matmul", ".1%"),  # as mfu_full, of the speed of a large matmul
    "memory_gib": ("GiB", ".2f"),
}


# ---------------------------------------------------------------- measuring


def measure_rounds(
    contenders: dict[str, Callable[[], object]],
    *,
    n_rounds: int,
    n_steps: int,
    wait_for_device: Callable[[], None] = lambda: None,
    read_clock_s: Callable[[], float] = time.perf_counter,
    clean_up: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return name -> seconds per step of each round. `clean_up` follows each turn, outside of its time."""
    step_times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for name in order_turns(list(contenders), n_rounds):
        with collection_paused():
            wait_for_device()
            start_s = read_clock_s()
            for _ in range(n_steps):
                contenders[name]()
            wait_for_device()  # a GPU works long after the call has returned
            step_times_s[name].append((read_clock_s() - start_s) / n_steps)
        clean_up()
    return step_times_s


def order_turns(names: list[str], n_rounds: int) -> Iterator[str]:
    """Yield whose turn it is. Another one is first each round."""
    for number in range(n_rounds):
        first = number % len(names)
        yield from names[first:] + names[:first]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Context manager: collects garbage before, and none inside, where it would delay an arbitrary contender."""
    gc.collect(1)  # young objects, so those of the last turn: a full collection takes a fifth of a second
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_setting(bench: str, *packages: str) -> dict[str, object]:
    """Return where and when a bench runs, with versions of Python, torch and the named packages."""
    return {
        "bench": bench,
        "device": detect_machine().name,
        "clocks": read_clocks(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            **{package: find_version(package) for package in packages},
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
    }


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_clocks() -> dict[str, str] | None:
    """Return clocks, power and temperature of the first GPU now; None without nvidia-smi or a GPU."""
    gpus = select_visible(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return None
    query = ["nvidia-smi", f"--id={gpus[0].uuid}", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return dict(zip(CLOCKS, answer.strip().split(", "), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


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
        spread = f"{format_speed(min(speeds))} - {format_speed(max(speeds))}"
        contenders.append((name, format_speed(median(speeds)), spread, seconds, *cells))
    ratios = [("ratio", "median", "lowest - highest", f"of {report.unit}/s")]
    for ratio, values in compare_rounds(report).items():
        spread = f"{min(values):.3f} - {max(values):.3f}"
        ratios.append((ratio, f"{median(values):.3f}", spread, " / ".join(report.ratio_of[ratio])))
    figures = [("figure", "median", "lowest - highest")] * bool(report.figures)
    for name, values in report.figures.items():
        figures.append((name, f"{median(values):.2f}", f"{min(values):.2f} - {max(values):.2f}"))
    blocks = [
        format_table([(name, format_setting(value)) for name, value in report.setting.items()]),
        "\n".join([format_table(contenders, "<><>>>>>"), *(f"{n}  absent: {why}" for n, why in report.absent.items())]),
        format_table(ratios, "<><"),
        *[format_table(figures, "<><")] * bool(figures),
    ]
    return "\n\n".join(blocks)


def format_speed(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"


def format_setting(value: object) -> str:
    """Return {"torch": "2.13.0", "transformers": None} as `torch 2.13.0`."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items() if one is not None)
    return str(value)
