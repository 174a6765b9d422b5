"""Say which rank makes the others wait: during a run, or afterwards from the files that hanging ranks wrote.

    FOLDER/hang/restart-N/rank-00003.json    faults/hang_watch.py
    FOLDER/comm_traces/rank_3                NCCL's flight recorder, on a time-out: read it with torch's `torchfrtrace`

    ranks        files with     a collective that has not completed, or a wait in the pipeline: they wait
    0 1 2 . 4    no file        stopped, ended, or busy without releasing the GIL: /proc on its host tells which
    5 6 7        neither        busy or asleep somewhere else: its stack tells where

If every rank waits, the report names a rank that waits elsewhere, and has not made the call that another rank waits in
for the longest time. If there is none, the cause is unknown.
"""

import json
import os
import sys
import time
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from pathlib import Path

LOOK_EVERY_S = 1.0
WAIT_FOR_RANKS_S = 2.0
STATES = {  # of a rank without a file, from /proc
    "Z": "its process has ended",
    "T": "it is stopped (SIGSTOP or a debugger)",
    "D": "it waits for a disk",
    "R": "it is busy and never releases the GIL",
    "S": "it sleeps and holds the GIL, or is between two steps (validation, a save)",
}
IN_PIPELINE = " _wait_batch_p2p"  # function of torch's schedules
# Of a rank with a file that waits for no other rank
DOES = {"D": "waits for a disk", "R": "is busy", "S": "sleeps"}
DISK = ("fsync", "write", "read", "sync_folder", "hash_file")  # functions


def main(options: Namespace) -> int:
    folders = {path.parent for path in options.folder.rglob("restart-*/rank-*.json")}
    if not folders:
        print(f"{options.folder} has no files of hanging ranks: no rank-*.json", file=sys.stderr)
        return 2
    culprits, text = explain(read_files(max(folders, key=os.path.getmtime)))
    print(text)
    return 0 if culprits else 1


def watch(folder: Path) -> None:
    """Print a paragraph about each hang of a run whose ranks write into `folder`. A thread of the launcher."""
    reported = {path.parent for path in folder.glob("restart-*/rank-*.json")}  # of an earlier run
    while True:
        time.sleep(LOOK_EVERY_S)
        hanging = {path.parent for path in folder.glob("restart-*/rank-*.json")}
        for one in hanging - reported:
            time.sleep(WAIT_FOR_RANKS_S)
            with suppress(FileNotFoundError, StopIteration):  # the step has ended after all
                _, text = explain(read_files(one))
                print(text, file=sys.stderr, flush=True)
        reported = hanging


def read_files(folder: Path) -> dict[int, dict]:
    """Return the contents of rank-*.json by rank."""
    files = {}
    for path in sorted(folder.glob("rank-*.json")):
        file = json.loads(path.read_text())
        files[file["rank"]] = file
    return files


def explain(files: dict[int, dict]) -> tuple[dict[int, str], str]:
    """Return rank -> what it does instead of what the others wait for, and a paragraph that tells all of it."""
    first = next(iter(files.values()))
    processes = {}
    for file in files.values():
        for rank, row in file["host"].items():
            processes[int(rank)] = row
    culprits = {}
    for rank in range(first["world_size"]):
        if rank not in files:
            _, state, _ = processes.get(rank, (0, "", ""))
            culprits[rank] = STATES.get(state, "unknown: no rank of its host has written")
        elif not list_waits(files[rank]):
            culprits[rank] = describe_idle(files[rank])
    missed = {}
    for rank in culprits or files:
        if call := find_missed_call(files, rank):
            missed[rank] = call
    if missed and not culprits:
        rank = min(missed, key=missed.get)
        stack = " < ".join(files[rank]["stack"][:6])
        culprits[rank] = f"it waits in {list_waits(files[rank])[0]}, at {stack}"

    text = [f"HANG in step {first['step']}, {first['seconds']:g} s after it began."]
    for rank, does in list(culprits.items())[:3]:
        pid, _, name = processes.get(rank, ("unknown", "", f"rank {rank}"))
        waiter = "and no rank with a file waits for it directly"
        if rank in missed:
            _, other, call = missed[rank]
            waiter = f"from {call}, which rank {other} waits for"
        text.append(f"{name} is missing {waiter}: {does}. Its process is {pid}.")
    if len(culprits) > 3:
        text.append(f"So are {len(culprits) - 3} more ranks: {sorted(culprits)[3:20]}.")
    if not culprits:
        waits = Counter(list_waits(file)[0] for file in files.values())
        most = [f"{n} ranks wait in {wait}" for wait, n in waits.most_common(4)]
        text.append(f"Cause unknown. {'; '.join(most)}.")
    text.append(f"{len(files)} of {first['world_size']} ranks wrote what they do.")
    return culprits, " ".join(text)


def list_waits(file: dict) -> list[str]:
    """Return the collectives that have not completed, and the wait in the pipeline. Empty: it waits for no rank."""
    waits = []
    for row in file["groups"].values():
        if row["pending"]:
            waits.append(describe_call(row["pending"]))
    if any(line.endswith(IN_PIPELINE) for line in file["stack"]):
        waits.append("the pipeline")
    return waits


def describe_idle(file: dict) -> str:
    _, state, _ = file["host"][str(file["rank"])]
    if file["stack"][0].split()[-1] in DISK:
        state = "D"
    return f"it {DOES.get(state, 'does something')} in {' < '.join(file['stack'][:3])}"


def find_missed_call(files: dict[int, dict], rank: int) -> tuple[int, int, str] | None:
    """Return time, rank and name of the oldest call in which another rank waits for this rank. None: there is none."""
    own_groups = files[rank]["groups"] if rank in files else {}
    waits = []
    for waiter, file in files.items():
        for group, row in file["groups"].items():
            call = row["pending"]
            if call is None or rank not in json.loads(group.partition(" ")[2]):
                continue
            own = own_groups.get(group, {"n": 0, "pending": None})
            n_made = own["n"] + (own["pending"] is not None)
            if n_made <= call["number"]:
                waits.append((call["at_ns"], waiter, describe_call(call)))
    return min(waits, default=None)


def describe_call(call: dict) -> str:
    axis = call["group"].partition(" ")[0].removeprefix("mesh_")  # "mesh_tp [0, 1]"
    return f"call {call['number']} on axis {axis}, {call['name']} {call['sizes']}"
