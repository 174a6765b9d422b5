"""Report what a rank is doing when a step hangs or a rank fails: its stack, its peers on this host, its collectives.

The collectives come from torch's flight recorder (comm.trace_buf_size entries), which records collectives on NCCL and
gloo, and also sends and receives on NCCL. On gloo, the stack of the main thread shows whether the rank waits in the
pipeline, and the schedule shows which microbatch from which rank is missing. tools/faults/hang.py reads the files of
all ranks, and names the rank that the others wait for.
"""

import json
import logging
import re
import sys
import threading
import time
import traceback
from bisect import bisect
from collections import Counter
from math import ceil
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from torchtitan_lite.checkpoint.format import find_coordinates
from torchtitan_lite.components.log import describe_rank, go_on_unwritten
from torchtitan_lite.config.layout import MESH_DIMS
from torchtitan_lite.faults.hang_watch import HangWatch
from torchtitan_lite.faults.processes import read_state
from torchtitan_lite.parallel.process_groups import HOST_GROUPS

logger = logging.getLogger(__name__)

# These lines are in the stack of the main thread if it waits for a save, and in the stack of the thread that saves.
WAITS_FOR_SAVE = re.compile(r"asynchronous_saves\.py:\d+ wait$")
SAVES = re.compile(r"save\.py:\d+ write$")
# type of an action in torch's schedules -> forward or backward; I computes the input gradients of a split backward
KINDS = {"F": "F", "B": "B", "I": "B"}
TORCH = Path(torch.__file__).parent
kind_of_call = itemgetter("name", "sizes")


def warn_of_timeout(step_s: float, timeout_s: int) -> None:
    """Log that the time of a step is close to the timeout of collectives."""
    key = "comm.train_timeout_seconds"
    logger.info(
        f"a step took {step_s:.3g} s, and collectives time out after {key} = {timeout_s}. "
        "If a later step takes even longer, the run may end. If a step hangs, the run may end without a report. "
        f"Set {key} to {ceil(4 * step_s)} or more"
    )


def write_report(watch: HangWatch, kind: str) -> None:
    """Write a report of what this rank is doing. `kind` is "rank" if a step hangs, and "failed" if a rank has ended.

    If a step hangs, this function also creates the file `watch.late`, which makes all other ranks write their reports.
    A report is complete or does not exist.
    """
    content = collect(watch, has_failed=kind == "failed")
    file = watch.name_file(kind)
    unfinished = file.with_suffix(".tmp")
    with go_on_unwritten(str(file), watch.unwritten):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(content))
        unfinished.rename(file)
        if kind == "rank":
            watch.late.touch()


def collect(watch: HangWatch, *, has_failed: bool) -> dict[str, object]:
    """Return a report of what this rank is doing, in the format that tools/faults/hang.py reads."""
    thread = threading.main_thread().ident or 0
    frames = sys._current_frames()
    stack = read_stack(frames[thread])
    if any(map(WAITS_FOR_SAVE.match, stack)):
        for other, frame in frames.items():
            saving = read_stack(frame)
            if any(map(SAVES.match, saving)):
                thread = other
                stack = saving
    host = {}
    for rank, (pid, hostname) in watch.processes.items():
        at = find_coordinates(rank, MESH_DIMS, watch.run.layout.degrees)
        name = describe_rank(rank, at)
        if rank in watch.place.host_ranks:
            host[rank] = (pid, read_state(pid), name)
        else:
            host[rank] = (pid, "", f"{name} on {hostname}")
    schedule = watch.run.schedule
    groups, unusual = read_recorder(thread, has_failed, list(watch.begun_ns))
    return {
        "kind": "FAILED" if has_failed else "HANG",
        "rank": watch.place.rank,
        "world_size": watch.place.world_size,
        "step": watch.step,
        "in_step": watch.is_in_step,
        "seconds": round(time.monotonic() - watch.began_s, 1),
        "host": host,
        "stack": stack,
        "groups": groups,
        "unusual": unusual if watch.is_in_step else [],
        "pipeline": read_pipeline(getattr(schedule, "schedule", schedule)),
    }


def read_stack(innermost: FrameType) -> list[str]:
    """Return the stack of a thread, the innermost call first."""
    stack = []
    for frame, line in traceback.walk_stack(innermost):
        file = Path(frame.f_code.co_filename)
        is_torch = file.is_relative_to(TORCH)
        name = file.relative_to(TORCH.parent) if is_torch else file.name
        stack.append(f"{name}:{line} {frame.f_code.co_name}")
    return stack


def read_pipeline(schedule: Any) -> dict[str, object]:
    """Return the number of microbatches that each pipeline stage of this rank has computed, and the next input that
    this rank needs.

    Returns {} without a pipeline. Activations arrive from the previous stage, and gradients from the next stage.
    """
    if schedule is None:
        return {}
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    by_index = {stage.stage_index: stage for stage in stages}
    idle_s = time.monotonic() - max(stage.done_at_s for stage in stages)
    done = {index: dict(stage.n_done) for index, stage in by_index.items()}
    n_seen: Counter = Counter()
    awaited = None
    for index, kind in list_actions(schedule.pipeline_order[stages[0].group_rank]):
        stage = by_index[index]
        n_done = stage.n_done[kind]
        n_in_step = n_done - stage.n_before[kind]
        n_seen[index, kind] += 1
        if n_seen[index, kind] > n_in_step:
            sender = index - 1 if kind == "F" else index + 1
            if 0 <= sender < stage.num_stages and sender not in by_index:
                rank = dist.get_global_rank(stage.group, stage.stage_index_to_group_rank[sender])
                awaited = {"rank": rank, "stage": sender, "kind": kind, "n": n_done}
                awaited["microbatch"] = n_in_step
            break
    return {"idle_s": round(idle_s, 1), "done": done, "awaits": awaited}


def list_actions(order: list) -> list[tuple[int, str]]:
    """Return (stage, kind) of each computation in a rank's schedule that needs an input. F is forward, B backward."""
    actions = []
    for action in order:
        for part in getattr(action, "sub_actions", None) or [action]:
            kind = part and KINDS.get(part.computation_type.value)
            if kind:
                actions.append((part.stage_index, kind))
    return actions


def read_recorder(
    thread: int, has_failed: bool, begun_ns: list[int]
) -> tuple[dict[str, dict], list[tuple[dict, dict]]]:
    """For each process group, return the number of its last call, and its first pending call.

    The name of a process group, such as "mesh_tp [0, 1]", is the same on all of its ranks. `thread` is the main thread,
    or the checkpoint thread that it waits for. Calls of other checkpoint threads are not included. If a call has failed
    (`has_failed`) and no call is pending any more, the last call is treated as pending.

    For each group, also returns the first call in which this step differs from all earlier steps, and the call that the
    most similar earlier step made instead. `begun_ns` lists the start times of this step and of the steps before it.
    """
    ranks = {}
    for group in dist.distributed_c10d._world.pg_map:
        ranks[group.group_name] = dist.get_process_group_ranks(group)
    entries = []  # entries of all recorders, the oldest first
    # the recorders of gloo and, in builds for CUDA, of NCCL
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(_distributed_c10d, recorder, None):
            entries += json.loads(dump(True, False)).get("entries", [])
    groups: dict[str, dict] = {}
    by_step: dict[str, list[list[dict]]] = {}
    for entry in entries:
        name, description = entry["process_group"]
        if description in HOST_GROUPS and int(entry["thread_id"]) != thread:
            continue
        group = f"{description} {ranks.get(name, [])}"
        row = groups.setdefault(group, {"pending": None})
        row["n"] = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        last = {
            "group": group,
            "number": row["n"],
            "name": entry["profiling_name"].partition(":")[2],  # "gloo:all_reduce"
            "sizes": entry["input_sizes"],
            "at_ns": entry["time_created_ns"],
        }
        steps = by_step.setdefault(group, [[] for _ in begun_ns])
        n_begun = bisect(begun_ns, last["at_ns"])
        if n_begun:
            steps[n_begun - 1].append(last)
        if not entry["retired"] and row["pending"] is None:
            row["pending"] = last
    if has_failed and groups and not any(row["pending"] for row in groups.values()):
        groups[group]["pending"] = last
    unusual = [find_unusual(steps) for steps in by_step.values()]
    return groups, [pair for pair in unusual if pair]


def find_unusual(steps: list[list[dict]]) -> tuple[dict, dict] | None:
    """Return the first call in which the last step differs from all earlier steps.

    Also returns the call that the most similar earlier step made instead.
    """
    *earlier, last = steps or [[]]
    found = None
    longest = -1
    for step in earlier:
        n_equal = 0
        for call, usual in zip(last, step, strict=False):
            if kind_of_call(call) != kind_of_call(usual):
                break
            n_equal += 1
        if n_equal > longest:
            longest = n_equal
            is_unusual = n_equal < min(len(last), len(step))
            found = (last[n_equal], step[n_equal]) if is_unusual else None
    return found
