"""Your task: write the 1F1B schedule as one list of actions per rank."""


def write_rows(n_stages: int, n_microbatches: int) -> list[list[str]]:
    """Return the actions of each rank, in order. Rank r has stage r.

    `0F3` is the forward of microbatch 3 in stage 0, and `0B3` is its backward. The code below is GPipe: all forwards,
    then all backwards.
    """
    rows = []
    for stage in range(n_stages):
        row = [f"{stage}F{microbatch}" for microbatch in range(n_microbatches)]
        row += [f"{stage}B{microbatch}" for microbatch in range(n_microbatches)]
        rows.append(row)
    return rows
