"""Read torch's flight recorder: the last collectives that a process called, group by group. No torch.

entry    process_group (name, description), collective_seq_id, profiling_name "gloo:all_reduce", input_sizes,
         time_created_ns, retired (the call has completed)
group    "mesh_tp [0, 1]" (the same on all of its ranks), number of its last call, and the first call that is pending
"""

# Groups of checkpoints, which threads use beside the steps
IN_THREADS = ("host", "saver", "snapshot")


def summarize(dump: dict, ranks: dict[str, list[int]], main_thread: int) -> dict[str, dict]:
    """Return for each group the number of calls, and the first call that has not completed.

    Leaves out calls of checkpoint threads. `ranks` has the ranks of a group by its name.
    """
    groups: dict[str, dict] = {}
    for entry in dump.get("entries", []):
        name, description = entry["process_group"]
        if description in IN_THREADS and int(entry["thread_id"]) != main_thread:
            continue
        group = f"{description} {ranks.get(name, [])}"
        row = groups.setdefault(group, {"pending": None})
        row["n"] = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        if not entry["retired"] and row["pending"] is None:
            row["pending"] = {
                "group": group,
                "number": row["n"],
                "name": entry["profiling_name"].partition(":")[2],
                "sizes": entry["input_sizes"],
                "at_ns": entry["time_created_ns"],
            }
    return groups
