"""A closer look at steps: traces of their time, snapshots of CUDA memory, and a warning when one compiles again.

steps  1 ... 6   7 ... 9   10         | 11 ... 16   17 ... 19   20      profile_freq 10, warm-up 3, active 1
       idle      warm-up   recorded   | idle        warm-up     recorded
                           -> traces/step-10/rank-R.json        -> traces/step-20/rank-R.json
                           -> memory_snapshot/step-10/rank-R.pickle ...

Open traces at https://ui.perfetto.dev, snapshots at https://pytorch.org/memory_viz. trace_summary.py
summarises each trace for the log.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch._dynamo.utils import get_compilation_metrics  # torch has no public name for it yet
from torch.profiler import profile, schedule

from torchtitan_lite.components.trace_summary import summarize_trace
from torchtitan_lite.config.schema import Profiling

logger = logging.getLogger(__name__)

N_STEPS_THAT_MAY_COMPILE = 2
MEMORY_EVENTS = 100_000  # allocations and frees that a snapshot remembers: a few steps of a large model, 100 MB


class Profiler(Protocol):
    def step(self) -> None:
        """End a step."""


class Profilers:
    """The profilers that are enabled: none, one or both."""

    def __init__(self, profilers: list[Profiler]):
        self.profilers = profilers

    def step(self) -> None:
        for profiler in self.profilers:
            profiler.step()


@contextmanager
def profile_steps(section: Profiling, dump_folder: Path, rank: int, *, resumed_step: int = 0) -> Iterator[Profiler]:
    """Context manager of the training loop. A trace that the end of the loop cuts short is not written.

    `resumed_step` is the last step before this process, so that file names count the steps of the whole run.
    """
    with ExitStack() as stack:
        profilers = []
        if section.enable_profiling:
            tracer = trace_steps(section, dump_folder / section.save_traces_folder, rank, resumed_step)
            profilers.append(stack.enter_context(tracer))
        if section.enable_memory_snapshot:
            folder = dump_folder / section.save_memory_snapshot_folder
            profilers.append(stack.enter_context(snapshot_memory(section, folder, rank, resumed_step)))
        yield Profilers(profilers)


def trace_steps(section: Profiling, folder: Path, rank: int, resumed_step: int) -> profile:
    """Make torch's profiler, which records the last steps of each period."""

    def write_trace(profiler: profile) -> None:
        if profiler.step_num % section.profile_freq != 0:  # the loop ended in the middle of a recording
            return
        step = resumed_step + profiler.step_num
        path = make_path(folder, f"step-{step}", f"rank-{rank}.json")
        profiler.export_chrome_trace(str(path))
        if logger.isEnabledFor(logging.INFO):  # rank 0: the others log nothing, so they need not read their trace
            logger.info(f"step {step} traced to {path}: {summarize_trace(path)}")

    warmup, active = section.profiler_warmup, section.profiler_active
    steps = schedule(wait=section.profile_freq - warmup - active, warmup=warmup, active=active)
    return profile(schedule=steps, on_trace_ready=write_trace, record_shapes=True)


@contextmanager
def snapshot_memory(section: Profiling, folder: Path, rank: int, resumed_step: int) -> Iterator[Profiler]:
    """Context manager: write this GPU's allocations and their stacks after each period, and when memory runs out."""
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    snapshots = MemorySnapshots(section, folder, rank, resumed_step)
    try:
        yield snapshots
    except torch.OutOfMemoryError:
        snapshots.write(f"step-{snapshots.n_steps + 1}-out-of-memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class MemorySnapshots:
    def __init__(self, section: Profiling, folder: Path, rank: int, resumed_step: int):
        self.profile_freq, self.folder, self.rank = section.profile_freq, folder, rank
        self.resumed_step = self.n_steps = resumed_step

    def step(self) -> None:
        self.n_steps += 1
        if (self.n_steps - self.resumed_step) % self.profile_freq == 0:
            self.write(f"step-{self.n_steps}")

    def write(self, name: str) -> None:
        path = make_path(self.folder, name, f"rank-{self.rank}.pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info(f"{name}: memory snapshot written to {path}")


def make_path(folder: Path, *names: str) -> Path:
    """Return the path of a file, whose folder is made."""
    path = folder.joinpath(*names)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def warn_on_recompile(n_th_step: int) -> Iterator[None]:
    """Context manager of a step: warn when torch.compile recompiles in it, from the third step of a process on.

    A run of one shape compiles in its first two steps. A function that is compiled again and again costs all ranks
    seconds each time, and after some times torch runs it uncompiled. The loss shows nothing of it.
    """
    before = get_compilation_metrics()
    yield
    if n_th_step > N_STEPS_THAT_MAY_COMPILE and (compiled := list_compiled_since(before)):
        logger.warning(f"step {n_th_step} of this process has compiled again: {'; '.join(compiled)}")


def list_compiled_since(before: list) -> list[str]:
    """List what torch has compiled since get_compilation_metrics() was `before`: `forward (llama3.py:78): reason`."""
    # torch keeps the last 64 entries only, so their number is no measure.
    known = {id(entry) for entry in before}
    entries = [entry for entry in get_compilation_metrics() if id(entry) not in known]
    return [
        f"{entry.co_name} ({Path(entry.co_filename).name}:{entry.co_firstlineno}): {entry.recompile_reason or 'new'}"
        for entry in entries
        if entry.co_name is not None  # a backward has no name, and follows from its forward
    ]
