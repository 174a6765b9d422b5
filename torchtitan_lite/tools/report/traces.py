"""Read torch's traces of one step: where the time of each rank goes, its calls, the pipeline as it ran.

    computing    kernels of a GPU, or operators in the main thread of a CPU
    exposed      communication while the rank computes nothing
    hidden       communication while it computes: NCCL only, because a CPU's main thread does one thing at a time
    waiting      none of these: the host runs Python, or another rank is late

NCCL records the group of each call. gloo does not: the code that makes a call tells its axis.
"""

import json
import re
from collections import Counter, defaultdict
from math import inf
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schedule import Action
from torchtitan_lite.tools.plan.timeline import Event, Timeline

MOST_RANKS = 16  # whose traces are read, evenly spaced
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")

Spans = list[tuple[float, float]]  # start and end


class Trace(NamedTuple):
    """The last recorded step of one rank, in seconds from its start."""

    rank: int
    parts: dict[str, float]  # "computing", "exposed AXIS", "waiting": their sum is the step
    hidden: dict[str, float]  # by axis
    calls: list[tuple[float, float, str, str]]  # start, end, name, axis or "": by start, callers first
    actions: list[tuple[float, float, Action]]  # of the pipeline: start and end on the host's clock, action


def read_traces(folder: Path, layout: Layout) -> list[Trace]:
    """Read the traces of the newest step; none if there are none."""
    newest = max(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), default=folder)
    ranks = sorted(int(path.stem.removeprefix("rank-")) for path in newest.glob("rank-*.json"))
    return [read_trace(newest, rank, layout) for rank in ranks[:: -(-len(ranks) // MOST_RANKS) or 1]]


def read_trace(folder: Path, rank: int, layout: Layout) -> Trace:
    data = json.loads((folder / f"rank-{rank}.json").read_bytes())
    events = sorted(
        (each for each in data["traceEvents"] if each["ph"] == "X"), key=lambda each: (each["ts"], -each["dur"])
    )
    steps = [each for each in events if each["name"].startswith("ProfilerStep") and each["cat"] == "user_annotation"]
    began, end = steps[-1]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    on_gpu = any(each["cat"] == "kernel" for each in events)
    groups = {each["pg_name"]: each["pg_desc"].removeprefix("mesh_") for each in data["distributedInfo"]["pg_config"]}
    spans, calls, actions, received = defaultdict(list), [], [], []
    for event in events:
        is_work = event["cat"] in ON_GPU if on_gpu else event["tid"] == steps[-1]["tid"]
        if not is_work or not began <= event["ts"] < end or event["name"] in ("PythonDispatchMode", "gloo:send"):
            continue
        name, span = event["name"], ((event["ts"] - began) / 1e6, (event["ts"] + event["dur"] - began) / 1e6)
        if name == "gloo:recv":  # from the call until the bytes have arrived; the thread may compute meanwhile
            received.append(span)
            continue
        axis = find_axis(event, layout, groups)
        calls.append((*span, name.removeprefix("autograd::engine::evaluate_function: "), axis))
        if axis or "annotation" not in event["cat"]:
            spans[axis].append(span)
        if found := re.match(r"pp ([FBIW])(\d+) stage (\d+)", name):
            actions.append(
                (began / 1e6 + span[0], began / 1e6 + span[1], Action(int(found[3]), found[1], int(found[2])))
            )
    computing = spans.pop("", [])
    layers = [(f"exposed {axis}", spans[axis]) for axis in sorted(spans)]
    layers.insert(0 if on_gpu else len(layers), ("computing", computing))
    busy, parts = [], Counter(computing=0.0)
    for part, each in [*layers, ("exposed pp", received)]:
        parts[part] += measure(busy + each) - measure(busy)
        busy = busy + each
    hidden = {f"hidden {axis}": measure(spans[axis]) - parts[f"exposed {axis}"] for axis in spans if on_gpu}
    return Trace(rank, parts | Counter(waiting=(end - began) / 1e6 - measure(busy)), hidden, calls, actions)


def measure(spans: Spans) -> float:
    """Return the length of the union of spans."""
    total, at = 0.0, -inf
    for start, end in sorted(spans):
        total, at = total + max(0.0, end - max(start, at)), max(at, end)
    return total


def find_axis(event: dict, layout: Layout, groups: dict[str, str]) -> str:
    """Return the axis over which a call communicates; "" if it computes."""
    name, dims = event["name"], []
    if "nccl" in name:
        return groups.get(event["args"].get("Process Group Name"), "various dims")
    if event["cat"] not in ON_GPU and name.startswith("FSDP::"):
        dims = ("dp_replicate", "dp_shard", "cp")
    elif name in ("c10d::send", "c10d::recv_"):
        return "pp"
    elif name.startswith("_c10d_functional::"):
        dims = ("cp", "tp", "ep")
    used = " or ".join(dim for dim in dims if getattr(layout, dim) > 1)
    return used or "various dims" if "c10d" in name or dims else ""


def measure_pipeline(traces: list[Trace], layout: Layout) -> Timeline | None:
    """Return the pipeline as it ran; None without one, or without a trace of each pp rank."""
    ranks = {trace.rank * layout.pp // layout.world_size: trace.actions for trace in reversed(traces) if trace.actions}
    if len(ranks) < layout.pp:
        return None
    began = min(start for actions in ranks.values() for start, *_ in actions)
    events = [
        Event(rank, start - began, end - began, action) for rank in sorted(ranks) for start, end, action in ranks[rank]
    ]
    return Timeline(events, layout.pp)
