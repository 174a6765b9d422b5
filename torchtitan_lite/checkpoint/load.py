"""Load a checkpoint on any layout: every rank reads only its shards, and each file is hashed by one rank.

    manifest.json       wq has 8 rows, split over 2 ranks: rows 0..3 are in rank-00000.safetensors, 4..7 in rank-00001
    shard of a rank     rows 2..5, copied from both files: `OpenCheckpoint.read_shard`

A rank opens only the files that contain its shards, and the files whose hashes it checks.

A load succeeds only if every hash matches. If the newest state is damaged, an older state is loaded. resume.py lists
the states that a run may resume from. If one rank fails, all ranks raise its error (`raise_on_all_ranks`). If only the
failed rank raised the error, the other ranks would wait in their next collective, and report a time-out minutes later.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint.format import CheckpointError, DamagedCheckpoint, Manifest
from torchtitan_lite.checkpoint.read import list_slices, read_manifest, require_undamaged
from torchtitan_lite.checkpoint.save import SPIKES, raise_on_all_ranks
from torchtitan_lite.dtensor import find_shard

logger = logging.getLogger(__name__)

# (the current prefix, the prefix that older versions of this code wrote)
OLD_NAME = (SPIKES, "optimizer.gradient_norms.")


# ---------------------------------------------------------------- one process


class OpenCheckpoint:
    """A checkpoint with its manifest. Files are opened when their tensors are read.

    The constructor divides the files into `n_parts` parts, and checks the hashes of part number `part`. By default, the
    constructor checks all files. Raises CheckpointError if there is no checkpoint, and DamagedCheckpoint with the names
    of damaged files.
    """

    def __init__(self, folder: Path, part: int = 0, n_parts: int = 1):
        self.folder = folder
        self.manifest = read_manifest(folder)
        require_undamaged(folder, part, n_parts)
        self.files: dict[str, safe_open] = {}

    def read(self, name: str) -> Tensor:
        """Return a full tensor on the CPU. Raises DamagedCheckpoint, or KeyError for an unknown name."""
        record = self.manifest.tensors[name]
        tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        self.read_shard(name, tensor)
        return tensor

    @torch.no_grad()
    def read_shard(self, name: str, tensor: Tensor) -> None:
        """Fill this rank's shard of a tensor from the stored slices that overlap it."""
        shard, begin = find_shard(tensor)
        record = self.manifest.tensors[name]
        among = self.manifest.host
        for stored in list_slices(record, self.manifest.mesh, begin, shard.shape, among):
            source = []
            target = []
            bounds = zip(begin, shard.shape, stored.offsets, stored.sizes, strict=True)
            for own_offset, own_size, offset, size in bounds:
                first = max(own_offset, offset)
                stop = min(own_offset + own_size, offset + size)
                source.append(slice(first - offset, stop - offset))
                target.append(slice(first - own_offset, stop - own_offset))
            if all(part.start < part.stop for part in source):
                if stored.file not in self.files:
                    self.files[stored.file] = open_tensors(self.folder / stored.file)
                values = self.files[stored.file].get_slice(name)[tuple(source)]
                shard[tuple(target)].copy_(values)


def open_tensors(path: Path) -> safe_open:
    """Map a safetensors file. Raises DamagedCheckpoint."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as safetensors: {error}") from None


def load_checkpoint(checkpoint: OpenCheckpoint, tensors: dict[str, Tensor]) -> None:
    """Load this rank's shards `tensors` in-place. No communication.

    Raises CheckpointError if a tensor is not in the checkpoint or has a different shape there, and DamagedCheckpoint if
    a file cannot be read. After an error, the values of `tensors` are undefined.
    """
    for name, tensor in tensors.items():
        stored = name if name in checkpoint.manifest.tensors else name.replace(*OLD_NAME)
        record = checkpoint.manifest.tensors.get(stored)
        found = record.shape if record else "nothing"
        if found == list(tensor.shape):
            checkpoint.read_shard(stored, tensor)
        elif not name.startswith(SPIKES):
            raise CheckpointError(
                f"{checkpoint.folder} does not fit this run: {name} has shape {list(tensor.shape)} in this run, "
                f"but {found} in the checkpoint. If the model, the optimizer or an extension has changed, undo the "
                "change, or start a new run from the weights of this checkpoint (checkpoint.initial_load_path)"
            )
        # Otherwise, the tensor is the history of the spike filter. The run that saved the checkpoint had no filter, or
        # its filter had a different window. In both cases, the filter of this run starts without a history.


# ---------------------------------------------------------------- all ranks


class Saved(NamedTuple):
    """A checkpoint, or a snapshot of one host."""

    step: int
    path: Path
    ranks: dist.ProcessGroup  # the ranks whose shards the state contains
    kind: str = "checkpoint"


def create_optimizer_state(optimizer: Optimizer) -> None:
    """Take a step with zero gradients, so that the optimizer allocates its state. Weight decay may change the weights
    in this step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def set_step(lr_scheduler: LRScheduler, step: int) -> None:
    """Set the learning rate for the step after `step`."""
    lr_scheduler.last_epoch = step - 1
    lr_scheduler.step()


def load_newest(
    found: list[Saved],
    choose: Callable[[Manifest], dict[str, Tensor]],
    group: dist.ProcessGroup,
) -> tuple[Saved, Manifest]:
    """Load the first undamaged state in `found`, newest first. Return it with its manifest. Collective over `group`.

    `choose` returns the tensors to load in-place. Renames and deletes nothing. Raises CheckpointError if every state is
    damaged.
    """
    reasons = []
    for saved in found:
        # The ranks hash all files before any rank reads a tensor. Each rank hashes one part of the files.
        part = (saved.ranks.rank(), saved.ranks.size())
        try:
            checkpoint = raise_on_all_ranks(group, partial(OpenCheckpoint, saved.path, *part))
            wanted = choose(checkpoint.manifest)
            raise_on_all_ranks(group, partial(load_checkpoint, checkpoint, wanted))
            return saved, checkpoint.manifest
        except DamagedCheckpoint as error:
            reasons.append(str(error))
            if group.rank() == 0:
                logger.error(f"DAMAGED {saved.kind.upper()}, not loaded: {error}")
    raise CheckpointError(
        f"nothing can be loaded: {'; '.join(reasons)}. Restore one of them from a copy, remove or change "
        "checkpoint.load_step or checkpoint.initial_load_path, or start over in a new job.dump_folder"
    )
