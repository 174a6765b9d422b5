"""What one step takes of the device's memory beside what already lies there: every allocation, counted."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # as torch's profiler numbers them


def measure_step_memory(step: Callable[[], object], device: torch.device) -> int:
    """The most bytes that lay there at once of those that `step` itself allocated.

    Activations, gradients and whatever else; weights and moments are there before. torch's profiler sees allocations
    of the CPU as well as of CUDA. (On a CPU it warns once of frees that it cannot place: those of older gradients.)
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, profile_memory=True) as profiler:
        step()
    with TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    alive: dict[int, int] = {}  # address -> bytes
    now = most = 0
    for change in sorted(changes, key=lambda event: event["ts"]):
        block = change["args"]
        if block["Device Type"] != DEVICE_TYPES[device.type]:
            continue
        if block["Bytes"] > 0:
            alive[block["Addr"]] = block["Bytes"]
            now += block["Bytes"]
            most = max(most, now)
        else:
            now -= alive.pop(block["Addr"], 0)
    return most
