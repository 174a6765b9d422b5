"""Measuring in rounds: contenders take turns in one process, so that only neighbours in time are compared.

    round 1    trainer       bare_loop     transformers  compiled        a turn: n_steps, one reading of the clock
    round 2    bare_loop     transformers  compiled      trainer         another one goes first
    ratio      the median, over the rounds, of (speed of one / speed of the other, both of that round)

Speeds say more about the machine than about the code, and on a shared machine they drift while one looks. The ratio of
neighbours does not, and a median forgets the round in which somebody else was busy.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from torchtitan_lite.components.metrics import compute_mfu
from torchtitan_lite.config.flavors import FlopsPerToken


@dataclass(frozen=True)
class Report:
    """What a bench found out."""

    setting: dict[str, object]  # what ran, on what, with which versions, when
    unit: str  # of the work that is counted: "tokens"
    units_per_step: dict[str, int]  # contender -> work of its step
    step_times_s: dict[str, list[float]]  # contender -> seconds per step in each round
    absent: dict[str, str]  # contender -> why it did not run
    ratio_of: dict[str, tuple[str, str]]  # ratio -> (contender, the one it is divided by): above 1, the first is faster
    figures: dict[str, list[float]] = field(default_factory=dict)  # what has no contenders -> its value in each round
    flops_per_token: dict[str, FlopsPerToken] = field(default_factory=dict)  # of contenders that train
    peak_flops: float | None = None  # of the device on paper, FLOP/s; None: not known, as of a CPU
    matmul_flops: dict[str, float] = field(
        default_factory=dict
    )  # contender -> what the device reached beside it, FLOP/s
    memory_gib: dict[str, float] = field(default_factory=dict)  # contender -> what the bench says it is


COLUMNS = {  # of what a contender makes of the hardware -> title and format in the table
    "mfu_full": ("MFU", ".1%"),  # share of the peak on paper that its FLOPs reach, attention counted in full
    "mfu_causal": ("causal", ".1%"),  # the same with the half of attention that a causal mask leaves
    "share_of_matmul": ("of matmul", ".1%"),  # as mfu_full, of what a large matmul reaches
    "memory_gib": ("GiB", ".2f"),
}


def measure_rounds(
    contenders: dict[str, Callable[[], object]],
    *,
    n_rounds: int,
    n_steps: int,
    wait_for_device: Callable[[], None],
    read_clock_s: Callable[[], float] = time.perf_counter,
    clean_up: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Name -> seconds per step of each round. In every round each contender makes n_steps.

    `clean_up` follows each turn, outside of its time.
    """
    step_times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for name in take_turns(list(contenders), n_rounds):
        with collection_paused():
            wait_for_device()
            start_s = read_clock_s()
            for _ in range(n_steps):
                contenders[name]()
            wait_for_device()  # a GPU works on what it was told long after the call has returned
            step_times_s[name].append((read_clock_s() - start_s) / n_steps)
        clean_up()
    return step_times_s


def take_turns(names: list[str], n_rounds: int) -> Iterator[str]:
    """Every name once a round; another one goes first each time."""
    for n_done in range(n_rounds):
        first = n_done % len(names)
        yield from names[first:] + names[:first]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collects garbage before, and none inside: it would fall to whoever is at work just then."""
    gc.collect(1)  # young objects, so the last turn's: a full collection takes a fifth of a second
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def compare_rounds(report: Report) -> dict[str, list[float]]:
    """Ratio -> its value in each round. A ratio with an absent contender is left out."""
    speeds = list_speeds(report)
    return {
        ratio: [one_speed / other_speed for one_speed, other_speed in zip(speeds[one], speeds[other], strict=True)]
        for ratio, (one, other) in report.ratio_of.items()
        if one in speeds and other in speeds
    }


def report_for_programs(report: Report) -> dict[str, object]:
    """What --json prints."""
    compared = compare_rounds(report)
    speeds = list_speeds(report)
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
    """For people: the setting, a table of contenders, a table of ratios."""
    lines = [f"{name:16}{format_setting(value)}" for name, value in report.setting.items()]
    rates = {name: compute_rates(report, name) for name in report.step_times_s}
    columns = [rate for rate in COLUMNS if any(row.get(rate) is not None for row in rates.values())]
    title = f"{f'{report.unit}/s':>10}  {'lowest - highest':24}{'s/step':>8}"
    lines += ["", f"{'contender':20}{title}" + "".join(f"{COLUMNS[rate][0]:>10}" for rate in columns)]
    for name, speeds in list_speeds(report).items():
        spread = f"{format_speed(min(speeds))} - {format_speed(max(speeds))}"
        line = f"{name:20}{format_speed(median(speeds)):>10}  {spread:24}{median(report.step_times_s[name]):8.3f}"
        values = [(rates[name].get(rate), COLUMNS[rate][1]) for rate in columns]
        lines.append(line + "".join(f"{'-' if value is None else format(value, form):>10}" for value, form in values))
    lines += [f"{name:20}absent: {why}" for name, why in report.absent.items()]
    lines += ["", f"{'ratio':20}{'':6}  {'lowest - highest':18}of {report.unit}/s: median of the ratios of each round"]
    for ratio, values in compare_rounds(report).items():
        spread = f"{min(values):.3f} - {max(values):.3f}"
        lines.append(f"{ratio:20}{median(values):6.3f}  {spread:18}{' / '.join(report.ratio_of[ratio])}")
    if report.figures:
        lines += ["", f"{'figure':24}{'':8}  lowest - highest"]
    for name, values in report.figures.items():
        lines.append(f"{name:24}{median(values):8.2f}  {min(values):.2f} - {max(values):.2f}")
    return "\n".join(lines)


def compute_rates(report: Report, name: str) -> dict[str, float | None]:
    """What a contender makes of the hardware: the keys of COLUMNS that apply to it."""
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


def list_speeds(report: Report) -> dict[str, list[float]]:
    """Contender -> units per second in each round."""
    return {
        name: [report.units_per_step[name] / seconds for seconds in times_s]
        for name, times_s in report.step_times_s.items()
    }


def format_speed(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"


def format_setting(value: object) -> str:
    """{"torch": "2.13.0", "transformers": None} as `torch 2.13.0`."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items() if one is not None)
    return str(value)
