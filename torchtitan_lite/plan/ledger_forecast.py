"""The ledger of a run: what the closed form forecasts of a step, and beside it what the run measured.

                        predicted            measured
    over tp             2.1 MiB in 54 calls  2.1 MiB in 54 calls  bytes that a rank moves: the one that moves most
    memory at the peak  25.3 MiB             61.2 MiB    of the rank that holds most
    bubble              20.0%                23.1%       idle share of the pipeline
    step time           0.0497 s             0.414 s
    tokens/s/rank       10,300               1,237

Numbers only: plan/ledger.py measures and logs, plan/score.py reads it back from metrics.jsonl.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torchtitan_lite.config.cluster import CLUSTERS, find_row
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config, ConfigError
from torchtitan_lite.config.tables import format_bytes, format_table
from torchtitan_lite.plan.forecast import forecast, list_all_traffic, list_memory
from torchtitan_lite.plan.simulator import Rows
from torchtitan_lite.plan.traffic import Moved, Traffic
from torchtitan_lite.plan.workload import describe_workload


@dataclass(frozen=True)
class Costs:
    """Of one step. What is not known is None, or left out of `traffic`."""

    traffic: dict[str, Moved] = field(default_factory=dict)  # mesh axis -> of the rank that moves most over it
    memory_bytes: float | None = None  # at the peak, of the rank that holds most
    bubble: float | None = None  # idle share of the pipeline; None without one
    step_time_s: float | None = None  # of train_step, its batch being there
    tokens_per_s_per_rank: float | None = None  # padding included


# Field of Costs -> its name for people, and how it is written.
QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "memory_bytes": ("memory at the peak", format_bytes),
    "bubble": ("bubble", "{:.1%}".format),
    "step_time_s": ("step time", "{:.3g} s".format),
    "tokens_per_s_per_rank": ("tokens/s/rank", "{:,.0f}".format),
}


@dataclass(frozen=True)
class Ledger:
    """One run's."""

    layout: str
    hardware: str  # a row of CLUSTERS, or the name of a machine that has none
    predicted: Costs
    notes: list[str]  # what the numbers leave out
    measured: Costs | None = None
    step: int | None = None  # that was measured


def open_ledger(config: Config, shape: ModelArgs, layout: Layout, machine: Machine, rows: Rows) -> Ledger:
    """The forecast for a run on machines like this one. `rows`: the order of work of each pp rank (schedule_order.py).

    Takes milliseconds. What cannot be forecast is a note and no error: the run does not depend on it.
    """
    row = find_row(machine)
    ledger = Ledger(describe_layout(config, layout), row or machine.name, Costs(), [])
    try:
        workload = describe_workload(config, shape, layout)
    except ConfigError as error:
        ledger.notes.extend(f"no forecast: {problem}" for problem in error.problems)
        return ledger
    costs = {
        "traffic": sum_by_axis(list_all_traffic(workload, rows)),
        "memory_bytes": max(memory.live for memory in list_memory(workload, rows)),
    }
    if config.training.enable_cpu_offload:
        costs["memory_bytes"] = None
        ledger.notes.append("no memory: with training.enable_cpu_offload part of it is on the host")
    elif machine.device_type == "cpu":
        ledger.notes.append(
            "memory: predicted of tensors; measured, what the process has grown by since before it built the model"
        )
    if row is None:
        known = ", ".join(CLUSTERS)
        ledger.notes.append(f"no times: config/cluster.py has no row for {machine.name}, only {known}")
    else:
        step = forecast(workload, CLUSTERS[row], rows)
        costs["bubble"] = step.bubble if layout.pp > 1 else None
        costs["step_time_s"] = step.rate.step_time_s
        costs["tokens_per_s_per_rank"] = step.rate.tokens_per_s_per_gpu
    if row == "cpu":
        ledger.notes.append("times: predicted for one core a rank")
    return Ledger(ledger.layout, ledger.hardware, Costs(**costs), ledger.notes)


def describe_layout(config: Config, layout: Layout) -> str:
    section = config.parallelism
    schedule = section.pipeline_parallel_schedule_csv or section.pipeline_parallel_schedule
    batch = f"microbatches: {layout.n_microbatches} x {layout.microbatch_size} x {config.training.seq_len} tokens"
    return ", ".join([str(layout), *[schedule] * (layout.pp > 1), batch])


def sum_by_axis(traffic: list[list[Traffic]]) -> dict[str, Moved]:
    """All operations of an axis together, of the pp rank that moves most over it."""
    most: dict[str, Moved] = {}
    for of_rank in traffic:
        for axis in {each.axis: None for each in of_rank}:  # in the order of their first
            calls = round(sum(each.count for each in of_rank if each.axis == axis))
            n_bytes = sum(each.n_bytes for each in of_rank if each.axis == axis)
            most[axis] = max(most.get(axis, Moved(0, 0.0)), Moved(calls, n_bytes), key=lambda moved: moved.n_bytes)
    return most


def describe(ledger: Ledger) -> str:
    """The block of the log. Before the measured step its column is not there."""
    title = f"ledger of a step, forecast for {ledger.hardware}: {ledger.layout}"
    rows = [("", "predicted", "measured"), *(tuple(cells) for _, *cells in list_quantities(ledger))]
    if ledger.measured is None:
        rows = [row[:2] for row in rows]
    else:
        title = f"ledger of step {ledger.step}, forecast for {ledger.hardware} and measured: {ledger.layout}"
    table = [format_table(rows)] * (len(rows) > 1)
    return "\n".join([title, *table, *(f"  {note}" for note in ledger.notes)])


def list_quantities(ledger: Ledger) -> list[tuple[str, str, str, str]]:
    """Of what is known: name in JSON, name for people, predicted, measured."""
    rows = []
    traffic = [costs.traffic if costs else {} for costs in (ledger.predicted, ledger.measured)]
    for axis in {**traffic[0], **traffic[1]}:
        rows.append((f"over {axis}", f"  over {axis}", *(write_moved(moved.get(axis)) for moved in traffic)))
    for name, (words, write) in QUANTITIES.items():
        pair = [getattr(costs, name, None) for costs in (ledger.predicted, ledger.measured)]
        if pair != [None, None]:
            rows.append((name, f"  {words}", *("-" if value is None else write(value) for value in pair)))
    return rows


def write_moved(moved: Moved | None) -> str:
    if moved is None:
        return "-"
    return f"{format_bytes(moved.n_bytes)} in {moved.n_calls:,} call{'s' * (moved.n_calls != 1)}"


def read_ledger(values: dict) -> Ledger:
    """The ledger of which these are the values, as `asdict` and JSON have left them."""
    both = {}
    for name in ("predicted", "measured"):
        traffic = {axis: Moved(**moved) for axis, moved in values[name]["traffic"].items()}
        both[name] = Costs(**{**values[name], "traffic": traffic})
    return Ledger(**{**values, **both})
