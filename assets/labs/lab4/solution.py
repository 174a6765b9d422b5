# one_f_one_b.py: write_rows
def write_rows(n_stages: int, n_microbatches: int) -> list[list[str]]:
    """Return the actions of each rank: some forwards, then alternating backwards and forwards, then the last
    backwards."""
    rows = []
    for stage in range(n_stages):
        n_first = min(n_stages - stage, n_microbatches)
        row = [f"{stage}F{microbatch}" for microbatch in range(n_first)]
        for microbatch in range(n_microbatches):
            row.append(f"{stage}B{microbatch}")
            if n_first + microbatch < n_microbatches:
                row.append(f"{stage}F{n_first + microbatch}")
        rows.append(row)
    return rows
