"""Describe a step by its result and by the events that torch's profiler recorded.

Events in backward are counted separately, because recompute shows up as an operator of forward that runs in backward.
Events are named after operators, FSDP's collectives and compiled regions.
"""

import threading
from collections import Counter
from dataclasses import dataclass

from torch.autograd.profiler import profile

from torchtitan_lite import build
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.step import StepResult


@dataclass(frozen=True)
class Observed:
    """A step that one rank ran in a trial."""

    run: build.Run  # run.config is the config of the trial, with its automatic values resolved
    batch: Batch
    result: StepResult
    options: set[str]  # keys that the step has read from the optimizer's parameter groups
    # Number of profiler events by name: `forward` counts the events outside of backward. The counters are empty if the
    # step was not profiled.
    forward: Counter[str]
    backward: Counter[str]

    @property
    def config(self) -> Config:
        return self.run.config

    def runs_thread(self, name: str) -> bool:
        return any(thread.name.startswith(name) for thread in threading.enumerate())


def count(events: Counter[str], text: str) -> int:
    """Return the number of events whose names contain the text."""
    return sum(n for name, n in events.items() if text in name)


def count_events(profiler: profile) -> tuple[Counter[str], Counter[str]]:
    """Count the events of a profile by name, separately for events outside and inside of backward. Some names include a
    dtype."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    if not profiler.enabled:
        return forward, backward
    end_ns = 0  # latest end time of the autograd nodes seen so far
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        name = event.name()
        start_ns = event.start_ns()
        if name.startswith("autograd::engine::evaluate_function"):
            end_ns = max(end_ns, start_ns + event.duration_ns())
        if name in ("aten::mm", "c10d::_allgather_base_"):
            name = f"{name} {event.dtypes()[0]}"
        events = backward if start_ns < end_ns else forward
        events[name] += 1
    return forward, backward
