"""Work between two steps besides training: timing, metrics, profiling, garbage collection.

A CUDA step is only queued when its call returns, so timing a single step on the host is wrong. Reading the loss for a
record waits for the device, so the time between two records is right. Rank 0 writes; all ranks profile and collect.
"""

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.build import Run
from torchtitan_lite.components.expert_balance import count_collapsed, describe_load
from torchtitan_lite.components.log import describe_rank
from torchtitan_lite.components.metrics import (
    MetricsWriter,
    describe_out_of_memory,
    describe_step,
    read_peak_memory,
)
from torchtitan_lite.components.profiling import is_out_of_memory, profile_steps
from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.config.machine import peak_flops
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel.process_groups import Groups, set_timeouts
from torchtitan_lite.step import StepResult

logger = logging.getLogger(__name__)


class RunLog:
    """Writes the metrics of a run. Use it as a context manager around the steps: on an exception it logs the rank.

    The time-outs of collectives change once, after the first step and the first validation. By then every rank has
    compiled its code and connected to its peers.
    """

    def __init__(
        self,
        run: Run,
        dump_folder: Path,
        *,
        device_name: str,
        resumed_step: int,
        origin: str,
        restarts: int,
        groups: Groups,
    ):
        config, layout = run.config, run.layout
        self.run, self.dump_folder, self.resumed_step, self.groups = (
            run,
            dump_folder,
            resumed_step,
            groups,
        )
        self.n_steps, self.step = config.training.steps, resumed_step
        model_args = run.parts[0].model_args
        self.workload = {
            "tokens_per_step": layout.global_batch_size * config.training.seq_len,
            "world_size": layout.world_size,
            "flops": count_flops_per_token(model_args, config.training.seq_len),
            "peak_flops": peak_flops(device_name) if run.device.type == "cuda" else None,
        }
        self.n_collapsed = 0  # consecutive logged steps with collapsed experts
        self.is_warm = False
        self.writer = None
        if dist.get_rank() == 0:
            options = {
                "n_steps": self.n_steps,
                "resumed_step": resumed_step,
                "settings": asdict(config),
            }
            self.writer = MetricsWriter(dump_folder, config.metrics, **options)
        about = {"layout": layout.degrees, "world_size": layout.world_size, "device": device_name}
        self.record(
            "start",
            resumed_step,
            **about,
            resumed=resumed_step > 0,
            restarts=restarts,
            weights=origin,
        )

    def record(self, kind: str, step: int, **fields: object) -> None:
        """Write a record to metrics.jsonl. Only rank 0 writes."""
        if self.writer:
            self.writer.write(kind, step, **fields)

    def time_loading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, and measure how long the host waits for them."""
        self.restart_clock()
        while True:
            started_s = time.perf_counter()
            if (batch := next(batches, None)) is None:
                return
            self.data_time_s += time.perf_counter() - started_s
            yield batch

    def restart_clock(self) -> None:
        self.started_s, self.data_time_s, self.n_timed = time.perf_counter(), 0.0, 0

    def after_step(
        self, step: int, result: StepResult, validation: dict[str, float] | None
    ) -> None:
        """Record the step if it is due. `validation`: the result of `validate` for this step."""
        section = self.run.config.metrics
        self.step, self.n_timed = step, self.n_timed + 1
        if validation:
            self.started_s += validation["val_time_s"]
        is_due = (
            validation
            or step % section.log_freq == 0
            or step in (self.resumed_step + 1, self.n_steps)
        )
        if self.writer and is_due:
            self.write_step(step, result)
            if validation:
                self.record("validation", step, **validation)
        if not self.is_warm and (validation or not self.run.config.validation.enable):
            self.is_warm = True
            set_timeouts(self.run.config.comm.train_timeout_seconds, self.groups)
        self.end_profiled_step()
        if step % self.run.config.training.gc_freq == 0:
            gc.collect(1)

    def write_step(self, step: int, result: StepResult) -> None:
        """Write the record of a step, with average times since the last record. Waits for the device."""
        fields = {"loss": result.loss.item(), "grad_norm": result.grad_norm.item(), "lr": result.lr}
        fields["tokens"] = (
            step * self.workload["tokens_per_step"]
        )  # of all ranks, from the first step to this one
        step_time_s = (time.perf_counter() - self.started_s) / self.n_timed
        fields |= describe_step(
            **self.workload, step_time_s=step_time_s, data_time_s=self.data_time_s / self.n_timed
        )
        fields |= read_peak_memory(self.run.device)
        if result.expert_loads is not None:
            moe = self.run.parts[0].model_args.moe
            load = describe_load(result.expert_loads, moe.top_k)
            self.n_collapsed = count_collapsed(step, load, moe, self.n_collapsed)
            fields |= load | {"expert_loads": result.expert_loads[:, :-1].int().tolist()}
        self.record("step", step, **fields)
        self.restart_clock()

    def __enter__(self) -> "RunLog":
        self.exits = ExitStack()
        set_timeouts(self.run.config.comm.init_timeout_seconds, self.groups)
        section, rank = self.run.config.profiling, dist.get_rank()
        profiling = profile_steps(section, self.dump_folder, rank, resumed_step=self.resumed_step)
        self.end_profiled_step = self.exits.enter_context(profiling)
        if self.run.device.type == "cuda":
            torch.cuda.empty_cache()  # initializing or loading weights allocated one full tensor at a time
        gc.collect()
        gc.freeze()  # never scan objects that exist now
        gc.disable()  # after_step collects at fixed steps: a rank that collects alone makes all others wait
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *rest: object) -> None:
        if isinstance(error, Exception):
            failed = describe_rank(dist.get_rank(), self.run.mesh.coordinates())
            logger.error(f"{failed} failed: {type(error).__name__}: {error}")
            if is_out_of_memory(error):
                logger.error(describe_out_of_memory(self.dump_folder, dist.get_world_size()))
            self.record("stop", self.step, reason=f"{type(error).__name__}: {error}")
        self.exits.__exit__(kind, error, *rest)
        if self.writer:
            self.writer.close()
