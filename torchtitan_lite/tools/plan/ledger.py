"""The forecast of a step by the closed form, and the ledger of a run: the forecast beside what the run measured.

                                   forecast             measured
    sent over tp                   2.1 MiB in 54 calls  2.1 MiB in 54 calls  by the rank that moves most over an axis
    peak memory of a rank          25.3 MiB             61.2 MiB             of the one with the highest peak
    idle in the pipeline (bubble)  20.0%                23.1%                of the time of all ranks
    time of the step               0.0497 s             0.414 s
    tokens a second, per rank      10,300               1,237

Every run logs its ledger once: the forecast, before it builds the model; with metrics.measure_ledger both columns,
after one step that it measures (step_measure.py), and metrics.jsonl gets them too. `plan --score RUN` reads them back.
Forecast memory and pipelines, and the measured pipeline, are also drawn as text for TensorBoard.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError, Problem, format_bytes, format_table
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.plan.cluster import CLUSTERS, Cluster, find_row
from torchtitan_lite.tools.plan.memory import Memory, estimate_memory, weigh_waiting
from torchtitan_lite.tools.plan.simulator import (
    PipelineOrder,
    Timeline,
    count_in_flight,
    draw_text,
    list_samples,
    pipeline_order,
    plan_order,
    simulate,
)
from torchtitan_lite.tools.plan.step_time import StepTimeModel
from torchtitan_lite.tools.plan.traffic import Moved, estimate_traffic, max_moved, sum_moved
from torchtitan_lite.tools.plan.workload import Workload, describe_workload

SECONDS_PER_DAY = 86400


# ---------------------------------------------------------------- the forecast


@dataclass(frozen=True)
class Rate:
    """Speed of a step."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu_full: float  # of the bf16 peak, attention counted in full
    mfu_causal: float

    def count_days(self, n_tokens: float, world_size: int) -> float:
        """Return the days to train on `n_tokens` without any stop."""
        return n_tokens / (self.tokens_per_s_per_gpu * world_size) / SECONDS_PER_DAY


@dataclass(frozen=True)
class Forecast:
    """Speed of a step, and its waits."""

    rate: Rate
    bubble: float  # idle fraction of the pipeline
    exposed_s: dict[str, float]  # axis -> seconds in which the worst rank waits for others, without the bubble
    timeline: Timeline | None = None  # None if only short schedules were simulated


def forecast(workload: Workload, cluster: Cluster, order: PipelineOrder) -> Forecast:
    """Forecast one step from the order of all its microbatches."""
    model = StepTimeModel(workload, cluster)
    timeline = simulate(order, model.durations)
    rate = rate_step(workload, cluster, timeline.end_time + model.once_s + model.optimizer_s)
    return Forecast(rate, timeline.bubble, model.exposed_s, timeline)


def forecast_quickly(model: StepTimeModel, schedule: str) -> Forecast:
    """Forecast a step from short schedules where that of all microbatches is long."""
    layout, durations = model.workload.layout, model.durations
    per_rank, end_time = len(layout.stages) // layout.pp, 0.0
    for n_microbatches, weight in list_samples(layout.n_microbatches, layout.pp):
        order = pipeline_order(schedule, layout.pp, n_microbatches, per_rank)
        end_time += weight * simulate(order, durations).end_time
    rate = rate_step(model.workload, model.cluster, end_time + model.once_s + model.optimizer_s)
    bubble = max(0.0, 1 - layout.n_microbatches * sum(durations.busy) / (end_time * layout.pp))
    return Forecast(rate, bubble, model.exposed_s)


def rate_step(workload: Workload, cluster: Cluster, step_time_s: float) -> Rate:
    """Return tokens per second and MFU of a step that takes `step_time_s`, forecast or measured."""
    tokens_per_s = workload.tokens_per_step / step_time_s / workload.layout.world_size
    flops = count_flops_per_token(workload.args, workload.seq_len)
    peak = cluster.peak("float32" if workload.compute_dtype == "float32" else "bfloat16")
    return Rate(step_time_s, tokens_per_s, tokens_per_s * flops.full / peak, tokens_per_s * flops.causal / peak)


def list_memory(workload: Workload, order: PipelineOrder) -> list[Memory]:
    """Return the peak memory of each pp rank."""
    weight = weigh_waiting(workload)
    return [estimate_memory(workload, rank, count_in_flight(row, weight)) for rank, row in enumerate(order)]


# ---------------------------------------------------------------- both columns


@dataclass(frozen=True)
class Costs:
    """Costs of one step. An unknown one is None, or missing in `traffic`."""

    traffic: dict[str, Moved] = field(default_factory=dict)  # mesh axis -> of the rank that moves most over it
    memory_bytes: float | None = None  # peak of the rank with the highest peak
    bubble: float | None = None  # idle share of the pipeline; None without one
    step_time_s: float | None = None  # of train_step, without the wait for its batch
    tokens_per_s_per_rank: float | None = None  # padding included


# Field of Costs -> its name for people, and its format.
QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "memory_bytes": ("peak memory of a rank", format_bytes),
    "bubble": ("idle in the pipeline (bubble)", "{:.1%}".format),
    "step_time_s": ("time of the step", "{:.3g} s".format),
    "tokens_per_s_per_rank": ("tokens a second, per rank", "{:,.0f}".format),
}


@dataclass(frozen=True)
class Ledger:
    """Both columns of one run."""

    layout: str
    hardware: str  # a row of CLUSTERS, or the name of a machine without one
    predicted: Costs
    notes: list[str]  # what the numbers leave out
    measured: Costs | None = None
    step: int | None = None  # the measured one


def open_ledger(
    config: Config, model_args: ModelArgs, layout: Layout, machine: Machine
) -> tuple[Ledger, dict[str, str]]:
    """Forecast a run on machines like this one, in milliseconds. Returns the ledger, and pictures by their names.

    What cannot be forecast becomes a note and no error: the run does not depend on it.
    """
    row = find_row(machine)
    section = config.parallelism
    schedule = section.pipeline_parallel_schedule_csv or section.pipeline_parallel_schedule
    n, size = layout.n_microbatches, layout.microbatch_size
    batch = f"{n} microbatch{'es' * (n > 1)} of {size} x {config.training.seq_len} tokens"
    title = ", ".join([str(layout), *[schedule] * (layout.pp > 1), batch])
    notes: list[str] = []
    ledger = Ledger(title, row or machine.name, Costs(), notes)
    try:
        workload = describe_workload(config, model_args, layout)
    except ConfigError as error:
        notes.extend(f"no forecast: {problem}" for problem in error.problems)
        return ledger, {}
    order = plan_order(section, layout)
    memory = list_memory(workload, order)
    pictures = {"memory forecast": draw_memory(memory)}
    ranks = [estimate_traffic(workload, pp_rank, order).items() for pp_rank in range(layout.pp)]
    most = max_moved(sum_moved((axis, each.n_calls, each.n_bytes) for (axis, _), each in moved) for moved in ranks)
    costs = {
        "traffic": {axis: replace(moved, n_calls=round(moved.n_calls)) for axis, moved in most.items()},
        "memory_bytes": max(of_rank.live for of_rank in memory),
    }
    if config.training.enable_cpu_offload:
        costs["memory_bytes"] = None
        notes.append("no memory: with training.enable_cpu_offload part of it is on the host")
    elif machine.device_type == "cpu":
        notes.append("memory: the forecast counts tensors; measured is what the process grew by, libraries included")
    if layout.ep > 1:
        notes.append("experts: the forecast counts even loads; measured are those of the step's tokens")
    if row is None:
        known = ", ".join(CLUSTERS)
        notes.append(f"no times: config/hardware.py has no row for {machine.name}, only {known}")
    else:
        step = forecast(workload, CLUSTERS[row], order)
        if layout.pp > 1:
            costs["bubble"] = step.bubble
            pictures["pipeline forecast"] = draw_text(step.timeline)
        costs["step_time_s"] = step.rate.step_time_s
        costs["tokens_per_s_per_rank"] = step.rate.tokens_per_s_per_gpu
    if row == "cpu":
        notes.append("times: the forecast is for ranks that have a core each")
    return replace(ledger, predicted=Costs(**costs)), pictures


def draw_memory(ranks: list[Memory], width: int = 60) -> str:
    """Return a bar for each pp rank, of what it holds at its peak, on one scale; and the bytes of each part."""
    per_column = max(memory.live for memory in ranks) / width
    letters = dict(zip(vars(ranks[0]), "PGOUARW", strict=True))  # U: gathered, so unsharded
    bars, rows = [], [("", *(f"{letter} {part}" for part, letter in letters.items()), "live")]
    for rank, memory in enumerate(ranks):
        ends = [round(end / per_column) for end in accumulate(vars(memory).values())]
        pieces = zip(letters.values(), [0, *ends], ends, strict=False)
        bars.append(
            f"pp rank {rank:<{len(str(len(ranks) - 1))}}  " + "".join(c * (end - start) for c, start, end in pieces)
        )
        rows.append((f"pp rank {rank}", *map(format_bytes, [*vars(memory).values(), memory.live])))
    return "\n".join([*bars, "", format_table(rows)])


# ---------------------------------------------------------------- the log


def describe(ledger: Ledger) -> str:
    """Return the block of the log; the measured column only after the measured step."""
    if ledger.measured is None:
        title = f"what a step should cost here ({ledger.hardware}): {ledger.layout}"
    else:
        title = f"what step {ledger.step} cost, and its forecast ({ledger.hardware}): {ledger.layout}"
    rows = [("", "forecast", "measured"), *list_quantities(ledger).values()]
    if ledger.measured is None:
        rows = [row[:2] for row in rows]
    table = [format_table(rows)] * (len(rows) > 1)
    return "\n".join([title, *table, *(f"  {note}" for note in ledger.notes)])


def list_quantities(ledger: Ledger) -> dict[str, tuple[str, str, str]]:
    """Return each known quantity, by its name in JSON: its name for people, predicted, measured."""
    both = ledger.predicted, ledger.measured or Costs()
    rows = {}
    for axis in {**both[0].traffic, **both[1].traffic}:
        rows[f"over {axis}"] = f"  sent over {axis}", *(format_moved(costs.traffic.get(axis)) for costs in both)
    for name, (words, write) in QUANTITIES.items():
        pair = [getattr(costs, name) for costs in both]
        if pair != [None, None]:
            rows[name] = f"  {words}", *("-" if value is None else write(value) for value in pair)
    return rows


def format_moved(moved: Moved | None) -> str:
    if moved is None:
        return "-"
    return f"{format_bytes(moved.n_bytes)} in {moved.n_calls:,} call{'s' * (moved.n_calls != 1)}"


# ---------------------------------------------------------------- plan --score


def print_score(run: Path, *, as_json: bool) -> None:
    """Print both columns of a run and their ratio. `run`: a dump folder, or its metrics.jsonl. Raises ConfigError."""
    ledger = find_ledger(run)
    ratios = list_ratios(ledger)
    if as_json:
        print(json.dumps({**asdict(ledger), "measured_over_predicted": ratios}))
        return
    table = [("", "forecast", "measured", "measured / forecast")]
    for name, cells in list_quantities(ledger).items():
        table.append((*cells, f"{ratios[name]:.3g}" if name in ratios else "-"))
    print(f"{run}: {ledger.layout}\nforecast ({ledger.hardware}), and measured in step {ledger.step}")
    print("\n".join([format_table(table), *(f"  {note}" for note in ledger.notes)]))


def list_ratios(ledger: Ledger) -> dict[str, float]:
    """Return measured over predicted, where both are known."""
    predicted, measured = ledger.predicted, ledger.measured
    pairs = {name: (getattr(predicted, name), getattr(measured, name)) for name in QUANTITIES}
    for axis, moved in predicted.traffic.items():
        if axis in measured.traffic:
            pairs[f"over {axis}"] = moved.n_bytes, measured.traffic[axis].n_bytes
    return {name: measured / predicted for name, (predicted, measured) in pairs.items() if predicted and measured}


def find_ledger(run: Path) -> Ledger:
    """Return the last ledger in metrics.jsonl: each process of a resumed run writes one. Raises ConfigError."""
    file = run / "metrics.jsonl" if run.is_dir() else run
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why, remedy = f"{file} cannot be read: {error}", "Name the dump folder of a run"
        raise ConfigError([Problem("--score", str(run), why, remedy)]) from error
    ledgers = [values for line in lines if (values := read_ledger(line))]
    if not ledgers:
        why = f"none of the {len(lines)} lines of {file} has a ledger"
        remedy = "Run with metrics.measure_ledger = true: the ledger comes with the first line logged after step 2 or 3"
        raise ConfigError([Problem("--score", str(run), why, remedy)])
    both = {}
    for name in ("predicted", "measured"):
        traffic = {axis: Moved(**moved) for axis, moved in ledgers[-1][name]["traffic"].items()}
        both[name] = Costs(**{**ledgers[-1][name], "traffic": traffic})
    return Ledger(**{**ledgers[-1], **both})


def read_ledger(line: str) -> dict | None:
    """Return the ledger in a line of metrics.jsonl; None without one, or if a kill cut the line."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    return values.get("ledger") if isinstance(values, dict) else None
