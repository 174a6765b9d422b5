"""Load weights from a Hugging Face folder, on any layout; export them in one process.

    load      every rank reads its own rows or columns from the mapped files; no traffic, nothing is allocated
    export    rank 0 reads the last checkpoint, a tensor at a time, as `convert` does

An export has one file in memory. A rank that loads has one matrix beside its shards.

Rotary order: both models rotate pairs of numbers of a head. Theirs takes (i, i + E/2), ours (2i, 2i + 1), so the rows
of wq and wk that produce these numbers have another order within each head, and so have the weights of the norms of
query and key heads. Drawn for E = 6:

    theirs   0 1 2 3 4 5      rows of ours in their order:   0 2 4 1 3 5
    ours     0 3 1 4 2 5      rows of theirs in our order

Legend: E head dim, R rows.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, GENERATION_CONFIG, make_config
from torchtitan_lite.checkpoint.hugging_face_folder import (
    INDEX,
    SINGLE_FILE,
    HuggingFaceFolder,
    Place,
    list_tensors,
    locate,
)
from torchtitan_lite.checkpoint.manifest import CheckpointError
from torchtitan_lite.checkpoint.storage import (
    convert_dtype,
    cut_into_files,
    open_tensors,
    write_tensors,
)
from torchtitan_lite.config.block import list_expert_biases
from torchtitan_lite.config.flavors import ModelArgs

IN_ROTARY_ORDER = tuple(f"attention.{name}.weight" for name in ("wq", "wk", "q_norm", "k_norm"))
MOST_FILE_BYTES = 5 * 10**9  # as transformers has it


def to_our_order(theirs: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of whole heads, (R, D) or (R,), for our wq and wk: the halves of each head become neighbours."""
    return theirs.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def to_their_order(ours: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of whole heads, (R, D) or (R,), for their q_proj and k_proj: neighbours become halves of a head."""
    return ours.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


# --- load ---


@torch.no_grad()
def load_weights(folder: HuggingFaceFolder, parameters: dict[str, Tensor]) -> None:
    """Fill this rank's shards of the parameters, by FQN, and biases of experts with zeros. Not collective.

    Raises CheckpointError for a damaged file.
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
            (chunk,) = parameter.__create_chunk_list__()  # what torch.distributed.checkpoint asks a tensor for
            local, offsets = parameter.to_local(), chunk.offsets
        if local.numel():
            boxes = read_boxes(folder, fqn, parameter.shape, offsets, local.shape)
            for target in local if local.dim() == 3 else [local]:
                target.copy_(next(boxes))  # no variable: one of their tensors is mapped at a time


def read_boxes(
    folder: HuggingFaceFolder, fqn: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[Tensor]:
    """Yield a box of one tensor of this shape: the whole box, or of experts the matrix of one after the other.

    In our row order and the dtype of their file; views of the mapped file where that can be. Raises CheckpointError for
    a damaged file.
    """
    places = locate(fqn, tuple(shape), folder.model_args)
    if len(shape) < 3:
        yield read_box(folder, fqn, places[0], offsets, sizes)
        return
    first, n_experts = offsets[0], sizes[0]
    n_in, n_out = (slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
    for place in places[first : first + n_experts]:
        yield open_tensors(folder.files[place.name]).get_slice(place.name)[n_out, n_in].t()


def read_box(folder: HuggingFaceFolder, fqn: str, place: Place, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a box of a tensor that is not of experts."""
    head_dim = folder.model_args.head_dim
    unit = head_dim if fqn.endswith(IN_ROTARY_ORDER) else 1  # rows can be reordered in whole heads only
    first, stop = offsets[0] // unit * unit, -(-(offsets[0] + sizes[0]) // unit) * unit
    columns = (slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
    file = open_tensors(folder.files[place.name])
    rows = file.get_slice(place.name)[(slice(first, stop), *columns)]
    if unit > 1:
        rows = to_our_order(rows, head_dim)
    return rows.narrow(0, offsets[0] - first, sizes[0])


def read_tensor(folder: HuggingFaceFolder, fqn: str) -> Tensor:
    """Return one whole tensor, as `read_boxes` does."""
    args = folder.model_args
    size = list_tensors(args).get(fqn) or (args.vocab_size, args.dim)  # a tied head
    boxes = read_boxes(folder, fqn, size, [0] * len(size), size)
    return torch.stack(list(boxes)) if len(size) == 3 else next(boxes)


# --- export ---


@dataclass(frozen=True)
class Export:
    """Everything in the folder but the weights."""

    model_args: ModelArgs
    dtype: str  # float32, bfloat16 or float16
    most_file_bytes: int = MOST_FILE_BYTES  # a larger tensor has its own file
    # Of the tokenizer: two special tokens, and the files that go beside the weights, name -> content.
    bos_id: int | None = None
    eos_id: int | None = None
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    context: int | None = None  # tokens of the longest text that the model has learnt to read, if that is known
    published: dict[str, dict] = field(default_factory=dict)  # config.json and generation_config.json of first weights


def explain_biases(saved: dict[str, Tensor]) -> str | None:
    """Return why weights cannot be exported: `saved` has biases of experts, by FQN, that have moved from zero."""
    moved = [fqn for fqn, tensor in saved.items() if fqn.endswith("expert_bias") and tensor.any()]
    if not moved:
        return None
    return (
        f"{moved[0]} has moved from zero, and no format of Hugging Face has a bias of experts, so another model would "
        "come out. Train with training.expert_bias_rate = 0, and balance experts by training.expert_balance_loss"
    )


def write_folder(out: Path, read: Callable[[str], Tensor], export: Export) -> None:
    """Write the folder `out`. `read(fqn)` returns each whole tensor when it is needed; one file is in memory.

    Raises CheckpointError if `out` or an unfinished one exists, or cannot be written; then nothing is left.
    """
    args, dtype = export.model_args, getattr(torch, export.dtype)
    sizes = list_tensors(args)
    cut = cut_into_files({fqn: math.prod(size) * dtype.itemsize for fqn, size in sizes.items()}, export.most_file_bytes)
    names = [f"model-{number:05}-of-{len(cut):05}.safetensors" for number in range(1, len(cut) + 1)]
    names = names if len(cut) > 1 else [SINGLE_FILE]
    unfinished, file_of = folders.create_unfinished(out), {}
    try:
        for name, fqns in zip(names, cut, strict=True):
            theirs = {}
            for fqn in fqns:
                tensor = convert_dtype(fqn, read(fqn), dtype)
                tensor = to_their_order(tensor, args.head_dim) if fqn.endswith(IN_ROTARY_ORDER) else tensor
                for place in locate(fqn, sizes[fqn], args):
                    theirs[place.name] = (tensor if place.expert is None else tensor[place.expert].t()).contiguous()
            write_tensors(unfinished / name, theirs)
            file_of |= dict.fromkeys(theirs, name)
        about = {"bos_id": export.bos_id, "eos_id": export.eos_id, "context": export.context}
        config = make_config(args, dtype=export.dtype, published=export.published.get(CONFIG), **about)
        contents = export.tokenizer_files | {CONFIG: encode(config)}
        if GENERATION_CONFIG in export.published:
            contents[GENERATION_CONFIG] = encode(export.published[GENERATION_CONFIG])
        if len(cut) > 1:
            n_bytes = sum(map(math.prod, sizes.values())) * dtype.itemsize
            contents[INDEX] = encode({"metadata": {"total_size": n_bytes}, "weight_map": file_of})
        for name, content in contents.items():
            folders.write_file(unfinished / name, content)
        folders.commit(out)
    except BaseException:
        folders.discard(out)
        raise


def encode(value: dict) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
