"""Where the time of a recorded step went: groups of operators, and communication that nothing hides.

    computing    |---matmul---|         |---norm---|----matmul----|
    talking            |------all-gather------|
    exposed                   |---------|                              the step waits: what overlap could still win

On a GPU it is the kernels that count, by their names, and not what the host did meanwhile. On a CPU it is the operators
of the training thread, nested ones counted once; gloo communicates in its own threads. Reads the Chrome trace that
torch.profiler has written, so it needs no torch.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Interval = tuple[float, float]  # start and end, in microseconds

# Group -> how its operators (CPU) and kernels (CUDA) are called, in any case of letters. One may run inside another, a
# copy inside a matmul for instance: of all enclosing names, the first row here decides.
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
BRACKETS = "FSDP::"  # annotations that name modules, around operators and around waiting: they say nothing of the work


@dataclass(frozen=True)
class TraceSummary:
    """Shares of the recorded time, 0 to 1. Two groups may run at once, so that they may add up to more than 1."""

    groups: dict[str, float]  # the most expensive first
    exposed: float  # in which ranks talk and nothing is computed

    def __str__(self) -> str:
        most = [f"{group} {share:.1%}" for group, share in list(self.groups.items())[:5]]
        return f"{', '.join(most)} of the time; communication that no computing hides {self.exposed:.1%}"


def summarize_trace(path: Path) -> TraceSummary:
    """Summarise a file that torch.profiler's export_chrome_trace has written."""
    return summarize_events(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def summarize_events(events: Iterable[dict]) -> TraceSummary:
    busy = {group: merge(intervals) for group, intervals in place_events(events).items()}
    everything = merge(interval for intervals in busy.values() for interval in intervals)
    if not everything:
        return TraceSummary({}, 0.0)
    time_us = everything[-1][1] - everything[0][0]
    of_computing = [intervals for group, intervals in busy.items() if group not in (None, COLLECTIVES)]
    computing = merge(interval for intervals in of_computing for interval in intervals)
    exposed_us = measure(merge([*computing, *busy.get(COLLECTIVES, [])])) - measure(computing)
    shares = {group: measure(intervals) / time_us for group, intervals in busy.items() if group is not None}
    return TraceSummary(dict(sorted(shares.items(), key=lambda item: -item[1])), exposed_us / time_us)


def place_events(events: Iterable[dict]) -> dict[str | None, list[Interval]]:
    """Return group -> intervals in which it ran. None: Python and waiting of the training thread."""
    complete = [event for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE | ON_HOST]
    on_device = [event for event in complete if event["cat"] in ON_DEVICE]
    gloo = [event for event in complete if event["name"].startswith("gloo:")]
    threads: dict[object, list[dict]] = {}
    for event in complete:
        if event["cat"] in ON_HOST and not event["name"].startswith("gloo:"):
            threads.setdefault(event["tid"], []).append(event)
    busiest = max(threads.values(), key=len, default=[])  # by far: the one that trains
    busy = {} if on_device else split_thread(busiest)
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
    ranks = {group: rank for rank, group in enumerate([*GROUPS, None])}
    pieces: dict[str | None, list[Interval]] = {}
    around: list[tuple[float, str | None]] = []  # end and group of each operator that is not over, outermost first
    now = 0.0

    def go_on_to(time_us: float) -> None:
        nonlocal now
        if around and time_us > now:
            pieces.setdefault(around[-1][1], []).append((now, time_us))
        now = max(now, time_us)

    def end_until(time_us: float) -> None:
        while around and around[-1][0] <= time_us:
            go_on_to(around[-1][0])
            around.pop()

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        end_until(start)
        go_on_to(start)
        outer = around[-1][1] if around else None
        around.append((end, min(outer, find_group(event["name"]), key=ranks.get)))
    end_until(float("inf"))
    return pieces


# ---------------------------------------------------------------- intervals


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
