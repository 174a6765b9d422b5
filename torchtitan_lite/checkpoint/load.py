"""Load a checkpoint on any layout: every rank reads its shards, and each file is hashed by one rank.

Reading and hashing overlap, but a load only succeeds if every hash matches. If the newest state is damaged, an older
one is loaded. faults/start.py lists the states that a run may resume from.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint.hugging_face import load_weights
from torchtitan_lite.checkpoint.hugging_face_config import CONFIG
from torchtitan_lite.checkpoint.hugging_face_folder import open_folder
from torchtitan_lite.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    find_damage,
    read_checksums,
    read_manifest,
)
from torchtitan_lite.checkpoint.save import name_tensors, name_weights
from torchtitan_lite.checkpoint.storage import StorageReader, explain_dcp_error, raise_on_all_ranks
from torchtitan_lite.config.schema import Checkpoint

logger = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A checkpoint, or a snapshot of one host."""

    step: int
    path: Path
    ranks: dist.ProcessGroup  # the ranks whose shards it has
    kind: str = "checkpoint"


def restore(
    found: list[Saved],
    parameters: dict[str, Tensor],
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    *,
    section: Checkpoint,
    group: dist.ProcessGroup,
) -> Saved:
    """Restore the newest of `found` that all ranks can open, and return it. Collective over `group`.

    Raises CheckpointError; the parameters are then undefined.
    """
    tensors = list_restored(parameters, optimizer, section)
    loaded = load_newest(found, tensors, verify=section.verify, group=group)
    set_step(lr_scheduler, loaded.step)
    logger.info(f"resumed from the {loaded.kind} {loaded.path}")
    return loaded


def load_initial(
    parameters: dict[str, Tensor],
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    *,
    section: Checkpoint,
    group: dist.ProcessGroup,
) -> int:
    """Load checkpoint.initial_load_path if it is set. Return the step of its optimizer state, or 0. Collective.

    preflight has already compared the config with the checkpoint. Raises CheckpointError; the parameters are then
    undefined.
    """
    if not section.initial_load_path:
        return 0
    path = Path(section.initial_load_path)
    if (path / CONFIG).is_file():
        raise_on_all_ranks(group, lambda: load_weights(open_folder(path), parameters))
    elif section.initial_load_model_only:
        load_checkpoint(path, name_weights(parameters), verify=section.verify, group=group)
    else:
        tensors = list_restored(parameters, optimizer, section)
        manifest = load_checkpoint(path, tensors, verify=section.verify, group=group)
        set_step(lr_scheduler, manifest.step)
        logger.info(f"the run continues {path}")
        return manifest.step
    logger.info(f"the run starts from the weights in {path}")
    return 0


def list_restored(
    parameters: dict[str, Tensor], optimizer: Optimizer, section: Checkpoint
) -> dict[str, Tensor]:
    """Return the tensors to load when a run continues: weights, and the optimizer state unless it is excluded."""
    if "optimizer" in section.exclude_from_loading:
        logger.info("the optimizer starts with new moments (checkpoint.exclude_from_loading)")
        return name_weights(parameters)
    create_optimizer_state(optimizer)
    return name_tensors(parameters, optimizer)


def create_optimizer_state(optimizer: Optimizer) -> None:
    """Make the optimizer allocate its state, with a step whose gradients and learning rate are zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_step(lr_scheduler: LRScheduler, step: int) -> None:
    """Set the learning rate for the step after `step`."""
    lr_scheduler.last_epoch = step - 1
    lr_scheduler.step()


def load_newest(
    found: list[Saved], tensors: dict[str, Tensor], *, verify: bool, group: dist.ProcessGroup
) -> Saved:
    """Load `tensors` in place from the newest undamaged one, and return it. Collective over `group`.

    Renames and deletes nothing. Raises CheckpointError if all are damaged.
    """
    reasons = []
    for saved in sorted(found, key=lambda saved: saved.step, reverse=True):
        load = partial(load_checkpoint, saved.path, tensors, verify=verify, group=saved.ranks)
        try:
            raise_on_all_ranks(group, load)
        except DamagedCheckpoint as error:
            reasons.append(str(error))
            if dist.get_rank(group) == 0:
                logger.error(f"DAMAGED {saved.kind.upper()}, trying an older one: {error}")
            continue
        return saved
    raise CheckpointError(
        f"nothing can be loaded: {'; '.join(reasons)}. Restore a checkpoint from a copy, or start another run with "
        "--job.dump_folder=FOLDER"
    )


def load_checkpoint(
    path: Path, tensors: dict[str, Tensor], *, verify: bool, group: dist.ProcessGroup
) -> Manifest:
    """Load `tensors` in place from the checkpoint `path`. Collective.

    `tensors` are this rank's shards. Raises CheckpointError if a tensor is missing or has another shape, and
    DamagedCheckpoint if a file has changed since it was saved; `tensors` are then undefined.
    """
    manifest = raise_on_all_ranks(group, lambda: read_matching_manifest(path, tensors))
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    own_files = sorted(read_checksums(path))[rank::world_size] if verify else []
    failure = None
    with ThreadPoolExecutor(1, thread_name_prefix="verify") as thread:
        hashing = thread.submit(find_damage, path, own_files)
        try:
            planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
            dcp.load(
                tensors,
                storage_reader=StorageReader(path, manifest),
                planner=planner,
                process_group=group,
            )
        except CheckpointException as error:  # the same on every rank
            failure = explain_dcp_error(error)
    found: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(found, hashing.result(), group=group)
    if problems := [problem for of_rank in found for problem in of_rank]:
        raise DamagedCheckpoint(
            "; ".join(problems[:3]) + f" and {len(problems) - 3} more" * (len(problems) > 3)
        )
    if failure:
        raise failure
    return manifest


def read_matching_manifest(path: Path, tensors: dict[str, Tensor]) -> Manifest:
    """Return the manifest. Raises CheckpointError if the checkpoint lacks one of `tensors`."""
    manifest = read_manifest(path)
    for name, tensor in tensors.items():
        record = manifest.tensors.get(name)
        if record is None:
            raise CheckpointError(f"{path} has a different model: it has no {name}")
        if record.shape != tuple(tensor.shape):
            shapes = f"has shape {list(record.shape)} there, but {list(tensor.shape)} in this run"
            raise CheckpointError(f"{path} has a different model: {name} {shapes}")
    return manifest
