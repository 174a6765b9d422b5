"""Mutants that are wrong only in a run of train.py: errors in data, schedule, log, save and resume."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from mutant_table import mutant
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite import preflight
from torchtitan_lite import resume as resuming
from torchtitan_lite.checkpoint import load as loading
from torchtitan_lite.checkpoint import save as saving
from torchtitan_lite.data import dataset
from torchtitan_lite.tools.verify.rank import local

in_first_start = partial(mutant, name="first start", trial="train.py")
in_resumed_start = partial(mutant, name="resumed start", trial="train.py")
in_saved_tensor = partial(mutant, kind="saved tensor", trial="train.py")


@in_first_start("dp2 x tp2", kind="loss", at=(dataset, "rows_of_rank"))
def tp_peers_read_other_rows(original, data_rank, dp, n_rows):
    """Rows are assigned by the number of the rank, as if tp did not exist."""
    return original(dist.get_rank() % dp, dp, n_rows)


@in_resumed_start("dp2", kind="loss", at=(dataset, "prefetch"))
def data_begins_anew_after_a_resume(original, *args, steps, device):
    """A resumed run starts again with the first batches."""
    return original(*args, steps=range(len(steps)), device=device)


@in_saved_tensor("pp2 1F1B", name="model.layers.1.attention.wo.weight", at=(resuming, "set_step"))
def only_rank_0_resumes_its_schedule(original, lr_scheduler, step):
    """Only rank 0 restores its learning rate. All other ranks begin the warm-up again. The log shows only the learning
    rate of rank 0."""
    if dist.get_rank() == 0:
        original(lr_scheduler, step)


@in_first_start("one rank", kind="lr", at=(preflight, "resolve_config"))
def schedule_as_long_as_this_start(original, config, layout, device_type):
    """The schedule ends after training.steps instead of lr_scheduler.total_steps."""
    config = original(config, layout, device_type)
    section = replace(config.lr_scheduler, total_steps=config.training.steps, warmup_steps=0)
    return replace(config, lr_scheduler=section)


@in_saved_tensor(
    "2 | ADAMW",
    name="optimizer.norm.weight.exp_avg_sq",
    at=(loading, "load_checkpoint"),
)
def second_moments_rounded_by_a_resume(original, path, tensors, **options):
    """Resuming rounds second moments to bf16. No loss shows it."""
    manifest = original(path, tensors, **options)
    for name, tensor in tensors.items():
        if name.endswith("exp_avg_sq"):
            local(tensor).copy_(local(tensor).bfloat16())
    return manifest


@in_resumed_start("dp2", kind="lr", at=(resuming, "set_step"))
def schedule_shifted_by_a_resume(original, lr_scheduler, step):
    """The first step after resuming uses the learning rate of the saved step again."""
    original(lr_scheduler, step - 1)


@in_saved_tensor("experts, dp2, ep2", name="model.layers.0.feed_forward.experts.w2")
@contextmanager
def experts_saved_in_another_order():
    """Experts are saved and loaded in an order that depends on ep. This order is correct only if the run that loads has
    the same ep as the run that saved."""
    plan_save, load_newest = saving.plan_save, resuming.load_newest

    def save_rolled(named, *layout):
        return plan_save({name: roll_experts(named[name], 1) for name in named}, *layout)

    def load_rolled(found, choose, group):
        loaded, manifest = load_newest(found, choose, group)
        for tensor in choose(manifest).values():
            local(tensor).copy_(local(roll_experts(tensor, -1)))
        return loaded, manifest

    with (
        patch.object(saving, "plan_save", save_rolled),
        patch.object(resuming, "load_newest", load_rolled),
    ):
        yield


def roll_experts(tensor: torch.Tensor, direction: int) -> torch.Tensor:
    if not isinstance(tensor, DTensor) or tensor.dim() != 3:
        return tensor
    mesh = tensor.device_mesh
    ep = mesh["ep"].size() if "ep" in mesh.mesh_dim_names else 1
    rolled = tensor.full_tensor().roll(direction * ep, 0)
    return distribute_tensor(rolled, mesh, tensor.placements, src_data_rank=None)
