"""Snapshots in memory: save checkpoints often into a folder on each host, such as one in /dev/shm.

    host 0    local_folder/<name and hash of dump_folder>/<run id>/step-12/   the shards of ranks 0 .. 7, each copy once
    host 1    local_folder/<name and hash of dump_folder>/<run id>/step-12/   the shards of ranks 8 .. 15
    shared    dump_folder/checkpoint/step-10/                                 all shards
              dump_folder/checkpoint/run_id                                   deleted with the checkpoints of the run

A snapshot has the format of a checkpoint, is committed by a rename, and the last two are kept. On start, a rank can use
a snapshot if its host has the shards of this rank. If there is none that all ranks can use, because a host was lost or
the layout has changed, they load the shared checkpoint (start.py). All snapshots are deleted at the end of the run.
"""

import logging
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.checkpoint.format import CheckpointError, find_steps, read_manifest
from torchtitan_lite.checkpoint.load import Saved
from torchtitan_lite.checkpoint.ranks import do_on_rank_0, raise_on_all_ranks
from torchtitan_lite.checkpoint.save import CheckpointSaver, name_tensors, name_weights
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.dump_folder import RUN_ID, name_snapshots
from torchtitan_lite.parallel.process_groups import Place

logger = logging.getLogger(__name__)


class Snapshots(CheckpointSaver):
    """Saves and restores snapshots. All methods are collective."""

    log_level = logging.DEBUG

    def __init__(
        self,
        dump_folder: Path,
        section: Checkpoint,
        place: Place,
        all_ranks: dist.ProcessGroup,
        **options: Any,
    ):
        self.all_ranks = all_ranks
        self.host = place.list_local_ranks()
        # Without local synchronization, all ranks would wait for each other once per host.
        group = dist.new_group(
            list(self.host), backend="gloo", use_local_synchronization=True, group_desc="snapshot"
        )
        run_id = do_on_rank_0(all_ranks, lambda: identify_run(dump_folder / section.folder))
        folder = name_snapshots(section.local_folder, dump_folder) / run_id
        # Before the first step, because the first snapshot is saved only after local_interval steps.
        raise_on_all_ranks(all_ranks, lambda: create_folder(folder))
        section = replace(section, keep_latest_k=2)
        manifest = replace(options.pop("manifest"), host=[self.host[0], self.host[-1]])
        super().__init__(folder, section, group=group, manifest=manifest, **options)

    def after_step(
        self,
        step: int,
        parameters: dict[str, Tensor],
        *,
        n_steps: int,
        is_stopped: bool,
        record: object = None,
    ) -> None:
        """Save every local_interval steps, except at the end of a run that saves a checkpoint. Raises errors of saves.

        Call it after the checkpoint of the same step is committed: the last step deletes all snapshots.
        """
        self.check()
        if step == n_steps:
            self.wait()
            if self.group.rank() == 0:
                rmtree(self.folder.parent, ignore_errors=True)
        elif step % self.section.local_interval == 0 and not is_stopped:
            self.save(step, name_tensors(parameters, self.optimizer, self.extension_state))

    def list_usable(self, parameters: dict[str, Tensor]) -> list[Saved]:
        """Return the snapshots of this run that all ranks can use. Does not check hashes."""
        weights = name_weights(parameters)
        own = [step for step in find_steps(self.folder) if self.has_shards(step, weights)]
        usable = []
        # Every rank has a newest step. The oldest of these is the only candidate for the newest common step, so ranks
        # need not exchange lists. The same holds for the steps before it.
        while newest := self.find_lowest(max(own, default=0)):
            if self.find_lowest(newest in own):
                path = self.folder / f"step-{newest}"
                usable.append(Saved(newest, path, self.group, "snapshot"))
            own = [step for step in own if step < newest]
        return usable

    def find_lowest(self, number: int) -> int:
        """Return the lowest number of all ranks."""
        lowest = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.all_ranks)  # 8 bytes
        return int(lowest)

    def has_shards(self, step: int, weights: dict[str, Tensor]) -> bool:
        """Return whether the snapshot of a step has every shard of this rank. True on the same layout."""
        try:
            manifest = read_manifest(self.folder / f"step-{step}")
        except CheckpointError:
            return False
        if manifest.mesh != self.manifest.mesh or manifest.host != self.manifest.host:
            return False
        return weights.keys() <= manifest.tensors.keys()

    def forget_after(self, step: int) -> None:
        """Delete snapshots of later steps, and of earlier runs in the same dump folder."""
        if self.group.rank() != 0:
            return
        kept = [self.folder / f"step-{found}" for found in find_steps(self.folder) if found <= step]
        for path in self.folder.parent.glob("*/*"):
            if path not in kept:
                why = f"does not continue step {step} of this run, and is deleted"
                logger.warning(f"the snapshot {path} {why}")
                rmtree(path)


def create_folder(folder: Path) -> None:
    """Create the folder of the snapshots. Raises CheckpointError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"checkpoint.local_folder: {folder} cannot be created: {error.strerror}"
        raise CheckpointError(f"{why}. Name another folder") from None


def identify_run(checkpoints: Path) -> str:
    """Return the id of the run that saves in the folder `checkpoints`. Write it there when the run starts."""
    path = checkpoints / RUN_ID
    if not path.exists():
        checkpoints.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid4().hex)
    return path.read_text()
