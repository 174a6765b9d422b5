"""Loads a checkpoint on any layout: every rank reads its slices, and some of the files are hashed by each.

Reading and hashing go on at the same time, and what was read counts only when every file was found to be whole. A run
that resumes from its newest checkpoint goes back to the one before where the newest is damaged, and says so; a
checkpoint that was asked for by its step is loaded or refused.
"""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.agreement import do_on_rank_0, explain, raise_on_all_ranks
from torchtitan_lite.checkpoint.manifest import CheckpointError, DamagedCheckpoint, Manifest, find_steps, read_manifest
from torchtitan_lite.checkpoint.state import create_optimizer_state, name_tensors, name_weights, set_step
from torchtitan_lite.checkpoint.storage import StorageReader
from torchtitan_lite.checkpoint.tensor_files import find_damage
from torchtitan_lite.config.certificates import describe_certificate
from torchtitan_lite.config.schema import Checkpoint

logger = logging.getLogger(__name__)


def resume(
    folder: Path,
    step: int | None,
    parameters: dict[str, Tensor],
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    *,
    section: Checkpoint,
    facts: dict[str, object],
    group: dist.ProcessGroup,
) -> int:
    """Puts a run where the checkpoint of `step` left it; None: the newest that is sound. Returns the step. Collective.

    Raises CheckpointError; what the run holds is then undefined.
    """
    if "optimizer" in section.exclude_from_loading:
        tensors = name_weights(parameters)
        logger.info("the optimizer begins with new moments (checkpoint.exclude_from_loading)")
    else:
        create_optimizer_state(parameters, optimizer)
        tensors = name_tensors(parameters, optimizer)
    if step is None:
        manifest = load_newest(folder, tensors, facts=facts, verify=section.verify, group=group)
    else:
        path = folder / f"step-{step}"
        manifest = load_checkpoint(path, tensors, facts=facts, verify=section.verify, group=group)
    set_step(lr_scheduler, manifest.step)
    certificate = describe_certificate(manifest.run.get("certificate"))
    logger.info(f"resumed from {folder / f'step-{manifest.step}'}, {certificate}")
    return manifest.step


def load_newest(
    folder: Path, tensors: dict[str, Tensor], *, facts: dict[str, object], verify: bool, group: dist.ProcessGroup
) -> Manifest:
    """Fills `tensors`, in place, from the newest checkpoint in `folder` that is not damaged. Collective.

    Those that are damaged are set aside, under names that end in .damaged. Raises CheckpointError where none is sound.
    """
    steps = do_on_rank_0(group, lambda: find_steps(folder))
    damaged = []
    for step in reversed(steps):
        path = folder / f"step-{step}"
        try:
            manifest = load_checkpoint(path, tensors, facts=facts, verify=verify, group=group)
        except DamagedCheckpoint as error:
            if dist.get_rank(group) == 0:
                logger.error(f"DAMAGED CHECKPOINT, so an older one is tried: {error}")
            damaged.append(path)
            continue
        do_on_rank_0(group, lambda: quarantine(damaged))
        return manifest
    raise CheckpointError(
        f"none of the checkpoints in {folder} can be loaded (steps {steps or 'none'}): put a sound one there, "
        "or begin anew with --job.overwrite, which deletes them"
    )


def quarantine(damaged: list[Path]) -> None:
    for path in damaged:
        logger.error(f"{path} is now {folders.quarantine(path)}: steps from here on are trained again")


def load_checkpoint(
    path: Path, tensors: dict[str, Tensor], *, facts: dict[str, object], verify: bool, group: dist.ProcessGroup
) -> Manifest:
    """Fills `tensors`, in place, from the checkpoint `path`, a step-N folder. Collective.

    `tensors` hold this rank's shares of what the layout shards. Raises CheckpointError where a fact has changed since
    it was saved, or a tensor is not there; DamagedCheckpoint where a file is not what was saved. After either, the
    content of `tensors` is undefined.
    """
    manifest = raise_on_all_ranks(group, lambda: read_fitting_manifest(path, tensors, facts))
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    own_files = sorted(manifest.files)[rank::world_size] if verify else []
    failure = None
    with ThreadPoolExecutor(thread_name_prefix="verify") as threads:  # hashing leaves the interpreter free
        hashing = [threads.submit(find_damage, path / name, manifest.files[name]) for name in own_files]
        try:
            planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
            dcp.load(tensors, storage_reader=StorageReader(path, manifest), planner=planner, process_group=group)
        except CheckpointException as error:  # the same on every rank
            failure = explain(error)
        damage = [problem for future in hashing if (problem := future.result())]
    found: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(found, damage, group=group)
    if problems := [problem for of_rank in found for problem in of_rank]:
        raise DamagedCheckpoint("; ".join(problems[:3]) + f" and {len(problems) - 3} more" * (len(problems) > 3))
    if failure:
        raise failure
    return manifest


def read_fitting_manifest(path: Path, tensors: dict[str, Tensor], facts: dict[str, object]) -> Manifest:
    """The manifest, if this run can go on with it."""
    manifest = read_manifest(path)
    for name, value in json.loads(json.dumps(facts)).items():
        if manifest.facts.get(name) != value:
            saved = manifest.facts.get(name)
            raise CheckpointError(f"{path} was saved with {name} = {saved!r}, this run has {value!r}")
    for name, tensor in tensors.items():
        record = manifest.tensors.get(name)
        if record is None:
            kind = name.partition(".")[0]
            if not any(other.startswith(f"{kind}.") for other in manifest.tensors):
                raise CheckpointError(
                    f"{path} holds no tensor of the {kind}, so a run cannot go on with it; as checkpoint."
                    "initial_load_path, it can begin with it"
                )
            raise CheckpointError(f"{path} is of another model: it has no {name}")
        if record.shape != tuple(tensor.shape):
            shapes = f"is {list(record.shape)} there and {list(tensor.shape)} here"
            raise CheckpointError(f"{path} is of another model: {name} {shapes}")
    return manifest
