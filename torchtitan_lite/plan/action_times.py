"""When each stage did what in one step, measured: a timeline like the simulator's, with real times in it.

    rank 0  F0F1....B0--F2B1--F3B2--..B3--    each rank times its own actions: by CUDA events, or the CPU's clock
    rank 1  ..F0B0--F1B1--F2B2--F3B3--....    all count from one barrier; rank 0 gets those of its own pipeline

torch's schedules wait for what other stages send between their calls of a stage, on CUDA in the stream between the
events: such a wait is a gap here, the bubble. What a stage waits for inside a call, its tp and cp neighbours or FSDP's
parameters, counts as work, as it does in the simulator.

Effect: none outside of `time_actions`: the methods of the stages are their own again.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from torchtitan_lite.config.pipeline_csv import Action
from torchtitan_lite.parallel.pipeline import Stage
from torchtitan_lite.plan.simulator import Event, Timeline

Moment = float | torch.cuda.Event
KINDS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}  # methods of a stage


class ActionTimes:
    """Beginning and end of each action of this rank. Reading the clock makes nobody wait."""

    def __init__(self, device: torch.device):
        self.device = device
        self.taken: list[tuple[Action, Moment, Moment]] = []
        self.origin = self.now()

    def now(self) -> Moment:
        """This moment of the host on a CPU, and on a GPU the one at which its stream comes to this point."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self, stage: Stage, kind: str, method: Callable, microbatch: int, *args, **kwargs):
        """Calls the method of the stage, and notes when."""
        kind = kind if kwargs.get("full_backward", True) else "I"
        begin = self.now()
        result = method(microbatch, *args, **kwargs)
        self.taken.append((Action(stage.stage_index, kind, microbatch), begin, self.now()))
        return result

    def list_events(self, pp_rank: int) -> list[Event]:
        """In seconds from the origin. The device must have come to the end of the step."""
        return [Event(pp_rank, self._seconds_to(begin), self._seconds_to(end), act) for act, begin, end in self.taken]

    def _seconds_to(self, moment: Moment) -> float:
        return moment - self.origin if self.device.type == "cpu" else self.origin.elapsed_time(moment) / 1000


@contextmanager
def time_actions(stages: list[Stage], device: torch.device) -> Iterator[ActionTimes]:
    """Times the actions of these stages inside. To be entered by all ranks at the same moment: after a barrier."""
    times = ActionTimes(device)
    for stage in stages:
        for name, kind in KINDS.items():
            setattr(stage, name, partial(times.take, stage, kind, getattr(stage, name)))
    try:
        yield times
    finally:
        for stage in stages:
            for name in KINDS:
                delattr(stage, name)  # what stays is the method of the class


def gather_timeline(own: list[Event], ranks: list[int], group: dist.ProcessGroup) -> Timeline | None:
    """The timeline of the pipeline on these ranks, first stage to last, on the first of them; elsewhere None.

    Sends some 100 bytes an action to that rank. `group` is one of the whole world that takes CPU tensors. Time begins
    with the first action. For the ranks of this pipeline only.
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
    begin = min(event.start for event in events)
    events = [event._replace(start=event.start - begin, end=event.end - begin) for event in events]
    return Timeline(sorted(events, key=lambda event: event.start), len(ranks))
