"""Say which rank makes the others wait: during a run, or afterwards from the files that hanging ranks wrote.

    FOLDER/hang/restart-N/rank-00003.json    faults/hang_watch.py
    FOLDER/comm_traces/rank_3                NCCL's flight recorder, on a time-out; has no stack and no process state

    ranks        files with     a collective that has not completed, or a receive of the pipeline: they wait
    0 1 2 . 4    no file        stopped, ended, or busy without releasing the GIL: /proc on its host tells which
    5 6 7        neither        busy or asleep somewhere else: its stack tells where

If every rank waits, the report looks for a rank whose calls differ from its previous step, then for a rank whose
pending call differs from most of its group, then for a pipeline rank that has passed a send its neighbor waits for.
Otherwise the cause is unknown.
"""

import json
import os
import pickle
import sys
import time
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.faults.flight_recorder import list_calls, summarize

LOOK_EVERY_S, WAIT_FOR_RANKS_S = 1.0, 2.0
STATES = {  # of a rank without a file, from /proc
    "": "its process has ended",
    "T": "it is stopped (SIGSTOP or a debugger)",
    "D": "it waits for a disk",
    "R": "it is busy and never releases the GIL",
    "S": "it sleeps and holds the GIL, or is between two steps (validation, a save)",
}
DOES = {
    "D": "waits for a disk",
    "R": "is busy",
    "S": "sleeps",
}  # a rank with a file that waits for no other rank
DISK = ("fsync", "write", "read", "sync_folder", "hash_file")  # functions


def main(options: Namespace) -> int:
    folders = sorted(
        {path.parent for path in options.folder.rglob("restart-*/rank-*.json")},
        key=os.path.getmtime,
    )
    dumps = {
        int(path.name[5:]): path
        for path in options.folder.rglob("rank_*")
        if path.name[5:].isdecimal()
    }
    if not folders and not dumps:
        print(
            f"{options.folder} has no files of hanging ranks: no rank-*.json and no rank_N",
            file=sys.stderr,
        )
        return 2
    files = (
        read_files(folders[-1])
        if folders
        else {rank: read_dump(rank, path) for rank, path in dumps.items()}
    )
    culprits, text = explain(files)
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
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return {file["rank"]: file for file in files}


class PlainUnpickler(pickle.Unpickler):
    """Reads pickles of plain values. Code in a pickle is never imported: it ends in a TypeError."""

    find_class = None


def read_dump(rank: int, path: Path) -> dict[str, object]:
    """Return NCCL's dump of a rank in the form of hang_watch.py."""
    with open(path, "rb") as file:
        dump = PlainUnpickler(file).load()
    ranks = {
        row["name"]: json.loads(row["ranks"]) for row in dump["pg_config"].values() if row["name"]
    }
    return {
        "rank": rank,
        "world_size": max([rank, *(max(members) for members in ranks.values())]) + 1,
        "step": "unknown",
        "seconds": 0,
        "host": {str(rank): ("unknown", "", f"rank {rank}")},
        "stack": ["an unknown place, because dumps have no stack"],
        "groups": summarize(list_calls(dump, ranks)),
        "deviation": "",
        "pipeline": {"waits_for": "", "sender": None, "sent": {}},
    }


def explain(files: dict[int, dict]) -> tuple[dict[int, str], str]:
    """Return rank -> what it does instead of what the others wait for, and a paragraph that tells all of it."""
    first = next(iter(files.values()))
    processes = {int(rank): row for file in files.values() for rank, row in file["host"].items()}
    missing = {}
    for rank in sorted(set(range(first["world_size"])) - files.keys()):
        _, state, _ = processes.get(rank, (0, "unknown", ""))
        missing[rank] = STATES.get(state, "unknown: no rank of its host has written")
    idle = {rank: describe_idle(file) for rank, file in files.items() if not list_pending(file)}
    deviating = {rank: file["deviation"] for rank, file in files.items() if file["deviation"]}
    culprits = missing | idle or deviating or find_odd(files) or find_passed_send(files)

    text = [f"HANG in step {first['step']}, {first['seconds']:g} s after it began."]
    for rank, does in list(culprits.items())[:3]:
        pid, _, name = processes.get(rank, ("unknown", "", f"rank {rank}"))
        text.append(f"{name} {find_waiter(files, rank)}: {does}. Its process is {pid}.")
    if len(culprits) > 3:
        text.append(f"So are {len(culprits) - 3} more ranks: {sorted(culprits)[3:20]}.")
    if not culprits:
        waits = Counter(list_pending(file)[0] for file in files.values())
        text.append(
            f"Cause unknown. {'; '.join(f'{n} ranks wait in {wait}' for wait, n in waits.most_common(4))}."
        )
    return culprits, " ".join(
        [*text, f"{len(files)} of {first['world_size']} ranks wrote what they do."]
    )


def list_pending(file: dict) -> list[str]:
    """Return the collectives that have not completed, and the wait in the pipeline. Empty: it waits for no rank."""
    calls = [describe_call(row["pending"]) for row in file["groups"].values() if row["pending"]]
    way = file["pipeline"]["waits_for"]
    return [*calls, f"the pipeline ({way})"] if way else calls


def describe_idle(file: dict) -> str:
    state = "D" if file["stack"][0].split()[-1] in DISK else file["host"][str(file["rank"])][1]
    does = DOES.get(state, "does something")
    return f"it {does} in {' < '.join(file['stack'][:3])}"


def find_odd(files: dict[int, dict]) -> dict[int, str]:
    """Return the ranks whose pending call in a group is not the call of most of its ranks."""
    for group in {group for file in files.values() for group in file["groups"]}:
        rows = {
            rank: file["groups"][group] for rank, file in files.items() if group in file["groups"]
        }
        last = {rank: row["last"] for rank, row in rows.items() if row["pending"]}
        calls = {
            rank: (call["number"], call["name"], str(call["sizes"])) for rank, call in last.items()
        }
        (usual, n), *others = Counter(calls.values()).most_common() or [(None, 0)]
        if others and n > len(calls) / 2:
            return {
                rank: "it called {1} {2}".format(*call)
                for rank, call in calls.items()
                if call != usual
            }
    return {}


def find_passed_send(files: dict[int, dict]) -> dict[int, str]:
    """Return the ranks that are past a send of the pipeline which a neighbor waits for."""
    found = {}
    for rank, file in files.items():
        way, sent, sender = (file["pipeline"][key] for key in ("waits_for", "sent", "sender"))
        if way in sent and sender in files:
            theirs = files[sender]
            is_past = not any("compute_gradients" in frame for frame in theirs["stack"])
            if is_past or theirs["pipeline"]["sent"].get(way, 0) > sent[way]:
                what = "hidden states" if way == "fwd_recv" else "gradients"
                found[sender] = (
                    f"it went on with fewer sends of {what} than rank {rank} expects, which has {sent[way]}"
                )
    return found


def find_waiter(files: dict[int, dict], rank: int) -> str:
    """Say which call of which rank waits for this rank. Of several, the one that was called first."""
    own, waits = files.get(rank, {}).get("groups", {}), []
    for waiter, file in files.items():
        if file["pipeline"]["sender"] == rank:
            way = file["pipeline"]["waits_for"]
            return f"is missing from a send of the pipeline (axis pp, {way}) that rank {waiter} waits for"
        for group, row in file["groups"].items():
            call, n_own = row["pending"], own.get(group, {"n": 0})["n"]
            if (
                call
                and waiter != rank
                and rank in json.loads(group.partition(" ")[2])
                and n_own <= call["number"]
            ):
                waits.append((call["at_ns"], waiter, describe_call(call)))
    if not waits:
        return "is missing, and no rank with a file waits for it directly"
    _, waiter, call = min(waits)
    return f"is missing from {call}, which rank {waiter} waits for"


def describe_call(call: dict) -> str:
    axis = call["group"].partition(" ")[0].removeprefix("mesh_")  # "mesh_tp [0, 1]"
    return f"call {call['number']} on axis {axis}, {call['name']} {call['sizes']}"
