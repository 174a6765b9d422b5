"""Measure one step of a real run: time, memory, traffic, and when each pipeline stage did what.

    pp rank 0  F0F1....B0--F2B1--F3B2--..B3--    each rank times its own actions: by CUDA events, or the CPU's clock
    pp rank 1  ..F0B0--F1B1--F2B2--F3B3--....    all start at one barrier; rank 0 gets those of its own pipeline

torch's schedules wait for other stages between their calls of a stage, on CUDA in the stream between the events: such a
wait is a gap here, the bubble. A wait inside a call, for tp and cp neighbours or for FSDP's parameters, counts as work,
as it does in the simulator.

Effect: none outside of `measure_step`: collectives and the methods of the stages are as they were.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from torchtitan_lite.components.metrics import GIB, read_peak_memory
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.pipeline_plan import Action
from torchtitan_lite.parallel.pipeline import Stage, list_stages
from torchtitan_lite.plan.collectives import Moved, count_traffic, find_most_moved
from torchtitan_lite.plan.simulator import Event, Timeline
from torchtitan_lite.step import Run

Moment = float | torch.cuda.Event
METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}  # of a stage


class StepMeasurement:
    """What `measure_step` has measured when it ends."""

    step_time_s: float
    peak_bytes: float  # of this rank
    traffic: dict[str, Moved]  # axis -> of the rank that moves most over it
    timeline: Timeline | None = None  # of rank 0's pipeline, on rank 0


@contextmanager
def measure_step(
    layout: Layout, run: Run, group: dist.ProcessGroup, *, besides: dist.ProcessGroup
) -> Iterator[StepMeasurement]:
    """Context manager around one step. Collective.

    `group`: all ranks, by gloo, used by this thread alone. `besides`: a group that another thread uses meanwhile, whose
    collectives are not counted.
    """
    measured = StepMeasurement()
    if run.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(run.device)
    dist.barrier(group)
    with (
        count_traffic(layout, besides=besides) as count,
        time_actions(list_stages(run.schedule), run.device) as actions,
    ):
        start_s = time.perf_counter()
        yield measured
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        measured.step_time_s = time.perf_counter() - start_s
    measured.peak_bytes = read_peak_bytes(run.device)
    measured.traffic = find_most_moved(count.moved, group)
    pipeline = range(0, layout.world_size, layout.world_size // layout.pp)  # that of rank 0
    if run.schedule is not None and dist.get_rank() in pipeline:
        measured.timeline = gather_timeline(actions.list_events(run.mesh.pp.get_local_rank()), list(pipeline), group)


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
        kind = kind if kwargs.get("full_backward", True) else "I"
        start = self.now()
        result = method(microbatch, *args, **kwargs)
        self.taken.append((Action(stage.stage_index, kind, microbatch), start, self.now()))
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
