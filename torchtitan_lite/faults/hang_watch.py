"""Notice a step that does not end, and write what this rank waits for. One thread per rank looks once a second.

    main thread    begin(1) train_step end() save ... begin(2) train_step end() ...
    watch thread   ... is this step older than the limit? then:
                       write hang/restart-0/rank-00003.json
    launcher       2 s after the first file: read all files, print one paragraph (tools/faults/hang.py)

The limit is comm.hang_seconds. A rank that is stopped or never releases the GIL cannot write. So each file also has the
state of every rank of its host, from /proc. If the step ends after all, the rank deletes its file.

The calls come from torch's flight recorder (comm.trace_buf_size entries), which records collectives on NCCL and gloo,
and on NCCL also sends and receives. On gloo, the main thread's stack tells where it is in a 1F1B pipeline.
"""

import json
import linecache
import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch._C import _distributed_c10d

from torchtitan_lite.components.log import describe_rank
from torchtitan_lite.config.schema import Comm
from torchtitan_lite.dump_folder import HANG
from torchtitan_lite.faults.flight_recorder import find_deviation, list_calls, summarize
from torchtitan_lite.parallel.mesh import Mesh

SHARE_OF_TIMEOUT = 0.75  # report before a collective times out and the ranks end


class HangWatch:
    """Watches the steps between `begin` and `end`. A context manager: leaving it ends the thread. Collective."""

    def __init__(
        self, dump_folder: Path, section: Comm, mesh: Mesh, restarts: int, group: dist.ProcessGroup
    ):
        self.folder = dump_folder / HANG / f"restart-{restarts}"
        self.section, self.rank, self.stage_size = (
            section,
            dist.get_rank(),
            mesh.world.size() // mesh.pp.size(),
        )
        self.ranks: list[tuple[str, int, str]] = [
            ("", 0, "")
        ] * mesh.world.size()  # host, process, name
        used = {dim: at for dim, at in mesh.coordinates().items() if mesh.world[dim].size() > 1}
        own = (socket.gethostname(), os.getpid(), describe_rank(self.rank, used))
        dist.all_gather_object(self.ranks, own, group=group)
        self.durations_s: deque[float] = deque(maxlen=50)
        self.last_step_ns = (
            0,
            0,
        )  # begin and end of the last step, by the clock of the flight recorder
        self.file = self.folder / f"rank-{self.rank:05}.json"
        self.file.unlink(missing_ok=True)  # of an earlier run
        self.leaving = threading.Event()
        self.begin(0)

    def begin(self, step: int) -> None:
        """Note that a step begins."""
        self.step, self.phase, self.began_s, self.began_ns = (
            step,
            "step",
            time.monotonic(),
            time.time_ns(),
        )

    def end(self) -> None:
        """Note that the step has ended. Validation, saves and logs follow."""
        self.durations_s.append(time.monotonic() - self.began_s)
        self.last_step_ns = (self.began_ns, time.time_ns())
        self.phase, self.began_s = "after", time.monotonic()

    def limit_s(self) -> float:
        """Return the seconds after which this is a hang. The first step, and saves and validation, may take longer."""
        if not self.durations_s or self.phase != "step":
            return SHARE_OF_TIMEOUT * self.section.init_timeout_seconds
        if self.section.hang_seconds > 0:
            return self.section.hang_seconds
        median_s = statistics.median(self.durations_s)
        return max(
            60,
            2 * median_s,
            min(10 * median_s, SHARE_OF_TIMEOUT * self.section.train_timeout_seconds),
        )

    def __enter__(self) -> "HangWatch":
        if self.section.hang_seconds != 0:
            threading.Thread(target=self.watch, name="hang", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leaving.set()

    def watch(self) -> None:
        while not self.leaving.wait(1.0):
            is_late = time.monotonic() - self.began_s > self.limit_s()
            if is_late and not self.file.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                unfinished = self.file.with_suffix(".tmp")
                unfinished.write_text(json.dumps(self.collect()))
                unfinished.rename(self.file)
            elif not is_late and self.file.exists():
                self.file.unlink()

    def collect(self) -> dict[str, object]:
        """Return what this rank does, as tools/faults/hang.py reads it."""
        main_thread, host = threading.main_thread().ident, self.ranks[self.rank][0]
        frames = list(traceback.walk_stack(sys._current_frames()[main_thread]))  # innermost first
        calls = read_recorder(main_thread)
        waits_for, sent = find_in_pipeline(frames)
        senders = {"fwd_recv": self.rank - self.stage_size, "bwd_recv": self.rank + self.stage_size}
        return {
            "rank": self.rank,
            "world_size": len(self.ranks),
            "step": self.step,
            "seconds": round(time.monotonic() - self.began_s, 1),
            "host": {
                rank: (pid, read_state(pid), who)
                for rank, (at, pid, who) in enumerate(self.ranks)
                if at == host
            },
            "stack": [
                f"{Path(f.f_code.co_filename).name}:{line} {f.f_code.co_name}" for f, line in frames
            ],
            "groups": summarize(calls),
            "deviation": find_deviation(calls, self.last_step_ns, self.began_ns)
            if self.phase == "step"
            else "",
            "pipeline": {"waits_for": waits_for, "sender": senders.get(waits_for), "sent": sent},
        }


def read_recorder(main_thread: int) -> list[dict]:
    """Return the calls that this process has recorded, oldest first. Calls of checkpoint threads are left out."""
    ranks = {
        group.group_name: dist.get_process_group_ranks(group)
        for group in dist.distributed_c10d._world.pg_map
    }
    calls = []
    for name in (
        "_dump_fr_trace_json",
        "_dump_nccl_trace_json",
    ):  # of gloo; of NCCL, in builds for CUDA
        if dump := getattr(_distributed_c10d, name, None):
            calls += list_calls(json.loads(dump(True, False)), ranks, main_thread)
    return sorted(calls, key=lambda call: call["at_ns"])


def read_state(pid: int) -> str:
    """Return the state of a process's main thread: R runs, S sleeps, D waits for a disk, T is stopped; "": ended."""
    try:
        return (
            Path(f"/proc/{pid}/stat")
            .read_text()
            .rpartition(")")[2]
            .split()[0]
            .upper()
            .replace("Z", "")
        )
    except OSError:
        return ""


def find_in_pipeline(frames: list[tuple[FrameType, int]]) -> tuple[str, dict[str, int]]:
    """Return what a rank waits for in its pipeline, and how many microbatches it has sent forward and backward.

    "fwd_recv" and "bwd_recv" are receives, "send" is any other wait, "" is none. The numbers are local variables of
    torch's Schedule1F1B; other schedules have no such numbers.
    """
    waits_for, sent = "", {}
    for (frame, line), (inner, _) in zip(frames[1:], frames, strict=False):
        if inner.f_code.co_name == "_wait_batch_p2p":
            text = linecache.getline(frame.f_code.co_filename, line)
            waits_for = next((way for way in ("fwd_recv", "bwd_recv") if f'{way}"' in text), "send")
        if "fwd_mb_index" in frame.f_locals:
            sent = {
                "fwd_recv": frame.f_locals["fwd_mb_index"],
                "bwd_recv": frame.f_locals["bwd_mb_index"],
            }
    return waits_for, sent
