"""Start a run: build its savers, and decide whether a state must be loaded (faults/resume.py)."""

import torch.distributed as dist

from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.format import Manifest, find_steps, list_degrees
from torchtitan_lite.checkpoint.save import CheckpointSaver, describe_run, do_on_rank_0
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.parallel.process_groups import Groups, Place
from torchtitan_lite.run_spec import RunSpec


def build_savers(
    run: Run, spec: RunSpec, place: Place, groups: Groups, fingerprint: dict[str, object]
) -> list[CheckpointSaver]:
    """Return the savers to call after each step: for checkpoints, then for snapshots if checkpoint.local_folder is set.

    Collective over all ranks if snapshots are on.
    """
    section = run.config.checkpoint
    published = spec.weights.published if spec.weights else {}
    about = describe_run(run.config, run.layout.degrees, published)
    saver = find_saver(section)(
        spec.dump_folder / section.folder,
        section,
        run.name_tensors,
        Manifest(0, fingerprint, about, mesh=list_degrees(run.layout)),
        groups.saver,
        run.device,
    )
    if not section.local_folder:
        return [saver]
    snapshots = load_extension("snapshots").Snapshots
    return [saver, snapshots(saver, spec.dump_folder, place, groups.host)]


def find_saver(section: Checkpoint) -> type[CheckpointSaver]:
    """Return the class of the savers of a run."""
    if section.async_mode != "disabled":
        return load_extension("asynchronous_saves").AsynchronousSaver
    return CheckpointSaver


def start_from(
    run: Run, savers: list[CheckpointSaver], group: dist.ProcessGroup, *, restarted: bool
) -> int:
    """Load the state that a run starts from. Return its step, or 0 for initial weights. Collective over all ranks.

    `savers` is the result of build_savers; `group` has all ranks. If torchrun `restarted` the job, the job resumes from
    its own newest state. Raises ConfigError if the config cannot continue a snapshot, and CheckpointError.
    """
    section = run.config.checkpoint
    checkpoints, *snapshots = savers
    steps = []
    if section.enable:
        steps = do_on_rank_0(group, lambda: find_steps(checkpoints.folder))
    if not (steps or snapshots or section.initial_load_path):
        return 0
    resume = load_module("faults.resume").resume
    return resume(run, steps, *(snapshots or [None]), group, restarted=restarted)
