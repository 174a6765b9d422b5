"""Load a checkpoint on any layout: every rank reads its shards, and each file is hashed by one rank.

Reading and hashing overlap, but a load only succeeds if every hash matches. If the newest checkpoint is damaged, a run
logs this and resumes from the previous one. A step that the user chose (load_step) is loaded or refused.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.hugging_face import load_weights
from torchtitan_lite.checkpoint.hugging_face_config import CONFIG
from torchtitan_lite.checkpoint.hugging_face_folder import open_folder
from torchtitan_lite.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    Manifest,
    find_damage,
    find_steps,
    read_checksums,
    read_manifest,
)
from torchtitan_lite.checkpoint.save import name_tensors, name_weights
from torchtitan_lite.checkpoint.storage import StorageReader, do_on_rank_0, explain_dcp_error, raise_on_all_ranks
from torchtitan_lite.config.schema import Checkpoint

logger = logging.getLogger(__name__)


def restore_or_load(
    checkpoints: Path,
    resumed_step: int,
    parameters: dict[str, Tensor],
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    *,
    is_named: bool,
    section: Checkpoint,
    group: dist.ProcessGroup,
) -> int:
    """Restore a checkpoint of this run, or load initial weights. Return the last finished step. Collective.

    `resumed_step` is the newest step, or with `is_named` the step that the user chose. If the newest step is damaged,
    an older one is loaded. If `resumed_step` is 0, checkpoint.initial_load_path is loaded, if set. preflight has
    already compared the config with the checkpoint. Raises CheckpointError; the parameters are then undefined.
    """
    path, options = Path(section.initial_load_path), {"verify": section.verify, "group": group}
    if not resumed_step and not section.initial_load_path:
        return 0
    is_hugging_face = (path / CONFIG).is_file()
    if not resumed_step and (section.initial_load_model_only or is_hugging_face):
        if is_hugging_face:
            raise_on_all_ranks(group, lambda: load_weights(open_folder(path), parameters))
        else:
            load_checkpoint(path, name_weights(parameters), **options)
        logger.info(f"the run starts from the weights in {path}")
        return 0

    if "optimizer" in section.exclude_from_loading:
        tensors = name_weights(parameters)
        logger.info("the optimizer starts with new moments (checkpoint.exclude_from_loading)")
    else:
        create_optimizer_state(optimizer)
        tensors = name_tensors(parameters, optimizer)
    if resumed_step and not is_named:
        manifest = load_newest(checkpoints, tensors, **options)
        path = checkpoints / f"step-{manifest.step}"
    else:  # a step that the user chose, or the weights, optimizer state and step of another run
        path = checkpoints / f"step-{resumed_step}" if resumed_step else path
        manifest = load_checkpoint(path, tensors, **options)
    set_step(lr_scheduler, manifest.step)
    logger.info(f"resumed from {path}")
    return manifest.step


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


def load_newest(folder: Path, tensors: dict[str, Tensor], *, verify: bool, group: dist.ProcessGroup) -> Manifest:
    """Load `tensors` in place from the newest undamaged checkpoint in `folder`. Collective.

    Renames damaged checkpoints to step-N.damaged. If all are damaged, raises CheckpointError and renames nothing.
    """
    steps = do_on_rank_0(group, lambda: find_steps(folder))
    damaged = []
    for step in reversed(steps):
        path = folder / f"step-{step}"
        try:
            manifest = load_checkpoint(path, tensors, verify=verify, group=group)
        except DamagedCheckpoint as error:
            if dist.get_rank(group) == 0:
                logger.error(f"DAMAGED CHECKPOINT, trying an older one: {error}")
            damaged.append(path)
            continue
        do_on_rank_0(group, lambda: folders.quarantine(damaged))
        return manifest
    raise CheckpointError(
        f"none of the checkpoints in {folder} can be loaded (steps {steps or 'none'}): restore one from a copy, "
        "or start over with --job.overwrite, which deletes them"
    )


def load_checkpoint(path: Path, tensors: dict[str, Tensor], *, verify: bool, group: dist.ProcessGroup) -> Manifest:
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
            dcp.load(tensors, storage_reader=StorageReader(path, manifest), planner=planner, process_group=group)
        except CheckpointException as error:  # the same on every rank
            failure = explain_dcp_error(error)
    found: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(found, hashing.result(), group=group)
    if problems := [problem for of_rank in found for problem in of_rank]:
        raise DamagedCheckpoint("; ".join(problems[:3]) + f" and {len(problems) - 3} more" * (len(problems) > 3))
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
