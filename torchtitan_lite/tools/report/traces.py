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
from torchtitan_lite.tools.plan.meter import OPERATIONS
from torchtitan_lite.tools.plan.timeline import Event, Timeline
from torchtitan_lite.tools.plan.transfers import Moved, fraction_moved, sum_moved

MOST_RANKS = 16  # whose traces are read, evenly spaced
DIMS = "pp|dp_replicate|dp_shard|efsdp|ep|cp|tp"
ITEM_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2}  # others: 1
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")

Spans = list[tuple[float, float]]  # start and end


class Trace(NamedTuple):
    """The last recorded step of one rank, in seconds from its start."""

    rank: int
    parts: dict[str, float]  # "computing", "exposed AXIS", "waiting": their sum is the step
    hidden: dict[str, float]  # by axis
    calls: list[tuple[float, float, str, str]]  # start, end, name, axis or "": by start, callers first
    actions: list[tuple[float, float, Action]]  # of the pipeline: start and end on the host's clock, action
    moved: dict[tuple[str, str], Moved]  # (axis, operation) -> what NCCL moved; empty for gloo


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
    described = {each["pg_name"]: each["pg_desc"] for each in data["distributedInfo"]["pg_config"]}
    axes = {name: " x ".join(re.findall(DIMS, about)) or "all ranks" for name, about in described.items()}
    spans, calls, actions, received, sent = defaultdict(list), [], [], [], []
    for event in events:
        if event["name"] == "record_param_comms" and began <= event["ts"] < end:
            sent.append(read_call(event["args"], axes))
        is_work = event["cat"] in ON_GPU if on_gpu else event["tid"] == steps[-1]["tid"]
        if not is_work or not began <= event["ts"] < end or event["name"] in ("PythonDispatchMode", "gloo:send"):
            continue
        name, span = event["name"], ((event["ts"] - began) / 1e6, (event["ts"] + event["dur"] - began) / 1e6)
        if name == "gloo:recv":  # from the call until the bytes have arrived; the thread may compute meanwhile
            received.append(span)
            continue
        axis = find_axis(event, layout, axes)
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
    return Trace(
        rank, parts | Counter(waiting=(end - began) / 1e6 - measure(busy)), hidden, calls, actions, sum_moved(sent)
    )


def measure(spans: Spans) -> float:
    """Return the length of the union of spans."""
    total, at = 0.0, -inf
    for start, end in sorted(spans):
        total, at = total + max(0.0, end - max(start, at)), max(at, end)
    return total


def read_call(args: dict, axes: dict[str, str]) -> tuple[tuple[str, str], int, float]:
    """Return (axis, operation), 1, and the bytes that the rank moves in a call of NCCL."""
    name = args["Collective name"].replace("_", "")
    operation = next((operation for part, operation in OPERATIONS.items() if part in name), name)
    n_bytes = max(args["In msg nelems"], args["Out msg nelems"]) * ITEM_BYTES.get(args["dtype"], 1)
    return (axes[args["Process Group Name"]], operation), 1, n_bytes * fraction_moved(operation, args["Group size"])


def find_axis(event: dict, layout: Layout, axes: dict[str, str]) -> str:
    """Return the axis over which a call communicates; "" if it computes."""
    name, used = event["name"], [dim for dim in layout.strides if getattr(layout, dim, 1) > 1]
    if "nccl" in name:
        return axes.get(event["args"].get("Process Group Name"), "various dims")
    if event["cat"] not in ON_GPU and name.startswith("FSDP::"):
        return " x ".join(dim for dim in ("dp_replicate", "dp_shard", "cp") if dim in used)
    if name in ("c10d::send", "c10d::recv_"):
        return "pp"
    of_tensors = " or ".join(dim for dim in ("cp", "tp", "ep") if dim in used)
    return (of_tensors if "functional" in name else "various dims") if "c10d" in name else ""


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
