"""Save snapshots in memory: frequent checkpoints in a folder of each host, such as one in /dev/shm.

    host 0    local_folder/<name and hash of dump_folder>/<run id>/step-12/   the shards of ranks 0 .. 7, without copies
    host 1    local_folder/<name and hash of dump_folder>/<run id>/step-12/   the shards of ranks 8 .. 15
    shared    dump_folder/checkpoint/step-10/                                 all shards
              dump_folder/checkpoint/run_id                                   deleted with the checkpoints of the run

A snapshot has the format of a checkpoint, and is committed by a rename. A host keeps the last two snapshots. On start,
a rank can use a snapshot if its host has the shards of this rank. If a host was lost or the layout has changed, all
ranks load the shared checkpoint instead (resume.py). All snapshots are deleted at the end of the run.
"""

import logging
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from uuid import uuid4

import torch
import torch.distributed as dist

from torchtitan_lite.checkpoint.format import CheckpointError, find_steps
from torchtitan_lite.checkpoint.load import Saved
from torchtitan_lite.checkpoint.read import read_manifest
from torchtitan_lite.checkpoint.save import CheckpointSaver, do_on_rank_0, raise_on_all_ranks
from torchtitan_lite.dump_folder import RUN_ID, name_snapshots
from torchtitan_lite.parallel.process_groups import Place

logger = logging.getLogger(__name__)


class Snapshots(CheckpointSaver):
    """Saves and restores snapshots. All methods are collective."""

    def __init__(
        self,
        checkpoints: CheckpointSaver,
        dump_folder: Path,
        place: Place,
        all_ranks: dist.ProcessGroup,
    ):
        """`checkpoints` is the saver of the run's checkpoints. Its config section and its tensors are used here too."""
        self.all_ranks = all_ranks
        host = place.list_local_ranks()
        # Without local synchronization, all ranks would wait for one another once per host.
        group = dist.new_group(
            list(host), backend="gloo", use_local_synchronization=True, group_desc="snapshot"
        )
        run_id = do_on_rank_0(all_ranks, lambda: identify_run(checkpoints.folder))
        folder = name_snapshots(checkpoints.section.local_folder, dump_folder) / run_id
        # Create the folder now. An error at the first snapshot would cost local_interval steps.
        raise_on_all_ranks(all_ranks, lambda: create_folder(folder))
        super().__init__(
            folder,
            replace(checkpoints.section, keep_latest_k=2),
            checkpoints.list_tensors,
            replace(checkpoints.manifest, host=list(host)),
            group,
            checkpoints.device,
            host,
            logging.DEBUG,
        )

    def after_step(
        self, step: int, *, n_steps: int, is_stopped: bool, record: object = None
    ) -> None:
        """Save every local_interval steps, except when the run ends or stops. Raises errors of earlier saves.

        Call it after the checkpoint of the same step is committed, because the last step deletes all snapshots.
        """
        if self.background:
            self.background.check()
        if step == n_steps:
            self.wait()
            if self.group.rank() == 0:
                rmtree(self.folder.parent, ignore_errors=True)
        elif step % self.section.local_interval == 0 and not is_stopped:
            self.save(step, self.list_tensors())

    def list_usable(self) -> list[Saved]:
        """Return the snapshots of this run that all ranks can use. Does not check hashes."""
        own = [step for step in find_steps(self.folder) if self.has_shards(step)]
        usable = []
        # The newest step that all ranks have cannot be above the lowest of their newest steps. So ranks compare this
        # step, and then earlier ones, and need not exchange lists.
        while newest := self.find_lowest(max(own, default=0)):
            if self.find_lowest(newest in own):
                path = self.folder / f"step-{newest}"
                usable.append(Saved(newest, path, self.group, "snapshot"))
            own = [step for step in own if step < newest]
        return usable

    def find_lowest(self, number: int) -> int:
        """Return the lowest `number` of all ranks."""
        lowest = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.all_ranks)  # 8 bytes
        return int(lowest)

    def has_shards(self, step: int) -> bool:
        """Return whether the snapshot of a step has every shard of this rank. It must have the same layout."""
        try:
            manifest = read_manifest(self.folder / f"step-{step}")
        except CheckpointError:
            return False
        if manifest.mesh != self.manifest.mesh or manifest.host != self.manifest.host:
            return False
        weights = {name for name in self.list_tensors() if name.startswith("model.")}
        return weights <= manifest.tensors.keys()

    def forget_after(self, step: int) -> None:
        """Delete snapshots of later steps, and all snapshots of earlier runs in the same dump folder."""
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
    """Return the id of the run that saves in the folder `checkpoints`. If there is no id yet, write one."""
    path = checkpoints / RUN_ID
    if not path.exists():
        checkpoints.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid4().hex)
    return path.read_text()
