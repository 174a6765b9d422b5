"""Chrome traces of some steps of every rank, by torch.profiler. Open them at https://ui.perfetto.dev.

steps  1 ... 6   7 ... 9   10         | 11 ... 16   17 ... 19   20      profile_freq 10, warm-up 3, active 1
       idle      warm-up   recorded   | idle        warm-up     recorded
                           -> traces/step-10/rank-R.json        -> traces/step-20/rank-R.json
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch.profiler import profile, schedule

from torchtitan_lite.config import Profiling

logger = logging.getLogger(__name__)


class Profiler(Protocol):
    def step(self) -> None:
        """Call it at the end of every step."""


class NoProfiler:
    def step(self) -> None:
        """Profiling is off."""


@contextmanager
def profile_steps(section: Profiling, dump_folder: Path, rank: int, *, resumed_step: int = 0) -> Iterator[Profiler]:
    """Stands around the training loop. A trace that the end of the loop cuts short is not written.

    `resumed_step` is the last step that is already done, so that traces bear the number of their last step.
    """
    if not section.enable_profiling:
        yield NoProfiler()
        return

    def write_trace(profiler: profile) -> None:
        if profiler.step_num % section.profile_freq != 0:  # the loop ended in the middle of a recording
            return
        path = (
            dump_folder / section.save_traces_folder / f"step-{resumed_step + profiler.step_num}" / f"rank-{rank}.json"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info(f"wrote a trace to {path}")

    warmup, active = section.profiler_warmup, section.profiler_active
    steps = schedule(wait=section.profile_freq - warmup - active, warmup=warmup, active=active)
    with profile(schedule=steps, on_trace_ready=write_trace, record_shapes=True) as profiler:
        yield profiler
