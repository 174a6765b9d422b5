"""Record Chrome traces of steps, and snapshots of CUDA memory.

    steps  1 ... 6   7 ... 9   10         | 11 ... 16   17 ... 19   20      profile_freq 10, warm-up 3, active 1
           idle      warm-up   recorded   | idle        warm-up     recorded
                               -> traces/step-10/rank-R.json        -> traces/step-20/rank-R.json
                               -> memory_snapshot/step-10/rank-R.pickle ...

Open traces at https://ui.perfetto.dev and snapshots at https://pytorch.org/memory_viz. To see recompiles, set
TORCH_LOGS=recompiles.
"""

import errno
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from torchtitan_lite.components.diagnosis import is_out_of_memory
from torchtitan_lite.components.log import go_on_unwritten
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
    """Context manager that profiles the training loop. Yields a function to call at the end of each step.

    `resumed_step` is the step that the run resumed from. Step numbers in file names include the steps before the
    resume. If the loop ends in the middle of a period, no trace is written. If memory runs out, a snapshot is written
    immediately. If a file cannot be written, the run logs the error once and continues.
    """
    step = resumed_step
    memory = torch.cuda.memory
    unwritten: set[str] = set()  # folders for which an error has been logged

    def is_due() -> bool:
        return (step - resumed_step) % section.profile_freq == 0

    def write(folder: str, name: str, export: Callable, last_byte: bytes) -> None:
        path = dump_folder / folder / name
        with go_on_unwritten(str(path.parents[1]), unwritten):
            path.parent.mkdir(parents=True, exist_ok=True)
            export_whole(path, export, last_byte)
            logger.info(f"profiled: {path}")

    def write_trace(profiler: profile) -> None:
        if is_due():  # otherwise, the loop ended while the profiler was recording
            name = f"step-{step}/rank-{rank}.json"
            write(section.save_traces_folder, name, profiler.export_chrome_trace, b"}")

    def write_snapshot(name: str) -> None:
        name = f"{name}/rank-{rank}.pickle"
        write(section.save_memory_snapshot_folder, name, memory._dump_snapshot, pickle.STOP)

    def end_step() -> None:
        nonlocal step
        step += 1
        if tracer:
            tracer.step()
        if section.enable_memory_snapshot and is_due():
            write_snapshot(f"step-{step}")

    tracer = None
    if section.enable_profiling:  # record the last steps of each period
        warmup = section.profiler_warmup
        active = section.profiler_active
        idle = section.profile_freq - warmup - active
        tracer = profile(
            schedule=schedule(wait=idle, warmup=warmup, active=active),
            on_trace_ready=write_trace,
            record_shapes=True,
        )
    if section.enable_memory_snapshot:
        memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        with tracer or nullcontext():
            yield end_step
    except Exception as error:
        if section.enable_memory_snapshot and is_out_of_memory(error):
            write_snapshot(f"step-{step + 1}-out-of-memory")
        raise
    finally:
        if section.enable_memory_snapshot:
            memory._record_memory_history(enabled=None)


def export_whole(path: Path, export: Callable[[str], object], last_byte: bytes) -> None:
    """Call `export(path)`. If the file is incomplete, delete it and raise OSError.

    If the disk is full, torch truncates the trace, or leaves it with the suffix .tmp, without raising an error.
    """
    try:
        export(str(path))
        end = b""
        if path.exists():
            with open(path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                end = file.read()
        if end != last_byte:
            why = "torch has written only a part of the trace, for example because the disk is full"
            raise OSError(errno.EIO, why, str(path))
    except OSError:
        for unfinished in path.parent.glob(f"{path.name}*"):
            unfinished.unlink()
        raise
