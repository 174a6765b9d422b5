"""The ledger of a run: what the closed form forecasts of a step, and what the run measured.

                                   forecast             measured
    sent over tp                   2.1 MiB in 54 calls  2.1 MiB in 54 calls  by the rank that moves most over an axis
    peak memory of a rank          25.3 MiB             61.2 MiB             of the one with the highest peak
    idle in the pipeline (bubble)  20.0%                23.1%                of the time of all ranks
    time of the step               0.0497 s             0.414 s
    tokens a second, per rank      10,300               1,237

Every run logs it once: the forecast, before it builds the model; with metrics.measure_ledger both columns, after one
step that it measures (step_measure.py), and metrics.jsonl gets them too. `plan --score RUN` reads them back. Forecast
memory and pipelines, and the measured pipeline, are also drawn as text for TensorBoard.

The measured step is the second of the process: the first one compiles, connects and allocates. It is the third where
the second does so again: compiled code meets the optimizer's state for the first time, or a validated pipeline makes
its buffers anew.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.hardware import CLUSTERS, Machine, find_row
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import ConfigError, Problem, format_bytes, format_table
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.workload import Workload, describe_workload
from torchtitan_lite.plan.collectives import Moved, max_moved, sum_moved
from torchtitan_lite.plan.forecast import forecast, list_memory
from torchtitan_lite.plan.simulator import PipelineOrder, Timeline, plan_order
from torchtitan_lite.plan.step_measure import measure_step, read_peak_bytes
from torchtitan_lite.plan.timeline import draw_memory, draw_svg, draw_text, trace_chrome
from torchtitan_lite.plan.traffic import estimate_traffic
from torchtitan_lite.step import Run

logger = logging.getLogger(__name__)


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


# ---------------------------------------------------------------- the forecast


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
    costs = {
        "traffic": estimate_most_moved(workload, order),
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


def estimate_most_moved(workload: Workload, order: PipelineOrder) -> dict[str, Moved]:
    """Return axis -> the traffic of the pp rank that moves most over it."""
    ranks = [estimate_traffic(workload, pp_rank, order).items() for pp_rank in range(workload.layout.pp)]
    most = max_moved(sum_moved((axis, each.n_calls, each.n_bytes) for (axis, _), each in moved) for moved in ranks)
    return {axis: replace(moved, n_calls=round(moved.n_calls)) for axis, moved in most.items()}


# ---------------------------------------------------------------- a run


class RunLedger:
    """The ledger of one process. Every rank makes it before it builds the model: on a CPU, memory counts from here."""

    def __init__(self, config: Config, model_args: ModelArgs, layout: Layout, machine: Machine, dump_folder: Path):
        self.layout, self.dump_folder = layout, dump_folder
        again = config.compile.enable or (layout.pp > 1 and config.validation.enable)
        self.n_steps, self.n_th_measured = 0, 3 if again else 2
        self.is_measured = config.metrics.measure_ledger and config.training.steps >= self.n_th_measured
        self.tokens_per_step = layout.global_batch_size * config.training.seq_len
        self.bytes_before = 0.0 if machine.device_type == "cuda" else read_peak_bytes(torch.device("cpu"))
        self.ledger, self._for_metrics, self._pictures = None, None, {}
        if dist.get_rank() == 0:
            self.ledger, self._pictures = open_ledger(config, model_args, layout, machine)
            if not self.is_measured:
                logger.info(describe(self.ledger))
                self._pictures["ledger"] = describe(self.ledger)

    @contextmanager
    def measured(self, step: int, run: Run, group: dist.ProcessGroup, *, besides: dist.ProcessGroup) -> Iterator[None]:
        """Context manager around every step; measures one of them. Collective. Groups: see measure_step."""
        self.n_steps += 1
        if not self.is_measured or self.n_steps != self.n_th_measured:
            yield
            return
        with measure_step(self.layout, run, group, besides=besides) as measured:
            yield
        memory = torch.tensor(measured.peak_bytes - self.bytes_before, dtype=torch.float64)
        dist.all_reduce(memory, dist.ReduceOp.MAX, group=group)  # 8 bytes
        if dist.get_rank() != 0:
            return
        timeline = measured.timeline
        costs = Costs(
            traffic=measured.traffic,
            memory_bytes=memory.item(),
            bubble=timeline.bubble if timeline else None,
            step_time_s=measured.step_time_s,
            tokens_per_s_per_rank=self.tokens_per_step / measured.step_time_s / self.layout.world_size,
        )
        self.ledger = replace(self.ledger, measured=costs, step=step)
        self._for_metrics = asdict(self.ledger)
        logger.info(describe(self.ledger))
        self._pictures["ledger"] = describe(self.ledger)
        if timeline:
            self._pictures["pipeline measured"] = draw_text(timeline)
            write_timeline(timeline, self.dump_folder, step)

    def take(self) -> dict[str, object] | None:
        """Return both columns, once, for the next line of metrics.jsonl; None at all other times."""
        taken, self._for_metrics = self._for_metrics, None
        return taken

    def take_pictures(self) -> dict[str, str]:
        """Return what is new since the last call, name -> text of several lines."""
        taken, self._pictures = self._pictures, {}
        return taken


def write_timeline(timeline: Timeline, dump_folder: Path, step: int) -> None:
    """Log the timeline as text; write it to the dump folder as a picture and a Chrome trace."""
    picture, trace = dump_folder / "timeline.svg", dump_folder / "timeline.json"
    picture.write_text(draw_svg(timeline, "measured"), encoding="utf-8")
    trace.write_text(json.dumps(trace_chrome(timeline)), encoding="utf-8")
    logger.info(
        f"the pipeline of rank 0 in step {step}: F forward, B backward, dots are idle; also in {picture} and {trace}\n"
        f"{draw_text(timeline)}"
    )


# ---------------------------------------------------------------- the log


def describe(ledger: Ledger) -> str:
    """Return the block of the log; the measured column only after the measured step."""
    title = f"what a step should cost here ({ledger.hardware}): {ledger.layout}"
    rows = [("", "forecast", "measured"), *(tuple(cells) for _, *cells in list_quantities(ledger))]
    if ledger.measured is None:
        rows = [row[:2] for row in rows]
    else:
        title = f"what step {ledger.step} cost, and its forecast ({ledger.hardware}): {ledger.layout}"
    table = [format_table(rows)] * (len(rows) > 1)
    return "\n".join([title, *table, *(f"  {note}" for note in ledger.notes)])


def list_quantities(ledger: Ledger) -> list[tuple[str, str, str, str]]:
    """Return for each known quantity: name in JSON, name for people, predicted, measured."""
    rows = []
    traffic = [costs.traffic if costs else {} for costs in (ledger.predicted, ledger.measured)]
    for axis in {**traffic[0], **traffic[1]}:
        rows.append((f"over {axis}", f"  sent over {axis}", *(format_moved(moved.get(axis)) for moved in traffic)))
    for name, (words, write) in QUANTITIES.items():
        pair = [getattr(costs, name, None) for costs in (ledger.predicted, ledger.measured)]
        if pair != [None, None]:
            rows.append((name, f"  {words}", *("-" if value is None else write(value) for value in pair)))
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
    for name, *cells in list_quantities(ledger):
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
    ledgers = [values for line in lines if (values := read_line(line).get("ledger"))]
    if not ledgers:
        why = f"none of the {len(lines)} lines of {file} has a ledger"
        remedy = "Run with metrics.measure_ledger = true: the ledger comes with the first line logged after step 2 or 3"
        raise ConfigError([Problem("--score", str(run), why, remedy)])
    both = {}
    for name in ("predicted", "measured"):
        traffic = {axis: Moved(**moved) for axis, moved in ledgers[-1][name]["traffic"].items()}
        both[name] = Costs(**{**ledgers[-1][name], "traffic": traffic})
    return Ledger(**{**ledgers[-1], **both})


def read_line(line: str) -> dict[str, object]:
    """Return the values of a line of metrics.jsonl; none if a kill cut it."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return values if isinstance(values, dict) else {}
