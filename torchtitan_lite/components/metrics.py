"""Write the records of a run to a file, the console and TensorBoard. Only rank 0 writes, and ranks do not communicate.

    metrics.jsonl         one JSON object per line, with `kind`, `step` and `time`
        start             layout, number of ranks, restarts of the job, git commit, command, host
        step              loss, gradient norm, times, the fields of `describe_speed`, and the load of each expert
        validation        val_loss, val_perplexity, val_bits_per_byte
        save              the checkpoint, and the seconds that the ranks waited for it
        stop              why the run ended
    console and log.txt   one line per logged step, and one per validation
    tb/, wandb            with the tags of torchtitan v0.2; extensions/wandb_sink.py has Weights & Biases

A sink has a path, the step that the run resumed from, `write(record)` and `close()`. The file of a sink is a cached
property, so the first record opens the file. If opening fails, nothing is cached, and the next record tries again.
"""

import json
import logging
import math
import os
import shlex
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from torchtitan_lite.components.log import go_on_unwritten
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.messages import name_command
from torchtitan_lite.config.schema import Config, Metrics

logger = logging.getLogger(__name__)

NO_TERMINAL = (200, 24)  # columns and lines to assume if the output is not a terminal
# Field of a record -> tag in TensorBoard and wandb. The tags are torchtitan's, except for experts and validation.
TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_per_s_per_rank": "throughput(tps)",
    "tflops_per_rank": "tflops",
    "mfu_full": "mfu(%)",
    "step_time_s": "time_metrics/end_to_end(s)",
    "data_time_s": "time_metrics/data_loading(s)",
    "data_time_share": "time_metrics/data_loading(%)",
    "peak_memory_gib": "memory/max_active(GiB)",
    "peak_memory_share": "memory/max_active(%)",
    "reserved_memory_gib": "memory/max_reserved(GiB)",
    "reserved_memory_share": "memory/max_reserved(%)",
    "n_alloc_retries": "memory/num_alloc_retries",
    "n_ooms": "memory/num_ooms",
    "expert_max_over_mean": "experts/max_over_mean",
    "expert_dead_share": "experts/dead_share",
    "router_entropy": "experts/router_entropy",
    "val_loss": "validation_metrics/global_avg_loss",
    "val_perplexity": "validation_metrics/perplexity",
    "val_bits_per_byte": "validation_metrics/bits_per_byte",
}


class MetricsWriter:
    """Writes records to the console, to metrics.jsonl and to the sinks that [metrics] enables.

    If a record cannot be written to a sink, the log reports the error once. Later records are still tried.
    """

    def __init__(self, dump_folder: Path | None, config: Config, resumed_step: int):
        """If `dump_folder` is None, records go to the console only."""
        self.n_steps = config.training.steps
        self.resumed_step = resumed_step
        self.sinks: list[Any] = []
        self.unwritten: set[str] = set()  # paths for which the log already has an error
        if dump_folder is None:
            return
        self.sinks.append(JsonLinesSink(dump_folder / "metrics.jsonl", resumed_step))
        section = config.metrics
        if section.enable_tensorboard:
            # TensorBoard names a run by its folder
            folder = dump_folder / section.save_tb_folder / dump_folder.resolve().name
            self.sinks.append(TensorBoardSink(folder, resumed_step))
        if section.enable_wandb:
            wandb_sink = load_extension("wandb_sink").WandbSink
            self.sinks.append(wandb_sink(dump_folder / "wandb", resumed_step, config))

    def record(self, kind: str, step: int, **fields: object) -> None:
        """Write one record. JSON has no NaN or infinity, so numbers that are not finite become null."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        record = {"kind": kind, "step": step, "time": now, **fields}
        for key, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None
        for sink in self.sinks:
            with go_on_unwritten(str(sink.path), self.unwritten):
                sink.write(record)
        if kind in FORMATS:
            width = len(str(self.n_steps))
            figures = FORMATS[kind](fields)
            figures[0] = f"step {step:{width}}/{self.n_steps}  {figures[0]}"
            columns, _ = shutil.get_terminal_size(NO_TERMINAL)
            line, *others = figures
            for figure in others:
                longer = f"{line}  {figure}"
                if len(longer) > columns - len("12:30:01 "):  # the last figures are omitted
                    break
                line = longer
            logger.info(line)

    def close(self) -> None:
        for sink in self.sinks:
            with go_on_unwritten(str(sink.path), self.unwritten):
                sink.close()


# ---------------------------------------------------------------- sinks


@dataclass(eq=False)
class JsonLinesSink:
    """Writes one JSON object per line. A resumed run drops the records after `resumed_step`, so each step is in the
    file once."""

    path: Path
    resumed_step: int

    @cached_property
    def file(self) -> TextIO:
        if self.path.exists():
            drop_later_steps = load_module("components.earlier_records").drop_later_steps
            drop_later_steps(self.path, self.resumed_step)
        # line-buffered: no record is lost if the process is killed
        return open(self.path, "a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self.file.close()


@dataclass(eq=False)
class TensorBoardSink:
    """Writes events to a new file in the folder `path`.

    torch's SummaryWriter writes from a thread, which ends at the first error.
    """

    path: Path
    resumed_step: int

    @cached_property
    def writer(self) -> RecordWriter:
        self.path.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        writer = RecordWriter(open(self.path / name, "wb"))
        writer.write(encode_event(file_version="brain.Event:2"))
        # this event makes TensorBoard hide these steps in the files of earlier starts
        start = SessionLog(status=SessionLog.START)
        writer.write(encode_event(step=self.resumed_step + 1, session_log=start))
        return writer

    def write(self, record: dict[str, Any]) -> None:
        scalars = find_scalars(record).items()
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
        if values:
            self.writer.write(encode_event(step=record["step"], summary=Summary(value=values)))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def encode_event(**fields: object) -> bytes:
    """Return a TensorBoard event with these fields and the current time, serialized."""
    return Event(wall_time=time.time(), **fields).SerializeToString()


def find_scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return tag -> value for all fields of a record that have a tag and are not null."""
    scalars = {}
    for key, value in record.items():
        # "lr/PATTERN": rate of a group in optimizer.groups
        tag = key if key.startswith("lr/") else TAGS.get(key)
        if tag and value is not None:
            scalars[tag] = 100 * value if tag.endswith("(%)") else value
    return scalars


# ---------------------------------------------------------------- console


def format_step(fields: dict[str, object]) -> list[str]:
    """Format a step for the console, with the most important figures first. metrics.jsonl has all figures."""
    figures = [f"loss {fields['loss']:.5f}", f"grad_norm {fields['grad_norm']:.4f}"]
    if "skipped_above" in fields:
        figures.append(
            f"SKIPPED, the norm is a spike: its median is {fields['skipped_above']:.4g} "
            f"({fields['skipped_steps']} skipped so far)"
        )
    if fields["remaining_s"]:
        figures.append(f"{timedelta(seconds=round(fields['remaining_s']))} left")
    figures.append(f"{fields['tokens_per_s_per_rank']:,.0f} tok/s/rank")
    if fields["mfu_full"] is not None:
        figures.append(f"MFU {fields['mfu_full']:.1%}")
    if "expert_max_over_mean" in fields:
        dead = f", {fields['expert_dead_share']:.0%} dead" if fields["expert_dead_share"] else ""
        figures.append(f"experts {fields['expert_max_over_mean']:.1f}x mean{dead}")
    figures.append(f"lr {fields['lr']:.2e}")
    figures.append(f"{fields['peak_memory_gib']:.3g} GiB")
    figures.append(f"{fields['step_time_s']:.3g} s")
    return figures


def format_validation(fields: dict[str, object]) -> list[str]:
    """Format a validation for the console."""
    return [
        f"val_loss {fields['val_loss']:.5f}",
        f"perplexity {fields['val_perplexity']:.4g}",
        f"{fields['val_bits_per_byte']:.4f} bits/byte",
    ]


FORMATS = {"step": format_step, "validation": format_validation}  # kinds of records on the console


def name_views(folder: Path, section: Metrics) -> str:
    """Return the commands that show the curves of the run in `folder`."""
    name = shlex.quote(str(folder))
    views = name_command(f"report {name}")
    if section.enable_tensorboard:
        python = os.path.relpath(sys.executable)
        if python.startswith(".."):
            python = sys.executable
        views += f", or {python} -m tensorboard.main --logdir {name}/{section.save_tb_folder}"
    return views
