"""Name the rank that the other ranks wait for, during or after a run, from the files that hanging ranks wrote.

    FOLDER/hang/restart-N/rank-00003.json      a report of rank 3 (faults/hang_watch.py)
    FOLDER/hang/restart-N/failed-00003.json    a report of rank 3, which failed because another rank ended
    FOLDER/comm_traces/rank_3                  NCCL's flight recorder, on a timeout: read it with `torchfrtrace`

The state of a rank follows from its report, or from the lack of a report:

    a pending collective, or a wait in the pipeline    the rank waits for another rank
    neither                                            the rank is busy or asleep elsewhere; its stack shows where
    no calls                                           unknown: the flight recorder is off
    no file                                            the rank is stopped, has ended, or never releases the GIL;
                                                       /proc on its host shows which

The ranks that do not wait block the others. However, two kinds of ranks are named first. A rank of the first kind has
made a call that differs from its own calls at the same place in earlier steps. A rank of the second kind has computed a
microbatch for a neighboring stage, but has not sent it.

If every rank waits, the report names the first match in this list; without a match, the cause is unknown:

    1. ranks whose call differs from the calls of the other ranks in their process group
    2. ranks that wait between steps while most ranks wait in a step, or the reverse
    3. a rank that has not made the call in which another rank has waited longest
"""

import json
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from torchtitan_lite.config.messages import UserError, tell

LOOK_EVERY_S = 1.0
WAIT_FOR_RANKS_S = 2.0
STATES = {  # process state in /proc -> description of a rank that wrote no file
    "Z": "its process has ended",
    "T": "it is stopped (SIGSTOP or a debugger)",
    "D": "it waits for a disk",
    "R": "it is busy and never releases the GIL",
    "S": "it sleeps and holds the GIL, or has not built its model yet",
}
IN_PIPELINE = (
    " _wait_batch_p2p"  # function in which torch's pipeline schedules wait for a send or a receive
)
# files of torch whose functions run only during compilation
COMPILERS = ("torch/_dynamo/convert_frame.py:", "torch/_inductor/compile_fx.py:")
# calls whose sizes may differ between ranks
UNEQUAL = ("all_to_all", "gather", "scatter")
N_STACK_LINES = 4  # number of stack lines to show above the lines of torch


def main(options: Namespace) -> int:
    culprits, text = explain_newest(options.folder, "rank", "failed")
    if not text:
        if not options.folder.is_dir():
            raise UserError(f"there is no folder {options.folder}. Name the dump folder of a run")
        tell(
            f"{options.folder} has no report that explains a hang: there is no rank-*.json, "
            "and no failed-*.json with more information than the errors of the ranks"
        )
        return 2
    print(text)
    return 0 if culprits else 1


def explain_newest(folder: Path, *kinds: str) -> tuple[list[int], str]:
    """Call `explain` for the files of the last start in `folder`. Uses the first of `kinds` that has files."""
    folders: set[Path] = set()
    for kind in kinds:
        folders.update(path.parent for path in folder.rglob(f"restart-*/{kind}-*.json"))
    if not folders:
        return [], ""
    # if two starts have the same time, the larger number is newer
    newest = max(folders, key=lambda each: (each.stat().st_mtime, int(each.name.partition("-")[2])))
    files = {}
    for kind in kinds:
        files = files or read_files(newest, kind)
    return explain(files)


def watch(folder: Path, report: Callable[[str], None]) -> None:
    """Call `report` with a paragraph about each hang of a run whose ranks write into `folder`. Runs in a thread.

    Files of failed ranks are ignored. A rank also fails if a signal ends one of its peers, so these files do not show a
    hang.
    """
    reported = list_hangs(folder)  # hangs of an earlier run
    while True:
        time.sleep(LOOK_EVERY_S)
        found = list_hangs(folder)
        for restart in found - reported:
            time.sleep(WAIT_FOR_RANKS_S)
            _, text = explain(read_files(restart))
            if text:  # the text is "" if the step has ended in the meantime
                report(text)
        reported = found


def list_hangs(folder: Path) -> set[Path]:
    """Return the folders with files of ranks that hang."""
    return {path.parent for path in folder.glob("restart-*/rank-*.json")}


def read_files(folder: Path, kind: str = "rank") -> dict[int, dict]:
    """Return the contents of rank-*.json, or of failed-*.json, by rank. Skip files that cannot be read."""
    files = {}
    for path in sorted(folder.glob(f"{kind}-*.json")):
        try:
            file = json.loads(path.read_text())
            files[file["rank"]] = file
        # the file was deleted because the step has ended, or it is damaged
        except (OSError, ValueError):
            tell(f"{path} cannot be read")
    return files


def explain(files: dict[int, dict]) -> tuple[list[int], str]:
    """Return the ranks that block the others, ascending, and a paragraph that says where these ranks are stuck.

    The paragraph is empty if there are no files, or if all ranks failed, because their errors already give the reason.
    """
    if not files:
        return [], ""
    first = next(iter(files.values()))
    reasons = find_unusual_calls(files) or find_unsent(files)
    if first["kind"] == "FAILED" and len(files) == first["world_size"] and not reasons:
        return [], ""
    if first["step"] == 0 and not any(map(find_wait, files.values())):  # all ranks load large files
        return [], ""
    processes = {}
    for file in files.values():
        for rank, row in file["host"].items():
            # row[1], the state of a process, is empty if a rank on a different host wrote the file
            if row[1] or int(rank) not in processes:
                processes[int(rank)] = row
    reasons = reasons or find_odd_calls(files) or find_idle(files)
    culprits = sorted(reasons)
    when = f"in step {first['step']}, {first['seconds']:g} s after it began"
    if first["step"] == 0:
        when = "before the first step"
    text = [f"{first['kind']} {when}."]
    compiling = [rank for rank in culprits if rank in files and is_compiling(files[rank])]
    if culprits and compiling == culprits and first["kind"] == "HANG":
        text = [
            f"COMPILING {when}. This is not a hang yet. "
            "If compiling takes longer than comm.init_timeout_seconds, increase this key."
        ]
    for rank in culprits[:3]:
        pid, state, name = processes.get(rank, ("unknown", "", f"rank {rank}"))
        if first["kind"] == "FAILED":
            # A failed rank has ended. If a peer on the same host recorded a state other than "Z", the peer read the
            # state before the rank ended.
            state = "Z"
        does = STATES.get(state, "unknown: no rank on its host has written a report")
        if rank in files and first["kind"] == "FAILED":
            does = "it has ended with an error"
        elif rank in files:
            innermost, *outer = files[rank]["stack"]
            code = [line for line in outer if not line.startswith("torch/")]
            does = "it is in " + " < ".join([innermost, *code[:N_STACK_LINES]])
        text.append(f"{name} {reasons[rank]}: {does}. Its process is {pid}.")
    if len(culprits) > 3:
        text.append(f"The same applies to {len(culprits) - 3} more ranks: {culprits[3:20]}.")
    if not culprits:
        waits = Counter(find_wait(file) or "unknown calls" for file in files.values())
        most = [f"{n} ranks wait in {wait}" for wait, n in waits.most_common(4)]
        text.append(f"Cause unknown. {'; '.join(most)}.")
    text.append(f"{len(files)} of {first['world_size']} ranks wrote a report.")
    return culprits, " ".join(text)


def find_idle(files: dict[int, dict]) -> dict[int, str]:
    """Return a dict mapping each rank to a description of the call that it has not made.

    These are the ranks that wrote no file, or that wait for no other rank. If all ranks wait, some in a step and some
    between steps, return the smaller of these two groups. If all ranks wait in the same phase, find the oldest pending
    call that some rank of the same group has not made, and return that rank. A rank whose calls are unknown is not
    returned.
    """
    ranks = range(next(iter(files.values()))["world_size"])
    idle = [
        rank
        for rank in ranks
        if rank not in files or (files[rank]["groups"] and not find_wait(files[rank]))
    ]
    if not idle:
        in_step = [rank for rank in files if files[rank]["in_step"]]
        between = [rank for rank in files if not files[rank]["in_step"]]
        if in_step and between:
            idle = min(between, in_step, key=len)
    # rank -> oldest call that waits for this rank: start time, waiting rank, description of the call
    missed: dict[int, tuple[int, int, str]] = {}
    for rank in idle or ranks:
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
        if waits:
            missed[rank] = min(waits)
    if missed and not idle:
        idle = [min(missed, key=missed.get)]
    reasons = {}
    for rank in idle:
        reasons[rank] = "has written no report, and no rank with a report waits for it directly"
        if rank in missed:
            _, waiter, call = missed[rank]
            reasons[rank] = f"is missing from {call}, which rank {waiter} waits for"
    return reasons


def find_unusual_calls(files: dict[int, dict]) -> dict[int, str]:
    """Find the ranks whose current call differs from their calls in earlier steps. Return rank -> description of the
    current call.

    Returns {} if the calls of all ranks differ from their calls in earlier steps, as in the first step after a
    validation.
    """
    found = {}
    for rank, file in files.items():
        for call, usual in file.get("unusual", []):
            made = f"made {describe_call(call)}, but"
            found.setdefault(rank, f"{made} {usual['name']} {usual['sizes']} in earlier steps")
    return found if len(found) < next(iter(files.values()))["world_size"] else {}


def find_unsent(files: dict[int, dict]) -> dict[int, str]:
    """Return a dict mapping ranks to messages, for each rank that has computed a result for which a pipeline neighbor
    still waits."""
    found = {}
    for waiter, file in files.items():
        awaits = file.get("pipeline", {}).get("awaits")
        if not awaits or not is_in_pipeline(file) or awaits["rank"] not in files:
            continue
        sender = files[awaits["rank"]]["pipeline"]
        n_done = sender["done"][str(awaits["stage"])][awaits["kind"]]
        # if the sender has been idle only briefly, it may have sent the result after the waiter's file was written
        if n_done > awaits["n"] and sender["idle_s"] > WAIT_FOR_RANKS_S:
            what = describe_input(awaits)
            found[awaits["rank"]] = f"has computed {what}, but rank {waiter} still waits for it"
    return found


def find_odd_calls(files: dict[int, dict]) -> dict[int, str]:
    """Return a dict mapping ranks to messages, for the ranks whose pending call differs from the most common call of
    their group.

    Only calls with the same sequence number are compared. If no call is more common than all other calls, all ranks
    that wait in calls with this sequence number are returned.
    """
    waiting: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, file in files.items():
        for group, row in file["groups"].items():
            if call := row["pending"]:
                sizes = "" if call["name"] in UNEQUAL else f" {call['sizes']}"
                waiting[f"{call['number']} of {group}"][call["name"] + sizes].append(rank)
    for number, by_call in waiting.items():
        if len(by_call) > 1:
            *fewer, most = sorted(by_call.values(), key=len)
            if len(most) == len(fewer[-1]):
                fewer.append(most)
            made = [f"{call} on ranks {ranks}" for call, ranks in by_call.items()]
            return dict.fromkeys(sum(fewer, []), f"differs in call {number}: {', '.join(made)}")
    return {}


def find_wait(file: dict) -> str:
    """Return what a rank waits for: its first pending collective, the pipeline, or "" if it does not wait."""
    for row in file["groups"].values():
        if row["pending"]:
            return describe_call(row["pending"])
    if is_in_pipeline(file):
        awaits = file.get("pipeline", {}).get("awaits")
        return f"the pipeline for {describe_input(awaits)}" if awaits else "the pipeline"
    return ""


def is_compiling(file: dict) -> bool:
    return any(line.startswith(COMPILERS) for line in file["stack"])


def is_in_pipeline(file: dict) -> bool:
    return any(line.endswith(IN_PIPELINE) for line in file["stack"])


def describe_input(awaits: dict) -> str:
    what = "the output" if awaits["kind"] == "F" else "the gradient"
    return f"{what} of microbatch {awaits['microbatch']} from stage {awaits['stage']}"


def describe_call(call: dict) -> str:
    axis = call["group"].partition(" ")[0].removeprefix("mesh_")  # "mesh_tp [0, 1]"
    return f"call {call['number']} on axis {axis}, {call['name']} {call['sizes']}"
