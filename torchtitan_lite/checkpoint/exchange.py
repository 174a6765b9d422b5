"""Weights that come from another run and go to others: where a run begins, and what it leaves at its end.

    begins   with checkpoint.initial_load_path, where its own folder holds no checkpoint
    leaves   step-N           weights alone, in export_dtype (last_save_model_only), or all that resuming takes
             step-N-hf        the same model as a Hugging Face folder (last_save_in_hf)

Every rank reads and converts its own share; nobody holds more than one whole tensor beside it.
"""

import logging
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.agreement import do_on_rank_0, raise_on_all_ranks
from torchtitan_lite.checkpoint.hugging_face import load_weights
from torchtitan_lite.checkpoint.hugging_face_export import Export, convert_dtype, export_weights
from torchtitan_lite.checkpoint.hugging_face_folder import open_folder
from torchtitan_lite.checkpoint.load import load_checkpoint, resume
from torchtitan_lite.checkpoint.state import name_tensors, name_weights
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.schema import Checkpoint

logger = logging.getLogger(__name__)


def begin(
    checkpoints: Path,
    resumed_step: int,
    parameters: dict[str, Tensor],
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    *,
    is_named: bool,
    section: Checkpoint,
    shape: ModelArgs,
    facts: dict[str, object],
    group: dist.ProcessGroup,
) -> int:
    """Puts a run that is built where it goes on, or begins. Returns the last step that is done. Collective.

    `resumed_step` is the newest checkpoint, for which an older one may stand in, or one that `is_named` and no other;
    0 where there is none. Raises CheckpointError; what the run holds is then undefined.
    """
    of_run = (parameters, optimizer, lr_scheduler)
    if resumed_step:
        step = resumed_step if is_named else None
        return resume(checkpoints, step, *of_run, section=section, facts=facts, group=group)
    if section.initial_load_path:
        return load_initial(*of_run, section=section, shape=shape, facts=facts, group=group)
    return 0


def load_initial(
    parameters: dict[str, Tensor],
    optimizer: Optimizer,
    lr_scheduler: LRScheduler,
    *,
    section: Checkpoint,
    shape: ModelArgs,
    facts: dict[str, object],
    group: dist.ProcessGroup,
) -> int:
    """Begins with what `section.initial_load_path` holds. Returns the step: 0 where it is weights only. Collective.

    Raises CheckpointError; what the parameters hold is then undefined.
    """
    path = Path(section.initial_load_path)
    if section.initial_load_in_hf:
        raise_on_all_ranks(group, lambda: load_weights(open_folder(path), parameters))
    elif section.initial_load_model_only:
        of_model = {"shape": asdict(shape)}
        load_checkpoint(path, name_weights(parameters), facts=of_model, verify=section.verify, group=group)
    else:
        step = int(path.name.removeprefix("step-"))
        return resume(path.parent, step, parameters, optimizer, lr_scheduler, section=section, facts=facts, group=group)
    logger.info(f"the run begins with the weights of {path}")
    return 0


def choose_tensors(
    parameters: dict[str, Tensor], optimizer: Optimizer, *, section: Checkpoint, is_last: bool, group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """What a checkpoint of this step holds. Collective where it is the last one and of weights alone."""
    if not (is_last and section.last_save_model_only):
        return name_tensors(parameters, optimizer)
    dtype = getattr(torch, section.export_dtype)
    weights = name_weights(parameters)
    return raise_on_all_ranks(
        group, lambda: {name: convert_dtype(name, tensor, dtype) for name, tensor in weights.items()}
    )


def export_hf(
    out: Path,
    parameters: dict[str, Tensor],
    *,
    export: Export,
    group: dist.ProcessGroup,
) -> None:
    """Writes the Hugging Face folder `out`, unless an earlier attempt has. Collective. Raises CheckpointError.

    `out` is in the folder of checkpoints, where this run alone is at work: what a death has left there is swept away.
    """
    if not do_on_rank_0(group, out.exists):
        do_on_rank_0(group, lambda: folders.sweep(out.parent))
        export_weights(out, parameters, export, group=group)
        logger.info(f"exported {out}")
