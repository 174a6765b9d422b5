"""Record Chrome traces of steps, and snapshots of CUDA memory.

    steps  1 ... 6   7 ... 9   10         | 11 ... 16   17 ... 19   20      profile_freq 10, warm-up 3, active 1
           idle      warm-up   recorded   | idle        warm-up     recorded
                               -> traces/step-10/rank-R.json        -> traces/step-20/rank-R.json
                               -> memory_snapshot/step-10/rank-R.pickle ...

Open traces at https://ui.perfetto.dev and snapshots at https://pytorch.org/memory_viz. To see recompiles, set
TORCH_LOGS=recompiles.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from torchtitan_lite.config.schema import Profiling

logger = logging.getLogger(__name__)

MEMORY_EVENTS = 100_000  # allocations and frees per snapshot


@contextmanager
def profile_steps(
    section: Profiling,
    dump_folder: Path,
    rank: int,
    *,
    resumed_step: int = 0,
) -> Iterator[Callable]:
    """Context manager around the training loop. Yields a function to call at the end of each step.

    `resumed_step` is the step that the run resumed from: file names count the steps of the whole run. An incomplete
    period at the end of the loop writes no trace.
    """
    with ExitStack() as stack:
        profilers = []
        if section.enable_profiling:
            folder = dump_folder / section.save_traces_folder
            tracer = make_tracer(section, folder, rank, resumed_step)
            profilers.append(stack.enter_context(tracer))
        if section.enable_memory_snapshot:
            folder = dump_folder / section.save_memory_snapshot_folder
            snapshots = MemorySnapshots(section.profile_freq, folder, rank, resumed_step)
            profilers.append(stack.enter_context(snapshots))

        def end_step() -> None:
            for profiler in profilers:
                profiler.step()

        yield end_step


def make_tracer(section: Profiling, folder: Path, rank: int, resumed_step: int) -> profile:
    """Create torch's profiler, which records the last steps of each period."""

    def write_trace(profiler: profile) -> None:
        if profiler.step_num % section.profile_freq:  # the loop ended in the middle of a recording
            return
        step = resumed_step + profiler.step_num
        path = folder / f"step-{step}" / f"rank-{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info(f"step {step} traced to {path}")

    warmup = section.profiler_warmup
    active = section.profiler_active
    idle = section.profile_freq - warmup - active
    return profile(
        schedule=schedule(wait=idle, warmup=warmup, active=active),
        on_trace_ready=write_trace,
        record_shapes=True,
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error is a CUDA out-of-memory error, or was raised from one as torch's pipeline does."""
    if error is None:
        return False
    return isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__cause__)


class MemorySnapshots:
    """Context manager that writes this GPU's allocations and their stacks after each period and on out of memory."""

    def __init__(self, profile_freq: int, folder: Path, rank: int, resumed_step: int):
        self.profile_freq = profile_freq
        self.folder = folder
        self.rank = rank
        self.resumed_step = resumed_step
        self.n_steps = resumed_step

    def __enter__(self) -> "MemorySnapshots":
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if is_out_of_memory(error):
            self._write(f"step-{self.n_steps + 1}-out-of-memory")
        torch.cuda.memory._record_memory_history(enabled=None)

    def step(self) -> None:
        self.n_steps += 1
        if (self.n_steps - self.resumed_step) % self.profile_freq == 0:
            self._write(f"step-{self.n_steps}")

    def _write(self, name: str) -> None:
        path = self.folder / name / f"rank-{self.rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info(f"{name}: memory snapshot written to {path}")
