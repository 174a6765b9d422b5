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


def explain(files: dict[int, dict]) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and a paragraph that tells what these ranks do instead."""
    first = next(iter(files.values()))
    processes = {}
    for file in files.values():
        for rank, row in file["host"].items():
            processes[int(rank)] = row
    ranks = range(first["world_size"])
    culprits = [rank for rank in ranks if rank not in files or not find_wait(files[rank])]
    missed = {}
    for rank in culprits or ranks:
        if call := find_missed_call(files, rank):
            missed[rank] = call
    if missed and not culprits:
        culprits = [min(missed, key=missed.get)]

    text = [f"HANG in step {first['step']}, {first['seconds']:g} s after it began."]
    for rank in culprits[:3]:
        pid, state, name = processes.get(rank, ("unknown", "", f"rank {rank}"))
        waiter = "and no rank with a file waits for it directly"
        if rank in missed:
            _, other, call = missed[rank]
            waiter = f"from {call}, which rank {other} waits for"
        does = STATES.get(state, "unknown: no rank of its host has written")
        if rank in files:
            does = "it is in " + " < ".join(files[rank]["stack"][:6])
        text.append(f"{name} is missing {waiter}: {does}. Its process is {pid}.")
    if len(culprits) > 3:
        text.append(f"So are {len(culprits) - 3} more ranks: {culprits[3:20]}.")
    if not culprits:
        waits = Counter(find_wait(file) for file in files.values())
        most = [f"{n} ranks wait in {wait}" for wait, n in waits.most_common(4)]
        text.append(f"Cause unknown. {'; '.join(most)}.")
    text.append(f"{len(files)} of {first['world_size']} ranks wrote what they do.")
    return culprits, " ".join(text)


def find_wait(file: dict) -> str:
    """Return the first collective that has not completed, or the pipeline. Empty: it waits for no rank."""
    for row in file["groups"].values():
        if row["pending"]:
            return describe_call(row["pending"])
    if any(line.endswith(IN_PIPELINE) for line in file["stack"]):
        return "the pipeline"
    return ""


def find_missed_call(files: dict[int, dict], rank: int) -> tuple[int, int, str] | None:
    """Return time, rank and name of the oldest call in which another rank waits for this rank. None: there is none."""
    own_groups = files[rank]["groups"] if rank in files else {}
    waits = []
    for waiter, file in files.items():
        for group, row in file["groups"].items():
            call = row["pending"]
            if call is None or rank not in json.loads(group.partition(" ")[2]):
                continue
            n_made = own_groups[group]["n"] if group in own_groups else 0
            if n_made < call["number"]:
                waits.append((call["at_ns"], waiter, describe_call(call)))
    return min(waits, default=None)


def describe_call(call: dict) -> str:
    axis = call["group"].partition(" ")[0].removeprefix("mesh_")  # "mesh_tp [0, 1]"
    return f"call {call['number']} on axis {axis}, {call['name']} {call['sizes']}"
