"""Snapshots in memory: save checkpoints often into a folder on each host, such as one in /dev/shm.

    host 0    checkpoint.local_folder/<run>/step-12/     the shards of ranks 0 .. 7, each copy once
    host 1    checkpoint.local_folder/<run>/step-12/     the shards of ranks 8 .. 15
    shared    dump_folder/checkpoint/step-10/            all shards

A snapshot has the format of a checkpoint, is committed by a rename, and the last two are kept. All ranks start from the
newest step that every rank can open: its host has the same shards of this rank, with the right hashes. If a host is
lost, or the layout has changed, that is the shared checkpoint.
"""

import json
import logging
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
        self.all_ranks, n_local = all_ranks, place.world_size // place.n_hosts
        if section.local_folder:
            first = place.rank // n_local * n_local
            ranks = list(range(first, first + n_local))
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="snapshot")
        else:
            group, section = all_ranks, replace(section, async_mode="disabled")
        run = "-".join(dump_folder.absolute().parts[1:])
        super().__init__(Path(section.local_folder) / run, section, group=group, **kw)
        self.n_kept = {"keep_latest_k": 2, "keep_every_m": 0}

    def after_step(self, step: int, parameters: dict[str, Tensor], *, n_steps: int, is_stopped: bool) -> None:
        """Save every local_interval steps, but not where the run ends with a checkpoint. Raises errors of saves."""
        self.check()
        is_due = step % self.section.local_interval == 0 and step < n_steps and not is_stopped
        if self.section.local_folder and is_due:
            self.save(step, name_tensors(parameters, self.optimizer))

    def restore(self, parameters: dict[str, Tensor], lr_scheduler: LRScheduler, newer_than: int) -> int:
        """Load the newest snapshot that all ranks can open, and return its step; 0: there is none after `newer_than`.

        Deletes later snapshots. Raises CheckpointError if all are damaged and `newer_than` is 0: no other step is left.
        """
        if not self.section.local_folder:
            return 0
        steps: list[set[int]] = [set()] * self.all_ranks.size()
        dist.all_gather_object(steps, self.find_complete(name_weights(parameters)), group=self.all_ranks)
        usable = sorted(step for step in set.intersection(*steps) if step > newer_than)
        loaded, failure = 0, None
        if usable:
            create_optimizer_state(self.optimizer)
            tensors = name_tensors(parameters, self.optimizer)
        while usable and not loaded:
            path, options = self.folder / f"step-{usable.pop()}", {"verify": self.section.verify, "group": self.group}
            try:
                loaded = raise_on_all_ranks(self.all_ranks, partial(load_checkpoint, path, tensors, **options)).step
                set_step(lr_scheduler, loaded)
                logger.info(f"resumed from the snapshot {path}")
            except CheckpointError as error:
                logger.error(f"DAMAGED SNAPSHOT, so an older one is tried: {error}")
                failure = error
        if self.group.rank() == 0:
            for step in find_steps(self.folder):
                if step > loaded:
                    rmtree(self.folder / f"step-{step}")
        if failure and not loaded and not newer_than:
            raise failure
        return loaded

    def find_complete(self, weights: dict[str, Tensor]) -> set[int]:
        """Return the steps of this run's snapshots that have every shard of this rank. Does not check hashes."""
        plan, complete = create_default_local_save_plan(weights, is_coordinator=False), set()
        own = {(item.index.fqn, *item.tensor_data.chunk.offsets, *item.tensor_data.chunk.sizes) for item in plan.items}
        for step in find_steps(self.folder):
            try:
                manifest = read_matching_manifest(self.folder / f"step-{step}", weights)
            except CheckpointError:
                continue
            stored = {(name, *c.offsets, *c.sizes) for name, record in manifest.tensors.items() for c in record.chunks}
            if own <= stored and json.dumps(manifest.fingerprint) == json.dumps(self.fingerprint):
                complete.add(step)
        return complete
