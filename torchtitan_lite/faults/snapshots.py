"""Snapshots in memory: save checkpoints often into a folder on each host, such as one in /dev/shm.

    host 0    checkpoint.local_folder/<run>/step-12/     the shards of ranks 0 .. 7, each copy once
    host 1    checkpoint.local_folder/<run>/step-12/     the shards of ranks 8 .. 15
    shared    dump_folder/checkpoint/step-10/            all shards

A snapshot has the format of a checkpoint, is committed by a rename, and the last two are kept. On start, all ranks load
the newest one that every rank can open: its host has the shards of this rank, with the right hashes. If there is none,
because a host was lost or the layout has changed, they load the shared checkpoint.
"""

import json
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_lite.checkpoint.load import create_optimizer_state, load_checkpoint, read_matching_manifest, set_step
from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps
from torchtitan_lite.checkpoint.save import CheckpointSaver, name_tensors, name_weights
from torchtitan_lite.checkpoint.storage import raise_on_all_ranks
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.parallel.process_groups import Place

logger = logging.getLogger(__name__)


class HostPlanner(DefaultSavePlanner):
    """Plans a save of the ranks of one host, whose shards need not cover a tensor."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(dedup_save_plans(all_plans))


class Snapshots(CheckpointSaver):
    """Saves and restores snapshots. Does neither if checkpoint.local_folder is empty. All methods are collective."""

    planner, log_level = HostPlanner, logging.DEBUG

    def __init__(self, dump_folder: Path, section: Checkpoint, place: Place, all_ranks: dist.ProcessGroup, **kw: Any):
        self.all_ranks, group, n_local = all_ranks, all_ranks, place.world_size // place.n_hosts
        if section.local_folder:
            ranks = [rank for rank in range(place.world_size) if rank // n_local == place.rank // n_local]
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="snapshot")
        else:
            section = replace(section, async_mode="disabled")
        folder = Path(section.local_folder) / "-".join(dump_folder.absolute().parts[1:])
        super().__init__(folder, section, group=group, **kw)
        self.n_kept = {"keep_latest_k": 2, "keep_every_m": 0}

    def after_step(self, step: int, parameters: dict[str, Tensor], *, n_steps: int, is_stopped: bool) -> None:
        """Save every local_interval steps, but not where the run ends with a checkpoint. Raises errors of saves."""
        self.check()
        is_due = self.section.local_folder and step % self.section.local_interval == 0
        if is_due and step < n_steps and not is_stopped:
            self.save(step, name_tensors(parameters, self.optimizer))

    def restore(self, parameters: dict[str, Tensor], lr_scheduler: LRScheduler, newer_than: int) -> int:
        """Load the newest snapshot that all ranks can open, and return its step; 0: there is none after `newer_than`.

        Deletes later snapshots. Raises CheckpointError if none can be loaded and there is no checkpoint either.
        """
        if not self.section.local_folder:
            return 0
        steps: list[set[int]] = [set()] * self.all_ranks.size()
        own = {step for step in self.find_complete(name_weights(parameters)) if step > newer_than}
        dist.all_gather_object(steps, own, group=self.all_ranks)
        if usable := sorted(set.intersection(*steps), reverse=True):
            create_optimizer_state(self.optimizer)
        tensors = name_tensors(parameters, self.optimizer)
        loaded = next((step for step in usable if self.load(step, tensors)), 0)
        if usable and not loaded and not newer_than:
            raise CheckpointError(f"all snapshots in {self.folder} are damaged, and there is no checkpoint")
        if loaded:
            set_step(lr_scheduler, loaded)
        for step in find_steps(self.folder):
            if step > loaded and self.group.rank() == 0:
                rmtree(self.folder / f"step-{step}")
        return loaded

    def load(self, step: int, tensors: dict[str, Tensor]) -> bool:
        """Load a snapshot. Return whether all ranks could. `tensors` are undefined if not."""
        path = self.folder / f"step-{step}"
        options = {"verify": self.section.verify, "group": self.group}
        try:
            raise_on_all_ranks(self.all_ranks, partial(load_checkpoint, path, tensors, **options))
        except CheckpointError as error:
            logger.error(f"DAMAGED SNAPSHOT, so an older one is tried: {error}")
            return False
        logger.info(f"resumed from the snapshot {path}")
        return True

    def find_complete(self, weights: dict[str, Tensor]) -> set[int]:
        """Return the steps of this run's snapshots that have every shard of this rank. Does not check hashes."""
        plan, complete = create_default_local_save_plan(weights, is_coordinator=False), set()
        own = {(item.index.fqn, *item.tensor_data.chunk.offsets, *item.tensor_data.chunk.sizes) for item in plan.items}
        for step in find_steps(self.folder):
            with suppress(CheckpointError):
                manifest = read_matching_manifest(self.folder / f"step-{step}", weights)
                chunks = [(name, chunk) for name, record in manifest.tensors.items() for chunk in record.chunks]
                stored = {(name, *chunk.offsets, *chunk.sizes) for name, chunk in chunks}
                if own <= stored and json.dumps(manifest.fingerprint) == json.dumps(self.fingerprint):
                    complete.add(step)
        return complete
