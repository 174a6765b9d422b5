"""Save snapshots in memory: frequent checkpoints in a local folder on each host, such as in /dev/shm.

    host 0    local_folder/<name and hash of dump_folder>/<run id>/step-12/   the shards of ranks 0 .. 7, without copies
    host 1    local_folder/<name and hash of dump_folder>/<run id>/step-12/   the shards of ranks 8 .. 15
    shared    dump_folder/checkpoint/step-10/                                 all shards
              dump_folder/checkpoint/run_id                                   deleted with the checkpoints of the run

A snapshot has the format of a checkpoint, and is committed by a rename. A host keeps the last two snapshots. When a run
starts, a rank can use a snapshot if the host of the rank stores the rank's shards. If a host was lost or the layout has
changed, all ranks load the shared checkpoint instead (resume.py). All snapshots are deleted at the end of the run.
"""

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
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


class Snapshots(AbstractContextManager):
    """Saves and restores snapshots. All methods are collective. train.py uses this class like a CheckpointSaver."""

    def __init__(
        self,
        checkpoints: CheckpointSaver,
        dump_folder: Path,
        place: Place,
        all_ranks: dist.ProcessGroup,
        timeout: timedelta,
    ):
        """`checkpoints` is the saver of the run's checkpoints. Snapshots use a second saver with the same class,
        section and tensors as `checkpoints`."""
        self.all_ranks = all_ranks
        host = list(place.host_ranks)
        # Without local synchronization, all ranks would wait for the creation of every host's group.
        group = dist.new_group(
            host,
            backend="gloo",
            timeout=timeout,
            use_local_synchronization=True,
            group_desc="snapshot",
        )
        run_id = do_on_rank_0(all_ranks, lambda: identify_run(checkpoints.folder))
        section = checkpoints.section
        self.folder = name_snapshots(section.local_folder, dump_folder) / run_id
        # Create the folder now, because an error at the first snapshot would cost local_interval steps.
        raise_on_all_ranks(all_ranks, lambda: create_folder(self.folder))
        self.saver = replace(
            checkpoints,
            folder=self.folder,
            section=replace(
                section,
                enable=True,
                interval=section.local_interval,
                enable_first_step_checkpoint=False,
                keep_latest_k=2,
            ),
            manifest=replace(checkpoints.manifest, host=host),
            group=group,
        )

    def after_step(self, step: int, *, n_steps: int, is_stopped: bool) -> None:
        """Save every local_interval steps, except when the run ends or stops. Raises errors of earlier saves.

        Call this after the checkpoint of the same step is committed, because the last step deletes all snapshots.
        """
        if step == n_steps:
            self.saver.wait()
            if self.saver.group.rank() == 0:
                rmtree(self.folder.parent, ignore_errors=True)
        elif not is_stopped:
            self.saver.after_step(step, n_steps=n_steps, is_stopped=False)

    def wait_for_copy(self) -> None:
        self.saver.wait_for_copy()

    def __exit__(self, *why: object) -> None:
        self.saver.__exit__(*why)

    def list_usable(self) -> list[Saved]:
        """Return the snapshots of this run that all ranks can use. Does not check hashes."""
        own = [step for step in find_steps(self.folder) if self.has_shards(step)]
        usable = []
        # Each rank names its newest step. The newest step that all ranks have cannot be above the lowest of the named
        # steps. Therefore ranks compare this lowest step first, and then earlier steps, without exchanging lists.
        while newest := self.find_lowest(max(own, default=0)):
            if self.find_lowest(newest in own):
                path = self.folder / f"step-{newest}"
                usable.append(Saved(newest, path, self.saver.group, "snapshot"))
            own = [step for step in own if step < newest]
        return usable

    def find_lowest(self, number: int) -> int:
        """Return the lowest `number` of all ranks."""
        lowest = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.all_ranks)  # 8 bytes
        return int(lowest)

    def has_shards(self, step: int) -> bool:
        """Return whether the snapshot of a step has every shard of this rank. The layout of the run must equal the
        layout in the snapshot."""
        try:
            manifest = read_manifest(self.folder / f"step-{step}")
        except CheckpointError:
            return False
        if manifest.mesh != self.saver.manifest.mesh or manifest.host != self.saver.manifest.host:
            return False
        weights = {name for name in self.saver.list_tensors() if name.startswith("model.")}
        return weights <= manifest.tensors.keys()

    def forget_after(self, step: int) -> None:
        """Delete snapshots of later steps, and all snapshots of earlier runs in the same dump folder."""
        if self.saver.group.rank() != 0:
            return
        kept = [self.folder / f"step-{found}" for found in find_steps(self.folder) if found <= step]
        for path in self.folder.parent.glob("*/*"):
            if path not in kept:
                logger.warning(
                    f"the snapshot {path} does not continue step {step} of this run, and is deleted"
                )
                rmtree(path)


def create_folder(folder: Path) -> None:
    """Create the folder of the snapshots. Raises CheckpointError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.local_folder: {folder} cannot be created: {error.strerror}. Name another folder"
        ) from None


def identify_run(checkpoints: Path) -> str:
    """Return the id of the run that saves in the folder `checkpoints`. If the folder has no id yet, write a new one."""
    path = checkpoints / RUN_ID
    if not path.exists():
        checkpoints.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid4().hex)
    return path.read_text()
