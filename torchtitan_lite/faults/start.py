"""Start a run: resume from the newest checkpoint or snapshot, or load initial weights.

    the run                          starts from
    with checkpoint.load_step        that checkpoint, or is refused. A run that has continued from there: see next row
    restarted by torchrun            the newest checkpoint or snapshot that all ranks can open
    in the folder of an earlier run  the same
    other                            checkpoint.initial_load_path, if set

With job.overwrite, the files of the earlier run are already deleted, and its snapshots belong to another run. Nothing
else is renamed or deleted until a state has been loaded. Then damaged newer checkpoints are renamed, and snapshots that
do not belong to this run any more are deleted. With checkpoint.load_only nothing is.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.continued import check_continued, excludes_moments
from torchtitan_lite.checkpoint.format import (
    CheckpointError,
    Manifest,
    find_steps,
    quarantine,
    read_manifest,
)
from torchtitan_lite.checkpoint.load import (
    Saved,
    create_optimizer_state,
    load_newest,
    set_step,
)
from torchtitan_lite.checkpoint.plan import list_degrees
from torchtitan_lite.checkpoint.ranks import do_on_rank_0, raise_on_all_ranks
from torchtitan_lite.checkpoint.save import (
    CheckpointSaver,
    describe_run,
    name_tensors,
    name_weights,
)
from torchtitan_lite.checkpoint.starting_weights import describe_checkpoint, names_step
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.models.registry import CONFIG
from torchtitan_lite.parallel.process_groups import Groups, Place
from torchtitan_lite.run_spec import RunSpec

logger = logging.getLogger(__name__)


def build_savers(
    run: Run, spec: RunSpec, place: Place, groups: Groups, fingerprint: dict[str, object]
) -> list[CheckpointSaver]:
    """Return the savers to call after each step: for checkpoints, then for snapshots if checkpoint.local_folder is set.

    Collective over all ranks if snapshots are on.
    """
    section = run.config.checkpoint
    published = spec.weights.published if spec.weights else {}
    about = describe_run(run.config, run.layout.degrees, published)
    manifest = Manifest(0, fingerprint, about, mesh=list_degrees(run.layout))
    options = {
        "optimizer": run.optimizer,
        "manifest": manifest,
        "device": run.device,
        "extension_state": run.extension_state,
    }
    folder = spec.dump_folder
    savers = [CheckpointSaver(folder / section.folder, section, group=groups.saver, **options)]
    if section.local_folder:
        snapshots = load_extension("snapshots").Snapshots(
            folder, section, place, groups.host, **options
        )
        savers.append(snapshots)
    return savers


def start_from(
    run: Run, savers: list[CheckpointSaver], group: dist.ProcessGroup, *, restarted: bool
) -> int:
    """Load the state that a run starts from. Return its step, or 0 for initial weights. Collective over all ranks.

    `savers` is the result of build_savers; `group` has all ranks. If torchrun `restarted` the job, the job resumes from
    its own newest state. Raises ConfigError if the config cannot continue a snapshot, and CheckpointError.
    """
    snapshots: Any = next(iter(savers[1:]), None)
    section = run.config.checkpoint
    folder = Path(run.config.job.dump_folder) / section.folder
    steps = []
    if section.enable:
        steps = do_on_rank_0(group, lambda: find_steps(folder))
    snapshotted = snapshots.list_usable(run.saved) if snapshots else []
    if names_step(section, steps, restarted):
        steps = [section.load_step]
        snapshotted = []
    checkpoints = [Saved(step, folder / f"step-{step}", group) for step in steps]
    found = checkpoints + snapshotted
    if found:
        newest = max(found, key=lambda saved: saved.step)
        if newest in snapshotted:
            check_snapshot(run, snapshots, newest.path)
        step = restore_run(found, run, group)
    else:
        step = load_initial(run, group)
    damaged = [saved.path for saved in checkpoints if saved.step > step]
    if not section.load_only:
        do_on_rank_0(group, lambda: quarantine(damaged))
    if snapshots:
        snapshots.forget_after(step)
    return step


def check_snapshot(run: Run, snapshots: Any, path: Path) -> None:
    """Print the keys that differ from the run that saved a snapshot. preflight only does so for a checkpoint.

    Raises ConfigError for keys that must not differ, and CheckpointError if the model or the documents differ.
    """
    weights = describe_checkpoint(path)
    problems, notices = check_continued(run.config, weights, documents={})
    if problems:
        raise ConfigError(problems)
    if json.dumps(weights.manifest.fingerprint) != json.dumps(snapshots.manifest.fingerprint):
        why = f"{path} was saved with another model, tokenizer, or other documents"
        raise CheckpointError(f"{why}: use the same, or start another run in a job.dump_folder")
    for notice in notices:
        logger.info(notice)


def restore_run(
    found: list[Saved], run: Run, group: dist.ProcessGroup, *, is_resumed: bool = True
) -> int:
    """Restore the newest of `found` that all ranks can open. Return its step. Collective over `group`.

    `is_resumed`: this run has saved them. Raises CheckpointError; the parameters are then undefined.
    """
    if run.config.checkpoint.exclude_from_loading:
        found = [mark_moments(saved, run.config, is_resumed) for saved in found]
    create_optimizer_state(run.optimizer)
    tensors = name_tensors(run.saved, run.optimizer, run.extension_state)
    loaded = load_newest(found, tensors, group)
    if loaded.is_without_moments:
        logger.info("the optimizer starts with new moments (checkpoint.exclude_from_loading)")
        for parameter in run.parameters.values():
            run.optimizer.state.pop(parameter, None)
    set_step(run.lr_scheduler, loaded.step)
    logger.info(f"resumed from the {loaded.kind} {loaded.path}")
    return loaded.step


def mark_moments(saved: Saved, config: Config, is_resumed: bool) -> Saved:
    """Note whether checkpoint.exclude_from_loading leaves out the optimizer state of a checkpoint or snapshot."""
    try:
        manifest = read_manifest(saved.path)
    except CheckpointError:  # loading it raises this again, on all ranks
        return saved
    starts_anew = excludes_moments(config, manifest, is_resumed=is_resumed)
    return saved._replace(is_without_moments=starts_anew)


def list_stored(run: Run, manifest: Manifest) -> dict[str, Tensor]:
    """Return the tensors to load. A model that differs from the one in the checkpoint may have more of them."""
    if manifest.fingerprint["shape"] == asdict(run.parts[0].model_args):
        return run.saved
    return {fqn: run.saved[fqn] for fqn in run.saved if f"model.{fqn}" in manifest.tensors}


def load_initial(run: Run, group: dist.ProcessGroup) -> int:
    """Load checkpoint.initial_load_path if it is set. Return the step of its optimizer state, or 0. Collective.

    preflight has already compared the config with the checkpoint. Raises CheckpointError; the parameters are then
    undefined.
    """
    section = run.config.checkpoint
    if not section.initial_load_path:
        return 0
    path = Path(section.initial_load_path)
    if (path / CONFIG).is_file():
        load_weights = load_extension("hugging_face").load_weights
        raise_on_all_ranks(group, lambda: load_weights(path, run.saved))
    else:
        manifest = raise_on_all_ranks(group, lambda: read_manifest(path))
        saved = Saved(manifest.step, path, group)
        if not section.initial_load_model_only:
            return restore_run([saved], run, group, is_resumed=False)
        load_newest([saved], name_weights(list_stored(run, manifest)), group)
    logger.info(f"the run starts from the weights in {path}")
    return 0
