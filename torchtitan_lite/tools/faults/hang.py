"""Say which rank makes the others wait, from the files that hanging ranks wrote (hang_watch.py).

    ranks        files with     a collective that has not completed, or a receive of the pipeline: they wait
    0 1 2 . 4    no file        stopped, ended, or busy without releasing Python's lock: /proc on its host tells which
    5 6 7        neither        busy or asleep somewhere else: its stack tells where

If every rank waits, one of them called something else than the others: the rank whose calls differ from its own last
step; else the rank that differs from the majority of its group; else, in a pipeline, the rank that has passed a send
which its neighbor still waits for. If none of these applies, the report says unknown.
"""

import json
import sys
import time
from collections import Counter
from contextlib import suppress
from math import prod
from pathlib import Path

from torchtitan_lite.components.log import describe_rank

REPORT = "report.txt"
LOOK_EVERY_S, WAIT_FOR_RANKS_S = 1.0, 2.0
STATES = {  # of a rank without a file, from /proc
    "": "its process has ended",
    "T": "it is stopped (SIGSTOP or a debugger)",
    "t": "it is stopped by a debugger",
    "D": "it waits for a disk",
    "R": "it is busy and never releases Python's lock",
    "S": "it sleeps and holds Python's lock, or is between two steps (validation, a save)",
}
DOES = {"D": "waits for a disk", "R": "is busy", "S": "sleeps"}  # a rank with a file that waits for no other rank
DISK = ("fsync", "write", "read", "sync_folder", "hash_file")  # functions


def watch(folder: Path) -> None:
    """Print a paragraph about each hang of a run whose ranks write into `folder`. A thread of the launcher."""
    reported = {path.parent for path in folder.glob("restart-*/rank-*.json")}  # of an earlier run
    while True:
        time.sleep(LOOK_EVERY_S)
        hanging = {path.parent for path in folder.glob("restart-*/rank-*.json")}
        for one in hanging - reported:
            time.sleep(WAIT_FOR_RANKS_S)
            with suppress(FileNotFoundError, IndexError):  # the step has ended after all
                text = explain(Hang([json.loads(path.read_text()) for path in sorted(one.glob("rank-*.json"))]))
                (one / REPORT).write_text(f"{text}\n")
                print(text, file=sys.stderr, flush=True)
        reported = hanging


class Hang:
    """What the ranks wrote that noticed a hang."""

    def __init__(self, files: list[dict]):
        self.files = {file["rank"]: file for file in files}
        self.degrees = files[0]["degrees"]
        self.states = {int(rank): state for file in files for rank, state in file["processes"].items()}

    def locate(self, rank: int) -> dict[str, int]:
        """Return the mesh coordinates of a rank."""
        coordinates = {}
        for dim, degree in reversed(self.degrees.items()):
            rank, coordinates[dim] = divmod(rank, degree)
        return {dim: coordinates[dim] for dim in self.degrees}

    def name(self, rank: int) -> str:
        return describe_rank(rank, {dim: at for dim, at in self.locate(rank).items() if self.degrees[dim] > 1})

    def name_axis(self, ranks: list[int]) -> str:
        """Return the mesh dims along which the ranks of a group differ."""
        places = [self.locate(rank) for rank in ranks]
        return " x ".join(dim for dim in self.degrees if len({place[dim] for place in places}) > 1)

    def find_sender(self, rank: int, way: str) -> int | None:
        """Return the rank from which this one receives: of the stage before (fwd_recv) or after (bwd_recv)."""
        stride = prod(self.degrees.values()) // self.degrees["pp"]
        return {"fwd_recv": rank - stride, "bwd_recv": rank + stride}.get(way)


def list_ranks(group: str) -> list[int]:
    """Return the ranks of a group by its key, "mesh_tp [0, 1]"."""
    return json.loads(group.partition(" ")[2])


def explain(hang: Hang) -> str:
    """Return one paragraph."""
    n_ranks = prod(hang.degrees.values())
    culprits = find_culprits(hang)
    file = next(iter(hang.files.values()))
    text = [f"HANG in step {file['step']}, {file['seconds']:g} s after it began."]
    for rank, does in list(culprits.items())[:3]:
        pid, _ = hang.states.get(rank, (None, None))
        where = (
            f" Its process is {pid} on {hang.files[rank]['host'] if rank in hang.files else 'its host'}." if pid else ""
        )
        text.append(f"{hang.name(rank)} {name_missing(hang, rank)}: {does}.{where}")
    if len(culprits) > 3:
        text.append(f"So are {len(culprits) - 3} more ranks: {sorted(culprits)[3:20]}.")
    if not culprits:
        waits = Counter(describe_wait(hang, rank) for rank in hang.files)
        text.append(f"Cause unknown. {'; '.join(f'{n} ranks wait in {wait}' for wait, n in waits.most_common(4))}.")
    text.append(f"{len(hang.files)} of {n_ranks} ranks wrote what they do.")
    return " ".join(text)


def find_culprits(hang: Hang) -> dict[int, str]:
    """Return rank -> what it does instead of what the others wait for."""
    missing = {}
    for rank in sorted(set(range(prod(hang.degrees.values()))) - hang.files.keys()):
        _, state = hang.states.get(rank, (0, None))
        missing[rank] = STATES.get(state, "unknown: no rank of its host has written")
    idle = {rank: describe_idle(file) for rank, file in hang.files.items() if not is_waiting(file)}
    return missing | idle or find_deviating(hang) or find_odd(hang) or find_passed_send(hang)


def is_waiting(file: dict) -> bool:
    """Return whether a rank waits for others: in a collective, or in its pipeline."""
    return bool(file["pipeline"]["waits_for"]) or any(row["pending"] for row in file["groups"].values())


def describe_idle(file: dict) -> str:
    pid, state = file["processes"][str(file["rank"])]
    at = file["stack"][0]
    does = "waits for a disk" if at.split()[-1] in DISK else DOES.get(state, "does something")
    return f"it {does} in {' < '.join(file['stack'][:3])}"


def find_deviating(hang: Hang) -> dict[int, str]:
    return {rank: file["deviation"] for rank, file in hang.files.items() if file["deviation"]}


def find_odd(hang: Hang) -> dict[int, str]:
    """Return the ranks whose call in a group is not the call of most of its ranks."""
    for group in {group for file in hang.files.values() for group in file["groups"]}:
        rows = {rank: hang.files[rank]["groups"].get(group) for rank in list_ranks(group) if rank in hang.files}
        last = {rank: row["last"] for rank, row in rows.items() if row and row["pending"]}
        calls = Counter((call["number"], call["name"], str(call["sizes"])) for call in last.values())
        (usual, n), *others = calls.most_common() or [(None, 0)]
        if others and n > len(last) / 2:
            is_odd = {rank: (call["number"], call["name"], str(call["sizes"])) != usual for rank, call in last.items()}
            return {rank: f"it called {last[rank]['name']} {last[rank]['sizes']}" for rank in last if is_odd[rank]}
    return {}


def find_passed_send(hang: Hang) -> dict[int, str]:
    """Return the ranks that are past a send of the pipeline which a neighbor waits for."""
    found = {}
    for rank, file in hang.files.items():
        way, sent = file["pipeline"]["waits_for"], file["pipeline"]["sent"]
        sender = hang.find_sender(rank, way)
        if way in sent and sender in hang.files:
            theirs = hang.files[sender]
            is_past = not any("compute_gradients" in frame for frame in theirs["stack"])
            if is_past or theirs["pipeline"]["sent"].get(way, 0) > sent[way]:
                what = "hidden states" if way == "fwd_recv" else "gradients"
                found[sender] = f"it went on with fewer sends of {what} than rank {rank} expects, which has {sent[way]}"
    return found


def name_missing(hang: Hang, rank: int) -> str:
    """Say which collective on which axis waits for this rank."""
    own = hang.files.get(rank, {}).get("groups", {})
    waits = []
    for waiter, file in hang.files.items():
        for group, row in file["groups"].items():
            call = row["pending"]
            if (
                call
                and waiter != rank
                and rank in list_ranks(group)
                and own.get(group, {"n": 0})["n"] <= call["number"]
            ):
                waits.append((call["at_ns"], waiter, group, call))
        way = file["pipeline"]["waits_for"]
        if hang.find_sender(waiter, way) == rank:
            return f"is missing from a send of the pipeline (axis pp, {way}) that rank {waiter} waits for"
    if not waits:
        return "is missing, and no rank with a file waits for it directly"
    _, waiter, group, call = min(waits)
    axis = hang.name_axis(list_ranks(group))
    what = f"call {call['number']} on axis {axis}, {call['name']} {call['sizes']}"
    return f"is missing from {what}, which rank {waiter} waits for"


def describe_wait(hang: Hang, rank: int) -> str:
    file = hang.files[rank]
    if file["pipeline"]["waits_for"]:
        return f"the pipeline ({file['pipeline']['waits_for']})"
    group, row = next((group, row) for group, row in file["groups"].items() if row["pending"])
    return f"{row['pending']['name']} on axis {hang.name_axis(list_ranks(group))}"
