"""The ledger of a running process: its forecast before the run, and the measurement of one step.

    pp rank 0  F0F1....B0--F2B1--F3B2--..B3--    each rank times its own actions: by CUDA events, or the CPU's clock
    pp rank 1  ..F0B0--F1B1--F2B2--F3B3--....    all start at one barrier; rank 0 gets those of its own pipeline

torch's schedules wait for other stages between their calls of a stage, on CUDA in the stream between the events: such a
wait is a gap here, the bubble. A wait inside a call, for tp and cp neighbours or for FSDP's parameters, counts as work,
as it does in the simulator.

Collectives are not watched by a TorchDispatchMode, because compiled code would run uncompiled under it. Instead, every
operator of the library c10d gets a kernel that counts the call and then runs that of the device, for some 20 us a call.

The measured step is the second of the process: the first one compiles, connects and allocates. It is the third where
the second does so again: compiled code meets the optimizer's state for the first time, or a validated pipeline makes
its buffers anew.

Effect: none in other steps: collectives and the methods of the stages are as they were.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.components.metrics import GIB, read_peak_memory
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.layout import MESH_DIMS, Layout
from torchtitan_lite.config.pipeline_plan import Action
from torchtitan_lite.config.schema import Config
from torchtitan_lite.parallel.pipeline import Stage, list_stages
from torchtitan_lite.plan.ledger import Costs, describe, open_ledger
from torchtitan_lite.plan.simulator import METHODS, Event, Timeline, draw_svg, draw_text, find_kind, trace_chrome
from torchtitan_lite.plan.traffic import OPERATIONS, CollectiveReader, Moved, find_group, sum_moved
from torchtitan_lite.step import Run

logger = logging.getLogger(__name__)

Moment = float | torch.cuda.Event
AXES = [*(" x ".join(dims) for n in range(1, len(MESH_DIMS) + 1) for dims in combinations(MESH_DIMS, n)), "efsdp", "ep"]
FRONT = torch.DispatchKey.BackendSelect  # runs before the kernels of all devices; c10d has no kernels there


class RunLedger:
    """The ledger of one process. Every rank makes it before it builds the model: on a CPU, memory counts from here."""

    def __init__(self, config: Config, model_args: ModelArgs, layout: Layout, machine: Machine, dump_folder: Path):
        self.layout, self.dump_folder = layout, dump_folder
        again = config.compile.enable or (layout.pp > 1 and config.validation.enable)
        self.n_steps, self.n_th_measured = 0, 3 if again else 2
        self.is_measured = config.metrics.measure_ledger and config.training.steps >= self.n_th_measured
        self.tokens_per_step = layout.global_batch_size * config.training.seq_len
        self.bytes_before = 0.0 if machine.device_type == "cuda" else read_peak_bytes(torch.device("cpu"))
        self.ledger, self._for_metrics, self._pictures = None, None, {}
        if dist.get_rank() == 0:
            self.ledger, self._pictures = open_ledger(config, model_args, layout, machine)
            if not self.is_measured:
                self._log_ledger()

    @contextmanager
    def measured(self, step: int, run: Run, group: dist.ProcessGroup, *, besides: dist.ProcessGroup) -> Iterator[None]:
        """Context manager around every step; measures one of them. Collective.

        `group`: all ranks, by gloo, used by this thread alone. `besides`: a group that another thread uses meanwhile,
        whose collectives are not counted.
        """
        self.n_steps += 1
        if not self.is_measured or self.n_steps != self.n_th_measured:
            yield
            return
        on_cuda = run.device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(run.device)
        dist.barrier(group)
        with (
            count_traffic(self.layout, besides=besides) as count,
            time_actions(list_stages(run.schedule), run.device) as actions,
        ):
            start_s = time.perf_counter()
            yield
            if on_cuda:
                torch.cuda.synchronize()
            step_time_s = time.perf_counter() - start_s
        memory = torch.tensor(read_peak_bytes(run.device) - self.bytes_before, dtype=torch.float64)
        traffic = find_most_moved(count.moved, group)
        dist.all_reduce(memory, dist.ReduceOp.MAX, group=group)  # 8 bytes
        timeline = None
        pipeline = range(0, self.layout.world_size, self.layout.world_size // self.layout.pp)  # that of rank 0
        if run.schedule is not None and dist.get_rank() in pipeline:
            timeline = gather_timeline(actions.list_events(run.mesh.pp.get_local_rank()), list(pipeline), group)
        if dist.get_rank() != 0:
            return
        costs = Costs(
            traffic=traffic,
            memory_bytes=memory.item(),
            bubble=timeline.bubble if timeline else None,
            step_time_s=step_time_s,
            tokens_per_s_per_rank=self.tokens_per_step / step_time_s / self.layout.world_size,
        )
        self.ledger = replace(self.ledger, measured=costs, step=step)
        self._for_metrics = asdict(self.ledger)
        self._log_ledger()
        if timeline:
            self._log_timeline(timeline)

    def _log_ledger(self) -> None:
        self._pictures["ledger"] = describe(self.ledger)
        logger.info(self._pictures["ledger"])

    def _log_timeline(self, timeline: Timeline) -> None:
        """Log the timeline as text; write it to the dump folder as a picture and a Chrome trace."""
        picture, trace = self.dump_folder / "timeline.svg", self.dump_folder / "timeline.json"
        picture.write_text(draw_svg(timeline, "measured"), encoding="utf-8")
        trace.write_text(json.dumps(trace_chrome(timeline)), encoding="utf-8")
        text = self._pictures["pipeline measured"] = draw_text(timeline)
        legend = "F forward, B backward, dots are idle"
        logger.info(
            f"the pipeline of rank 0 in step {self.ledger.step}: {legend}; also in {picture} and {trace}\n{text}"
        )

    def take(self) -> dict[str, object] | None:
        """Return both columns, once, for the next line of metrics.jsonl; None at all other times."""
        taken, self._for_metrics = self._for_metrics, None
        return taken

    def take_pictures(self) -> dict[str, str]:
        """Return what is new since the last call, name -> text of several lines."""
        taken, self._pictures = self._pictures, {}
        return taken


def read_peak_bytes(device: torch.device) -> float:
    """Return the peak of live tensors since the last reset (CUDA), or of the process since its start (CPU)."""
    if device.type == "cuda":
        return torch.cuda.memory_stats(device)["active_bytes.all.peak"]
    return read_peak_memory(device).peak_gib * GIB


# ---------------------------------------------------------------- the actions of a pipeline


class ActionTimes:
    """Start and end of each action of this rank. Reading the clock makes nobody wait."""

    def __init__(self, device: torch.device):
        self.device = device
        self.taken: list[tuple[Action, Moment, Moment]] = []
        self.origin = self.now()

    def now(self) -> Moment:
        """Return this moment: the host's time on a CPU, an event in the current stream on a GPU."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self, stage: Stage, kind: str, method: Callable, microbatch: int, *args, **kwargs):
        """Call the method of the stage and record its times."""
        start = self.now()
        result = method(microbatch, *args, **kwargs)
        self.taken.append((Action(stage.stage_index, find_kind(kind, kwargs), microbatch), start, self.now()))
        return result

    def list_events(self, pp_rank: int) -> list[Event]:
        """Return the events in seconds from the origin. On a GPU, synchronize first."""
        return [Event(pp_rank, self._seconds_to(start), self._seconds_to(end), act) for act, start, end in self.taken]

    def _seconds_to(self, moment: Moment) -> float:
        return moment - self.origin if self.device.type == "cpu" else self.origin.elapsed_time(moment) / 1000


@contextmanager
def time_actions(stages: list[Stage], device: torch.device) -> Iterator[ActionTimes]:
    """Context manager: times the actions of these stages. All ranks must enter it at one moment: after a barrier."""
    times = ActionTimes(device)
    for stage in stages:
        for name, kind in METHODS.items():
            setattr(stage, name, partial(times.take, stage, kind, getattr(stage, name)))
    try:
        yield times
    finally:
        for stage in stages:
            for name in METHODS:
                delattr(stage, name)  # the method of the class is visible again


def gather_timeline(own: list[Event], ranks: list[int], group: dist.ProcessGroup) -> Timeline | None:
    """Return the timeline of the pipeline on these ranks (first stage to last) on the first of them; elsewhere None.

    Sends some 100 bytes an action to that rank, over `group`: the whole world, with CPU tensors. Call it on the ranks
    of this pipeline only. Time starts with the first action.
    """
    first, *others = ranks
    if dist.get_rank() != first:
        dist.send_object_list([own], dst=first, group=group)
        return None
    events = list(own)
    for rank in others:
        box = [None]
        dist.recv_object_list(box, src=rank, group=group)
        events += box[0]
    start = min(event.start for event in events)
    events = [event._replace(start=event.start - start, end=event.end - start) for event in events]
    return Timeline(sorted(events, key=lambda event: event.start), len(ranks))


# ---------------------------------------------------------------- traffic


class TrafficCount:
    """Collectives of this rank. Calls in the group `besides` are not counted: another thread makes them."""

    def __init__(self, layout: Layout, besides: dist.ProcessGroup):
        self.reader, self.besides = CollectiveReader(layout), besides.group_name
        self.calls: list[tuple[str, int, float]] = []  # mesh axis, 1, bytes

    @property
    def moved(self) -> dict[str, Moved]:
        """Mesh axis -> all calls over it."""
        return sum_moved(self.calls)

    def take(self, name: str, keys: torch.DispatchKeySet, *args):
        """Count a call of the c10d operator `name`, then run its kernel."""
        if find_group(args).group_name != self.besides and (call := self.reader.read(f"c10d::{name}", args)):
            self.calls.append((call.axis, 1, call.n_bytes))
        # redispatch releases Python's lock; gloo's threads need it before this call can end.
        return getattr(torch.ops.c10d, name).default.redispatch(keys.remove(FRONT), *args)


@contextmanager
def count_traffic(layout: Layout, *, besides: dist.ProcessGroup) -> Iterator[TrafficCount]:
    """Context manager: counts this rank's collectives inside. Outside, c10d's operators are as they were."""
    count = TrafficCount(layout, besides)
    with torch.library._scoped_library("c10d", "IMPL") as library:
        for namespace, operator in (name.split("::") for name in OPERATIONS):
            if namespace == "c10d":
                library.impl(operator, partial(count.take, operator), FRONT.name, with_keyset=True)
        yield count


def find_most_moved(moved: dict[str, Moved], group: dist.ProcessGroup) -> dict[str, Moved]:
    """Return, for each axis, the traffic of the rank that moves most over it.

    Two all-reduces of 264 bytes in `group`: all ranks, by gloo. Each rank may know other axes.
    """
    own = [moved.get(axis, Moved(0, 0.0)) for axis in AXES]
    own_bytes = torch.tensor([each.n_bytes for each in own], dtype=torch.float64)
    most_bytes = own_bytes.clone()
    dist.all_reduce(most_bytes, dist.ReduceOp.MAX, group=group)
    n_calls = torch.tensor([each.n_calls for each in own]) * (own_bytes == most_bytes)
    dist.all_reduce(n_calls, dist.ReduceOp.MAX, group=group)
    most = zip(AXES, n_calls.tolist(), most_bytes.tolist(), strict=True)
    return {axis: Moved(calls, n_bytes) for axis, calls, n_bytes in most if calls}
