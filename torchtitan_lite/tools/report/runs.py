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


class Run(Plan):
    """A run: its plan, the records in metrics.jsonl, and the traces."""

    def __init__(self, folder: Path, color: str):
        """Read a dump folder. `color`: of the run's curves. Raises UserError or OSError if there is no step."""
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        self.records = [json.loads(line) for line in lines if line.endswith("}")]  # the last line may be incomplete
        if not any(record["kind"] == "step" for record in self.records):
            raise UserError(f"{folder}/metrics.jsonl has no step yet")
        start = [record for record in self.records if record["kind"] == "start"][-1]
        self.folder, self.name, self.color, self.device = folder, folder.resolve().name, color, start["device"]
        gpu = find_row(self.device)
        args = ["--config", str(folder / "config.toml")]
        super().__init__(plan_run(args, start["world_size"], "cpu" if gpu == "cpu" else "cuda"), gpu, CLUSTERS[gpu])

    @cached_property
    def traces(self) -> list[Trace]:
        return read_traces(self.folder / self.planned.config.profiling.save_traces_folder, self.planned.layout)

    @cached_property
    def pipeline(self) -> Timeline | None:
        return measure_pipeline(self.traces, self.planned.layout)

    def list_values(self, field: str) -> Points:
        """Return (step, value) for each record that has this field."""
        return [(record["step"], record[field]) for record in self.records if record.get(field) is not None]

    def find_median(self, field: str) -> float:
        """Return the median over the records. Ignore the first record (warm-up) if there are others."""
        values = [value for _, value in self.list_values(field)]
        return median(values[1:] or values)


def describe_run(run: Run) -> list[str]:
    """Return the first sentences of the page: model, data, hardware, results, what to look at, how to continue."""
    config, layout, model_args = run.planned.config, run.planned.layout, run.planned.model_args
    losses, validation, tokens = map(run.list_values, ("loss", "val_loss", "tokens"))
    times = [(record["kind"], datetime.fromisoformat(record["time"])) for record in run.records]
    pairs = zip(times, times[1:], strict=False)
    trained_s = sum((after - before).total_seconds() for (_, before), (kind, after) in pairs if kind != "start")
    n_starts = sum(kind == "start" for kind, _ in times)
    validated = f" The validation loss is {validation[-1][1]:.4f}." if validation else ""
    reason = run.records[-1].get("reason", "unknown (still running, or killed)").partition("; newest")[0]
    ngpu = f"NGPU={layout.world_size} " * (layout.world_size <= 8)  # if one host was enough
    command = f"{ngpu}./run_train.sh --config {shlex.quote(f'{run.folder}/config.toml')} --job.no_overwrite"
    if losses[-1][0] >= (n_steps := config.training.steps):
        command += f" --training.steps={2 * n_steps} --lr_scheduler.total_steps={2 * n_steps}"
    return [
        f"{config.job.description or 'A language model'}: {model_args.name}, {count_parameters(model_args):,} "
        f"parameters, trained on {' and '.join(config.training.dataset)} by {layout.world_size} rank"
        f"{'s' * (layout.world_size > 1)} ({layout}) on {run.device}.",
        f"{losses[-1][0]:,} of {n_steps:,} steps, {tokens[-1][1]:,} tokens, took {trained_s:,.0f} s in {n_starts} "
        f"start{'s' * (n_starts > 1)}. The loss went from {losses[0][1]:.4f} to {losses[-1][1]:.4f}.{validated}",
        f"End of the run: {reason}.",
        f"Look at: {'; '.join(list_remarks(run)) or 'nothing stands out'}.",
        f"To continue: {command}" if config.checkpoint.enable else "The run saved nothing, so it cannot be continued.",
    ]


def list_remarks(run: Run) -> list[str]:
    remarks = warn_of_bubble(run.planned, run.pipeline.bubble) if run.pipeline else []
    median_s, validation = run.find_median("step_time_s"), run.list_values("val_loss")
    if slow := [step for step, value in run.list_values("step_time_s")[1:] if value > 2 * median_s]:
        remarks.append(f"steps that took more than twice the median ({len(slow)} records, first step {slow[0]:,})")
    if validation and validation[-1][1] > 1.01 * min(value for _, value in validation):
        remarks.append("the validation loss is above its minimum")
    return remarks
