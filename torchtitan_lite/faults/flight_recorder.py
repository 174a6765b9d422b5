"""Read torch's flight recorder: the last collectives that a process called, group by group. No torch.

entry    process_group (name, description), collective_seq_id, profiling_name "gloo:all_reduce", input_sizes,
         time_created_ns, retired (the call has completed)
call     group "mesh_tp [0, 1]" (the same on all of its ranks), number in its group, name, sizes, at_ns, is_completed
"""

# Groups of checkpoints, which threads use beside the steps
IN_THREADS = ("host", "saver", "snapshot")


def list_calls(dump: dict, ranks: dict[str, list[int]], main_thread: int) -> list[dict]:
    """Return the calls in a dump, except those of checkpoint threads. `ranks` has the ranks of a group by its name."""
    calls = []
    for entry in dump.get("entries", []):
        name, description = entry["process_group"]
        if description in IN_THREADS and int(entry["thread_id"]) != main_thread:
            continue
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        call = {
            "group": f"{description} {ranks.get(name, [])}",
            "number": number,
            "name": entry["profiling_name"].partition(":")[2],
            "sizes": entry["input_sizes"],
            "at_ns": entry["time_created_ns"],
            "is_completed": entry["retired"],
        }
        calls.append(call)
    return calls


def summarize(calls: list[dict]) -> dict[str, dict]:
    """Return for each group the number of calls, and the first call that has not completed."""
    groups: dict[str, dict] = {}
    for call in calls:
        row = groups.setdefault(call["group"], {"pending": None})
        row["n"] = call["number"]
        if not call["is_completed"] and row["pending"] is None:
            row["pending"] = call
    return groups
