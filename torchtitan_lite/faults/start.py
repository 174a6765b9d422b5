"""Start a run: resume from the newest checkpoint or snapshot, or load initial weights.

    the run                          resumes from
    with checkpoint.load_step        that checkpoint, or is refused
    restarted by torchrun            the newest checkpoint or snapshot that all ranks can open
    in the folder of an earlier run  the same
    other                            checkpoint.initial_load_path, if set

Nothing is renamed or deleted until a state has been loaded. Then damaged newer checkpoints are renamed, and snapshots
that do not belong to this run any more are deleted.
"""

from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.folders import quarantine
from torchtitan_lite.checkpoint.load import Saved, load_initial, restore
from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps
from torchtitan_lite.checkpoint.storage import do_on_rank_0
from torchtitan_lite.faults.snapshots import Snapshots


def start_from(run: Run, snapshots: Snapshots, group: dist.ProcessGroup, *, restarted: bool) -> int:
    """Load the state that a run starts from. Return its step; 0: initial weights. Collective over `group`, all ranks.

    `restarted`: torchrun has restarted the job, which then resumes from its own newest state. Raises CheckpointError.
    """
    section = run.config.checkpoint
    folder = Path(run.config.job.dump_folder) / section.folder
    steps = do_on_rank_0(group, lambda: find_steps(folder)) if section.enable else []
    snapshotted = snapshots.list_usable(run.saved)
    if steps and section.load_step != -1 and not restarted:
        steps = [section.load_step]
        snapshotted = []
    checkpoints = [Saved(step, folder / f"step-{step}", group) for step in steps]
    found = checkpoints + snapshotted
    of_run = (run.saved, run.optimizer, run.lr_scheduler)
    if found:
        loaded = restore(found, *of_run, section=section, group=group)
        step, source = loaded.step, loaded.path
    else:
        step, source = (
            load_initial(*of_run, section=section, group=group),
            section.initial_load_path,
        )
    if step >= run.config.training.steps:
        raise CheckpointError(
            f"{source} is already at step {step}: set training.steps to more than {step}"
        )
    damaged = [saved.path for saved in checkpoints if saved.step > step]
    do_on_rank_0(group, lambda: quarantine(damaged))
    snapshots.forget_after(step)
    return step
