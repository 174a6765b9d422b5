"""Every run scores the planner: a forecast of its steps before the first one, and what a step really took beside it.

    before the model is built    rank 0 logs the forecast (plan/ledger_forecast.py)
    one early step               every rank times it; counts its collectives (plan/traffic_count.py), and times
                                 the actions of its pipeline (plan/action_times.py)
    after it                     rank 0 logs both columns, leaves them to metrics.jsonl, and draws the pipeline

The step is the second of this process, for the first one compiles, connects and allocates. It is the third where the
second does so again: compiled code meets the optimizer's state for the first time, or a pipeline has been validated
and makes its buffers anew. In all other steps nothing is timed here, patched, or waited for.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.components.metrics import GIB, read_peak_memory
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.parallel.pipeline import list_stages
from torchtitan_lite.plan.action_times import gather_timeline, time_actions
from torchtitan_lite.plan.ledger_forecast import Costs, describe, open_ledger
from torchtitan_lite.plan.schedule_order import list_rows
from torchtitan_lite.plan.simulator import Timeline
from torchtitan_lite.plan.timeline import draw_svg, draw_text, trace_chrome
from torchtitan_lite.plan.traffic_count import count_traffic, find_most_moved
from torchtitan_lite.step import Run

logger = logging.getLogger(__name__)


class RunLedger:
    """Of one process. To be made by every rank before the model is: on a CPU, memory counts from here."""

    def __init__(self, config: Config, shape: ModelArgs, layout: Layout, machine: Machine, dump_folder: Path):
        self.layout, self.dump_folder = layout, dump_folder
        again = config.compile.enable or (layout.pp > 1 and config.validation.enable)
        self.n_steps, self.n_th_measured = 0, 3 if again else 2
        self.tokens_per_step = layout.global_batch_size * config.training.seq_len
        self.bytes_before = 0.0 if machine.device_type == "cuda" else read_peak_bytes(torch.device("cpu"))
        self.ledger, self._for_metrics = None, None
        if dist.get_rank() == 0:
            self.ledger = open_ledger(config, shape, layout, machine, list_rows(config.parallelism, layout))
            logger.info(describe(self.ledger))

    @contextmanager
    def measured(self, step: int, run: Run, group: dist.ProcessGroup, *, besides: dist.ProcessGroup) -> Iterator[None]:
        """Context manager around every step. Collective.

        `group`: all ranks, with gloo, for this thread alone. `besides`: what another thread talks over meanwhile, which
        is not counted.
        """
        self.n_steps += 1
        if self.n_steps != self.n_th_measured:
            yield
            return
        if run.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(run.device)
        dist.barrier(group)
        with (
            count_traffic(self.layout, besides=besides) as count,
            time_actions(list_stages(run.schedule), run.device) as actions,
        ):
            begin_s = time.perf_counter()
            yield
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            step_time_s = time.perf_counter() - begin_s
        memory = torch.tensor(read_peak_bytes(run.device) - self.bytes_before, dtype=torch.float64)
        dist.all_reduce(memory, dist.ReduceOp.MAX, group=group)  # 8 bytes
        traffic = find_most_moved(count.moved, group)
        timeline = None
        pipeline = range(0, self.layout.world_size, self.layout.world_size // self.layout.pp)  # that of rank 0
        if run.schedule is not None and dist.get_rank() in pipeline:
            timeline = gather_timeline(actions.list_events(run.mesh.pp.get_local_rank()), list(pipeline), group)
        if dist.get_rank() == 0:
            measured = Costs(
                traffic=traffic,
                memory_bytes=memory.item(),
                bubble=timeline.bubble if timeline else None,
                step_time_s=step_time_s,
                tokens_per_s_per_rank=self.tokens_per_step / step_time_s / self.layout.world_size,
            )
            self._tell(measured, step, timeline)

    def _tell(self, measured: Costs, step: int, timeline: Timeline | None) -> None:
        self.ledger = replace(self.ledger, measured=measured, step=step)
        self._for_metrics = asdict(self.ledger)
        logger.info(describe(self.ledger))
        if timeline:
            leave_timeline(timeline, self.dump_folder, self.ledger.predicted.bubble)

    def take(self) -> dict[str, object] | None:
        """Both columns, once, for the next line of metrics.jsonl; None at all other times."""
        taken, self._for_metrics = self._for_metrics, None
        return taken


def read_peak_bytes(device: torch.device) -> float:
    """On CUDA of live tensors since the last reset; on a CPU of all that this process has ever held."""
    if device.type == "cuda":
        return torch.cuda.memory_stats(device)["active_bytes.all.peak"]
    return read_peak_memory(device).peak_gib * GIB


def leave_timeline(timeline: Timeline, dump_folder: Path, predicted_bubble: float | None) -> None:
    """In the log as text, and in the dump folder as a picture and a Chrome trace."""
    predicted = "not predicted" if predicted_bubble is None else f"predicted {predicted_bubble:.1%}"
    picture, trace = dump_folder / "timeline.svg", dump_folder / "timeline.json"
    picture.write_text(draw_svg(timeline, "measured"), encoding="utf-8")
    trace.write_text(json.dumps(trace_chrome(timeline)), encoding="utf-8")
    logger.info(
        f"bubble: {predicted}, measured {timeline.bubble:.1%}. The pipeline of rank 0, also in {picture} and {trace}\n"
        f"{draw_text(timeline)}"
    )
