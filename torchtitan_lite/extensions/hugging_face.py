"""Load weights from a Hugging Face folder on any layout.

Every rank reads only its rows or columns from the mapped files, without communication. Loading needs memory for the
rank's shards and for one more matrix.

RoPE rotates pairs of features in a head: (i, i + E/2) in transformers, (2i, 2i + 1) here. Therefore, in modules that
the model's table marks `is_rotated`, this trainer and transformers store the rows of each head in different orders. For
E = 6:

    our row           0 1 2 3 4 5        their row          0 1 2 3 4 5
    is their row      0 3 1 4 2 5        is our row         0 2 4 1 3 5

Legend: E head dim, R rows.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.load import open_tensors
from torchtitan_lite.config.block import list_expert_biases, list_parameters
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.dtensor import find_shard
from torchtitan_lite.extensions.hugging_face_folder import (
    HuggingFaceFolder,
    name_theirs,
    open_folder,
)


def to_our_order(theirs: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of full heads, (R, D) or (R,), for wq and wk of this trainer: i and i + E/2 become neighbors."""
    return theirs.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def to_their_order(ours: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of full heads, (R, D) or (R,), for Hugging Face's q_proj and k_proj: the inverse of to_our_order."""
    return ours.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def find_unit(fqn: str, model_args: ModelArgs) -> int:
    """Return the `unit` for `read_box`, in rows: head_dim if RoPE rotates the module's output, otherwise 1."""
    entry = list_parameters(model_args).get(fqn)
    return model_args.head_dim if entry and entry.row.is_rotated else 1


@torch.no_grad()
def load_weights(path: Path, parameters: dict[str, Tensor]) -> None:
    """Load this rank's shards of the parameters (FQN -> parameter), and set expert biases to zero. Not collective.

    Parameters that are not in the folder keep their initial weights. Raises the errors of `open_folder`, and
    DamagedCheckpoint for a damaged file.
    """
    folder = open_folder(path)
    model_args = folder.model_args
    biases = list_expert_biases(model_args)
    stored = list_parameters(model_args)
    for fqn, parameter in parameters.items():
        if fqn in biases:
            parameter.zero_()
            continue
        if fqn not in stored:
            continue
        names = name_theirs(fqn, model_args)
        shard, offsets = find_shard(parameter)
        if shard.dim() == 3:
            for matrix, name in zip(shard, names[offsets[0] :], strict=False):
                read_box(matrix.t(), folder, name, offsets[:0:-1])
        elif shard.numel():
            read_box(shard, folder, names[0], offsets, unit=find_unit(fqn, model_args))


def read_box(
    target: Tensor, folder: HuggingFaceFolder, name: str, offsets: Sequence[int], unit: int = 1
) -> None:
    """Fill `target` with a slice of the tensor `name` in the folder. The slice begins at `offsets`.

    If `unit` is above 1, each unit of rows is a head, and its rows are reordered.
    """
    first = offsets[0]
    stop = first + target.shape[0]
    begin = first // unit * unit  # only full heads can be reordered
    end = math.ceil(stop / unit) * unit
    box = [slice(begin, end)]
    for offset, size in zip(offsets[1:], target.shape[1:], strict=True):
        box.append(slice(offset, offset + size))
    file, stored_name = folder.tensors[name]
    rows = open_tensors(file).get_slice(stored_name)[tuple(box)]
    if unit > 1:
        rows = to_our_order(rows, unit)
    target.copy_(rows[first - begin : stop - begin])
