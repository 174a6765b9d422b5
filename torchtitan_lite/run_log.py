"""Work between two steps besides training: timing, metrics, profiling, garbage collection, and the last words of a run.

A CUDA step is only queued when its call returns, so timing a single step on the host is wrong. Reading the loss for a
record waits for the device, so the time between two records is right. Rank 0 writes; all ranks profile and collect.
"""

import gc
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.build import Run
from torchtitan_lite.components.expert_balance import count_collapsed, describe_load
from torchtitan_lite.components.log import IN_FILE, describe_rank
from torchtitan_lite.components.metrics import (
    MetricsWriter,
    describe_speed,
    read_peak_memory,
)
from torchtitan_lite.components.optim import NORMS
from torchtitan_lite.components.profiling import is_out_of_memory, profile_steps
from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.config.machine import peak_flops
from torchtitan_lite.config.messages import name_command
from torchtitan_lite.config.schema import Metrics
from torchtitan_lite.files import describe_launch
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel.process_groups import Groups, set_timeouts
from torchtitan_lite.run_spec import RunSpec
from torchtitan_lite.step import StepResult

logger = logging.getLogger(__name__)


class RunLog:
    """Writes the metrics of a run. Make the steps inside `around_steps`.

    The time-outs of collectives change once, after the first step and the first validation. By then every rank has
    compiled its code and connected to its peers.
    """

    def __init__(
        self,
        run: Run,
        spec: RunSpec,
        resumed_step: int,
        restarts: int,
        groups: Groups,
    ):
        config = run.config
        self.run = run
        self.spec = spec
        self.groups = groups
        self.resumed_step = resumed_step
        self.n_steps = config.training.steps
        self.tokens_per_step = run.layout.global_batch_size * config.training.seq_len
        self.flops = count_flops_per_token(spec.model_args, config.training.seq_len)
        self.peak_flops = peak_flops(spec.machine.name) if run.device.type == "cuda" else None
        self.step = resumed_step
        self.skipped_above = math.inf  # the median norm, if the last step was skipped
        self.n_collapsed = 0  # consecutive logged steps with collapsed experts
        self.is_warm = False
        self.writer = None
        if dist.get_rank() == 0:
            self.writer = MetricsWriter(
                spec.written_folder,
                config.metrics,
                n_steps=self.n_steps,
                resumed_step=resumed_step,
                settings=asdict(config),
            )
        self.record(
            "start",
            resumed_step,
            layout=run.layout.degrees,
            world_size=run.layout.world_size,
            device=spec.machine.name,
            resumed=resumed_step > 0,
            restarts=restarts,
            weights=spec.origin,
            **describe_launch(),
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
            batch = next(batches, None)
            if batch is None:
                return
            self.data_time_s += time.perf_counter() - started_s
            yield batch

    def restart_clock(self) -> None:
        self.highest_norm = 0.0  # since the last record
        self.started_s = time.perf_counter()
        self.data_time_s = 0.0
        self.n_timed = 0

    def after_step(
        self,
        step: int,
        result: StepResult,
        validation: dict[str, float] | None,
        *,
        is_applied: bool,
        grad_norm: float,
    ) -> None:
        """Record the step if it is due, was skipped, or is the first one after that.

        `validation`: the result of `validate` for this step.

        Collective over all ranks once, when the run is warm.
        """
        config = self.run.config
        self.step = step
        self.n_timed += 1
        self.highest_norm = max(self.highest_norm, grad_norm)
        is_due = step % config.metrics.log_freq == 0
        is_end = step in (self.resumed_step + 1, self.n_steps)
        if validation:
            self.started_s += validation["val_time_s"]
        is_after_spike = math.isfinite(self.skipped_above)
        if self.writer and (validation or is_due or is_end or is_after_spike or not is_applied):
            self.write_step(step, result, is_applied)
            if validation:
                self.record("validation", step, **validation)
        if not self.is_warm and (validation or not config.validation.enable):
            self.is_warm = True
            set_timeouts(config.comm.train_timeout_seconds, self.groups)
        self.end_profiled_step()
        if step % config.training.gc_freq == 0:
            gc.collect(1)

    def write_step(self, step: int, result: StepResult, is_applied: bool) -> None:
        """Write the record of a step, with average times since the last record. Waits for the device."""
        fields = {
            "loss": result.loss.item(),
            "grad_norm": result.grad_norm.item(),
            "grad_norm_max": self.highest_norm,  # since the last record
            "lr": result.lr,
            "tokens": step * self.tokens_per_step,  # of all ranks, from the first step to this one
        }
        seconds = time.perf_counter() - self.started_s  # without validation
        n_tokens = self.n_timed * self.tokens_per_step
        speed = n_tokens / seconds / self.run.layout.world_size
        fields |= describe_speed(speed, self.flops, self.peak_flops)
        fields["step_time_s"] = seconds / self.n_timed
        fields["data_time_s"] = self.data_time_s / self.n_timed  # the host waited for a batch
        fields["data_time_share"] = self.data_time_s / seconds
        fields["remaining_s"] = self.estimate_remaining(step)
        fields |= read_peak_memory(self.run.device)
        if result.expert_loads is not None:
            moe = self.spec.model_args.moe
            load = describe_load(result.expert_loads, moe.top_k)
            self.n_collapsed = count_collapsed(step, load, moe, self.n_collapsed)
            fields |= load
            fields["expert_loads"] = result.expert_loads[:, :-1].int().tolist()
        if spikes := self.run.optimizer.state.get(NORMS):
            fields["skipped_steps"] = int(spikes["skipped"])
            median = spikes["history"].median().item()
            if not is_applied:
                fields["skipped_above"] = median
            elif fields["grad_norm"] > self.run.config.training.skip_spikes * self.skipped_above:
                rise = f"rose from {self.skipped_above:.4g} to {median:.4g}"
                window = f"the last {len(spikes['history'])} steps (training.spike_window)"
                why = f"their median over {window} {rise}"
                logger.warning(f"step {step}: such gradient norms are no longer skipped: {why}")
            self.skipped_above = math.inf if is_applied else median
        self.record("step", step, **fields)
        self.restart_clock()

    def estimate_remaining(self, step: int) -> float | None:
        """Return the seconds until the last step, as fast as since the first record; with its validations and saves."""
        now_s = time.perf_counter()
        n_steps = step - self.resumed_step - 1  # without the first step, which is slower
        if n_steps == 0:
            self.first_s = now_s
            return None
        return (now_s - self.first_s) / n_steps * (self.n_steps - step)

    # ---------------------------------------------------------------- the last words

    def stop(self, step: int, reason: str) -> None:
        """Say why the run ends after this step."""
        logger.info(reason)
        self.record("stop", step, reason=reason)

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        """Profile and collect garbage at fixed steps. An exception is logged with its rank, and raised again."""
        config = self.run.config
        folder = self.spec.dump_folder
        rank = dist.get_rank()
        set_timeouts(config.comm.init_timeout_seconds, self.groups)
        if self.run.device.type == "cuda":
            torch.cuda.empty_cache()  # initializing or loading weights allocated one full tensor at a time
        gc.collect()
        gc.freeze()  # never scan objects that exist now
        gc.disable()  # after_step collects at fixed steps: a rank that collects alone makes all others wait
        profiling = profile_steps(config.profiling, folder, rank, resumed_step=self.resumed_step)
        try:
            with profiling as self.end_profiled_step:
                yield
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            reason = f"{describe_rank(rank, self.run.mesh.coordinates())}: {reason}"
            # not on the screen: if another rank failed first, the launcher shows that error
            logger.log(IN_FILE, reason)
            self.record("stop", self.step, reason=reason)
            if is_out_of_memory(error):
                config_file = shlex.quote(f"{folder}/config.toml")
                plan = f"plan --gpus {dist.get_world_size()} --config {config_file}"
                hint = f"To see what uses the memory: {name_command(plan)}"
                error.args = (f"{error}\n{hint}",)  # Python 3.10 has no add_note
            raise
        else:
            if self.spec.written_folder:
                logger.info(f"look at it: {name_views(folder, config.metrics)}")
        finally:
            if self.writer:
                self.writer.close()


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
