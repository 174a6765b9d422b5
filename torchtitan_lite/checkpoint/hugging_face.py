"""Load weights from a Hugging Face folder on any layout.

Every rank reads its own rows or columns from the mapped files, without traffic. It has one matrix beside its shards.

Both models rotate pairs of numbers of a head. Theirs takes (i, i + E/2), ours (2i, 2i + 1), so the rows of wq and wk
that produce these numbers have another order within each head, and so have the weights of the norms of query and key
heads. Drawn for E = 6:

    theirs   0 1 2 3 4 5      rows of ours in their order:   0 2 4 1 3 5
    ours     0 3 1 4 2 5      rows of theirs in our order

Legend: E head dim, R rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.hugging_face_folder import HuggingFaceFolder, list_tensors, name_theirs
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.checkpoint.storage import open_tensors
from torchtitan_lite.config.block import list_expert_biases

IN_ROTARY_ORDER = tuple(f"attention.{name}.weight" for name in ("wq", "wk", "q_norm", "k_norm"))


def to_our_order(theirs: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of whole heads, (R, D) or (R,), for our wq and wk: the halves of each head become neighbours."""
    return theirs.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def to_their_order(ours: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of whole heads, (R, D) or (R,), for their q_proj and k_proj: neighbours become halves of a head."""
    return ours.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


@torch.no_grad()
def load_weights(folder: HuggingFaceFolder, parameters: dict[str, Tensor]) -> None:
    """Fill this rank's shards of the parameters, by FQN, and biases of experts with zeros. Not collective.

    Raises CheckpointError if the folder has no such parameter, DamagedCheckpoint for a damaged file.
    """
    biases = list_expert_biases(folder.model_args)
    if unknown := parameters.keys() - {*list_tensors(folder.model_args), "output.weight", *biases}:
        raise CheckpointError(f"{folder.path} is of another model: it has no {min(unknown)}")
    for fqn, parameter in parameters.items():
        if fqn in biases:
            parameter.zero_()
            continue
        local, offsets = parameter, [0] * parameter.dim()
        if isinstance(parameter, DTensor):
            (chunk,) = parameter.__create_chunk_list__()  # torch.distributed.checkpoint asks a tensor for its chunks
            local, offsets = parameter.to_local(), chunk.offsets
        if local.dim() == 3:
            for matrix, name in zip(local, name_theirs(fqn, folder.model_args)[offsets[0] :], strict=False):
                read_box(matrix.t(), folder, name, offsets[:0:-1])
        elif local.numel():
            unit = folder.model_args.head_dim if fqn.endswith(IN_ROTARY_ORDER) else 1
            read_box(local, folder, *name_theirs(fqn, folder.model_args), offsets, head_dim=unit)


def read_box(target: Tensor, folder: HuggingFaceFolder, name: str, offsets: Sequence[int], head_dim: int = 1) -> None:
    """Fill `target` with the box at `offsets` of their tensor. Reorder rows in heads of `head_dim`, if above 1."""
    first, stop = offsets[0], offsets[0] + target.shape[0]
    whole = slice(first // head_dim * head_dim, -(-stop // head_dim) * head_dim)  # only whole heads can be reordered
    columns = [slice(offset, offset + size) for offset, size in zip(offsets[1:], target.shape[1:], strict=True)]
    rows = open_tensors(folder.files[name]).get_slice(name)[(whole, *columns)]
    rows = to_our_order(rows, head_dim) if head_dim > 1 else rows
    target.copy_(rows[first - whole.start : stop - whole.start])
