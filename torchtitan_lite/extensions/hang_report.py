"""Collect what a rank does when a step hangs or a rank fails: its stack, its peers on this host, its collectives.

The calls come from torch's flight recorder (comm.trace_buf_size entries), which records collectives on NCCL and gloo,
and on NCCL also sends and receives. On gloo, the main thread's stack tells that it waits in a pipeline.
tools/faults/hang.py reads the records of all ranks, and names the rank that the others wait for.
"""

import json
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from torchtitan_lite.faults.hang_watch import HangWatch

# Groups of checkpoints, which threads use beside the steps
IN_THREADS = ("host", "saver", "snapshot")
TORCH = Path(torch.__file__).parent


def collect(watch: HangWatch, *, has_failed: bool) -> dict[str, object]:
    """Return what this rank does, as tools/faults/hang.py reads it."""
    main_thread = threading.main_thread().ident
    stack = []  # innermost call first
    for frame, line in traceback.walk_stack(sys._current_frames()[main_thread]):
        file = Path(frame.f_code.co_filename)
        is_torch = file.is_relative_to(TORCH)
        name = file.relative_to(TORCH.parent) if is_torch else file.name
        stack.append(f"{name}:{line} {frame.f_code.co_name}")
    host = {}
    for rank, (pid, described) in watch.local.items():
        host[rank] = (pid, watch.find_state(pid), described)
    return {
        "kind": "FAILED" if has_failed else "HANG",
        "rank": watch.rank,
        "world_size": watch.world_size,
        "step": watch.step,
        "in_step": watch.is_in_step,
        "seconds": round(time.monotonic() - watch.began_s, 1),
        "host": host,
        "stack": stack,
        "groups": read_recorder(main_thread, has_failed),
    }


def read_recorder(main_thread: int, has_failed: bool) -> dict[str, dict]:
    """Return for each group the number of its last call, and the first call that is pending.

    The name of a group, "mesh_tp [0, 1]", is the same on all of its ranks. Calls of checkpoint threads are left out.
    If a call `has_failed`, none may be pending any more. In this case the last one counts.
    """
    ranks = {}
    for group in dist.distributed_c10d._world.pg_map:
        ranks[group.group_name] = dist.get_process_group_ranks(group)
    entries = []  # the oldest first
    # gloo; NCCL in builds for CUDA
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(_distributed_c10d, recorder, None):
            entries += json.loads(dump(True, False)).get("entries", [])
    groups: dict[str, dict] = {}
    for entry in entries:
        name, description = entry["process_group"]
        if description in IN_THREADS and int(entry["thread_id"]) != main_thread:
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
        if not entry["retired"] and row["pending"] is None:
            row["pending"] = last
    if has_failed and groups and not any(row["pending"] for row in groups.values()):
        groups[group]["pending"] = last
    return groups
