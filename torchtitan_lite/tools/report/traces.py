"""Read torch's traces of one step: the time of each rank by activity, its calls, and the measured pipeline.

    computing    kernels of a GPU, or operators in the main thread of a CPU
    exposed      communication that does not overlap with computing
    hidden       communication that overlaps with computing; NCCL only, because a CPU's main thread does one at a time
    waiting      the rest: the host runs Python, or another rank is late

NCCL records the group and the bytes of each call. gloo does not: there, the axis is derived from the caller.
"""

import json
import re
from collections import Counter, defaultdict
from math import inf
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.tools.plan.actions import Action
from torchtitan_lite.tools.plan.meter import OPERATIONS
from torchtitan_lite.tools.plan.timeline import Event, Timeline
from torchtitan_lite.tools.plan.transfers import Moved, fraction_moved, sum_moved

MOST_RANKS = 16  # maximum number of traces that are read, evenly spaced
DIMS = "pp|dp_replicate|dp_shard|efsdp|ep|cp|tp"
ITEM_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2}  # others: 1
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


class Trace(NamedTuple):
    """The last traced step of one rank, in seconds."""

    rank: int
    parts: dict[str, float]  # "computing", "exposed AXIS", "waiting"; they add up to the step
    hidden: dict[str, float]  # by axis
    calls: list[tuple[float, float, str, str]]  # start and end within the step, name, axis or ""
    actions: dict[Action, tuple[float, float]]  # action of the pipeline -> start and end, by the clock of the host
    moved: dict[tuple[str, str], Moved]  # (axis, operation) -> calls and bytes of NCCL; empty for gloo


def read_traces(folder: Path, layout: Layout) -> list[Trace]:
    """Read the traces of the newest step. Return an empty list if there are none."""
    newest = max(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), default=folder)
    ranks = sorted(int(path.stem.removeprefix("rank-")) for path in newest.glob("rank-*.json"))
    return [read_trace(newest, rank, layout) for rank in ranks[:: -(-len(ranks) // MOST_RANKS) or 1]]


def read_trace(folder: Path, rank: int, layout: Layout) -> Trace:
    data = json.loads((folder / f"rank-{rank}.json").read_bytes())
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    steps = [each for each in events if each["name"].startswith("ProfilerStep") and each["cat"] == "user_annotation"]
    began, ended = steps[-1]["ts"] / 1e6, (steps[-1]["ts"] + steps[-1]["dur"]) / 1e6
    on_gpu = any(event["cat"] == "kernel" for event in events)
    used = [dim for dim, degree in layout.degrees.items() if degree > 1]
    described = {each["pg_name"]: each["pg_desc"] for each in data["distributedInfo"]["pg_config"]}
    axes = {name: " x ".join(re.findall(DIMS, about) or used) for name, about in described.items()}
    spans, calls, actions, received, sent = defaultdict(list), [], {}, [], []
    for event in events:
        name, start, end = event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if not began <= start < ended or name in ("PythonDispatchMode", "gloo:send"):
            continue
        if name == "record_param_comms":
            sent.append(read_call(event["args"], axes))
        if not (event["cat"] in ON_GPU if on_gpu else event["tid"] == steps[-1]["tid"]):
            continue
        if name == "gloo:recv":  # lasts until the bytes have arrived, and may overlap with computing
            received.append((start, end))
            continue
        axis = find_axis(event, used + ["ep"] * (layout.ep > 1), axes)
        calls.append((start - began, end - began, name.removeprefix("autograd::engine::evaluate_function: "), axis))
        if axis or "annotation" not in event["cat"]:
            spans[axis].append((start, end))
        if found := re.match(r"pp ([FBIW])(\d+) stage (\d+)", name):
            action = Action(int(found[3]), found[1], int(found[2]))
            first, last = actions.get(action, (start, end))
            actions[action] = first if start < last else start, max(last, end)  # overlap: two streams; else: run again
    computing = spans.pop("", [])
    layers = [(f"exposed {axis}", spans[axis]) for axis in sorted(spans)]
    layers.insert(0 if on_gpu else len(layers), ("computing", computing))
    busy, parts = [], Counter(computing=0.0)
    for part, each in [*layers, ("exposed pp", received)]:
        parts[part] += measure(busy + each) - measure(busy)
        busy = busy + each
    parts["waiting"] = ended - began - measure(busy)
    hidden = {f"hidden {axis}": measure(spans[axis]) - parts[f"exposed {axis}"] for axis in spans if on_gpu}
    return Trace(rank, {part: s for part, s in parts.items() if s > 0}, hidden, calls, actions, sum_moved(sent))


def measure(spans: list[tuple[float, float]]) -> float:
    """Return the total length of the union of the spans."""
    total, at = 0.0, -inf
    for start, end in sorted(spans):
        total, at = total + max(0.0, end - max(start, at)), max(at, end)
    return total


def read_call(args: dict, axes: dict[str, str]) -> tuple[tuple[str, str], int, float]:
    """Return (axis, operation), 1, and the bytes that the rank moves in an NCCL call."""
    name = args["Collective name"].replace("_", "")
    operation = next((operation for part, operation in OPERATIONS.items() if part in name), name)
    n_bytes = max(args["In msg nelems"], args["Out msg nelems"]) * ITEM_BYTES.get(args["dtype"], 1)
    return (axes[args["Process Group Name"]], operation), 1, n_bytes * fraction_moved(operation, args["Group size"])


def find_axis(event: dict, used: list[str], axes: dict[str, str]) -> str:
    """Return the axis over which a call communicates; "" if it computes. `used`: dims with more than one rank."""
    name = event["name"]
    if "nccl" in name:
        return axes.get(event["args"].get("Process Group Name"), "various dims")
    if event["cat"] not in ON_GPU and name.startswith("FSDP::"):
        return " x ".join(dim for dim in ("dp_replicate", "dp_shard", "cp") if dim in used)
    if name in ("c10d::send", "c10d::recv_"):
        return "pp"
    if name.startswith("_c10d_functional::"):
        return " or ".join(dim for dim in ("cp", "tp", "ep") if dim in used)
    return "various dims" if name.startswith("c10d::") else ""


def measure_pipeline(traces: list[Trace], layout: Layout) -> Timeline | None:
    """Return the measured pipeline, or None if there is no pipeline or a pp rank has no trace."""
    ranks = {trace.rank * layout.pp // layout.world_size: trace.actions for trace in reversed(traces) if trace.actions}
    if len(ranks) < layout.pp:
        return None
    began = min(start for actions in ranks.values() for start, _ in actions.values())
    events = []
    for rank, actions in ranks.items():
        events += [Event(rank, start - began, end - began, action) for action, (start, end) in actions.items()]
    return Timeline(events, layout.pp)
