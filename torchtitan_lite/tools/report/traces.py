"""Summarize the torch profiler traces of one step: how each rank spends its time, and how the pipeline ran.

    computing    kernels on a GPU; on a CPU, operators in the main thread
    exposed      communication that does not overlap with computing
    hidden       communication that overlaps with computing; only with NCCL, because a CPU's main thread does one thing
                 at a time
    waiting      the rest of the step: the host runs Python, or another rank is late

NCCL records the process group of each call. gloo does not, so with gloo the axis is derived from the caller.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.plan.orders import Action
from torchtitan_lite.tools.plan.timeline import Event, Timeline
from torchtitan_lite.tools.plan.transfers import name_axis

MOST_TRACES = 16  # maximum number of ranks whose traces are read; the ranks are evenly spaced
IGNORED_EVENTS = ("PythonDispatchMode", "gloo:send")
# the hooks of FSDP before and after a module
MODULE = re.compile(r"FSDP::(pre|post)_(forward|backward)(?:_reshard)? \((.+)\)")
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


class TracedCall(NamedTuple):
    """A phase, a module or a collective in a step. Times are in seconds from the start of the step."""

    row: str  # "phase", "module", or the axis of a collective
    start: float
    end: float
    name: str
    exposed: float = 0.0  # time of a collective that does not overlap with compute, in seconds


class Trace(NamedTuple):
    """The last traced step of one rank. Times are in seconds."""

    rank: int
    # "computing", "exposed AXIS", "waiting"; their sum is the time of the step
    parts: dict[str, float]
    hidden: dict[str, float]  # "hidden AXIS" -> seconds
    actions: dict[Action, tuple]  # action of the pipeline -> its start and end on the host's clock
    # Sorted by start. Calls in the same row do not overlap, except receives and kernels on different streams.
    calls: list[TracedCall]


def read_traces(folder: Path, layout: Layout) -> list[Trace]:
    """Read the traces of the newest step with traces. Return [] if no step has traces. Raises UserError."""
    files = defaultdict(dict)  # step -> rank -> file
    for path in folder.glob("step-*/rank-*.json"):
        # skip copies that a user may have made, such as step-10-old
        if found := re.fullmatch(r".*/step-(\d+)/rank-(\d+)\.json", str(path), re.ASCII):
            step, rank = map(int, found.groups())
            files[step][rank] = path
    if not files:
        return []
    newest = sorted(files[max(files)].items())
    traces = []
    for rank, path in newest[:: ceil(len(newest) / MOST_TRACES)]:
        try:
            traces.append(read_trace(json.loads(path.read_bytes()), rank, layout))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not a complete trace: {error!r}. Delete it") from None
    return traces


def read_trace(data: dict, rank: int, layout: Layout) -> Trace:
    """Return the last step of a trace in the format of torch's profiler. Raises LookupError, TypeError, ValueError."""
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    on_gpu = any(event["cat"] == "kernel" for event in events)
    annotations = [event for event in events if event["cat"] == "user_annotation"]
    *_, step = (event for event in annotations if event["name"].startswith("ProfilerStep"))
    step_start, step_end = find_span(step)
    axes = {}  # process group -> axis
    for group in data["distributedInfo"]["pg_config"]:
        axes[group["pg_name"]] = name_axis(layout, group["pg_desc"])
    used = layout.used_dims + ["ep"] * (layout.ep > 1)
    spans = defaultdict(list)  # axis -> its calls
    received = []
    actions = {}
    calls = []
    modules = {}  # direction and module -> start
    outer_ends = Counter()  # stream -> end time of the last collective
    operation = ""
    for event in events:
        name = event["name"]
        start, end = find_span(event)
        is_shown = event["cat"] in GPU_EVENTS if on_gpu else event["tid"] == step["tid"]
        if not (is_shown and step_start <= start < step_end) or name in IGNORED_EVENTS:
            continue
        # a receive lasts until the bytes arrive, and may overlap with computing
        if name == "gloo:recv":
            received.append((start, end))
            continue
        axis = find_axis(event, used, axes)
        if axis or "annotation" not in event["cat"]:
            spans[axis].append((start, end))
        stream = axis if on_gpu else "main thread"
        # a call that starts before the end of an earlier call is part of the earlier call
        if axis and start >= outer_ends[stream]:
            outer_ends[stream] = end
            short = name.rpartition("::")[2].strip("_")
            operation = f"wait for {operation}" if short == "wait_tensor" else short
            calls.append(TracedCall(axis, start, end, operation))
        if found := MODULE.match(name):
            when, direction, module = found.groups()
            name = f"{direction} of {module}"
            if when == "pre":
                modules[name] = start
            elif name in modules:
                calls.append(TracedCall("module", modules.pop(name), end, name))
        elif found := re.match(r"pp ([FBIW])(\d+) stage (\d+)", name):
            kind, microbatch, stage = found.groups()
            action = Action(int(stage), kind, int(microbatch))
            first, last = actions.get(action, (start, end))
            if start >= last:  # events of one execution overlap, so this is a second execution
                first = start
            actions[action] = first, max(last, end)
        elif name.startswith("Optimizer.step"):
            calls.append(TracedCall("phase", start, end, "optimizer"))
    for (stage, kind, microbatch), (start, end) in actions.items():
        calls.append(TracedCall("phase", start, end, f"{kind}{microbatch} stage {stage}"))
    calls += [TracedCall("pp", start, end, "receive") for start, end in received]
    told = []
    for row, start, end, name, _ in sorted(calls, key=lambda call: call.start):
        exposed = 0.0
        if row not in ("phase", "module"):
            computing = spans[""] if on_gpu or name == "receive" else []
            beside = [(max(first, start), min(last, end)) for first, last in computing]
            exposed = end - start - measure_union(beside)
        told.append(TracedCall(row, start - step_start, end - step_start, name, exposed))
    parts, hidden = divide_step(spans, received, step_end - step_start, on_gpu)
    return Trace(rank, parts, hidden, actions, told)


def find_span(event: dict) -> tuple[float, float]:
    """Return the start and the end of an event in seconds."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def divide_step(
    spans: dict,
    received: list,
    step_s: float,
    on_gpu: bool,
) -> tuple[dict, dict]:
    """Return Trace.parts and Trace.hidden."""
    computing = [("computing", spans.pop("", []))]
    communication = [(f"exposed {axis}", spans[axis]) for axis in sorted(spans)]
    layers = computing + communication if on_gpu else communication + computing
    parts = Counter(computing=0.0)
    busy = []
    for part, layer in [*layers, ("exposed pp", received)]:
        busy_s = measure_union(busy)
        busy = busy + layer
        parts[part] += measure_union(busy) - busy_s
    parts["waiting"] = step_s - measure_union(busy)
    hidden = {}
    if on_gpu:
        for axis in spans:
            hidden[f"hidden {axis}"] = measure_union(spans[axis]) - parts[f"exposed {axis}"]
    return +parts, hidden  # unary plus keeps the positive parts


def measure_union(spans: Iterable) -> float:
    """Return the total length of the union of the spans. A span that ends before its start counts as empty."""
    total = 0.0
    covered = -inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def find_axis(event: dict, used: list[str], axes: dict) -> str:
    """Return the axis over which a call communicates, or "" if it computes. `used` contains the mesh dims with several
    ranks."""
    name = event["name"]
    # torch also annotates the kernels of a call with the name of the call, without the group
    if "nccl" in name and "annotation" not in event["cat"]:
        return axes.get(event["args"].get("Process Group Name"), "various dims")
    if event["cat"] not in GPU_EVENTS and name.startswith("FSDP::"):
        return " x ".join(dim for dim in ("dp_replicate", "dp_shard", "cp") if dim in used)
    if name in ("c10d::send", "c10d::recv_"):
        return "pp"
    if name.startswith("_c10d_functional::"):
        return " or ".join(dim for dim in ("cp", "tp", "ep") if dim in used)
    return "various dims" if name.startswith("c10d::") else ""


def measure_pipeline(traces: list[Trace], layout: Layout) -> Timeline | None:
    """Return the measured pipeline. None if the run has no pipeline, or if a pp rank has no trace."""
    by_pp_rank = {}
    for trace in reversed(traces):
        if trace.actions:
            pp_rank = trace.rank * layout.pp // layout.world_size
            by_pp_rank[pp_rank] = trace.actions
    if len(by_pp_rank) < layout.pp:
        return None
    first = min(start for actions in by_pp_rank.values() for start, _ in actions.values())
    events = []
    for pp_rank, actions in by_pp_rank.items():
        for action, (start, end) in actions.items():
            events.append(Event(pp_rank, start - first, end - first, action))
    return Timeline(events, layout.pp)
