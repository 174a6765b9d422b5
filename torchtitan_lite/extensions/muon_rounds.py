"""Choose which rank updates which matrix under Muon. This file needs no torch, so that `plan` can import it."""

from math import prod

NEWTON_SCHULZ_STEPS = 5  # number of Newton-Schulz steps in each update


def deal_matrices(sizes: list[tuple[int, ...]], n_ranks: int) -> list[list[int]]:
    """Return Muon's rounds. A round is a list of indices into `sizes`. Rank i owns the i-th matrix of the round.

    A size is (rows, columns), and may start with a batch dim. Rounds are sorted by work, the largest matrices first.
    """
    flops = []  # FLOPs of one Newton-Schulz step, for each matrix
    for *batch, rows, columns in sizes:
        m, n = sorted((rows, columns))
        flops.append(prod(batch) * (4 * m * m * n + 2 * m**3))
    order = sorted(range(len(sizes)), key=lambda index: -flops[index])
    return [order[first : first + n_ranks] for first in range(0, len(sizes), n_ranks)]
