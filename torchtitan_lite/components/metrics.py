"""Measure a run from log line to log line, and write its metrics for people, programs and plots.

    console and log.txt   one line             step, loss, grad_norm, lr, throughput, MFU, memory, time
                          one more             validation, after the steps that have it
    metrics.jsonl         one JSON object      the fields of StepMetrics
    tb/, wandb            sinks.py             the tags of torchtitan v0.2

Loss and grad_norm are the same on every rank; times and memory are those of rank 0, which writes.
MFU is the share of the hardware's peak that the model's own FLOPs reach (PaLM, app. B, arXiv:2204.02311).
"""

import json
import logging
import math
import os
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torchtitan_lite.components.expert_balance import ExpertLoad
from torchtitan_lite.components.log import paint
from torchtitan_lite.components.sinks import TensorBoardSink, WandbSink
from torchtitan_lite.config.block import FlopsPerToken
from torchtitan_lite.config.schema import Metrics

logger = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True)
class StepTimes:
    """Means over the steps since the last log line."""

    step_time_s: float  # wall time from step to step, everything included
    data_time_s: float  # the part of it in which the host waited for a batch


class StepMeter:
    """Measure wall time from log line to log line.

    A CUDA step is only queued when its call returns, so timing one step on the host is wrong. Reading the loss for the
    log line waits for the device: between two log lines the host's clock is right.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.start()

    def start(self) -> None:
        """Restart the measurement: right before the loop, and at each read."""
        self.started_at = self.clock()
        self.data_time_s = 0.0
        self.n_steps = 0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context manager, once per step: add the time inside to data_time_s."""
        started_at = self.clock()
        yield
        self.data_time_s += self.clock() - started_at
        self.n_steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: exclude the time inside from step_time_s. The device must be idle, as around validation."""
        paused_at = self.clock()
        yield
        self.started_at += self.clock() - paused_at

    def read(self) -> StepTimes:
        """Return the times since the last read. Call it after the loss was read."""
        step_time_s = (self.clock() - self.started_at) / self.n_steps
        times = StepTimes(step_time_s, self.data_time_s / self.n_steps)
        self.start()
        return times


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory of this rank: on CUDA since the last reading; on a CPU since the process started, peak_gib only."""

    peak_gib: float  # CUDA: in live tensors; CPU: resident, with Python and torch (about 0.3 GiB) in it
    peak_percent: float | None = None  # of the device's memory
    reserved_gib: float | None = None  # held by torch's allocator, gaps included
    reserved_percent: float | None = None
    n_alloc_retries: int | None = None  # the allocator gave its cache back and asked again: memory is too tight
    n_ooms: int | None = None


def read_peak_memory(device: torch.device) -> PeakMemory:
    """Read the peak memory. On CUDA, reset it."""
    if device.type != "cuda":
        unit_bytes = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
        return PeakMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / GIB)
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    peak_bytes, reserved_bytes = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return PeakMemory(
        peak_gib=peak_bytes / GIB,
        peak_percent=100 * peak_bytes / total_bytes,
        reserved_gib=reserved_bytes / GIB,
        reserved_percent=100 * reserved_bytes / total_bytes,
        n_alloc_retries=stats["num_alloc_retries"],
        n_ooms=stats["num_ooms"],
    )


def describe_out_of_memory(args: list[str], world_size: int) -> str:
    """Return one line: the memory of this rank, and the command that forecasts it. `args`: the run's."""
    peak, live = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    command = shlex.join(["python", "-m", "torchtitan_lite", "plan", "--gpus", str(world_size), *args])
    return f"out of memory: {peak:,} bytes at the peak, {live:,} bytes live. To see what takes them: {command}"


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl, with these names."""

    step: int  # 1 = first
    loss: float  # of the global batch
    grad_norm: float  # before clipping
    lr: float  # that this step used
    tokens: int  # of all ranks, from the first step to this one
    tokens_per_s_per_rank: float
    mfu_full: float | None  # 0 to 1, attention counted in full; None where no peak is known
    mfu_causal: float | None  # the same, with the half of attention that a causal mask leaves
    peak_memory_gib: float
    step_time_s: float
    data_time_s: float
    val_loss: float | None = None  # on held-out documents, nats per token; None where the step was not validated
    val_perplexity: float | None = None
    val_bits_per_byte: float | None = None
    # Of a model with experts (expert_balance.py); None without
    expert_max_over_mean: float | None = None
    expert_dead_share: float | None = None
    router_entropy: float | None = None


def compute_mfu(flops_per_token: int, tokens_per_s_per_rank: float, peak_flops: float | None) -> float | None:
    """Return the share of the peak, 0 to 1. `peak_flops` is that of one device."""
    return None if peak_flops is None else flops_per_token * tokens_per_s_per_rank / peak_flops


class MetricsWriter:
    """Write every logged step to the console, metrics.jsonl and the sinks of [metrics]. Only rank 0 makes one.

    A resumed run logs each step once: lines of an earlier attempt beyond `resumed_step` are dropped.
    """

    def __init__(
        self,
        dump_folder: Path,
        section: Metrics,
        *,
        n_steps: int,  # of the whole run
        resumed_step: int,  # the last step that is already done; 0 at the start
        tokens_per_step: int,  # of the global batch, padding included
        world_size: int,  # all ranks: a pipeline or tensor parallel group shares one batch, and each counts
        flops_per_token: FlopsPerToken,
        peak_flops: float | None,  # of one device, FLOP/s; None: not known
        settings: dict[str, object],  # the config, section by section, for sinks that show it as a table
    ):
        self.n_steps, self.tokens_per_step, self.world_size = n_steps, tokens_per_step, world_size
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        path = dump_folder / "metrics.jsonl"
        drop_later_steps(path, resumed_step)
        self.jsonl = open(path, "a", encoding="utf-8", buffering=1)  # line-buffered: a kill loses no logged step
        self.sinks: list[TensorBoardSink | WandbSink] = []
        if section.enable_tensorboard:
            self.sinks.append(TensorBoardSink(dump_folder / section.save_tb_folder, resumed_step=resumed_step))
        if section.enable_wandb:
            self.sinks.append(WandbSink(dump_folder, settings=settings, resumed_step=resumed_step))

    def write(
        self,
        step: int,  # 1 = first
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        times: StepTimes,
        memory: PeakMemory,
        validation: dict[str, float],  # val_loss and so on; empty if the step was not validated
        experts: ExpertLoad | None = None,
    ) -> None:
        """Write one step, with the throughput and MFU since the last one that was written."""
        tokens_per_s_per_rank = self.tokens_per_step / times.step_time_s / self.world_size
        metrics = StepMetrics(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=step * self.tokens_per_step,
            tokens_per_s_per_rank=tokens_per_s_per_rank,
            mfu_full=compute_mfu(self.flops_per_token.full, tokens_per_s_per_rank, self.peak_flops),
            mfu_causal=compute_mfu(self.flops_per_token.causal, tokens_per_s_per_rank, self.peak_flops),
            peak_memory_gib=memory.peak_gib,
            step_time_s=times.step_time_s,
            data_time_s=times.data_time_s,
            **validation,
            expert_max_over_mean=experts and experts.max_over_mean,
            expert_dead_share=experts and experts.dead_share,
            router_entropy=experts and experts.router_entropy,
        )
        self.jsonl.write(format_json_line(metrics))
        scalars = list_scalars(metrics, memory, self.flops_per_token)
        for sink in self.sinks:
            sink.write(step, scalars)
        for line in format_console_lines(metrics, self.n_steps):
            logger.info(line)

    def close(self) -> None:
        self.jsonl.close()
        for sink in self.sinks:
            sink.close()


def format_console_lines(metrics: StepMetrics, n_steps: int) -> list[str]:
    """Format a step for people, in color: one line, and one more for validation. metrics.jsonl has all figures."""
    step = f"step {metrics.step:{len(str(n_steps))}}/{n_steps}"
    mfu = "" if metrics.mfu_full is None else f"  MFU {metrics.mfu_full:.1%}"
    experts = ""
    if metrics.expert_max_over_mean is not None:
        dead = f", {metrics.expert_dead_share:.0%} dead" if metrics.expert_dead_share else ""
        experts = f"  experts {metrics.expert_max_over_mean:.1f}x mean{dead}"
    lines = [
        f"{step}  {paint(f'loss {metrics.loss:.5f}', 'green')}  grad_norm {metrics.grad_norm:.4f}  "
        f"lr {metrics.lr:.2e}  "
        + paint(f"{metrics.tokens_per_s_per_rank:,.0f} tok/s/rank", "cyan")
        + f"{mfu}  {metrics.peak_memory_gib:.3g} GiB  {metrics.step_time_s:.3g} s{experts}"
    ]
    if metrics.val_loss is not None:
        val_loss = paint(f"val_loss {metrics.val_loss:.5f}", "green")
        figures = f"perplexity {metrics.val_perplexity:.4g}  {metrics.val_bits_per_byte:.4f} bits/byte"
        lines.append(f"{step}  {val_loss}  {figures}")
    return lines


def format_json_line(metrics: StepMetrics) -> str:
    """Format one line for programs. JSON has no NaN and no infinity: a loss that is not finite becomes null."""
    values = asdict(metrics).items()
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values}
    return json.dumps(finite, allow_nan=False) + "\n"


def list_scalars(metrics: StepMetrics, memory: PeakMemory, flops_per_token: FlopsPerToken) -> dict[str, float]:
    """Return tag -> value for TensorBoard, with the tags and units of torchtitan v0.2. Unknown values are left out."""
    scalars = {
        "loss_metrics/global_avg_loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "lr": metrics.lr,
        "throughput(tps)": metrics.tokens_per_s_per_rank,
        "tflops": metrics.tokens_per_s_per_rank * flops_per_token.full / 1e12,
        "mfu(%)": None if metrics.mfu_full is None else 100 * metrics.mfu_full,
        "time_metrics/end_to_end(s)": metrics.step_time_s,
        "time_metrics/data_loading(s)": metrics.data_time_s,
        "time_metrics/data_loading(%)": 100 * metrics.data_time_s / metrics.step_time_s,
        "memory/max_active(GiB)": memory.peak_gib,
        "memory/max_active(%)": memory.peak_percent,
        "memory/max_reserved(GiB)": memory.reserved_gib,
        "memory/max_reserved(%)": memory.reserved_percent,
        "memory/num_alloc_retries": memory.n_alloc_retries,
        "memory/num_ooms": memory.n_ooms,
        "experts/max_over_mean": metrics.expert_max_over_mean,
        "experts/dead_share": metrics.expert_dead_share,
        "experts/router_entropy": metrics.router_entropy,
        "validation_metrics/global_avg_loss": metrics.val_loss,
        "validation_metrics/perplexity": metrics.val_perplexity,  # this and the next are ours
        "validation_metrics/bits_per_byte": metrics.val_bits_per_byte,
    }
    return {tag: value for tag, value in scalars.items() if value is not None}


def drop_later_steps(path: Path, last_step: int) -> None:
    """Drop from metrics.jsonl all lines after `last_step`, and an incomplete last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            continue
    new = path.with_name(path.name + ".new")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, path)  # atomic: a kill loses nothing
