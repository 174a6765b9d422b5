"""Resume from the newest checkpoint or snapshot, or load checkpoint.initial_load_path.

    the run                          starts from
    with checkpoint.load_step        the checkpoint of that step, or an error. If the run has saved later checkpoints
                                     since then, the next row applies
    restarted by torchrun            the newest checkpoint or snapshot that all ranks can open
    in the folder of an earlier run  the newest checkpoint or snapshot that all ranks can open
    any other run                    checkpoint.initial_load_path, if set

With job.overwrite, the files of the earlier run are already deleted, and the snapshots of that run are ignored. No
other file is renamed or deleted before a state has been loaded. After the load, damaged newer checkpoints are renamed,
and snapshots of other runs are deleted. With checkpoint.load_only, nothing is renamed or deleted.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.continued import excludes_moments
from torchtitan_lite.checkpoint.format import Manifest
from torchtitan_lite.checkpoint.load import (
    Saved,
    create_optimizer_state,
    load_newest,
    set_step,
)
from torchtitan_lite.checkpoint.save import do_on_rank_0, name_weights, raise_on_all_ranks
from torchtitan_lite.checkpoint.starting_weights import describe_checkpoint, names_step
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.messages import ConfigError, Problems
from torchtitan_lite.from_weights import check_loaded_weights
from torchtitan_lite.models.registry import CONFIG
from torchtitan_lite.preflight import RunSpec

logger = logging.getLogger(__name__)


def resume(
    run: Run,
    spec: RunSpec,
    steps: list[int],
    snapshots: Any,
    group: dist.ProcessGroup,
    *,
    restarted: bool,
) -> int:
    """Load the newest state. Return the step of that state, or 0 if only weights are loaded. Collective over all ranks.

    `steps`: steps of the checkpoints in the dump folder. Raises the same errors as `start_from`.
    """
    section = run.config.checkpoint
    folder = Path(run.config.job.dump_folder) / section.folder
    snapshotted = snapshots.list_usable() if snapshots else []
    if names_step(section, steps, restarted):
        steps = [section.load_step]
        snapshotted = []
    checkpoints = [Saved(step, folder / f"step-{step}", group) for step in steps]
    found = sorted(checkpoints + snapshotted, key=lambda saved: saved.step, reverse=True)
    if found:
        if found[0] in snapshotted:
            check_snapshot(spec, found[0].path)
        step = restore_run(found, run, group)
    else:
        step = load_initial(run, group)
    damaged = [saved.path for saved in checkpoints if saved.step > step]
    if not section.load_only:
        do_on_rank_0(group, lambda: quarantine(damaged))
    if snapshots:
        snapshots.forget_after(step)
    return step


def quarantine(damaged: list[Path]) -> None:
    """Rename damaged checkpoints. The run can then save the same steps again."""
    for final in damaged:
        aside = final.with_name(f"{final.name}.damaged")
        n_earlier = len(list(final.parent.glob(f"{aside.name}*")))
        if n_earlier:
            aside = final.with_name(f"{aside.name}-{n_earlier + 1}")
        logger.error(f"{final} was renamed to {final.rename(aside)}; its steps are trained again")


def check_snapshot(spec: RunSpec, path: Path) -> None:
    """Check a snapshot by the rules for checkpoints, which preflight applies, and log the notices.

    Raises ConfigError if the run cannot continue from the snapshot.
    """
    weights = replace(describe_checkpoint(path), is_resumed=True)
    problems = Problems(spec.config, spec.model_args)
    check_loaded_weights(problems, spec.layout, spec.tokenizer, weights)
    if problems:
        raise ConfigError(*problems)
    for notice in problems.notices:
        logger.info(notice)


def restore_run(
    found: list[Saved], run: Run, group: dist.ProcessGroup, *, is_resumed: bool = True
) -> int:
    """Restore the first state in `found` that all ranks can open. Return its step. Collective over `group`.

    `is_resumed`: whether the states are from this run, and not from initial_load_path. If this function raises
    CheckpointError, the parameters are undefined.
    """

    def choose(manifest: Manifest) -> dict[str, Tensor]:
        create_optimizer_state(run.optimizer)
        owners = run.parameters  # the parameters whose optimizer state is loaded
        if excludes_moments(run.config, manifest, is_resumed=is_resumed):
            run.optimizer.state.clear()
            owners = {}
            logger.info("the optimizer starts with new moments (checkpoint.exclude_from_loading)")
        wanted = run.name_tensors()
        kinds = {"optimizer", *(name.partition(".")[0] for name in wanted)}
        dropped = []
        for name in sorted(manifest.tensors.keys() - wanted):
            kind, _, rest = name.partition(".")
            if kind not in kinds or rest.rpartition(".")[0] in owners:
                dropped.append(name)
        # for example, an extension has been turned off, or a fork has changed an optimizer
        if dropped:
            logger.info(
                f"not loaded, because nothing uses these tensors: {', '.join(dropped[:3])} ({len(dropped)} in total)"
            )
        return wanted

    loaded, manifest = load_newest(found, choose, group)
    set_step(run.lr_scheduler, manifest.step)
    logger.info(f"resumed from the {loaded.kind} {loaded.path}")
    return manifest.step


def load_initial(run: Run, group: dist.ProcessGroup) -> int:
    """Load checkpoint.initial_load_path if it is set. Return the step of the loaded optimizer state, or 0. Collective.

    preflight has already compared the config with the checkpoint. If this function raises CheckpointError, the
    parameters are undefined.
    """
    section = run.config.checkpoint
    if not section.initial_load_path:
        return 0
    path = Path(section.initial_load_path)
    saved = Saved(0, path, group)
    if (path / CONFIG).is_file():
        load_weights = load_extension("hugging_face").load_weights
        raise_on_all_ranks(group, lambda: load_weights(path, run.saved))
    elif section.initial_load_model_only:
        weights = name_weights(run.saved)
        load_newest(
            [saved],
            lambda manifest: {name: weights[name] for name in weights if name in manifest.tensors},
            group,
        )
    else:
        return restore_run([saved], run, group, is_resumed=False)
    logger.info(f"the run starts from the weights in {path}")
    return 0
