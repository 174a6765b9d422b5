"""Measure the steps of a run, and record them. Only rank 0 writes, and ranks do not communicate.

A step lasts from the request of its batch until the host has read the gradient norm, which waits for the device.
Validations, saves and logging happen between two steps, so their time is not included. On CUDA, the weights are updated
while the host continues, so the time of the update is included in the next step.

Loss and grad_norm are the same on every rank; times and memory are measured on rank 0.
MFU is the FLOP/s of the model divided by the peak FLOP/s of the hardware (PaLM, app. B, arXiv:2204.02311).
"""

import logging
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_lite.build import Run
from torchtitan_lite.components.log import IN_FILE, describe_rank
from torchtitan_lite.components.metrics import MetricsWriter, name_views
from torchtitan_lite.config.block import FlopsPerToken, count_flops_per_token
from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.learning_rate import list_rates
from torchtitan_lite.config.machine import GIB, peak_flops
from torchtitan_lite.files import describe_launch
from torchtitan_lite.parallel.process_groups import Place
from torchtitan_lite.preflight import RunSpec
from torchtitan_lite.step import StepResult

logger = logging.getLogger(__name__)

# the first steps after a start are all recorded, because the user watches them
N_FIRST = 10


@dataclass
class Interval:
    """Measurements since the last record."""

    time_s: float = 0.0  # total duration of the steps
    data_time_s: float = 0.0  # time that the host waited for batches
    n_steps: int = 0
    highest_norm: float = 0.0


class RunMetrics(MetricsWriter):
    """Measures and records the steps of a run.

    A context manager: on exit, it records the error, or logs how to look at the run.
    """

    def __init__(
        self, run: Run, spec: RunSpec, folder: Path | None, resumed_step: int, place: Place
    ):
        """`folder`: where this rank writes records, or None."""
        super().__init__(folder, spec.config, resumed_step)
        self.run = run
        self.spec = spec
        self.rank = place.rank
        training = spec.config.training
        self.tokens_per_step = run.layout.global_batch_size * training.seq_len
        self.flops = count_flops_per_token(
            spec.model_args, training.seq_len, spec.config.model.attention
        )
        self.peak_flops = peak_flops(spec.machine.name) if run.device.type == "cuda" else None
        self.was_skipped = False  # whether the previous step was skipped
        self.first_s = math.nan  # time of the first record
        self.interval = Interval()
        self.record(
            "start",
            resumed_step,
            layout=run.layout.degrees,
            world_size=run.layout.world_size,
            device=spec.machine.name,
            resumed=resumed_step > 0,
            restarts=place.restarts,
            weights=spec.origin,
            **describe_launch(),
        )

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Measure how long the host waits for a batch."""
        started_s = time.perf_counter()
        yield
        self.interval.data_time_s += time.perf_counter() - started_s

    def log(
        self,
        step: int,
        result: StepResult,
        validation: dict[str, float] | None,
        *,
        time_s: float,
        is_applied: bool,
        grad_norm: float,
    ) -> None:
        """Record the result of `validate`. Record the step if it is due, if it was skipped, or after a skipped step.

        `time_s`: the duration of the step.
        """
        if self.rank > 0:
            return  # all ranks have the same loss and norm, and rank 0 writes them
        interval = self.interval
        interval.n_steps += 1
        interval.time_s += time_s
        interval.highest_norm = max(interval.highest_norm, grad_norm)
        is_always_logged = step <= self.resumed_step + N_FIRST or step == self.n_steps
        is_due = is_always_logged or step % self.spec.config.metrics.log_freq == 0
        if validation or is_due or self.was_skipped or not is_applied:
            self.write_step(step, result, grad_norm, is_applied=is_applied)
            if validation:
                self.record("validation", step, **validation)
        self.was_skipped = not is_applied

    def write_step(
        self, step: int, result: StepResult, grad_norm: float, *, is_applied: bool
    ) -> None:
        """Write the record of a step, with average times since the last record. Waits for the device."""
        interval = self.interval
        fields = {
            "loss": result.loss.item(),
            "grad_norm": grad_norm,
            "grad_norm_max": interval.highest_norm,  # since the last record
            # the rates that the optimizer used: the schedule is one step ahead
            **list_rates(self.spec.config, self.run.lr_scheduler.last_epoch - 1),
            # number of tokens that all ranks have read since step 1
            "tokens": step * self.tokens_per_step,
        }
        n_tokens = interval.n_steps * self.tokens_per_step
        speed = n_tokens / interval.time_s / self.run.layout.world_size
        fields |= describe_speed(speed, self.flops, self.peak_flops)
        fields["step_time_s"] = interval.time_s / interval.n_steps
        fields["data_time_s"] = interval.data_time_s / interval.n_steps
        fields["data_time_share"] = interval.data_time_s / interval.time_s
        fields["remaining_s"] = self.estimate_remaining(step)
        fields |= read_peak_memory(self.run.device)
        if self.run.balance:
            fields |= self.run.balance.describe(step, result.expert_loads)
        if self.run.spikes:
            fields |= self.run.spikes.describe(step, grad_norm, is_applied=is_applied)
        self.record("step", step, **fields)
        self.interval = Interval()

    def estimate_remaining(self, step: int) -> float | None:
        """Return the seconds until the last step, at the average speed since the first record.

        The average includes validations and saves.
        """
        now_s = time.perf_counter()
        n_steps = step - self.resumed_step - 1  # without the first step, which is slower
        if n_steps == 0:
            self.first_s = now_s
            return None
        return (now_s - self.first_s) / n_steps * (self.n_steps - step)

    def stop(self, step: int, reason: str) -> None:
        """Log and record why the run ends after this step."""
        logger.info(reason)
        self.record("stop", step, reason=reason)

    def __enter__(self) -> "RunMetrics":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, Exception):
            load_module("components.diagnosis").explain_out_of_memory(
                error, self.spec.dump_folder, self.run.layout.world_size
            )
            name = describe_rank(self.rank, self.run.mesh.coordinates())
            reason = f"{name}: {type(error).__name__}: {error}"
            # not on the screen, because the launcher shows the error of the rank that failed first
            logger.log(IN_FILE, reason)
            self.record("stop", self.run.lr_scheduler.last_epoch, reason=reason)
        elif error is None and self.sinks:
            views = name_views(self.spec.dump_folder, self.spec.config.metrics)
            logger.info(f"look at it: {views}")
        self.close()


def describe_speed(
    tokens_per_s_per_rank: float, flops: FlopsPerToken, peak_flops: float | None
) -> dict[str, float | None]:
    """Return throughput and MFU, from 0 to 1. `peak_flops` is the peak FLOP/s of one device, or None if unknown.

    Throughput includes all tokens of the global batch, even padding. It is divided by the number of all ranks,
    including pp and tp ranks.
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
    """Return the peak memory of this rank: on CUDA since the last call, on a CPU since the process started."""
    if device.type != "cuda":  # resident memory, including Python and torch
        unit_bytes = 1 if sys.platform == "darwin" else 1024  # unit of getrusage
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_memory_gib": peak * unit_bytes / GIB}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    peak_bytes = stats["active_bytes.all.peak"]  # live tensors
    reserved_bytes = stats["reserved_bytes.all.peak"]  # by torch's allocator, including gaps
    return {
        "peak_memory_gib": peak_bytes / GIB,
        "peak_memory_share": peak_bytes / total_bytes,
        "reserved_memory_gib": reserved_bytes / GIB,
        "reserved_memory_share": reserved_bytes / total_bytes,
        # The allocator freed its cache and retried: memory is tight.
        "n_alloc_retries": stats["num_alloc_retries"],
        "n_ooms": stats["num_ooms"],
    }
