"""Write the metrics of a run to a file, the console and TensorBoard. Only rank 0 writes; other ranks send nothing.

    metrics.jsonl         one JSON object per line, with `kind`, `step` and `time`
        start             layout, number of ranks, restarts of the job, git commit, command, host
        step              loss, gradient norm, times, the fields of `describe_speed`, and the load of each expert
        validation        val_loss, val_perplexity, val_bits_per_byte
        save              the checkpoint, and the seconds that the ranks waited for it
        stop              why the run ended
    console and log.txt   one line per logged step, and one per validation
    tb/, wandb            sinks.py, with the tags of torchtitan v0.2

Loss and grad_norm are the same on every rank; times and memory are measured on rank 0.
MFU is the FLOP/s of the model divided by the peak FLOP/s of the hardware (PaLM, app. B, arXiv:2204.02311).
"""

import logging
import math
import resource
import shutil
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.components.log import go_on_unwritten
from torchtitan_lite.components.sinks import JsonLinesSink, TensorBoardSink
from torchtitan_lite.config.block import FlopsPerToken
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.schema import Metrics

logger = logging.getLogger(__name__)

GIB = 2**30
NO_TERMINAL = (200, 24)  # columns and lines, if the output goes to a file
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


def describe_speed(
    tokens_per_s_per_rank: float, flops: FlopsPerToken, peak_flops: float | None
) -> dict[str, float | None]:
    """Return throughput and MFU, from 0 to 1. `peak_flops` is the peak FLOP/s of one device, or None if unknown.

    All tokens of the global batch count, including padding. They are divided by the number of all ranks, including pp
    and tp ranks.
    """
    full_flops = flops.full * tokens_per_s_per_rank
    return {
        "tokens_per_s_per_rank": tokens_per_s_per_rank,
        "tflops_per_rank": full_flops / 1e12,
        # These count the full attention matrix, and its causal half.
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


class MetricsWriter:
    """Writes records to the console, to metrics.jsonl and to the sinks that [metrics] enables. Only rank 0 creates one.

    If a sink cannot be written, the log says so once. Each new record is tried again.
    """

    def __init__(
        self,
        dump_folder: Path | None,
        section: Metrics,
        *,
        n_steps: int,
        resumed_step: int,
        settings: dict[str, object],
    ):
        """`n_steps`: number of steps in the whole run. `settings`: the config by section, for sinks that display it.

        Without `dump_folder`, only the console is written.
        """
        self.n_steps = n_steps
        self.sinks: dict[str, Any] = {}  # name -> open sink
        self.unwritten: set[str] = set()  # names of the sinks that the log has reported
        self.openers: dict[str, Callable] = {}
        if dump_folder is None:
            return
        path = dump_folder / "metrics.jsonl"
        self.openers[str(path)] = partial(JsonLinesSink, path, resumed_step=resumed_step)
        if section.enable_tensorboard:
            # TensorBoard names a run by its folder
            folder = dump_folder / section.save_tb_folder / dump_folder.resolve().name
            self.openers[str(folder)] = partial(TensorBoardSink, folder, resumed_step=resumed_step)
        if section.enable_wandb:
            folder = dump_folder / "wandb"
            wandb_sink = load_extension("wandb_sink").WandbSink
            self.openers[str(folder)] = partial(wandb_sink, dump_folder, settings=settings)

    def write(self, kind: str, step: int, **fields: object) -> None:
        """Write one record. JSON has no NaN or infinity, so numbers that are not finite become null."""
        time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        record = {"kind": kind, "step": step, "time": time, **fields}
        scalars = {}
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None
            tag = key if key.startswith("lr/") else TAGS.get(key)  # lr/PATTERN: of optimizer.groups
            if tag and value is not None:
                scalars[tag] = 100 * value if tag.endswith("(%)") else value
        for name, open_sink in self.openers.items():
            with go_on_unwritten(name, self.unwritten):
                if name not in self.sinks:
                    self.sinks[name] = open_sink()
                self.sinks[name].write(record, scalars)
        if kind in FORMATS:
            width = len(str(self.n_steps))
            figures = FORMATS[kind](fields)
            figures[0] = f"step {step:{width}}/{self.n_steps}  {figures[0]}"
            columns, _ = shutil.get_terminal_size(NO_TERMINAL)
            logger.info(fit_line(figures, columns - len("12:30:01 ")))

    def close(self) -> None:
        for name, sink in self.sinks.items():
            with go_on_unwritten(name, self.unwritten):
                sink.close()


def format_step(fields: dict[str, object]) -> list[str]:
    """Format a step for the console: its figures, most important first. metrics.jsonl has all of them."""
    figures = [f"loss {fields['loss']:.5f}", f"grad_norm {fields['grad_norm']:.4f}"]
    if "skipped_above" in fields:
        median = f"its median is {fields['skipped_above']:.4g}"
        count = f"{fields['skipped_steps']} skipped so far"
        figures.append(f"SKIPPED, the norm is a spike: {median} ({count})")
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


def fit_line(figures: list[str], width: int) -> str:
    """Join figures to a line of at most `width` characters. The last ones are left out if there is no room."""
    line = figures[0]
    for figure in figures[1:]:
        longer = f"{line}  {figure}"
        if len(longer) > width:
            break
        line = longer
    return line
