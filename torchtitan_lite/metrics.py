"""Measure the steps of a run, and write the records of the run. Only rank 0 writes, and ranks do not communicate.

    metrics.jsonl         one JSON object per line, with `kind`, `step` and `time`
        start             layout, number of ranks, restarts of the job, git commit, command, host
        step              loss, gradient norm, times, the fields of `describe_speed`, and the load of each expert
        validation        val_loss, val_perplexity, val_bits_per_byte
        save              path of the checkpoint, and how many seconds the ranks waited for it
        stop              why the run ended
    console and log.txt   one line per logged step, and one per validation
    tb/, wandb            the same fields with the tags of torchtitan v0.2 (wandb: extensions/wandb_sink.py)

The time of a step begins when the host requests the batch, and ends when the host has read the gradient norm. Reading
the norm waits until the device has updated the weights. Validations, saves and logging happen between two steps, so
their time is not included.

Loss and grad_norm are the same on every rank; times and memory are measured on rank 0.
MFU is the FLOP/s of the model divided by the peak FLOP/s of the hardware (PaLM, app. B, arXiv:2204.02311).

A sink has a `path` and the methods `write(record)` and `close()`. A sink opens its file in a cached property, when it
writes the first record. If the file cannot be opened, nothing is cached, so the sink tries again with the next record.
"""

import json
import logging
import math
import os
import resource
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from torchtitan_lite.build import Run
from torchtitan_lite.components.log import IN_FILE, describe_rank, go_on_unwritten
from torchtitan_lite.config.block import FlopsPerToken, count_flops_per_token
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.learning_rate import list_rates
from torchtitan_lite.config.machine import GIB, peak_flops
from torchtitan_lite.config.messages import name_command
from torchtitan_lite.config.schema import Metrics
from torchtitan_lite.files import describe_launch
from torchtitan_lite.parallel.process_groups import Place
from torchtitan_lite.preflight import RunSpec
from torchtitan_lite.step import StepResult

logger = logging.getLogger(__name__)

# number of steps after a start that are all recorded, because the user watches them
N_FIRST = 10
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


class RunMetrics:
    """Measures the steps of a run. Writes records to the console, to metrics.jsonl and to the sinks of [metrics].

    A context manager. On entry, it records the start of the run. On exit, it records the error, or logs the commands
    that show the run. If a record cannot be written to a sink, the log reports the error once, and the sink is tried
    again for the next record.
    """

    def __init__(
        self, run: Run, spec: RunSpec, folder: Path | None, resumed_step: int, place: Place
    ):
        """`folder`: the folder that records are written to. If `folder` is None, records go to the console only."""
        training = spec.config.training
        self.run = run
        self.spec = spec
        self.place = place
        self.resumed_step = resumed_step
        self.n_steps = training.steps
        self.tokens_per_step = run.layout.global_batch_size * training.seq_len
        self.flops = count_flops_per_token(
            spec.model_args, training.seq_len, spec.config.model.attention
        )
        self.peak_flops = peak_flops(spec.machine.name) if run.device.type == "cuda" else None
        # (time_s, data_time_s, grad_norm) of each step since the last record
        self.steps: list[tuple[float, float, float]] = []
        self.was_skipped = False  # whether the previous step was skipped
        self.first_s = math.nan  # time of the first record
        self.sinks: list[Any] = []
        self.unwritten: set[str] = set()  # paths for which an error has been logged
        if folder is None:
            return
        self.sinks.append(JsonLinesSink(folder / "metrics.jsonl", resumed_step))
        section = spec.config.metrics
        if section.enable_tensorboard:
            # TensorBoard shows a run under the name of its folder
            events = folder / section.save_tb_folder / folder.resolve().name
            self.sinks.append(TensorBoardSink(events, resumed_step))
        if section.enable_wandb:
            wandb_sink = load_extension("wandb_sink").WandbSink
            self.sinks.append(wandb_sink(folder / "wandb", spec.config))

    def log(
        self,
        step: int,
        result: StepResult,
        validation: dict[str, float] | None,
        *,
        time_s: float,
        data_time_s: float,
        is_applied: bool,
        grad_norm: float,
    ) -> None:
        """Record a step if a record is due, if this step was validated or skipped, or if the previous step was skipped.

        `validation`: the result of `validate`, or None. `time_s`: the duration of the step. `data_time_s`: how long the
        host waited for the batch. A record has the average times of the steps since the previous record. Writing a
        record waits for the device.
        """
        if self.place.rank > 0:
            return  # all ranks have the same loss and norm, and rank 0 writes them
        self.steps.append((time_s, data_time_s, grad_norm))
        is_always_logged = step <= self.resumed_step + N_FIRST or step == self.n_steps
        is_due = is_always_logged or step % self.spec.config.metrics.log_freq == 0
        if not (validation or is_due or self.was_skipped) and is_applied:
            return
        n_steps = len(self.steps)
        times_s, data_times_s, grad_norms = zip(*self.steps, strict=True)
        total_s = sum(times_s)
        speed = n_steps * self.tokens_per_step / total_s / self.run.layout.world_size
        fields = {
            "loss": result.loss.item(),
            "grad_norm": grad_norm,
            "grad_norm_max": max(grad_norms),
            # the learning rates of this step: the scheduler is already one step ahead
            **list_rates(self.spec.config, self.run.lr_scheduler.last_epoch - 1),
            # number of tokens that all ranks have read since step 1
            "tokens": step * self.tokens_per_step,
            **describe_speed(speed, self.flops, self.peak_flops),
            "step_time_s": total_s / n_steps,
            "data_time_s": sum(data_times_s) / n_steps,
            "data_time_share": sum(data_times_s) / total_s,
            "remaining_s": self.estimate_remaining(step),
            **read_peak_memory(self.run.device),
        }
        if self.run.balance:
            fields |= self.run.balance.describe(step, result.expert_loads)
        if self.run.spikes:
            fields |= self.run.spikes.describe(step, grad_norm, is_applied=is_applied)
        self.record("step", step, **fields)
        if validation:
            self.record("validation", step, **validation)
        self.was_skipped = not is_applied
        self.steps.clear()

    def estimate_remaining(self, step: int) -> float | None:
        """Return the seconds until the last step, at the average speed since the first record.

        The average includes the time of validations and saves.
        """
        now_s = time.perf_counter()
        n_steps = step - self.resumed_step - 1  # leave out the slow first step
        if n_steps == 0:
            self.first_s = now_s
            return None
        return (now_s - self.first_s) / n_steps * (self.n_steps - step)

    def stop(self, step: int, reason: str) -> None:
        """Log and record why the run ends after this step."""
        logger.info(reason)
        self.record("stop", step, reason=reason)

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
            first, *others = FORMATS[kind](fields)
            line = f"step {step:{width}}/{self.n_steps}  {first}"
            columns, _ = shutil.get_terminal_size(NO_TERMINAL)
            for figure in others:
                longer = f"{line}  {figure}"
                if len(longer) > columns - len("12:30:01 "):  # omit what does not fit on the line
                    break
                line = longer
            logger.info(line)

    def __enter__(self) -> "RunMetrics":
        layout = self.run.layout
        self.record(
            "start",
            self.resumed_step,
            layout=layout.degrees,
            world_size=layout.world_size,
            device=self.spec.machine.name,
            resumed=self.resumed_step > 0,
            restarts=self.place.restarts,
            weights=self.spec.origin,
            **describe_launch(),
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, Exception):
            load_module("components.diagnosis").explain_out_of_memory(
                error, self.spec.dump_folder, self.run.layout.world_size
            )
            name = describe_rank(self.place.rank, self.run.mesh.coordinates())
            reason = f"{name}: {type(error).__name__}: {error}"
            # log to the file only, because the launcher shows the error of the rank that failed first
            logger.log(IN_FILE, reason)
            self.record("stop", self.run.lr_scheduler.last_epoch, reason=reason)
        elif error is None and self.sinks:
            views = name_views(self.spec.dump_folder, self.spec.config.metrics)
            logger.info(f"look at it: {views}")
        for sink in self.sinks:
            with go_on_unwritten(str(sink.path), self.unwritten):
                sink.close()


# ---------------------------------------------------------------- figures


def describe_speed(
    tokens_per_s_per_rank: float, flops: FlopsPerToken, peak_flops: float | None
) -> dict[str, float | None]:
    """Return throughput, and MFU from 0 to 1. `peak_flops` is the peak FLOP/s of one device, or None if unknown.

    Throughput is the number of tokens per second and rank. The tokens are all tokens of the global batch, including
    padding. The ranks are all ranks, including pp and tp ranks.
    """
    full_flops = flops.full * tokens_per_s_per_rank
    return {
        "tokens_per_s_per_rank": tokens_per_s_per_rank,
        "tflops_per_rank": full_flops / 1e12,
        # mfu_full counts the FLOPs of the full attention matrix; mfu_causal counts only the causal half.
        "mfu_full": peak_flops and full_flops / peak_flops,
        "mfu_causal": peak_flops and flops.causal * tokens_per_s_per_rank / peak_flops,
    }


def read_peak_memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory of this rank: on CUDA since the previous call of this function, on a CPU since the process
    started."""
    if device.type != "cuda":  # peak resident memory, which includes Python and torch
        unit_bytes = 1 if sys.platform == "darwin" else 1024  # unit of getrusage
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_memory_gib": peak * unit_bytes / GIB}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    peak_bytes = stats["active_bytes.all.peak"]  # bytes of live tensors
    reserved_bytes = stats["reserved_bytes.all.peak"]  # of torch's allocator, including gaps
    return {
        "peak_memory_gib": peak_bytes / GIB,
        "peak_memory_share": peak_bytes / total_bytes,
        "reserved_memory_gib": reserved_bytes / GIB,
        "reserved_memory_share": reserved_bytes / total_bytes,
        # how often the allocator freed its cache and retried; above 0, memory is tight
        "n_alloc_retries": stats["num_alloc_retries"],
        "n_ooms": stats["num_ooms"],
    }


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
            load_module("components.earlier_records").drop_later_steps(self.path, self.resumed_step)
        # line-buffered: no record is lost if the process is killed
        return open(self.path, "a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self.file.close()


@dataclass(eq=False)
class TensorBoardSink:
    """Writes events to a new file in the folder `path`.

    torch's SummaryWriter is not used, because it writes from a thread that ends at the first error.
    """

    path: Path
    resumed_step: int

    @cached_property
    def writer(self) -> RecordWriter:
        self.path.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        writer = RecordWriter(open(self.path / name, "wb"))
        writer.write(encode_event(file_version="brain.Event:2"))
        # this event makes TensorBoard hide records of earlier starts, if their step is this step or a later one
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
    """Return a serialized TensorBoard event with these fields and the current time."""
    return Event(wall_time=time.time(), **fields).SerializeToString()


def find_scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return a dict mapping tags to values, for all fields of a record that have a tag and are not null."""
    scalars = {}
    for key, value in record.items():
        # "lr/PATTERN" is the learning rate of a group in optimizer.groups
        tag = key if key.startswith("lr/") else TAGS.get(key)
        if tag and value is not None:
            scalars[tag] = 100 * value if tag.endswith("(%)") else value
    return scalars


# ---------------------------------------------------------------- console


def format_step(fields: dict[str, object]) -> Iterator[str]:
    """Format a step for the console, with the most important figures first. metrics.jsonl has all figures."""
    yield f"loss {fields['loss']:.5f}"
    yield f"grad_norm {fields['grad_norm']:.4f}"
    if "skipped_above" in fields:
        yield (
            f"SKIPPED, the norm is a spike: the median norm is {fields['skipped_above']:.4g} "
            f"({fields['skipped_steps']} skipped so far)"
        )
    if fields["remaining_s"]:
        yield f"{timedelta(seconds=round(fields['remaining_s']))} left"
    yield f"{fields['tokens_per_s_per_rank']:,.0f} tok/s/rank"
    if fields["mfu_full"] is not None:
        yield f"MFU {fields['mfu_full']:.1%}"
    if "expert_max_over_mean" in fields:
        dead = f", {fields['expert_dead_share']:.0%} dead" if fields["expert_dead_share"] else ""
        yield f"experts {fields['expert_max_over_mean']:.1f}x mean{dead}"
    yield f"lr {fields['lr']:.2e}"
    yield f"{fields['peak_memory_gib']:.3g} GiB"
    yield f"{fields['step_time_s']:.3g} s"


def format_validation(fields: dict[str, object]) -> Iterator[str]:
    """Format a validation for the console."""
    yield f"val_loss {fields['val_loss']:.5f}"
    yield f"perplexity {fields['val_perplexity']:.4g}"
    yield f"{fields['val_bits_per_byte']:.4f} bits/byte"


# kinds of records that the console shows
FORMATS = {"step": format_step, "validation": format_validation}


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
