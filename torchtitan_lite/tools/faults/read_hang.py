"""Explain a hang afterwards, from the files of hanging ranks or from NCCL's flight-recorder dumps.

    FOLDER/hang/restart-N/rank-00003.json    hang_watch.py; the newest restart is read
    FOLDER/comm_traces/rank_3                NCCL, on a time-out: a pickle of plain values, in which no code is accepted

A dump has no stack and no coordinates, so the axis of a group is its description, such as mesh_tp.
"""

import json
import os
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from typing import NoReturn

from torchtitan_lite.dump_folder import HANG
from torchtitan_lite.faults.flight_recorder import list_calls, summarize
from torchtitan_lite.tools.faults.hang import Hang, explain, find_culprits


def main(options: Namespace) -> int:
    folders = sorted({path.parent for path in options.folder.rglob("rank-*.json")}, key=os.path.getmtime)
    dumps = sorted(path for path in options.folder.rglob("rank_*") if path.name[5:].isdecimal())
    if folders:
        own = [folder for folder in folders if folder.parent.name == HANG]
        files = [json.loads(path.read_text()) for path in sorted((own or folders)[-1].glob("rank-*.json"))]
    elif dumps:
        files = [convert(path, len(dumps)) for path in dumps]
    else:
        print(f"{options.folder} has no files of hanging ranks: no rank-*.json and no rank_N", file=sys.stderr)
        return 2
    hang = Hang(files)
    print(json.dumps(find_culprits(hang)) if options.json else explain(hang))
    return 0 if find_culprits(hang) else 1


class PlainUnpickler(pickle.Unpickler):
    """Reads pickles of plain values."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is code, and a dump has only plain values")


def convert(path: Path, n_dumps: int) -> dict[str, object]:
    """Return NCCL's dump of one rank in the form of hang_watch.py."""
    with open(path, "rb") as file:
        dump = PlainUnpickler(file).load()
    rank = int(path.name[5:])
    ranks = {row["name"]: json.loads(row["ranks"]) for row in dump.get("pg_config", {}).values() if row["name"]}
    world_size = max([rank + 1, n_dumps, *(1 + max(members) for members in ranks.values())])
    return {
        "rank": rank,
        "degrees": {"pp": 1, "rank": world_size},
        "step": "unknown",
        "seconds": 0,
        "host": "unknown",
        "pid": 0,
        "processes": {str(rank): (0, "unknown")},
        "stack": ["an unknown place: dumps have no stack"],
        "pipeline": {"waits_for": "", "sent": {}},
        "groups": summarize(list_calls(dump, ranks)),
        "deviation": "",
    }
