"""Checkpoints with torch.distributed.checkpoint (DCP): saved by all ranks, whole or absent, opened on any layout.

    step-20.tmp/   every rank writes the slices that it holds; rank 0 adds run.json
    barrier        every file is there and on disk
    step-20/       rank 0 renames: from this moment on, and not before, there is a checkpoint of step 20

Tensors have global names and shapes ("model.layers.3.attention.wq.weight", "optimizer.<fqn>.exp_avg"), so another
layout reads the slices that it needs: nothing in a checkpoint depends on the mesh. The learning rate, the data and the
initial weights are functions of step and seed, so `run.json` holds the step and what must not have changed since.

Legend: FQN, the name of a parameter in the whole model.
"""

import json
import logging
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.preflight import find_steps

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, and why."""


def save_checkpoint(
    folder: Path,
    step: int,
    parameters: dict[str, Tensor],
    optimizer: Optimizer,
    *,
    facts: dict[str, object],
    keep_latest_k: int,
) -> None:
    """Writes and commits `folder`/step-N, then deletes all but the newest k (0 keeps all). Collective.

    `facts` must hold again when the run goes on: what the data are, for instance. Raises CheckpointError where there
    is a step-N already.
    """
    final, unfinished = folder / f"step-{step}", folder / f"step-{step}.tmp"
    if final.exists():
        raise CheckpointError(f"{final} exists already, and a checkpoint is never overwritten")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that died while saving
        unfinished.mkdir(parents=True)
    dist.barrier()
    dcp.save(name_tensors(parameters, optimizer), checkpoint_id=unfinished)  # synchronises every file to disk
    if dist.get_rank() == 0:
        (unfinished / "run.json").write_text(json.dumps({"step": step, **facts}, indent=1))
    dist.barrier()
    if dist.get_rank() == 0:
        unfinished.rename(final)
        logger.info("saved checkpoint %s", final)
        for old in find_steps(folder)[:-keep_latest_k] if keep_latest_k else []:
            # Renamed first, so that a death while deleting leaves no half checkpoint under a good name.
            doomed = (folder / f"step-{old}").rename(folder / f"step-{old}.tmp")
            shutil.rmtree(doomed)
    dist.barrier()


def load_checkpoint(
    folder: Path,
    step: int,
    parameters: dict[str, Tensor],
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    *,
    facts: dict[str, object],
) -> None:
    """Fills parameters, optimizer state and learning rate from `folder`/step-N, in place. Collective.

    Raises CheckpointError where there is none, or where a fact has changed since it was saved.
    """
    path = folder / f"step-{step}"
    if not (path / "run.json").is_file():
        raise CheckpointError(f"there is no checkpoint {path}; whole ones: steps {find_steps(folder) or 'none'}")
    saved = json.loads((path / "run.json").read_text())
    for name, value in facts.items():
        if saved.get(name) != value:
            raise CheckpointError(f"{path} was saved with {name} = {saved.get(name)!r}, this run has {value!r}")
    create_optimizer_state(parameters, optimizer)
    dcp.load(name_tensors(parameters, optimizer), checkpoint_id=path)
    lr_scheduler.last_epoch = step - 1
    lr_scheduler.step()
    logger.info("resumed from %s", path)


def name_tensors(parameters: dict[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """All tensors of the training state under names that no layout changes."""
    named = {f"model.{fqn}": parameter.detach() for fqn, parameter in parameters.items()}
    for fqn, parameter in parameters.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                named[f"optimizer.{fqn}.{name}"] = value
    return named


def create_optimizer_state(parameters: dict[str, Tensor], optimizer: Optimizer) -> None:
    """Makes the optimizer allocate its state, by a step with gradients and learning rate of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
