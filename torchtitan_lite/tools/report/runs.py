"""Read the files in a run's folder, and summarize the run in words.

Runs of forks can be read too. If a run used a feature that this checkout lacks, such as the fork's optimizer, the page
omits the parts that depend on the feature, and gives the reason.
"""

import json
import shlex
from datetime import datetime
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from statistics import median

from torchtitan_lite.components.earlier_records import read_record
from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.messages import ConfigError, UserError, name_command
from torchtitan_lite.config.reader import flatten_table, load_toml, read_config
from torchtitan_lite.extensions.foreign_json import has_kind
from torchtitan_lite.tools.pictures import Points
from torchtitan_lite.tools.plan.cluster import find_gpu_row
from torchtitan_lite.tools.plan.planned_run import plan_run
from torchtitan_lite.tools.plan.remedies import warn_of_bubble
from torchtitan_lite.tools.plan.timeline import Timeline
from torchtitan_lite.tools.report.traces import Trace, measure_pipeline, read_traces
from torchtitan_lite.tools.tables import plural

SPIKE_RATIO = 3  # a gradient norm above this multiple of the median is a spike
WARM_UP = 3  # the first records are not checked for spikes, because gradient norms may be large
AXES = ("steps", "tokens", "hours")  # horizontal axes of the curves
MEASURED = ("loss", "tokens", "step_time_s", "peak_memory_gib")  # fields that the page needs
NEEDED = set("job.description model.name training.dataset training.steps checkpoint.enable".split())


class RecordedRun:
    """A run: its settings, the records in metrics.jsonl, the traces, and a forecast if possible."""

    def __init__(self, folder: Path):
        """Read a dump folder. Raises OSError, ValueError or UserError if the folder has no step or no config."""
        self.folder = folder
        self.name = folder.resolve().name
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        self.records = []
        # Line numbers of invalid lines. A line can be incomplete if the run ended while it wrote the line.
        self.unread: list[int] = []
        for number, line in enumerate(lines, 1):
            if record := read_record(line):
                self.records.append(record)
            else:
                self.unread.append(number)
        self.start = {}  # the last record of a start
        for record in self.records:
            match record:
                case {"kind": "start", "device": str(), "world_size": int()}:
                    self.start = record
        if not (self.start and all(map(self.list_values, MEASURED))):
            raise UserError(
                f"{folder}/metrics.jsonl lacks a start record, or finite values of {', '.join(MEASURED)}: "
                "wait for the run to log these values, or use the code that the run used"
            )
        table = load_toml(folder / "config.toml")
        self.settings = dict(flatten_table(table))  # "optimizer.lr" -> 0.001
        args = ["--config", str(folder / "config.toml")]
        wrong = {problem.key for problem in read_config(args).problems}
        wrong.discard("model.name")  # a fork may have models that this checkout lacks
        if missing := NEEDED - (self.settings.keys() - wrong):
            raise UserError(
                f"{folder}/config.toml lacks a valid {', '.join(sorted(missing))}: copy the file that the run wrote"
            )
        self.plan = None
        self.no_plan = ""  # why there is no forecast
        try:
            gpu = find_gpu_row(self.start["device"])
            self.plan = plan_run(args, self.start["world_size"], gpu)
        except ConfigError as error:
            self.no_plan = str(error)

    @cached_property
    def traces(self) -> list[Trace]:
        if self.plan is None:
            return []
        folder = self.folder / self.plan.config.profiling.save_traces_folder
        return read_traces(folder, self.plan.layout)

    @cached_property
    def pipeline(self) -> Timeline | None:
        if not self.traces:
            return None
        return measure_pipeline(self.traces, self.plan.layout)

    @cached_property
    def places(self) -> dict[int, dict[str, float]]:
        """Step -> axis -> position. Hours do not include the time between starts of the run.

        If the host's clock was set back between two records, the time between them counts as 0.
        """
        places = {0: dict.fromkeys(AXES, 0.0)}
        last_step, n_tokens = self.list_values("tokens")[-1]
        tokens_per_step = n_tokens / last_step
        seconds = 0.0
        time = inf  # before the first record
        for record in self.records:
            last_time = time
            time = datetime.fromisoformat(record["time"]).timestamp()
            if record["kind"] != "start":
                seconds += max(0.0, time - last_time)
            step = record["step"]
            places[step] = {
                "steps": step,
                "tokens": step * tokens_per_step,
                "hours": seconds / 3600,
            }
        return places

    def list_values(self, field: str) -> Points:
        """Return (step, value) for each record in which the value of this field is finite. Raises UserError if a value
        is not a number."""
        points = []
        for record in self.records:
            value = record.get(field)
            if value is not None:
                if not has_kind(value, list if field == "expert_loads" else float):
                    place = (
                        f"{self.folder}/metrics.jsonl: {field} = {value!r} at step {record['step']}"
                    )
                    raise UserError(f"{place} is not a number. Correct or delete this record")
                if isinstance(value, list) or isfinite(value):
                    points.append((record["step"], value))
        return points

    def show(self, key: str) -> str:
        """Return the value of a key as text."""
        return json.dumps(self.settings.get(key), ensure_ascii=False).strip('"')


def list_differences(runs: list[RecordedRun]) -> list[str]:
    """Return the keys whose values differ, except the folder."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    keys.pop("job.dump_folder", None)
    return [key for key in keys if len({run.show(key) for run in runs}) > 1]


def summarize(run: RecordedRun) -> list[str]:
    """Return the first sentences of the page: model, data, hardware, results, warnings, and how to continue."""
    settings = run.settings
    n_ranks = run.start["world_size"]
    model = settings["model.name"]
    ranks = plural(n_ranks, "rank")
    if run.plan:
        model += f", {count_parameters(run.plan.model_args):,} parameters"
        ranks += f" ({run.plan.layout})"
    losses = run.list_values("loss")
    validation = run.list_values("val_loss")
    n_steps = settings["training.steps"]
    last_step, last_loss = losses[-1]
    n_starts = [record["kind"] for record in run.records].count("start")
    duration_s = 3600 * run.places[last_step]["hours"]
    reason = run.records[-1].get("reason", "unknown (still running, or killed)")
    results = (
        f"{last_step:,} of {n_steps:,} steps, {run.list_values('tokens')[-1][1]:,} tokens, "
        f"took {duration_s:,.0f} s in {plural(n_starts, 'start')}. "
        f"The loss went from {losses[0][1]:.4f} to {last_loss:.4f}."
    )
    if validation:
        results += f" The validation loss is {validation[-1][1]:.4f}."
    sentences = [
        f"{settings['job.description'] or 'A language model'}: {model}, "
        f"from {run.records[0].get('weights', 'unknown weights')}, "
        f"trained on {' and '.join(settings['training.dataset'])} by {ranks} on {run.start['device']}.",
        results,
        f"End of the run: {reason.partition('; newest')[0]}.",
        f"Look at: {'; '.join(list_findings(run)) or 'nothing stands out'}.",
    ]
    if not settings["checkpoint.enable"]:
        return [*sentences, "The run saved nothing, so it cannot be continued."]
    # the folder in config.toml can be relative to another working directory
    args = ["--config", f"{run.folder}/config.toml", f"--job.dump_folder={run.folder}"]
    command = name_command(f"train {shlex.join(args)} --job.no_overwrite")
    if n_ranks <= 8:  # assume one host
        command = f"NGPU={n_ranks} {command}"
    return [*sentences, f"To continue: {command}"]


def list_findings(run: RecordedRun) -> list[str]:
    """Return warnings: gradient spikes, a large bubble, slow or skipped steps, a validation loss above its minimum."""
    remarks = []
    if run.unread:
        numbers = ", ".join(map(str, run.unread))
        remarks.append(f"lines of metrics.jsonl that are not records: {numbers}")
    steps = {record["step"] for record in run.records if "loss" in record}
    if diverged := sorted(steps - dict(run.list_values("loss")).keys()):
        remarks.append(f"the loss is NaN or infinite at step {', '.join(map(str, diverged))}")
    norms = run.list_values("grad_norm_max")[WARM_UP:]
    usual = median([norm for _, norm in norms] or [0.0])
    spikes = [(step, norm) for step, norm in norms if norm > SPIKE_RATIO * usual]
    if spikes:
        step, norm = max(spikes, key=lambda spike: spike[1])
        remarks.append(
            f"spikes of the gradient norm, whose median is {usual:.4g} "
            f"({plural(len(spikes), 'record')}, the highest {norm:.4g} by step {step:,})"
        )
    if run.pipeline:
        remarks += warn_of_bubble(run.plan, run.pipeline.bubble)
    times = run.list_values("step_time_s")[1:]
    median_s = median([seconds for _, seconds in times] or [0.0])
    slow_steps = [step for step, seconds in times if seconds > 2 * median_s]
    if slow_steps:
        remarks.append(
            f"steps that took more than twice the median time ({plural(len(slow_steps), 'record')}, "
            f"first step {slow_steps[0]:,})"
        )
    if skipped := run.list_values("skipped_steps"):
        remarks.append(f"{plural(skipped[-1][1], 'step')} skipped (training.skip_spikes)")
    losses = [loss for _, loss in run.list_values("val_loss")]
    if losses and losses[-1] > 1.01 * min(losses):
        remarks.append("the validation loss is above its minimum")
    return remarks
