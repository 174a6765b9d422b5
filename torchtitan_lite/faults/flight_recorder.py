"""Read torch's flight recorder: the last collectives that a process called, group by group. No torch.

entry    process_group (name, description), collective_seq_id, profiling_name "gloo:all_reduce", input_sizes,
         time_created_ns, retired (the call has completed)
call     group "mesh_tp [0, 1]" (the same on all of its ranks), number in its group, name, sizes, at_ns, is_completed
"""

IN_THREADS = (
    "host",
    "saver",
    "snapshot",
)  # groups of checkpoints, which threads use beside the steps
VARYING = "all_to_all"  # experts: sizes differ between ranks and steps


def list_calls(
    dump: dict, ranks: dict[str, list[int]], main_thread: int | None = None
) -> list[dict]:
    """Return the calls in a dump, except those of checkpoint threads. `ranks` has the ranks of a group by its name."""
    return [
        {
            "group": f"{description} {ranks.get(name, [])}",
            "number": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            "name": entry["profiling_name"].partition(":")[2],
            "sizes": entry["input_sizes"],
            "at_ns": entry["time_created_ns"],
            "is_completed": entry["retired"],
        }
        for entry in dump.get("entries", [])
        for name, description in [entry["process_group"]]
        if description not in IN_THREADS or int(entry.get("thread_id", -1)) == main_thread
    ]


def summarize(calls: list[dict]) -> dict[str, dict]:
    """Return for each group the number of calls, the last one, and the first that has not completed."""
    groups: dict[str, dict] = {}
    for call in calls:
        row = groups.setdefault(call["group"], {"pending": None})
        row |= {"n": call["number"], "last": call}
        if not call["is_completed"] and row["pending"] is None:
            row["pending"] = call
    return groups


def find_deviation(calls: list[dict], last_step_ns: tuple[int, int], began_ns: int) -> str:
    """Return how the calls of this step differ from those of the last one; "": so far they are the same."""
    last = [call for call in calls if last_step_ns[0] <= call["at_ns"] < last_step_ns[1]]
    for before, now in zip(
        last, (call for call in calls if call["at_ns"] >= began_ns), strict=False
    ):
        is_same = now["sizes"] == before["sizes"] or VARYING in now["name"]
        if (now["group"], now["name"]) != (before["group"], before["name"]) or not is_same:
            what = f"{before['name']} {before['sizes']} on {before['group']}"
            return f"it called {now['name']} {now['sizes']} on {now['group']}, where the last step called {what}"
    return ""
