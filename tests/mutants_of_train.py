"""Mutants that are wrong only in train.py, or in what only it calls."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch.distributed as dist
from layouts import ADAMW, Row
from mutant_table import mutant
from mutants_of_updates import RATE, in_place_of

from torchtitan_lite import preflight, validation
from torchtitan_lite.checkpoint import load as loading
from torchtitan_lite.checkpoint import save as saving
from torchtitan_lite.checkpoint.save import name_weights
from torchtitan_lite.tools.verify import train_start

in_train_py, replacing = partial(mutant, trial="train.py"), partial(in_place_of, trial="train.py")
VALIDATION = ("validation loss", "validate")


def train_py_with(old: str, new: str) -> AbstractContextManager:
    """train.py with one stretch of its text replaced."""
    original = train_start.read_source

    def edited(path):
        source = original(path)
        assert source.count(old) == 1, f"train.py has {source.count(old)} times {old!r}"
        return source.replace(old, new)

    return patch.object(train_start, "read_source", edited)


@in_train_py("dp2 x tp2", "rows", ("rows", "rows_of_rank"), dims=("tp",))
def tp_peers_read_other_rows():
    """Rows are dealt out by the number of the rank, as if tp did not exist. Peers mix halves of unlike sequences: the
    loss falls, a little more slowly, and half of the data is never seen."""
    return train_py_with("rows_of_rank(mesh.data_rank, ", "rows_of_rank(rank % layout.dp, ")


@in_train_py("hsdp2x2", "rows", ("rows", "rows_of_rank"))
def replicas_read_the_same_rows():
    """The place on dp_replicate is left out, so that all replicas read the same rows. The curve is that of half of the
    batch size; half of the rows are never read."""
    return train_py_with("rows_of_rank(mesh.data_rank, ", "rows_of_rank(mesh.data_rank % layout.dp_shard, ")


@in_train_py("dp2", "rows", ("rows", "SampleStream"))
def every_rank_shuffles_with_a_seed_of_its_own():
    """A habit from trainers whose ranks shuffle alone. Rows of one step come from two orders, so that some samples are
    seen twice in an epoch and others never; and the data depends on the layout."""
    return train_py_with("seed=config.debug.seed,\n    )", "seed=config.debug.seed + rank,\n    )")


@in_train_py("dp2", "rows", ("rows", "prefetch"))
def data_begins_anew_after_a_resume():
    """A resumed run reads the first batches again. Its loss is even a little better than expected."""
    return train_py_with("steps=range(resumed_step, n_steps)", "steps=range(n_steps - resumed_step)")


@in_train_py("one rank", "rows", ("rows", "prefetch"))
def a_batch_is_skipped_at_each_resume():
    """An off-by-one: the batch after the checkpoint is never learned from."""
    return train_py_with(
        "steps=range(resumed_step, n_steps)", "steps=range(resumed_step + (resumed_step > 0), n_steps + 1)"
    )


@replacing(loading, "set_step", "pp2 1F1B", "learning rate", RATE, dims=("dp_shard",))
def only_rank_0_resumes_its_schedule(set_step, lr_scheduler, step):
    """The rank that reads the manifest sets its learning rate, the others begin their warm-up again. Logged is the one
    of rank 0, which is right."""
    if dist.get_rank() == 0:
        set_step(lr_scheduler, step)


@in_train_py("one rank", "learning rate", RATE)
def schedule_forgotten_by_a_resume():
    """Each resume begins with warm-up and peak again; the loss jumps up a little, as it may for other reasons."""
    return patch.object(loading, "set_step", lambda lr_scheduler, step: None)


@replacing(preflight, "resolve_config", "one rank", "learning rate", RATE)
def schedule_as_long_as_this_start(resolve, config, layout, device_type):
    """lr_scheduler.total_steps gives way to training.steps: who prolongs a run has another course of the learning rate
    than was asked for."""
    config = resolve(config, layout, device_type)
    section = replace(config.lr_scheduler, total_steps=config.training.steps, decay_ratio=None, warmup_steps=0)
    return replace(config, lr_scheduler=section)


@in_train_py(Row(2, ADAMW), "resumed state", ("resume", "tok_embeddings.weight"))
def moments_forgotten_by_a_resume():
    """Weights alone are loaded. AdamW begins with moments of zero and the step count of a new run: a small bump in the
    loss after each restart."""
    return patch.object(loading, "name_tensors", lambda parameters, optimizer: name_weights(parameters))


@replacing(saving, "name_tensors", "tp2", "resumed state", ("resume", "tok_embeddings.weight"))
def checkpoints_rounded_to_bfloat16(name_tensors, parameters, optimizer):
    """Weights are saved in half of the space. Every resume loses what learned slowly; no curve shows it."""
    return {name: tensor.bfloat16().float() for name, tensor in name_tensors(parameters, optimizer).items()}


@in_train_py("dp2", "validation", VALIDATION)
def validation_counts_padding():
    """Padding counts in the denominator of the validation loss: the fewer held-out documents, the better it looks."""
    return patch.object(validation, "IGNORE_INDEX", -1)


@in_train_py("dp2", "validation", VALIDATION, dims=("dp_shard",))
def validation_of_one_rank():
    """Each rank has the validation loss of its own rows, and rank 0 logs it: it depends on the layout, and on who got
    the padding."""
    return patch.object(validation, "dist", SimpleNamespace(all_reduce=lambda tensor, group: None))


@in_train_py("one rank", "validation", VALIDATION)
def validation_on_training_documents():
    """What is validated on was trained on: overfitting is never seen."""
    return train_py_with('choose_validation(config), "validation")', 'choose_validation(config), "train")')


@in_train_py("pp2 GPipe", "validation", VALIDATION)
def last_validation_batch_left_out():
    """The incomplete batch at the end is dropped, as data loaders do by default: the loss is that of other documents
    whenever the batch size changes."""
    return train_py_with("range(validation_data.n_batches)", "range(validation_data.n_batches - 1)")


@in_train_py("dp2", "logged numbers", ("logged loss", "metrics.jsonl"))
def loss_of_rank_0_logged():
    """The logged loss is the share of rank 0: about half of what it is, on four ranks a quarter."""
    return train_py_with("loss=result.loss.item()", "loss=result.local_loss.item()")


@in_train_py("one rank", "logged numbers", ("logged lr", "metrics.jsonl"))
def rate_of_the_next_step_logged():
    """The learning rate is read after the schedule has stepped: every plot is shifted by one step."""
    return train_py_with("                    lr=lr,", "                    lr=run.lr_scheduler.get_last_lr()[0],")


@in_train_py("dp2", "logged numbers", ("logged grad_norm", "metrics.jsonl"))
def norm_logged_after_clipping():
    """The logged gradient norm never exceeds max_norm, so that spikes are not seen."""
    clipped = "grad_norm=result.grad_norm.clamp(max=config.training.max_norm).item()"
    return train_py_with("grad_norm=result.grad_norm.item()", clipped)


@replacing(validation, "validate", "dp2", "loss", ("loss", "train_step"))
def validation_moves_the_weights(validate, run, *args):
    """A validation that steps: the held-out documents are trained on, a little, at each validation."""
    validated = validate(run, *args)
    for parameter in run.parameters.values():
        parameter.data.mul_(0.999)
    return validated
