"""Small patches that break the code on purpose. The layout table must catch each of them, or it proves nothing.

They are teaching material too: each says what its user would have seen, which is mostly nothing at all. A patch is in
force inside one worker process, for one measurement.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite import step
from torchtitan_lite.components import optim
from torchtitan_lite.model.head import count_valid_tokens
from torchtitan_lite.parallel import (
    activation_checkpoint,
    fsdp,
    initial_weights,
    parallelize,
    pipeline,
    tensor_parallel,
)


@dataclass(frozen=True)
class Mutant:
    row: str  # of the layout table: the one that must notice
    noticed_by: str  # the measure that must fail
    patch: Callable[[], AbstractContextManager]
    seen: str  # by a user without the table


MUTANTS: dict[str, Mutant] = {}


def mutant(row: str, noticed_by: str):
    """Adds a patch to MUTANTS; its docstring is what a user would have seen."""

    def add(function: Callable) -> Callable:
        MUTANTS[function.__name__] = Mutant(row, noticed_by, function, " ".join(function.__doc__.split()))
        return function

    return add


@mutant(row="pp2 1F1B", noticed_by="grad_norm")
def clip_norm_forgets_pp():
    """Each stage clips by the norm of its own gradients. The loss falls; deep stages just learn at another rate."""
    return patch.object(optim.dist, "all_reduce", lambda tensor, group: None)


@mutant(row="tp2", noticed_by="initial")
def ranks_drawn_alike():
    """Every rank draws its own slice from the same seed, so the slices are copies: half of the heads are one
    head twice. Training works, and the model is worth one of half the width."""

    def draw_slice(parameter, full):
        if not isinstance(parameter, DTensor):
            parameter.copy_(full)
            return
        local = parameter.to_local()
        local.copy_(full.flatten()[: local.numel()].view_as(local))

    return patch.object(initial_weights, "keep_own_slice", draw_slice)


@mutant(row="dp2", noticed_by="gradient")
def loss_averaged_per_rank():
    """Each rank divides by its own number of tokens, and the ranks are averaged. Tokens on ranks with much padding
    count for more. The loss curve looks as always."""

    def mean_of_means(run, batch):
        return (count_valid_tokens(batch.targets) * run.layout.dp).clamp(min=1)

    return patch.object(step, "count_global_tokens", mean_of_means)


@mutant(row="dp4", noticed_by="gradient")
def gradients_averaged_instead_of_summed():
    """FSDP's default divides by the number of ranks, after the loss was already divided by all tokens. AdamW hides the
    constant factor; only the gradient norm, and so the clipping, depends on the number of ranks."""
    return patch.object(fsdp.FSDPModule, "set_gradient_divide_factor", lambda module, factor: None)


@mutant(row="accumulation 2", noticed_by="gradient")
def last_microbatch_dropped():
    """An off-by-one in the accumulation loop: a part of every batch is never learned from. Throughput looks better."""
    original = step.Batch.split
    return patch.object(step.Batch, "split", lambda batch, n: original(batch, n)[: n - 1] if n > 1 else [batch])


@mutant(row="pp2 GPipe", noticed_by="gradient")
def pipeline_divides_by_microbatches():
    """torch's schedules divide gradients by the number of microbatches by default, which is right for mean losses.
    Clipping hides most of it."""
    original = pipeline.get_schedule_class

    def scaled(name):
        schedule_class = original(name)
        return lambda stage, **options: schedule_class(stage, **{**options, "scale_grads": True})

    @contextmanager
    def applied():
        with (
            patch.object(pipeline, "get_schedule_class", scaled),
            patch.object(pipeline, "issubclass", create=True) as is_a,
        ):
            is_a.side_effect = lambda *args: True
            yield

    return applied()


@mutant(row="pp2 1F1B", noticed_by="loss")
def loss_not_summed_over_pp():
    """Rank 0 holds no head and logs a loss of zero, or each stage logs its own idea of it."""
    return patch.object(step, "sum_losses", lambda run, local_loss: local_loss.clone())


@mutant(row="one rank", noticed_by="gradient")
def masked_targets_counted():
    """Padding counts in the denominator: batches with much padding weigh too little, on every layout alike."""
    return patch.object(step, "count_valid_tokens", lambda targets: torch.tensor(targets.numel()))


@mutant(row="dp2 x tp2 compile", noticed_by="gradient")
def collective_enters_compiled_block():
    """The embedding's AsyncCollectiveTensor goes into a compiled block unwaited: the gradient of tok_embeddings is
    wrong by 100 % while loss and all other gradients are right."""
    return patch.object(tensor_parallel, "wait_for_collective", lambda module, args, output: None)


@mutant(row="ddp2", noticed_by="gradient")
def replicas_not_reduced():
    """The all-reduce over dp_replicate is left out: every replica learns from its own data and they drift apart. The
    logged loss is their mean and falls nicely; a checkpoint holds one of them."""

    original = parallelize.apply_fsdp

    def shard_only(part, mesh, **options):
        original(part, mesh["shard"], **options)

    return patch.object(parallelize, "apply_fsdp", shard_only)


@mutant(row="full recompute", noticed_by="gradient")
def recompute_forgets_an_input():
    """The recomputed block sees positions that start elsewhere: forward and loss are right, gradients are not."""
    original = activation_checkpoint.recomputed

    def with_other_rotation(forward, **options):
        calls = iter(range(1 << 30))

        def drifting(x, rotation, doc_ids):
            return forward(x, rotation if next(calls) % 2 == 0 else rotation.roll(1, dims=-2), doc_ids)

        return original(drifting, **options)

    return patch.object(activation_checkpoint, "recomputed", with_other_rotation)
