"""Read the files in a run's folder, and summarize the run in words."""

import json
import shlex
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median

from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.pictures import Points
from torchtitan_lite.tools.plan.cluster import CLUSTERS, find_row
from torchtitan_lite.tools.plan.command import Plan
from torchtitan_lite.tools.plan.planned_run import plan_run
from torchtitan_lite.tools.plan.remedies import warn_of_bubble
from torchtitan_lite.tools.plan.timeline import Timeline
from torchtitan_lite.tools.report.traces import Trace, measure_pipeline, read_traces

SPIKE = 3  # a gradient norm is a spike if it is more than this times the median
WARM_UP = 3  # records at the start, whose norms may be large


class Run(Plan):
    """A run: its plan, the records in metrics.jsonl, and the traces."""

    def __init__(self, folder: Path, color: str):
        """Read a dump folder. `color`: of the run's curves. Raises UserError or OSError if there is no step."""
        self.folder = folder
        self.name = folder.resolve().name
        self.color = color
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        self.records = [
            json.loads(line) for line in lines if line.endswith("}")
        ]  # the last line may be incomplete
        if not any(record["kind"] == "step" for record in self.records):
            raise UserError(f"{folder}/metrics.jsonl has no step yet")
        *_, start = (record for record in self.records if record["kind"] == "start")
        self.device = start["device"]
        gpu = find_row(self.device)
        planned = plan_run(
            ["--config", str(folder / "config.toml")],
            start["world_size"],
            "cpu" if gpu == "cpu" else "cuda",
        )
        super().__init__(planned, gpu, CLUSTERS[gpu])

    @cached_property
    def traces(self) -> list[Trace]:
        return read_traces(
            self.folder / self.planned.config.profiling.save_traces_folder,
            self.planned.layout,
        )

    @cached_property
    def pipeline(self) -> Timeline | None:
        return measure_pipeline(self.traces, self.planned.layout)

    def list_values(self, field: str) -> Points:
        """Return (step, value) for each record that has this field."""
        return [
            (record["step"], record[field])
            for record in self.records
            if record.get(field) is not None
        ]

    def find_median(self, field: str) -> float:
        """Return the median over the records. Ignore the first record (warm-up) if there are others."""
        values = [value for _, value in self.list_values(field)]
        return median(values[1:] or values)


def describe_run(run: Run) -> list[str]:
    """Return the first sentences of the page: model, data, hardware, results, what to look at, how to continue."""
    config = run.planned.config
    layout = run.planned.layout
    model_args = run.planned.model_args
    losses = run.list_values("loss")
    validation = run.list_values("val_loss")
    n_steps = config.training.steps
    last_step, last_loss = losses[-1]
    duration_s, n_starts = measure_attempts(run)
    reason = run.records[-1].get("reason", "unknown (still running, or killed)")
    results = (
        f"{last_step:,} of {n_steps:,} steps, {run.list_values('tokens')[-1][1]:,} tokens, "
        f"took {duration_s:,.0f} s in {plural(n_starts, 'start')}. "
        f"The loss went from {losses[0][1]:.4f} to {last_loss:.4f}."
    )
    if validation:
        results += f" The validation loss is {validation[-1][1]:.4f}."
    command = (
        f"./run_train.sh --config {shlex.quote(f'{run.folder}/config.toml')} --job.no_overwrite"
    )
    if layout.world_size <= 8:  # one host was enough
        command = f"NGPU={layout.world_size} {command}"
    if last_step >= n_steps:
        command += f" --training.steps={2 * n_steps} --lr_scheduler.total_steps={2 * n_steps}"
    return [
        f"{config.job.description or 'A language model'}: {model_args.name}, {count_parameters(model_args):,} "
        f"parameters, from {run.records[0].get('weights', 'unknown weights')}, "
        f"trained on {' and '.join(config.training.dataset)} by {plural(layout.world_size, 'rank')} "
        f"({layout}) on {run.device}.",
        results,
        f"End of the run: {reason.partition('; newest')[0]}.",
        f"Look at: {'; '.join(list_remarks(run)) or 'nothing stands out'}.",
        f"To continue: {command}"
        if config.checkpoint.enable
        else "The run saved nothing, so it cannot be continued.",
    ]


def measure_attempts(run: Run) -> tuple[float, int]:
    """Return the seconds of all attempts, without the time between them, and the number of attempts."""
    total_s = 0.0
    n_starts = 0
    time = None
    for record in run.records:
        last_time = time
        time = datetime.fromisoformat(record["time"])
        if record["kind"] == "start":
            n_starts += 1
        elif last_time:
            total_s += (time - last_time).total_seconds()
    return total_s, n_starts


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def list_remarks(run: Run) -> list[str]:
    remarks = warn_of_bubble(run.planned, run.pipeline.bubble) if run.pipeline else []
    median_s = run.find_median("step_time_s")
    slow_steps = [
        step for step, step_s in run.list_values("step_time_s")[1:] if step_s > 2 * median_s
    ]
    if slow_steps:
        remarks.append(
            f"steps that took more than twice the median ({len(slow_steps)} records, first step {slow_steps[0]:,})"
        )
    if skipped := run.list_values("skipped_steps"):
        remarks.append(f"{plural(skipped[-1][1], 'step')} skipped (training.skip_spikes)")
    norms = run.list_values("grad_norm_max")[WARM_UP:]
    usual = median([norm for _, norm in norms] or [0.0])
    spikes = [(step, norm) for step, norm in norms if norm > SPIKE * usual]
    if spikes:
        step, norm = max(spikes, key=lambda spike: spike[1])
        highest = f"{plural(len(spikes), 'record')}, the highest {norm:.4g} by step {step:,}"
        remarks.append(f"spikes of the gradient norm, whose median is {usual:.4g} ({highest})")
    losses = [loss for _, loss in run.list_values("val_loss")]
    if losses and losses[-1] > 1.01 * min(losses):
        remarks.append("the validation loss is above its minimum")
    return remarks
