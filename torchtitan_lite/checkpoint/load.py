"""Load a checkpoint on any layout: every rank reads only its shards, and each file is hashed by one rank.

    manifest.json       chunks of wq: rows 0..3 in rank-00000.safetensors, rows 4..7 in rank-00001.safetensors
    shard of a rank     rows 2..5, copied from both: `OpenCheckpoint.read_shard`

A load only succeeds if every hash matches. If the newest state is damaged, an older one is loaded. faults/start.py
lists the states that a run may resume from. If a rank fails, every rank raises its error (`raise_on_all_ranks`);
otherwise the others would wait in their next collective, and report a time-out minutes later.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint.format import (
    CheckpointError,
    DamagedCheckpoint,
    read_manifest,
    require_undamaged,
)
from torchtitan_lite.checkpoint.save import GRADIENT_NORMS

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------- one process


class OpenCheckpoint:
    """A checkpoint with its manifest. Files are opened when their tensors are read.

    Opening it checks the hashes of all files, or of one of `n_parts` of them. Raises CheckpointError if there is no
    checkpoint, DamagedCheckpoint with the names of damaged files.
    """

    def __init__(self, folder: Path, part: int = 0, n_parts: int = 1):
        self.folder = folder
        self.manifest = read_manifest(folder)
        require_undamaged(folder, part, n_parts)
        self.files: dict[str, safe_open] = {}

    def read(self, name: str) -> Tensor:
        """Return a full tensor on the CPU. Raises KeyError if there is none, DamagedCheckpoint for a damaged file."""
        record = self.manifest.tensors[name]
        tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        self.read_shard(name, tensor)
        return tensor

    @torch.no_grad()
    def read_shard(self, name: str, tensor: Tensor) -> None:
        """Fill this rank's shard of a tensor, from all chunks that overlap it."""
        shard, begin = find_shard(tensor)
        for chunk in self.manifest.tensors[name].chunks:
            source = []
            target = []
            bounds = zip(begin, shard.shape, chunk.offsets, chunk.sizes, strict=True)
            for own_offset, own_size, offset, size in bounds:
                first = max(own_offset, offset)
                stop = max(first, min(own_offset + own_size, offset + size))
                source.append(slice(first - offset, stop - offset))
                target.append(slice(first - own_offset, stop - own_offset))
            box = shard[tuple(target)]
            if box.numel():
                box.copy_(self.open(chunk.file).get_slice(name)[tuple(source)])

    def open(self, file: str) -> safe_open:
        if file not in self.files:
            self.files[file] = open_tensors(self.folder / file)
        return self.files[file]


def open_tensors(path: Path) -> safe_open:
    """Map a safetensors file. Raises DamagedCheckpoint."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as safetensors: {error}") from None


def find_shard(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return this rank's shard of a tensor, and the index of its first element in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, [0] * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()  # the method that torch.distributed.checkpoint calls
    return tensor.to_local(), chunk.offsets


def load_checkpoint(path: Path, tensors: dict[str, Tensor], *, group: dist.ProcessGroup) -> None:
    """Load this rank's shards `tensors` in place. The ranks of `group` share the files to hash. No communication.

    Raises CheckpointError if a tensor is missing or has another shape, and DamagedCheckpoint if a file has changed
    since it was saved; `tensors` are then undefined.
    """
    checkpoint = OpenCheckpoint(path, group.rank(), group.size())
    for name, tensor in tensors.items():
        record = checkpoint.manifest.tensors.get(name)
        if record is None and GRADIENT_NORMS in name:
            continue  # a run that only now skips spikes has no history
        if record is None or record.shape != list(tensor.shape):
            found = record and record.shape
            shapes = f"{list(tensor.shape)} in this run, but {found} there"
            raise CheckpointError(f"{path} has a different model: {name} has shape {shapes}")
        checkpoint.read_shard(name, tensor)


# ---------------------------------------------------------------- all ranks


def raise_on_all_ranks(group: dist.ProcessGroup, action: Callable[[], Any]) -> Any:
    """Call `action` on every rank. If it fails on any rank, all raise one of the errors. Collective.

    Damage explains other errors, so it is raised first; then the error of the lowest rank.
    """
    result = None
    failure = None
    try:
        result = action()
    except CheckpointError as error:
        failure = error
    except Exception as error:  # a type that every process can unpickle
        failure = CheckpointError(f"{type(error).__name__}: {error}")
    failures: list[CheckpointError | None] = [None] * group.size()
    dist.all_gather_object(failures, failure, group=group)  # a few hundred bytes per rank
    raised = [failure for failure in failures if failure is not None]
    if raised:
        raise min(raised, key=lambda error: not isinstance(error, DamagedCheckpoint))
    return result


def do_on_rank_0(group: dist.ProcessGroup, action: Callable[[], Any]) -> Any:
    """Call `action` on rank 0 only. Return its result, or raise its error, on every rank. Collective."""
    results = [raise_on_all_ranks(group, action if group.rank() == 0 else lambda: None)]
    dist.broadcast_object_list(results, group=group, group_src=0)
    return results[0]


class Saved(NamedTuple):
    """A checkpoint, or a snapshot of one host."""

    step: int
    path: Path
    ranks: dist.ProcessGroup  # the ranks whose shards it has
    kind: str = "checkpoint"
    is_without_moments: bool = False  # load its weights only


def create_optimizer_state(optimizer: Optimizer) -> None:
    """Make the optimizer allocate its state, with a step whose gradients are zero. The weights may decay."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def set_step(lr_scheduler: LRScheduler, step: int) -> None:
    """Set the learning rate for the step after `step`."""
    lr_scheduler.last_epoch = step - 1
    lr_scheduler.step()


def load_newest(found: list[Saved], tensors: dict[str, Tensor], group: dist.ProcessGroup) -> Saved:
    """Load `tensors` in place from the newest undamaged one, and return it. Collective over `group`.

    Renames and deletes nothing. Raises CheckpointError if all are damaged.
    """
    reasons = []
    for saved in sorted(found, key=lambda saved: saved.step, reverse=True):
        wanted = tensors
        if saved.is_without_moments:
            wanted = {name: tensors[name] for name in tensors if name.startswith("model.")}
        load = partial(load_checkpoint, saved.path, wanted, group=saved.ranks)
        try:
            raise_on_all_ranks(group, load)
            return saved
        except DamagedCheckpoint as error:
            reasons.append(str(error))
            if group.rank() == 0:
                logger.error(f"DAMAGED {saved.kind.upper()}, trying an older one: {error}")
    remedy = "Restore a checkpoint from a copy, or start another run with --job.dump_folder=FOLDER"
    raise CheckpointError(f"nothing can be loaded: {'; '.join(reasons)}. {remedy}")
