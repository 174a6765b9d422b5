"""Find the rows of a weight and the tokens that each rank has, for pictures of a layout. Does not need torch.

              stored all the time                           in use, after an all-gather
    weight    rows between steps: 1/(tp x fsdp)             rows while the block runs: all-gathered over dp_shard x cp
    tokens    positions between matmuls: 1/(cp x tp)        positions in matmuls: all-gathered over tp
    experts   1/(ep x efsdp)                                1/ep, all-gathered over efsdp

explain.py takes the slices of every parameter from a dry run. A test checks that these slices equal the slices that
this file computes.
"""

from math import ceil
from typing import NamedTuple

from torchtitan_lite.checkpoint.format import find_coordinates
from torchtitan_lite.config.layout import MESH_DIMS, Layout

MOST_DRAWN_RANKS = 64  # a picture shows at most this number of ranks


class Slices(NamedTuple):
    """The slices that one rank has of a colwise weight, of a batch, and of the experts of a layer."""

    held_rows: range  # rows of the weight
    used_rows: range
    sequences: range  # sequences of the global batch
    held_tokens: list[range]
    used_tokens: list[range]
    experts: range


def slice_range(whole: range, n: int, index: int) -> range:
    """Return one of n slices. As in torch.chunk, the last slice may be smaller than the others."""
    size = ceil(len(whole) / n)
    return whole[index * size : (index + 1) * size]


def find_slices(layout: Layout, rank: int, n_rows: int, seq_len: int, n_experts: int = 0) -> Slices:
    """Return a rank's slices of `n_rows` output features, of `n_experts` experts, and of sequences of `seq_len`."""
    at = find_coordinates(rank, MESH_DIMS, layout.degrees)
    cp, tp = at["cp"], at["tp"]
    data_rank = at["dp_replicate"] * layout.dp_shard + at["dp_shard"]
    used_rows = slice_range(range(n_rows), layout.tp, tp)
    used_tokens = [range(seq_len)]
    if layout.cp > 1:  # a rank has an early and a late piece of the sequence (context_parallel.py)
        used_tokens = []
        for piece in (cp, 2 * layout.cp - 1 - cp):
            used_tokens.append(slice_range(range(seq_len), 2 * layout.cp, piece))
    # indices into the concatenated pieces
    own = slice_range(range(seq_len // layout.cp), layout.tp, tp)
    held_tokens = []
    start = 0
    for piece in used_tokens:
        held = piece[max(0, own.start - start) : max(0, own.stop - start)]
        start += len(piece)
        if held:
            held_tokens.append(held)
    return Slices(
        slice_range(used_rows, layout.fsdp, at["dp_shard"] * layout.cp + cp),
        used_rows,
        slice_range(range(layout.global_batch_size), layout.dp, data_rank),
        held_tokens,
        used_tokens,
        slice_range(range(n_experts), max(1, layout.ep), rank % max(1, layout.ep)),
    )


def choose_shown(layout: Layout) -> dict[str, list[int]]:
    """Return a dict mapping each mesh dim to the coordinates that a picture shows: only the first and the last of the
    largest dims."""
    shown = {dim: list(range(n)) for dim, n in layout.degrees.items()}
    n_ranks = layout.world_size
    while n_ranks > MOST_DRAWN_RANKS:
        dim = max(shown, key=lambda each: len(shown[each]))
        n_ranks = n_ranks // len(shown[dim]) * 2
        shown[dim] = [0, layout.degrees[dim] - 1]
    return shown
