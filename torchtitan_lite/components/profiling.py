"""Look closer at steps: traces of their time, snapshots of CUDA memory, and a warning when a step compiles again.

    steps  1 ... 6   7 ... 9   10         | 11 ... 16   17 ... 19   20      profile_freq 10, warm-up 3, active 1
           idle      warm-up   recorded   | idle        warm-up     recorded
                               -> traces/step-10/rank-R.json        -> traces/step-20/rank-R.json
                               -> memory_snapshot/step-10/rank-R.pickle ...

Open traces at https://ui.perfetto.dev, snapshots at https://pytorch.org/memory_viz. Rank 0 logs a summary of its trace:
the share of the time that each group of operators took, and of communication that no computation hides.

    computation      |---matmul---|         |---norm---|----matmul----|
    communication            |------all-gather------|
    exposed                       |---------|                              the step waits: more overlap would save this

On a GPU kernels count, by their names, and not what the host does meanwhile. On a CPU the operators of the training
thread count, nested ones once; gloo communicates in its own threads.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch._dynamo.utils import get_compilation_metrics  # torch has no public name for it yet
from torch.profiler import profile, schedule

from torchtitan_lite.config.schema import Profiling

logger = logging.getLogger(__name__)

N_STEPS_THAT_MAY_COMPILE = 2
MEMORY_EVENTS = 100_000  # allocations and frees in a snapshot: a few steps of a large model, 100 MB


class Profilers:
    """The profilers that are enabled: none, one or both."""

    def __init__(self, profilers: list):
        self.profilers = profilers

    def step(self) -> None:
        """End a step."""
        for profiler in self.profilers:
            profiler.step()


@contextmanager
def profile_steps(section: Profiling, dump_folder: Path, rank: int, *, resumed_step: int = 0) -> Iterator[Profilers]:
    """Context manager of the training loop. A trace that the end of the loop cuts short is not written.

    `resumed_step` is the last step before this process, so that file names count the steps of the whole run.
    """
    profilers = []
    if section.enable_profiling:
        profilers.append(make_tracer(section, dump_folder / section.save_traces_folder, rank, resumed_step))
    if section.enable_memory_snapshot:
        folder = dump_folder / section.save_memory_snapshot_folder
        profilers.append(MemorySnapshots(section.profile_freq, folder, rank, resumed_step))
    with ExitStack() as stack:
        for profiler in profilers:
            stack.enter_context(profiler)
        yield Profilers(profilers)


def make_tracer(section: Profiling, folder: Path, rank: int, resumed_step: int) -> profile:
    """Make torch's profiler, which records the last steps of each period."""

    def write_trace(profiler: profile) -> None:
        if profiler.step_num % section.profile_freq != 0:  # the loop ended in the middle of a recording
            return
        step = resumed_step + profiler.step_num
        path = folder / f"step-{step}" / f"rank-{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        if logger.isEnabledFor(logging.INFO):  # on rank 0 only: a trace is large to read
            logger.info(f"step {step} traced to {path}: {summarize_trace(path)}")

    warmup, active = section.profiler_warmup, section.profiler_active
    steps = schedule(wait=section.profile_freq - warmup - active, warmup=warmup, active=active)
    return profile(schedule=steps, on_trace_ready=write_trace, record_shapes=True)


class MemorySnapshots:
    """Context manager: write this GPU's allocations and their stacks after each period, and when memory runs out."""

    def __init__(self, profile_freq: int, folder: Path, rank: int, resumed_step: int):
        self.profile_freq, self.folder, self.rank = profile_freq, folder, rank
        self.resumed_step = self.n_steps = resumed_step

    def __enter__(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
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


# ---------------------------------------------------------------- summary of a trace

# Group -> pattern of its operators (CPU) and kernels (CUDA), in any case of letters. One may run inside another, a copy
# inside a matmul for instance: of all enclosing names, the first row here decides.
GROUPS = {
    "optimizer": r"^Optimizer\.step|multi_tensor_apply|fused_adam|_foreach_",  # and clipping
    "collectives": r"^nccl|^gloo:|c10d::|_c10d_functional::|symm_mem|multimem",
    "attention": r"scaled_dot_product|ScaledDotProduct|flash|fmha|sdpa|flex_attention",
    "matmul": r"^aten::(linear|matmul|mm|bmm|addmm|_scaled_mm)$|gemm|nvjet|cublas|cutlass|xmma|matmul|triton_tem_",
    "embedding": r"embedding|indexSelect",
    "loss": r"cross_entropy|log_softmax|logsumexp|nll_loss|softmax",
    "copies": r"^(?!triton_).*copy|Memcpy|Memset|CatArray|chunk_cat|^aten::(to|cat|stack|clone|contiguous|zero_)$",
    "norms and elementwise": r"^aten::|triton_|elementwise|reduce_kernel|norm|Compiled",  # and what a compiler fused
}
COLLECTIVES = "collectives"

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of events
ON_HOST = {"cpu_op", "user_annotation"}
BRACKETS = "FSDP::"  # annotations around operators and around waiting: they name a module, not the work

Interval = tuple[float, float]  # start and end, in microseconds


@dataclass(frozen=True)
class TraceSummary:
    """Shares of the recorded time, 0 to 1. Two groups may run at once, so that they may add up to more than 1."""

    groups: dict[str, float]  # the most expensive first
    exposed: float  # ranks communicate and compute nothing

    def __str__(self) -> str:
        most = [f"{group} {share:.1%}" for group, share in list(self.groups.items())[:5]]
        return f"{', '.join(most)} of the time; communication that no computing hides {self.exposed:.1%}"


def summarize_trace(path: Path) -> TraceSummary:
    """Summarize a file that torch.profiler's export_chrome_trace has written."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    busy = {group: merge(intervals) for group, intervals in group_events(events).items()}
    everything = merge(interval for intervals in busy.values() for interval in intervals)
    if not everything:
        return TraceSummary({}, 0.0)
    time_us = everything[-1][1] - everything[0][0]
    of_computing = [intervals for group, intervals in busy.items() if group not in (None, COLLECTIVES)]
    computing = merge(interval for intervals in of_computing for interval in intervals)
    exposed_us = measure(merge([*computing, *busy.get(COLLECTIVES, [])])) - measure(computing)
    shares = {group: measure(intervals) / time_us for group, intervals in busy.items() if group is not None}
    return TraceSummary(dict(sorted(shares.items(), key=lambda item: -item[1])), exposed_us / time_us)


def group_events(events: Iterable[dict]) -> dict[str | None, list[Interval]]:
    """Return group -> intervals in which it ran. None: Python and waiting of the training thread."""
    complete = [event for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE | ON_HOST]
    on_device = [event for event in complete if event["cat"] in ON_DEVICE]
    gloo = [event for event in complete if event["name"].startswith("gloo:")]
    threads: dict[object, list[dict]] = {}
    for event in complete:
        if event["cat"] in ON_HOST and not event["name"].startswith("gloo:"):
            threads.setdefault(event["tid"], []).append(event)
    training_thread = max(threads.values(), key=len, default=[])  # has by far the most events
    busy = {} if on_device else split_thread(training_thread)
    for event in on_device or gloo:
        busy.setdefault(find_group(event["name"]), []).append((event["ts"], event["ts"] + event["dur"]))
    return busy


def find_group(name: str) -> str | None:
    """Return the first row of GROUPS that matches a name; None for waiting and Python."""
    if name.startswith(BRACKETS):
        return None
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), None)


def split_thread(events: list[dict]) -> dict[str | None, list[Interval]]:
    """Cut the time of one thread where an operator starts or ends: group -> its intervals. None: no group."""
    changes = []  # (time, operators more or fewer, group)
    for event in events:
        group = find_group(event["name"])
        changes += [(event["ts"], 1, group), (event["ts"] + event["dur"], -1, group)]
    running = dict.fromkeys([*GROUPS, None], 0)  # operators of each group that enclose the current moment
    pieces: dict[str | None, list[Interval]] = {}
    for (start, change, group), (end, _, _) in pairwise(sorted(changes, key=lambda change: change[0])):
        running[group] += change
        enclosing = [each for each, n in running.items() if n]
        if enclosing and end > start:
            pieces.setdefault(enclosing[0], []).append((start, end))
    return pieces


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def measure(merged: list[Interval]) -> float:
    return sum(end - start for start, end in merged)


# ---------------------------------------------------------------- recompiles


@contextmanager
def warn_on_recompile(n_th_step: int) -> Iterator[None]:
    """Context manager of a step: warn when torch.compile recompiles in it, from the third step of a process on.

    A run of one shape compiles in its first two steps. A function that compiles again and again costs all ranks seconds
    each time, and after some times torch runs it uncompiled. The loss does not show it.
    """
    before = get_compilation_metrics()
    yield
    if n_th_step > N_STEPS_THAT_MAY_COMPILE and (compiled := list_compiled_since(before)):
        logger.warning(f"step {n_th_step} of this process has compiled again: {'; '.join(compiled)}")


def list_compiled_since(before: list) -> list[str]:
    """List what torch has compiled since get_compilation_metrics() was `before`: `forward (llama3.py:78): reason`."""
    known = {id(entry) for entry in before}  # torch keeps the last 64 entries only, so their number is no measure
    return [
        f"{entry.co_name} ({Path(entry.co_filename).name}:{entry.co_firstlineno}): {entry.recompile_reason or 'new'}"
        for entry in get_compilation_metrics()
        if id(entry) not in known and entry.co_name is not None  # a backward has no name, and follows from its forward
    ]
