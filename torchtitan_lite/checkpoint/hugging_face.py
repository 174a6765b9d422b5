"""Weights from a Hugging Face folder into parameters, sharded or not: each rank reads what it holds and no more.

    file        one tensor          mapped           parameter                        (drawn for Shard(0), two ranks)
    +--------+                                       rank 0: rows [:R/2]  of q_proj -> wq
    | q_proj | -> its own rows   -> into memory   -> rank 1: rows [R/2:]
    +--------+    or columns        when touched

Nothing travels and nothing is allocated beside the parameters: what is mapped are pages of the file, which the system
drops when it likes, and one tensor is mapped at a time. Types are converted as the numbers are copied.

Both models turn pairs of a head's numbers by angles. Theirs turns (i, i + E/2), ours (2i, 2i + 1), so that the rows
of wq and wk that make these numbers stand in another order within each head, drawn for E = 6:

    theirs   0 1 2 3 4 5      rows of ours in their order:   0 2 4 1 3 5
    ours     0 3 1 4 2 5      rows of theirs in our order

Legend: E head dim, R rows.
"""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.hugging_face_folder import HuggingFaceFolder
from torchtitan_lite.checkpoint.safetensors_header import DTYPE_BYTES, Entry
from torchtitan_lite.checkpoint.tensor_files import DTYPES

IN_ROTARY_ORDER = ("attention.wq.weight", "attention.wk.weight")


@torch.no_grad()
def load_weights(folder: HuggingFaceFolder, parameters: dict[str, Tensor]) -> None:
    """Fills the parameters, by FQN, with what this rank holds of them. Not collective."""
    for fqn, parameter in parameters.items():
        offsets, sizes = slice_local_shard(parameter)
        if 0 not in sizes:
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            own.copy_(read_slice(folder, fqn, offsets, sizes))


def slice_local_shard(parameter: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets and sizes of this rank's part within the global tensor."""
    if not isinstance(parameter, DTensor):
        return [0] * parameter.dim(), parameter.shape
    (chunk,) = parameter.__create_chunk_list__()  # what torch.distributed.checkpoint asks a tensor for
    return chunk.offsets, chunk.sizes


def read_slice(folder: HuggingFaceFolder, fqn: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A part of one tensor, in our order and the file's dtype; pages of the file as long as nobody writes to it."""
    rotary, head_dim = fqn.endswith(IN_ROTARY_ORDER), folder.shape.head_dim
    unit = head_dim if rotary else 1  # so many rows stand in order only together
    first, stop = offsets[0] // unit * unit, -(-(offsets[0] + sizes[0]) // unit) * unit
    mapped = map_rows(folder.entries[fqn], first, stop)
    for dim in range(1, len(sizes)):
        mapped = mapped.narrow(dim, offsets[dim], sizes[dim])
    if rotary:
        mapped = to_our_order(mapped, head_dim)
    return mapped.narrow(0, offsets[0] - first, sizes[0])


def read_tensor(folder: HuggingFaceFolder, fqn: str) -> Tensor:
    """One whole tensor, in our order and the file's dtype."""
    shape = folder.entries[fqn].shape
    return read_slice(folder, fqn, [0] * len(shape), shape)


def map_rows(entry: Entry, first: int, stop: int) -> Tensor:
    """Rows first .. stop - 1 of the tensor: mapped, not read."""
    values_per_row = math.prod(entry.shape[1:])
    start = entry.start + first * values_per_row * DTYPE_BYTES[entry.dtype]
    n_values = (stop - first) * values_per_row
    skipped = start % mmap.ALLOCATIONGRANULARITY  # a mapping begins at the border of a page
    n_bytes = skipped + n_values * DTYPE_BYTES[entry.dtype]
    with open(entry.path, "rb") as file:
        # A private copy: torch knows no memory that must not be written.
        pages = mmap.mmap(file.fileno(), n_bytes, offset=start - skipped, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(pages, dtype=DTYPES[entry.dtype], count=n_values, offset=skipped)
    return flat.view(-1, *entry.shape[1:])


def to_our_order(theirs: Tensor, head_dim: int) -> Tensor:
    """Rows of whole heads (R, D) as our wq and wk have them: halves of each head become neighbours."""
    return theirs.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def to_their_order(ours: Tensor, head_dim: int) -> Tensor:
    """The way back: neighbours become halves of each head."""
    return ours.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
