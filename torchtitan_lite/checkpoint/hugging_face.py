"""Load and export weights as a Hugging Face folder, in one process or on all ranks of a run.

    load      every rank reads its own rows or columns from the mapped files; no traffic, nothing is allocated
    export    out.tmp/   each pipeline stage all-gathers one tensor after the other; its first rank writes them.
                         The first rank of all adds index, config.json and tokenizer
              barrier    every file is on the disk
              out        one rename

                                       stage 0                   stage 1         (drawn for pp 2, three files)
    model-00001-of-00003.safetensors   embedding, layers 0 to 3
    model-00002-of-00003.safetensors                             layers 4 to 6
    model-00003-of-00003.safetensors                             layer 7, norm, head

Besides its shards a rank has one whole tensor in memory; of experts, one matrix when it loads.

Rotary order: both models rotate pairs of numbers of a head. Theirs takes (i, i + E/2), ours (2i, 2i + 1), so the rows
of wq and wk that produce these numbers have another order within each head, and so have the weights of the norms of
query and key heads. Drawn for E = 6:

    theirs   0 1 2 3 4 5      rows of ours in their order:   0 2 4 1 3 5
    ours     0 3 1 4 2 5      rows of theirs in our order

Legend: E head dim, R rows.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
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
from torchtitan_lite.checkpoint.storage import do_on_rank_0, raise_on_all_ranks
from torchtitan_lite.checkpoint.tensor_files import TensorFileWriter, convert_dtype, cut_into_files, open_tensor_file
from torchtitan_lite.config.flavors import ModelArgs, list_expert_biases

logger = logging.getLogger(__name__)

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
    places = locate(fqn, tuple(shape), folder.model_args, stacked=folder.stacked)
    if len(shape) < 3:
        yield read_box(folder, fqn, places[0], offsets, sizes)
        return
    first, n_experts = offsets[0], sizes[0]
    n_in, n_out = (slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
    for place in places[first : first + n_experts]:
        yield open_tensor_file(folder.files[place.name]).get_slice(place.name)[place.index(n_out, n_in)].t()


def read_box(folder: HuggingFaceFolder, fqn: str, place: Place, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a box of a tensor that is not of experts."""
    head_dim = folder.model_args.head_dim
    unit = head_dim if fqn.endswith(IN_ROTARY_ORDER) else 1  # rows can be reordered in whole heads only
    first, stop = offsets[0] // unit * unit, -(-(offsets[0] + sizes[0]) // unit) * unit
    columns = (slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
    file = open_tensor_file(folder.files[place.name])
    rows = file.get_slice(place.name)[place.index(slice(first, stop), *columns)]
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


@dataclass(frozen=True)
class PlannedFile:
    name: str
    writer: int  # rank
    fqns: list[str]


def plan_files(export: Export, held: list[Iterable[str]]) -> list[PlannedFile]:
    """Return every file. `held` are the FQNs of each rank; the first rank that has a tensor writes it."""
    itemsize = getattr(torch, export.dtype).itemsize
    bytes_by_writer: dict[int, dict[str, int]] = {}
    for fqn, size in list_tensors(export.model_args).items():
        writer = next(rank for rank, fqns in enumerate(held) if fqn in fqns)
        bytes_by_writer.setdefault(writer, {})[fqn] = math.prod(size) * itemsize
    cut = [
        (writer, fqns)
        for writer, n_bytes in bytes_by_writer.items()
        for fqns in cut_into_files(n_bytes, export.most_file_bytes)
    ]
    names = [f"model-{number:05}-of-{len(cut):05}.safetensors" for number in range(1, len(cut) + 1)]
    if len(cut) == 1:
        names = [SINGLE_FILE]
    return [PlannedFile(name, writer, fqns) for name, (writer, fqns) in zip(names, cut, strict=True)]


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
    """Write the folder `out` in one process. `read(fqn)` returns each whole tensor when it is needed.

    Raises CheckpointError if `out` or an unfinished one exists, or cannot be written; then nothing is left.
    """
    unfinished = folders.create_unfinished(out)
    try:
        files = plan_files(export, [list_tensors(export.model_args)])
        for planned in files:
            write_tensors(unfinished / planned.name, planned.fqns, map(read, planned.fqns), export)
        finish_folder(out, files, export)
    except BaseException:
        folders.discard(out)
        raise


def refuse_biases(saved: dict[str, Tensor]) -> None:
    if why := explain_biases(saved):
        raise CheckpointError(why)


def export_hf(out: Path, parameters: dict[str, Tensor], export: Export, *, group: dist.ProcessGroup) -> None:
    """Write all parameters of a run (Run.saved) as the folder `out`, unless an earlier attempt has. Collective.

    `group` has all ranks and uses gloo. Raises CheckpointError, on every rank, if `out` cannot be written; then nothing
    is left. Only the run that holds the lock of the dump folder may call this: unfinished folders there are deleted.
    """
    if do_on_rank_0(group, out.exists):
        return
    raise_on_all_ranks(group, lambda: refuse_biases(parameters))
    rank = dist.get_rank(group)
    do_on_rank_0(group, lambda: folders.remove_partial(out.parent))
    do_on_rank_0(group, lambda: folders.create_unfinished(out))
    held: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, list(parameters), group=group)  # names only
    files = plan_files(export, held)
    try:
        raise_on_all_ranks(group, lambda: write_own_files(out, parameters, files, export, rank))
        do_on_rank_0(group, lambda: finish_folder(out, files, export))
    except CheckpointError:
        if rank == 0:
            folders.discard(out)
        raise
    logger.info(f"exported {out}")


def write_own_files(
    out: Path, parameters: dict[str, Tensor], files: list[PlannedFile], export: Export, rank: int
) -> None:
    """Gather this stage's tensors, in the order in which all its ranks do, and write this rank's files."""
    failure = None
    for planned in files:
        # all-gathers each tensor over the ranks that share it
        held = (parameters[fqn].detach() for fqn in planned.fqns if fqn in parameters)
        gathered = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in held)
        if planned.writer == rank and failure is None:
            try:
                write_tensors(folders.name_unfinished(out) / planned.name, planned.fqns, gathered, export)
            except CheckpointError as error:
                failure = error  # raised later: until then the other ranks of the stage need this one to gather
        for _ in gathered:
            pass
    if failure:
        raise failure


def write_tensors(path: Path, fqns: list[str], tensors: Iterable[Tensor], export: Export) -> None:
    """Write one safetensors file and wait until it is on the disk. One whole tensor is in memory at a time."""
    args, dtype = export.model_args, getattr(torch, export.dtype)
    sizes, tensors = list_tensors(args), iter(tensors)
    places = [place for fqn in fqns for place in locate(fqn, sizes[fqn], args)]
    with TensorFileWriter(path, {place.name: (dtype, place.shape) for place in places}, hashed=False) as file:
        for fqn in fqns:
            tensor = next(tensors)
            for place in locate(fqn, sizes[fqn], args):  # experts one by one
                own = convert_dtype(fqn, tensor if place.expert is None else tensor[place.expert].t(), dtype)
                file.write(place.name, to_their_order(own, args.head_dim) if fqn.endswith(IN_ROTARY_ORDER) else own)
            del tensor, own  # before the next one is made
        file.finish()


def finish_folder(out: Path, files: list[PlannedFile], export: Export) -> None:
    """Add the other files and commit the folder."""
    config = make_config(
        export.model_args,
        dtype=export.dtype,
        bos_id=export.bos_id,
        eos_id=export.eos_id,
        context=export.context,
        published=export.published.get(CONFIG),
    )
    contents = export.tokenizer_files | {CONFIG: encode(config)}
    if GENERATION_CONFIG in export.published:
        contents[GENERATION_CONFIG] = encode(export.published[GENERATION_CONFIG])
    if len(files) > 1:
        sizes = list_tensors(export.model_args)
        n_bytes = sum(map(math.prod, sizes.values())) * getattr(torch, export.dtype).itemsize
        file_of = {
            place.name: planned.name
            for planned in files
            for fqn in planned.fqns
            for place in locate(fqn, sizes[fqn], export.model_args)
        }
        contents[INDEX] = encode({"metadata": {"total_size": n_bytes}, "weight_map": file_of})
    for name, content in contents.items():
        folders.write_file(folders.name_unfinished(out) / name, content)
    folders.commit(out)


def encode(value: dict) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
