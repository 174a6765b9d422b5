"""Small patches that break the code on purpose. `verify` must catch and name each of them, or it proves nothing.

They are teaching material too: each says what its user would have seen, which is mostly nothing at all. A patch is in
force inside one worker process, for one measurement.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts import ADAMW, CHUNK, CHUNKS, GATHER, LAYOUTS, MODE, PP, PRECOMPUTE, SCHEDULE, TP, ZERO, Row
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lite import layout, preflight, step, validation
from torchtitan_lite.components import adamw_bfloat16, optim
from torchtitan_lite.components.checkpoint import exchange, loading
from torchtitan_lite.components.checkpoint.state import name_weights
from torchtitan_lite.model import chunked_loss, llama3
from torchtitan_lite.model.head import IGNORE_INDEX, count_valid_tokens
from torchtitan_lite.parallel import (
    activation_checkpoint,
    context_attention,
    context_parallel,
    float8,
    fsdp,
    initial_weights,
    parallelize,
    pipeline,
    tensor_parallel,
    vocabulary_parallel_loss,
)
from torchtitan_lite.tools import train_start

CP = "parallelism.context_parallel_degree"
SHARD = "parallelism.data_parallel_shard_degree"
CP2 = {CP: 2}
RING = {"parallelism.context_parallel_rotate_method": "ring"}
DOCUMENTS = {"model.attention": "document"}


@dataclass(frozen=True)
class Mutant:
    row: Row  # the layout that must notice
    noticed_by: str  # the measure that must fail
    culprit: tuple[str, str]  # kind and name that must be found
    mesh_dims: tuple[str, ...]  # along which ranks must be said to disagree
    cause: str  # that must be named, or its beginning
    trial: str  # of TRIALS, which sees it
    patch: Callable[[], AbstractContextManager]
    seen: str  # by a user without `verify`


MUTANTS: dict[str, Mutant] = {}


def mutant(
    row: str | Row,
    noticed_by: str,
    culprit: tuple[str, str],
    *,
    dims: tuple = (),
    cause: str = "unknown",
    trial: str = "wide",
):
    """Adds a patch to MUTANTS; its docstring is what a user would have seen."""

    def add(function: Callable) -> Callable:
        where = LAYOUTS[row] if isinstance(row, str) else row
        seen = " ".join(function.__doc__.split())
        MUTANTS[function.__name__] = Mutant(where, noticed_by, culprit, dims, cause, trial, function, seen)
        return function

    return add


@mutant("pp2 1F1B", "grad_norm", ("gradient norm", "clip_grad_norm"), dims=("pp",))
def clip_norm_forgets_pp():
    """Each stage clips by the norm of its own gradients. The loss falls; deep stages just learn at another rate."""
    return patch.object(optim, "dist", SimpleNamespace(all_reduce=lambda tensor: None))


@mutant("tp2", "grad_norm", ("gradient norm", "clip_grad_norm"))
def norm_counts_every_copy():
    """What several ranks hold, norm weights under tp, counts once on each of them. Clipping sets in a little too early,
    and earlier the more ranks there are."""
    return patch.object(optim, "count_copies", lambda tensor: 1)


@mutant("tp2", "initial", ("initial weights", "tok_embeddings.weight"), cause="the rule of the initial weights")
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


@mutant("dp2", "gradient", ("counted tokens", "count_global_tokens"), dims=("dp_shard",))
def loss_averaged_per_rank():
    """Each rank divides by its own number of tokens, and the ranks are averaged. Tokens on ranks with much padding
    count for more. The loss curve looks as always."""

    def mean_of_means(run, batch):
        return (count_valid_tokens(batch.targets) * run.layout.dp).clamp(min=1)

    return patch.object(step, "count_global_tokens", mean_of_means)


@mutant("dp4", "gradient", ("gradient", "output.weight"))
def gradients_averaged_instead_of_summed():
    """FSDP's default divides by the number of ranks, after the loss was already divided by all tokens. AdamW hides the
    constant factor; only the gradient norm, and so the clipping, depends on the number of ranks."""
    return patch.object(fsdp.FSDPModule, "set_gradient_divide_factor", lambda module, factor: None)


@mutant("accumulation 2", "gradient", ("microbatches", "tok_embeddings"))
def last_microbatch_dropped():
    """An off-by-one in the accumulation loop: a part of every batch is never learned from. Throughput looks better."""
    original = step.Batch.split
    return patch.object(step.Batch, "split", lambda batch, n: original(batch, n)[: n - 1] if n > 1 else [batch])


@mutant("pp2 GPipe", "gradient", ("gradient", "output.weight"))
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


@mutant("pp2 1F1B", "loss", ("loss", "sum_losses"), dims=("pp",))
def loss_not_summed_over_pp():
    """Rank 0 holds no head and logs a loss of zero, or each stage logs its own idea of it."""
    return patch.object(step, "sum_losses", lambda run, local_loss: local_loss.clone())


@mutant("one rank", "gradient", ("counted tokens", "count_global_tokens"))
def masked_targets_counted():
    """Padding counts in the denominator: batches with much padding weigh too little, on every layout alike."""
    return patch.object(step, "count_valid_tokens", lambda targets: torch.tensor(targets.numel()))


@mutant(
    "tp2 compile, many chunks",
    "gradient",
    ("gradient", "tok_embeddings.weight"),
    cause="the embedding's AsyncCollectiveTensor",
)
def collective_enters_compiled_block():
    """The embedding's AsyncCollectiveTensor goes into a compiled block unwaited: the gradient of tok_embeddings is
    wrong by 100 % while loss and all other gradients are right."""
    return patch.object(tensor_parallel, "wait_for_collective", lambda module, args, output: None)


@mutant("ddp2", "gradient", ("gradient", "output.weight"), dims=("dp_replicate",))
def replicas_not_reduced():
    """The all-reduce over dp_replicate is left out: every replica learns from its own data and they drift apart. The
    logged loss is their mean and falls nicely; a checkpoint holds one of them."""

    original = parallelize.apply_fsdp

    def shard_only(part, mesh, **options):
        original(part, mesh["shard"], **options)

    return patch.object(parallelize, "apply_fsdp", shard_only)


@mutant("full recompute", "gradient", ("gradient", "layers.3.feed_forward.w2.weight"))
def recompute_forgets_an_input():
    """The recomputed block sees positions that start elsewhere: forward and loss are right, gradients are not."""
    original = activation_checkpoint.recomputed

    def with_other_rotation(forward, **options):
        calls = iter(range(1 << 30))

        def drifting(x, rotation, doc_ids):
            return forward(x, rotation if next(calls) % 2 == 0 else rotation.roll(1, dims=-2), doc_ids)

        return original(drifting, **options)

    return patch.object(activation_checkpoint, "recomputed", with_other_rotation)


@mutant(Row(2, {**CP2, **RING}), "gradient", ("module output", "layers.0.attention.inner"))
def zig_zag_forgotten():
    """The ring reckons as if all that an earlier rank holds came earlier, while the pieces lie head and tail. Some
    tokens see their future: the loss is a little too good, and generation is poor."""
    original = context_attention.visible_of_one

    def as_if_contiguous(rank, source, half):
        return (slice(None), slice(None)) if source < rank else original(rank, source, half)

    return patch.object(context_attention, "visible_of_one", as_if_contiguous)


@mutant(Row(2, CP2), "gradient", ("positions", "take_pieces"))
def positions_not_sharded():
    """Each context-parallel rank counts the positions of its tokens from 0. The model learns to read the folded
    sequence, with a slightly higher loss, and fails at inference, where sequences are not folded."""
    original = step.take_pieces

    def restarted(run, batch):
        pieces = original(run, batch)
        return replace(pieces, positions=batch.positions[:, : pieces.tokens.shape[1]])

    return patch.object(step, "take_pieces", restarted)


@mutant(Row(2, CP2), "gradient", ("gradient", "output.weight"))
def gradients_averaged_over_cp():
    """Context-parallel ranks share a sequence, so their gradients are shares of a sum; averaging them halves all.
    AdamW hides it, but for clipping, which then comes too late."""

    def averaged(module, factor):
        original(module, 2.0)

    original = fsdp.FSDPModule.set_gradient_divide_factor
    return patch.object(fsdp.FSDPModule, "set_gradient_divide_factor", averaged)


@mutant(Row(2, {PP: 2, **DOCUMENTS}), "loss", ("documents", "layers.2"))
def documents_lost_after_the_first_stage():
    """Later stages are not told where documents begin, so that half of the layers attend across borders. The loss is a
    little lower or higher; answers leak from one document into the next."""
    original = llama3.Llama3.forward

    def forgetful(part, x, *, positions, doc_ids=None, targets=None):
        if part.tok_embeddings is None:
            doc_ids = torch.zeros_like(doc_ids)
        return original(part, x, positions=positions, doc_ids=doc_ids, targets=targets)

    return patch.object(llama3.Llama3, "forward", forgetful)


@mutant("dp2 tied", "gradient", ("gradient", "tok_embeddings.weight"))
def tied_gradient_counted_twice():
    """The shared matrix is listed as embedding and as head, and each adds the whole gradient. Loss and all other
    gradients are right; the embedding just learns twice as fast."""
    original = step.forward_backward

    def doubled(run, batch, n_tokens):
        loss = original(run, batch, n_tokens)
        run.parameters["tok_embeddings.weight"].grad.mul_(2)
        return loss

    return patch.object(step, "forward_backward", doubled)


@mutant("tp2", "replicas", ("replicas", "layers.0.attention_norm.weight"), dims=("tp",))
def norm_updated_on_one_rank_only():
    """Norm weights are copied on each tensor-parallel rank, and one rank forgets to step them. Every gradient of the
    first step is right. The copies drift apart, and a checkpoint holds whichever is saved."""
    original = step.step_if_finite

    def forgetful(optimizer, grad_norm):
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.dim() == 1]
        before = [parameter.to_local().detach().clone() for parameter in parameters]
        finite = original(optimizer, grad_norm)
        if dist.get_rank() == 1:
            for parameter, old in zip(parameters, before, strict=True):
                parameter.to_local().detach().copy_(old)
        return finite

    return patch.object(step, "step_if_finite", forgetful)


@mutant("tp2", "loss", ("module output", "output"))
def loss_counted_by_every_tp_rank():
    """All tensor-parallel ranks hold the same loss and it is added up over them. The logged loss is twice what it is,
    which looks like a bad start; gradients are too."""
    original = tensor_parallel.VocabularyParallelHead.make_whole

    def added_up(module, output, mesh):
        return original(module, output, mesh) * mesh.size()

    return patch.object(tensor_parallel.VocabularyParallelHead, "make_whole", staticmethod(added_up))


@mutant("tp2", "loss", ("module output", "layers.0.attention.inner"))
def causal_mask_lost_on_one_rank():
    """Half of the heads, those of one rank, see the future. The loss falls wonderfully, to near zero in the end."""
    original = llama3.F.scaled_dot_product_attention

    def blind(query, key, value, *, is_causal, enable_gqa):
        return original(query, key, value, is_causal=is_causal and dist.get_rank() == 0, enable_gqa=enable_gqa)

    return patch.object(llama3.F, "scaled_dot_product_attention", blind)


@mutant("pp2 1F1B", "loss", ("module input", "layers.2"))
def hidden_states_rounded_between_stages():
    """Hidden states travel in bf16 while the model computes in fp32. Every curve looks right, one digit too coarse."""
    original = llama3.Llama3.forward

    def rounded(part, x, **inputs):
        hidden = original(part, x, **inputs)
        return hidden if part.output is not None else hidden.bfloat16().float()

    return patch.object(llama3.Llama3, "forward", rounded)


@mutant("pp2 1F1B", "initial", ("initial weights", "layers.2.attention.wq.weight"), cause="the rule of the initial")
def stages_number_their_layers_from_zero():
    """Each stage draws its layers by their place in the stage, so that layer 2 is born a copy of layer 0. The run
    trains; it only differs from the same run on other layouts, which nobody compares."""
    original = initial_weights.seed_of
    later = {"layers.2.": "layers.0.", "layers.3.": "layers.1."}

    def local_seed(seed, fqn):
        return original(seed, later.get(fqn[:9], fqn[:9]) + fqn[9:])

    return patch.object(initial_weights, "seed_of", local_seed)


@mutant(
    Row(4, {PP: 2, SCHEDULE: "DualPipeV", ZERO: 3, MODE: "none"}),
    "gradient",
    ("gradient", "layers.4.feed_forward.w2.weight"),
    cause="a split backward with resharding",
)
def refused_combination_run():
    """A fork takes a row out of the table of refused combinations. Loss and gradient norm look plausible; gradients of
    weights are computed after their parameters were freed."""
    return patch.object(layout, "find_refused", lambda *args: [])


@mutant(Row(2, {TP: 2, **CHUNKS}), "loss", ("module output", "output"))
def softmax_over_a_share_of_the_vocabulary():
    """Each tensor-parallel rank normalises over its own tokens of the vocabulary only. The loss starts at the logarithm
    of half of the vocabulary and falls; the model never learns to choose between the halves."""
    original = vocabulary_parallel_loss.ShardedLoss.combine

    def own_total(loss, log_total, of_target):
        return log_total, original(loss, log_total, of_target)[1]

    return patch.object(vocabulary_parallel_loss.ShardedLoss, "combine", own_total)


@mutant(Row(2, {TP: 2, **CHUNKS}), "gradient", ("gradient", "norm.weight"))
def hidden_gradient_of_one_share():
    """Each rank's gradient of the hidden states stems from its share of the vocabulary; nobody adds them. The loss and
    the gradient of the head are right, and everything below learns from half of the tokens that it could have said."""
    return patch.object(vocabulary_parallel_loss, "Partial", Replicate)


@mutant(Row(1, CHUNKS), "gradient", ("gradient", "output.weight"))
def gradients_of_the_last_chunk_kept():
    """The head's gradient is overwritten by every chunk instead of added up. Loss and all other gradients are right;
    the head just learns from a few tokens of each batch."""
    return patch.object(torch.Tensor, "addmm_", lambda total, one, other: total.copy_(one @ other))


# ---------------------------------------------------------------- bfloat16

ANGLES, REDUCTION = ("rotary angles", "layers.0"), ("gradient reduction", "output.weight")
BLOCK = ("module output", "layers.0")


@mutant("dp2", "gradient reduction", REDUCTION, trial="bfloat16")
def gradients_reduced_in_bfloat16():
    """FSDP adds the gradients of the ranks in the compute dtype. With two ranks nobody sees it; with a thousand, small
    gradients vanish beside the sum of the others."""
    original = parallelize.apply_fsdp

    def in_bfloat16(part, mesh, **options):
        original(part, mesh, **{**options, "reduce_dtype": torch.bfloat16})

    return patch.object(parallelize, "apply_fsdp", in_bfloat16)


@mutant(Row(4, {TP: 2}), "gradient reduction", REDUCTION, trial="bfloat16")
def gradients_reduced_in_bfloat16_beside_tp():
    """The same beside tensor parallelism, whose partial sums are rounded too, rightly."""
    return gradients_reduced_in_bfloat16()


@mutant("one rank", "rotary angles", ANGLES, trial="bfloat16")
def rotary_angles_cast_to_bfloat16():
    """FSDP casts what enters a block, as it does by default, and cosines and sines with it. Neighbouring tokens of a
    long text can no longer be told apart; short texts are read as ever."""
    original = fsdp.MixedPrecisionPolicy
    return patch.object(
        fsdp, "MixedPrecisionPolicy", lambda **options: original(**{**options, "cast_forward_inputs": True})
    )


@mutant("tp2", "rotary angles", ANGLES, trial="bfloat16")
def rotary_angles_cast_to_bfloat16_under_tp():
    """The same on ranks that share heads."""
    return rotary_angles_cast_to_bfloat16()


@mutant(Row(2, CP2), "rotary angles", ANGLES, trial="bfloat16")
def positions_rounded_to_bfloat16():
    """Positions travel as floating-point numbers and are rounded like those: from 256 on every second one is another,
    from 8,192 on each stands for 64. Models that were trained on short sequences notice nothing."""
    original = step.take_pieces

    def rounded(run, batch):
        pieces = original(run, batch)
        return replace(pieces, positions=pieces.positions.bfloat16().long())

    return patch.object(step, "take_pieces", rounded)


@mutant("dp2 accumulation 4 ZeRO-1", "gradient reduction", REDUCTION, trial="bfloat16")
def microbatches_accumulated_in_bfloat16():
    """What one rank's microbatches contribute is added in the compute dtype, and in fp32 only between ranks. The more
    a run accumulates, the less its last microbatches count."""
    return patch.object(FSDPParam, "to_accumulated_grad_if_needed", lambda parameter: None)


@mutant(Row(2, {TP: 2}), "block outputs", BLOCK, dims=("tp",), trial="bfloat16")
def norms_computed_in_bfloat16_on_one_rank():
    """One tensor-parallel rank squares and adds in bf16 before it takes the root, so that norms of its tokens are off
    in the third digit. The loss is as before within its noise."""
    original = torch.nn.RMSNorm.forward

    def coarse(norm, x):
        if dist.get_rank() == 0:
            return original(norm, x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight

    return patch.object(torch.nn.RMSNorm, "forward", coarse)


@mutant(
    Row(4, {"parallelism.context_parallel_degree": 4, **RING}), "block outputs", BLOCK, dims=("cp",), trial="bfloat16"
)
def attention_merged_in_bfloat16():
    """Around the ring the attention to each rank's keys is added to what there is, which is kept in bf16: rounded once
    for each rank instead of once. The longer the ring, the coarser."""
    original = context_attention.merge_into

    def coarse(out, lse, new_out, new_lse):
        original(out, lse, new_out, new_lse)
        out.copy_(out.bfloat16())

    return patch.object(context_attention, "merge_into", coarse)


@mutant(Row(2, {TP: 2, **CHUNKS}), "loss", ("loss", "sum_losses"), trial="bfloat16")
def softmax_normalised_in_bfloat16():
    """The logarithm of the sum over the vocabulary is exchanged in bf16: a loss of 11 is known to 0.03, and gradients
    of all logits of a token are too large or too small by as much."""
    original = vocabulary_parallel_loss.ShardedLoss.combine

    def coarse(loss, log_total, of_target):
        log_total, of_target = original(loss, log_total, of_target)
        return log_total.bfloat16().float(), of_target

    return patch.object(vocabulary_parallel_loss.ShardedLoss, "combine", coarse)


# ---------------------------------------------------------------- float8


@mutant(Row(4, {TP: 2, **GATHER}), "block outputs", BLOCK, trial="float8")
def scale_set_beside_the_weight():
    """Under TP the gathered weight is a DTensor, and the new scale is set on it instead of inside. Blocks multiply by
    new weights with the scale of the first step. The loss falls, and less and less."""
    original = float8.TravellingWeight.after_gather

    def beside(weight, gathered, told, dtype, *, out=None):
        if out is None:
            return original(weight, gathered, told, dtype)
        (out.scale,) = told

    return patch.object(float8.TravellingWeight, "after_gather", beside)


@mutant(Row(2, GATHER), "block outputs", BLOCK, trial="float8")
def ranks_round_with_scales_of_their_own():
    """The largest weight is looked for among a rank's own rows. Each rank then takes all rows to be rounded as its own
    were: rows from other ranks are some percent too large or too small, differently on each rank."""
    alone = SimpleNamespace(all_reduce=lambda *args, **options: None, ReduceOp=dist.ReduceOp)
    return patch.object(float8, "dist", alone)


@mutant(Row(2, PRECOMPUTE), "block outputs", BLOCK, trial="float8")
def scales_of_the_step_before():
    """Scales are computed before the optimizer step. Nothing is seen while weights shrink; where they grow, the largest
    are cut off."""
    original = step.sum_losses

    @contextmanager
    def applied():
        with (
            patch.object(step, "precompute_scales", lambda *args: None),
            patch.object(step, "sum_losses", too_early),
        ):
            yield

    def too_early(run, local_loss):
        float8.precompute_scales(run.float8_weights, run.mesh.parameters)
        return original(run, local_loss)

    return applied()


@mutant(Row(2, GATHER), "block outputs", BLOCK, trial="float8")
def weights_travel_unscaled():
    """Weights of about 0.02 are rounded as they are: to where float8 has a step of 0.002."""
    return patch.object(float8, "choose_scale", lambda amax, dtype: torch.ones_like(amax))


# ---------------------------------------------------------------- updates

# Warm-up, peak and decay all differ, and the decay ends above zero.
RATES = {
    "lr_scheduler.warmup_steps": 3,
    "lr_scheduler.decay_ratio": 0.5,
    "lr_scheduler.min_lr_factor": 0.1,
    "training.steps": 30,
}
ADAMW_WITH_RATES = {**ADAMW, **RATES}
MOMENTS_IN_BFLOAT16 = {**ADAMW_WITH_RATES, "optimizer.moments_dtype": "bfloat16"}
FIRST = "tok_embeddings.weight"


def change_optimizer(change: Callable) -> AbstractContextManager:
    """`change(optimizer)` right after a run has built it."""
    original = step.build_optimizer

    def build(section, parameters):
        optimizer = original(section, parameters)
        change(optimizer)
        return optimizer

    return patch.object(step, "build_optimizer", build)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@mutant("tp2", "clipping", ("clipping", "clip_grad_norm"), trial="updates")
def small_gradients_are_scaled_up():
    """Gradients below the threshold are brought up to it, because nothing keeps the factor at most 1. The loss falls,
    faster at first; toward the end of training, where gradients are small, it is noisy and nobody knows why."""
    original = step.clip_grad_norm

    def unclamped(parameters, max_norm):
        parameters = list(parameters)
        norm = original(parameters, max_norm)
        if norm < max_norm:
            for parameter in parameters:
                local_of(parameter.grad).mul_(max_norm / (norm + 1e-6))
        return norm

    return patch.object(step, "clip_grad_norm", unclamped)


@mutant("dp2", "clipping", ("clipping", "clip_grad_norm"), dims=("dp_shard",), trial="updates")
def one_rank_clips_only_very_large_gradients():
    """To save a pass over its slices, one rank clips them only where the norm is far above the threshold. Most batches
    train rightly; in the others some slices take longer steps than the rest."""
    original = step.clip_grad_norm

    def only_far_above(parameters, max_norm):
        parameters = list(parameters)
        before = [local_of(parameter.grad).clone() for parameter in parameters]
        norm = original(parameters, max_norm)
        if norm < 2.5 * max_norm and dist.get_rank() == 0:
            for parameter, old in zip(parameters, before, strict=True):
                local_of(parameter.grad).copy_(old)
        return norm

    return patch.object(step, "clip_grad_norm", only_far_above)


@mutant(
    Row(2, {TP: 2, **ADAMW_WITH_RATES}),
    "replicas",
    ("update", "layers.0.attention_norm.weight"),
    dims=("tp",),
    trial="updates",
)
def norms_decay_on_one_tp_rank():
    """One tensor-parallel rank's AdamW spares its norm weights the weight decay. Copies drift apart slowly, and
    gradients are right in every step; a checkpoint holds whichever copy is saved."""

    def exempt_norms(optimizer):
        if dist.get_rank() == 1 and isinstance(optimizer, torch.optim.AdamW):
            (group,) = optimizer.param_groups
            norms = [parameter for parameter in group["params"] if parameter.dim() == 1]
            group["params"] = [parameter for parameter in group["params"] if parameter.dim() > 1]
            optimizer.add_param_group({"params": norms, "weight_decay": 0.0})

    return change_optimizer(exempt_norms)


@mutant(Row(2, ADAMW_WITH_RATES), "moments", ("moments", FIRST), dims=("dp_shard",), trial="updates")
def another_beta_on_one_rank():
    """One host reads an older config: its slices of all weights forget the second moment twenty times as slowly. The
    loss falls a little less."""

    def remember_longer(optimizer):
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["betas"] = (0.9, 0.9975)

    return change_optimizer(remember_longer)


@mutant(Row(2, {PP: 2, **RATES}), "learning_rate", ("learning rate", "lr_scheduler"), dims=("pp",), trial="updates")
def schedule_stepped_on_the_first_stage_only():
    """Later stages stay at the learning rate of the first step. The logged rate, that of rank 0, is right."""
    original = step.build_lr_scheduler

    def build(section, optimizer):
        scheduler = original(section, optimizer)
        if dist.get_rank() == 1:
            scheduler.step = lambda: None
        return scheduler

    return patch.object(step, "build_lr_scheduler", build)


@mutant(Row(2, RATES), "learning_rate", ("learning rate", "lr_scheduler"), trial="updates")
def decay_ends_at_zero():
    """min_lr_factor is not read: the end of training is spent with a rate of nearly zero."""
    original = optim.learning_rate_factor
    return patch.object(
        optim, "learning_rate_factor", lambda section, at: original(replace(section, min_lr_factor=0.0), at)
    )


@mutant(Row(2, {PP: 2}), "non_finite", ("non-finite step", "step_if_finite"), dims=("pp",), trial="updates")
def each_stage_judges_for_itself_what_is_finite():
    """A stage whose own gradients are finite steps, while the one that met a NaN does not. The model is then one of two
    steps, and a checkpoint holds both."""
    original = step.step_if_finite

    def judge_own(optimizer, grad_norm):
        gradients = [local_of(p.grad) for group in optimizer.param_groups for p in group["params"]]
        return original(optimizer, torch.stack([gradient.norm() for gradient in gradients]).norm())

    return patch.object(step, "step_if_finite", judge_own)


@mutant(Row(2, ADAMW_WITH_RATES), "non_finite", ("non-finite step", "step_if_finite"), trial="updates")
def infinity_counts_as_finite():
    """Only NaN is looked for. An overflow passes, AdamW divides infinity by infinity, and all weights with such a
    gradient are NaN from the next step on."""

    def unless_nan(optimizer, grad_norm):
        return original(optimizer, torch.where(grad_norm.isnan(), grad_norm, 1.0))

    original = step.step_if_finite
    return patch.object(step, "step_if_finite", unless_nan)


@mutant(Row(2, {TP: 2, **ADAMW_WITH_RATES}), "non_finite", ("non-finite step", "step_if_finite"), trial="updates")
def moments_move_in_a_step_that_is_not_finite():
    """Weights are left alone, but moments forget a part of what they held, as after a gradient of zero. Runs that skip
    such a step and go on are a little off, and the same run without it is never made."""
    original = step.step_if_finite

    def forgetful(optimizer, grad_norm):
        finite = original(optimizer, grad_norm)
        if not finite:
            for state in optimizer.state.values():
                local_of(state["exp_avg"]).mul_(0.9)
        return finite

    return patch.object(step, "step_if_finite", forgetful)


@mutant(Row(2, ADAMW_WITH_RATES), "moments", ("moments", FIRST), trial="updates")
def adam_instead_of_adamw():
    """Weight decay is added to the gradient, which the second moment then divides away: it hardly decays anything. The
    loss of the training data is lower, that of other data is not."""

    def build(parameters, section, implementation):
        betas = (section.beta1, section.beta2)
        options = {"eps": section.eps, "weight_decay": section.weight_decay, **implementation}
        return torch.optim.Adam(parameters, section.lr, betas, **options)

    return patch.dict(optim.OPTIMIZERS, {"AdamW": build})


@mutant(Row(2, {TP: 2, **ADAMW_WITH_RATES}), "update", ("update", FIRST), trial="updates")
def decay_without_the_learning_rate():
    """Each step takes the same share off each weight, in the warm-up and at the end too. Norms of weights shrink; the
    loss follows late."""
    original = step.step_if_finite

    def decay_fully(optimizer, grad_norm):
        (group,) = optimizer.param_groups
        if grad_norm.isfinite():
            for parameter in group["params"]:
                by_rate = 1 - group["lr"] * group["weight_decay"]
                local_of(parameter.detach()).mul_((1 - group["initial_lr"] * group["weight_decay"]) / by_rate)
        return original(optimizer, grad_norm)

    return patch.object(step, "step_if_finite", decay_fully)


@mutant(Row(2, {PP: 2, **ADAMW_WITH_RATES}), "update", ("update", "layers.2.attention_norm.weight"), trial="updates")
def steps_counted_twice_on_the_last_stage():
    """The moments of one stage are taken for those of a later step and corrected too little for their start. The first
    hundred steps of that stage are shorter or longer than they should be."""
    original = step.step_if_finite

    def count_on(optimizer, grad_norm):
        finite = original(optimizer, grad_norm)
        if dist.get_rank() == 1 and finite:
            for state in optimizer.state.values():
                state["step"] += 1
        return finite

    return patch.object(step, "step_if_finite", count_on)


@mutant(Row(2, {PP: 2, **ADAMW_WITH_RATES}), "moments", ("moments", FIRST), trial="updates")
def second_moment_of_gradients_clipped_by_stage():
    """The first moment gets gradients clipped by the norm of the model, the second one gradients clipped by the norm of
    the stage. Steps are too short where gradients are cut, and right where they are not."""
    original = step.step_if_finite

    def clip_again(optimizer, grad_norm):
        (group,) = optimizer.param_groups
        states = {parameter: state for parameter, state in optimizer.state.items() if "exp_avg_sq" in state}
        before = {parameter: local_of(state["exp_avg_sq"]).clone() for parameter, state in states.items()}
        left = torch.stack([local_of(parameter.grad).norm() for parameter in group["params"]]).norm()
        finite = original(optimizer, grad_norm)
        if finite and grad_norm > 0.5 and "betas" in group:  # max_norm of the table
            for parameter in group["params"]:
                second = local_of(optimizer.state[parameter]["exp_avg_sq"])
                kept = group["betas"][1] * before.get(parameter, torch.zeros_like(second))
                second.copy_(kept + (second - kept) * (0.5 / left) ** 2)
        return finite

    return patch.object(step, "step_if_finite", clip_again)


@mutant(Row(2, {TP: 2, **ADAMW_WITH_RATES}), "update", ("update", FIRST), trial="updates")
def eps_inside_the_root():
    """eps is added to the second moment before its root is taken. Weights with large gradients do not notice; those of
    rare tokens, whose gradients are as small as eps, stand still."""

    class Inside(torch.optim.AdamW):
        @torch.no_grad()
        def step(self):
            before = [local_of(p).clone() for group in self.param_groups for p in group["params"]]
            super().step()
            if getattr(self, "found_inf", 0.0) > 0:
                return
            for group in self.param_groups:
                for p, old in zip(group["params"], before, strict=True):
                    state, t = self.state[p], self.state[p]["step"]
                    first = local_of(state["exp_avg"]) / (1 - group["betas"][0] ** t)
                    second = local_of(state["exp_avg_sq"]) / (1 - group["betas"][1] ** t)
                    shrunk = old * (1 - group["lr"] * group["weight_decay"])
                    local_of(p).copy_(shrunk - group["lr"] * first / (second + group["eps"]).sqrt())

    return patch.object(optim, "AdamW", Inside)


@mutant(Row(2, MOMENTS_IN_BFLOAT16), "moments", ("moments", FIRST), trial="updates")
def moments_cut_instead_of_rounded():
    """The lower half of the bits of each moment is dropped, so that it moves toward zero. It shrinks by 0.3 % in each
    step, and remembers ten: steps are a few percent off."""
    original = torch.Tensor.copy_

    def cut(target, source, *args, **options):
        if target.dtype == torch.bfloat16 and source.dtype == torch.float32:
            source = (source.contiguous().view(torch.int32) & -65536).view(torch.float32)
        return original(target, source, *args, **options)

    return patch.object(torch.Tensor, "copy_", cut)


@mutant(Row(2, {TP: 2, **MOMENTS_IN_BFLOAT16}), "update", ("update", FIRST), trial="updates")
def weights_moved_by_rounded_moments():
    """Moments are rounded to bf16 before the weight takes its step instead of after. The moments of the next step are
    the same; weights are off by a third of a percent of each update."""

    def move(lists: list, moments: list, step_list: list, *, weight_decay, eps, lr, beta1, beta2, found_inf=None, **_):
        (weight,), (gradient,) = lists
        if found_inf is not None and found_inf > 0:
            return
        (first,), (second,), (n,) = *moments, step_list
        n += 1
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrected = first.bfloat16().float() / (1 - beta1**n), second.bfloat16().float() / (1 - beta2**n)
        weight.mul_(1 - lr * weight_decay).sub_(lr * corrected[0] / (corrected[1].sqrt() + eps))

    def adamw(weights, gradients, firsts, seconds, _, steps, **options):
        move([weights, gradients], [firsts, seconds], steps, **options)

    return patch.object(adamw_bfloat16, "adamw", adamw)


# ---------------------------------------------------------------- wide: pieces, positions, masks, small errors


@mutant(Row(2, CP2), "gradient", ("pieces", "tokens"))
def wrong_zig_zag_pieces():
    """Each context-parallel rank takes one half of a sequence, while attention takes it for head and tail of a zig-zag.
    Tokens of the first half see tokens of the second: the loss is a little too good."""

    def contiguous(whole, mesh):
        return whole.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]

    return patch.object(step, "shard_sequence", contiguous)


@mutant("tp2", "gradient", ("module output", "layers.0.feed_forward.w1"))
def small_error_from_layer_0():
    """One matrix of the first layer is 0.1 % too large on one tensor-parallel rank. No curve shows it, and all that
    later layers compute is a little wrong."""
    original = tensor_parallel.apply_tensor_parallel

    def slightly_off(part, mesh, plan):
        original(part, mesh, plan)
        if mesh.get_local_rank() == 1:
            part.layers["0"].feed_forward.w1.register_forward_hook(lambda module, args, output: output * 1.001)

    return patch.object(parallelize, "apply_tensor_parallel", slightly_off)


@mutant("tp2", "gradient", ("module output", "layers.0"))
def residual_scaled_from_layer_0():
    """Each block adds 0.1 % too much of its feed-forward part. Every single module is right; the error grows with
    depth, and is larger than rounding in the third layer only."""

    def scaled(block, x, rotation, doc_ids=None):
        x = x + block.attention(block.attention_norm(x), rotation, doc_ids)
        return x + 1.001 * block.feed_forward(block.ffn_norm(x))

    return patch.object(llama3.TransformerBlock, "forward", scaled)


@mutant(Row(2, CP2), "gradient", ("rotary angles", "layers.0"))
def angles_in_bfloat16():
    """Rotary angles are computed in bf16, which has 8 bits: neighbouring tokens further on stand at the same place.
    Short sequences hardly show it."""
    original = llama3.rotary_angles

    def rounded(positions, shape):
        return original(positions, shape).bfloat16().float()

    return patch.object(llama3, "rotary_angles", rounded)


@mutant(Row(2, {PP: 2, **DOCUMENTS}), "gradient", ("positions", "layers.2"))
def later_stages_count_as_another_row():
    """Later stages get the positions of the row before. They restart where that row's documents begin, so that tokens
    of one document seem to be far apart, or at the same place."""
    original = step.further_inputs

    def counted_elsewhere(batch):
        positions = batch.positions.roll(1, 0) if dist.get_rank() == 1 else batch.positions
        return {**original(batch), "positions": positions}

    return patch.object(step, "further_inputs", counted_elsewhere)


@mutant(Row(2, {**CP2, **DOCUMENTS}), "gradient", ("documents", "tok_embeddings"))
def documents_of_another_row():
    """Rows get the documents of their neighbours: attention stops where another row's documents end. Every loss is
    plausible."""
    original = step.further_inputs

    def rolled(batch):
        return {**original(batch), "doc_ids": batch.doc_ids.roll(1, 0)}

    return patch.object(step, "further_inputs", rolled)


@mutant("tp2", "gradient", ("module output", "layers.0.attention"))
def keys_not_turned_on_one_rank():
    """The heads of one tensor-parallel rank rotate their queries and not their keys. Those heads learn to do without
    positions, and the loss is a little higher."""
    original = llama3.rotate
    calls = iter(range(1 << 30))

    def queries_only(x, rotation):
        is_key = next(calls) % 2 == 1
        return x if is_key and dist.get_rank() == 1 else original(x, rotation)

    return patch.object(llama3, "rotate", queries_only)


# ---------------------------------------------------------------- wrong only beyond a depth, a length, a size, a count

LONG = {"training.seq_len": 2048}
BEYOND_TWO_BYTES = {"model.vocab_size": 2**17}
WIDE_FFN = {"model.dim": 1024, "model.ffn_dim": 8192}


@mutant("accumulation 2", "gradient", ("microbatches", "tok_embeddings"))
def third_accumulation_step_dropped():
    """Two accumulation steps are right, and of more the third is skipped: rows that are read and never learned from."""
    original = step.Batch.split

    def without_third(batch, n):
        micros = original(batch, n)
        return micros[:2] + micros[3:]

    return patch.object(step.Batch, "split", without_third)


@mutant("one rank", "weight", ("updated weights", "layers.0.attention.wo.weight"))
def small_gradients_scaled_up():
    """Clipping lacks its limit of 1, so that gradients below max_norm are made as long as it. With AdamW nothing shows,
    for it divides by the length; with SGD the run does not settle."""
    original = step.clip_grad_norm

    def scaled(parameters, max_norm):
        parameters = list(parameters)
        norm = original(parameters, max_norm)
        if norm < max_norm:
            torch._foreach_mul_([parameter.grad for parameter in parameters], max_norm / norm)
        return norm

    return patch.object(step, "clip_grad_norm", scaled)


@mutant(Row(4, {CP: 4, **RING, SHARD: 1}), "gradient", ("module output", "layers.0.attention.inner"))
def ring_right_for_two_ranks_only():
    """Each rank takes what comes after the first round for keys of a later rank. Two ranks have one round, so the test
    of the ring passes; four ranks leave out a part of the sequence."""
    original = context_attention.visible_of_one

    def of_two(rank, source, half):
        return original(rank, source if abs(rank - source) == 1 else rank + 1, half)

    return patch.object(context_attention, "visible_of_one", of_two)


@mutant("pp2 1F1B", "gradient", ("module input", "layers.6"), trial="deep")
def layers_in_the_order_of_text():
    """A stage sorts its layers by name: 1, 10, 11, 2. Up to ten layers all is right, and with more the model is another
    one than the one that is generated with. The loss curve is as good as ever."""
    original = step.apply_stage

    def sorted_by_name(model, fqns):
        part = original(model, fqns)
        part.layers = torch.nn.ModuleDict(dict(sorted(part.layers.items())))
        return part

    return patch.object(step, "apply_stage", sorted_by_name)


@mutant("dp2", "initial", ("initial weights", "layers.10.attention.wq.weight"), trial="deep", cause="the rule of the")
def layer_numbers_of_one_digit():
    """The seed of a layer's weights is made of the first digit of its number, so that layers 10 to 19 are born as
    copies of layer 1. The run trains; a part of its depth is worth little at first."""
    original = initial_weights.seed_of

    def by_first_digit(seed, fqn):
        head, _, rest = fqn.partition("layers.")
        number, dot, name = rest.partition(".")
        return original(seed, f"{head}layers.{number[0]}{dot}{name}" if rest else fqn)

    return patch.object(initial_weights, "seed_of", by_first_digit)


@mutant("dp2", "gradient", ("gradient", "layers.11.feed_forward.w2.weight"), trial="deep")
def layers_beyond_the_tenth_averaged():
    """A pattern with room for one digit finds the layers whose gradients are to be summed; the others keep FSDP's mean.
    Deep layers learn from half of their gradient, which AdamW hides."""
    original = parallelize.apply_fsdp

    def one_digit(part, mesh, **options):
        original(part, mesh, **options)
        for layer, block in part.layers.items():
            if len(layer) > 1:
                block.set_gradient_divide_factor(float(mesh.size()))

    return patch.object(parallelize, "apply_fsdp", one_digit)


@mutant("one rank", "grad_norm", ("gradient norm", "clip_grad_norm"), trial="deep")
def norm_of_the_first_hundred_tensors():
    """The norm is taken of a list that was cut for a kernel with a limit. Small models have fewer tensors; large ones
    are clipped too late."""
    original = optim.sum_squares
    return patch.object(optim, "sum_squares", lambda tensors: original(tensors[:100]))


@mutant("tp2", "clipping", ("clipping", "clip_grad_norm"), trial="deep")
def first_forty_tensors_clipped():
    """Gradients are scaled in one call that takes so many tensors at most. The norm in the log is right, and the layers
    at the end are never clipped."""
    original = optim.torch._foreach_mul_
    return patch.object(optim.torch, "_foreach_mul_", lambda tensors, scale: original(tensors[:40], scale))


@mutant(Row(2, {CP: 2, **LONG}), "gradient", ("positions", "take_pieces"), trial="long")
def positions_of_cp_pieces_rounded():
    """Positions go through bf16 on their way to a context-parallel rank: right up to 256, then every second one, then
    every fourth. The loss is a little higher, and long texts are read as if words stood on each other."""
    original = step.take_pieces

    def rounded(run, batch):
        pieces = original(run, batch)
        return replace(pieces, positions=pieces.positions.bfloat16().long())

    return patch.object(step, "take_pieces", rounded)


@mutant(Row(1, {"model.rope_scaling": "llama3", **LONG}), "gradient", ("rotary angles", "layers.0"), trial="long")
def positions_end_at_original_length():
    """A table of rotary angles has original_length rows, and what lies behind takes the last one. Everything is right
    until the context is extended, which is what the stretched wavelengths are for."""
    original = llama3.rotary_angles
    return patch.object(llama3, "rotary_angles", lambda positions, shape: original(positions.clamp(max=8191), shape))


@mutant(Row(2, {CP: 2, **DOCUMENTS, **LONG}), "gradient", ("module output", "layers.0.attention.inner"), trial="long")
def documents_numbered_in_a_byte():
    """Document numbers are kept in eight bits to save memory, so that document 256 sees document 0. In rows with many
    short documents answers leak from one into another."""
    original = context_parallel.attend_within_documents

    def modulo(query, key, value, doc_ids, **places):
        return original(query, key, value, doc_ids % 256, **places)

    return patch.object(context_parallel, "attend_within_documents", modulo)


@mutant(Row(1, {**LONG, CHUNK: 512}), "loss", ("module output", "output"), trial="long")
def loss_of_the_first_eight_chunks():
    """Chunks of the loss are counted in three bits. Short rows have fewer; of long ones the end is never learned from,
    and since easy tokens are missing too, the loss looks right."""
    original = chunked_loss.ChunkedLoss.differentiate

    def first_eight(loss, logits, targets, *, with_gradient):
        loss.n_seen = getattr(loss, "n_seen", 0) + 1
        result, gradient = original(loss, logits, targets, with_gradient=with_gradient)
        return (result, gradient) if loss.n_seen <= 8 else (result * 0, gradient * 0)

    return patch.object(chunked_loss.ChunkedLoss, "differentiate", first_eight)


@mutant(Row(2, WIDE_FFN), "grad_norm", ("gradient norm", "clip_grad_norm"), trial="real width")
def norm_added_up_in_fp32():
    """torch's vector norm on a CPU adds fp32 numbers one after another: the larger a slice, the more is lost of what
    comes late. The norm depends on the layout, and with it the clipping."""

    def in_order(tensors):
        return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).double().square().sum()

    return patch.object(optim, "sum_squares", in_order)


@mutant(Row(2, {TP: 2, **CHUNKS, **BEYOND_TWO_BYTES}), "loss", ("module output", "output"), trial="real width")
def vocabulary_offset_in_two_bytes():
    """The first token id of a rank's share of the vocabulary is computed in 16 bits and wraps. Each rank takes targets
    for its own that are not: small vocabularies are right."""
    original = chunked_loss.ChunkedLoss.differentiate

    def wrapped(loss, logits, targets, **options):
        offset = loss.share * logits.shape[1]
        wrong = (offset + 2**15) % 2**16 - 2**15
        counted = targets != IGNORE_INDEX
        return original(loss, logits, torch.where(counted, targets + offset - wrong, targets), **options)

    return patch.object(chunked_loss.ChunkedLoss, "differentiate", wrapped)


@mutant(
    Row(2, BEYOND_TWO_BYTES),
    "initial",
    ("initial weights", "tok_embeddings.weight"),
    trial="real width",
    cause="the rule",
)
def first_two_million_numbers_copied():
    """Initial weights are copied in one call with a limit on its size. The rest of a large matrix stays as it was
    allocated: zeros, mostly."""
    original = initial_weights.keep_own_slice

    def first_numbers(parameter, full):
        original(parameter, full)
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own.flatten()[2**21 :].zero_()

    return patch.object(initial_weights, "keep_own_slice", first_numbers)


# ---------------------------------------------------------------- train.py

in_train_py = partial(mutant, trial="train.py")


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


@in_train_py("pp2 1F1B", "learning rate", ("learning rate", "lr_scheduler"), dims=("dp_shard",))
def only_rank_0_resumes_its_schedule():
    """The rank that reads the manifest sets its learning rate, the others begin their warm-up again. Logged is the one
    of rank 0, which is right."""
    original = loading.set_step
    return patch.object(loading, "set_step", lambda *args: original(*args) if dist.get_rank() == 0 else None)


@in_train_py("one rank", "learning rate", ("learning rate", "lr_scheduler"))
def schedule_forgotten_by_a_resume():
    """Each resume begins with warm-up and peak again; the loss jumps up a little, as it may for other reasons."""
    return patch.object(loading, "set_step", lambda lr_scheduler, step: None)


@in_train_py("one rank", "learning rate", ("learning rate", "lr_scheduler"))
def schedule_as_long_as_this_start():
    """lr_scheduler.total_steps gives way to training.steps: who prolongs a run has another course of the learning rate
    than was asked for."""
    original = preflight.resolve_config

    def shortened(config, layout, device_type):
        config = original(config, layout, device_type)
        section = replace(config.lr_scheduler, total_steps=config.training.steps, decay_ratio=None, warmup_steps=0)
        return replace(config, lr_scheduler=section)

    return patch.object(preflight, "resolve_config", shortened)


@in_train_py(Row(2, ADAMW), "resumed state", ("resume", "tok_embeddings.weight"))
def moments_forgotten_by_a_resume():
    """Weights alone are loaded. AdamW begins with moments of zero and the step count of a new run: a small bump in the
    loss after each restart."""
    return patch.object(loading, "name_tensors", lambda parameters, optimizer: name_weights(parameters))


@in_train_py("tp2", "resumed state", ("resume", "tok_embeddings.weight"))
def checkpoints_rounded_to_bfloat16():
    """Weights are saved in half of the space. Every resume loses what learned slowly; no curve shows it."""
    original = exchange.name_tensors

    def rounded(parameters, optimizer):
        return {name: tensor.bfloat16().float() for name, tensor in original(parameters, optimizer).items()}

    return patch.object(exchange, "name_tensors", rounded)


@in_train_py("dp2", "validation", ("validation loss", "validate"))
def validation_counts_padding():
    """Padding counts in the denominator of the validation loss: the fewer held-out documents, the better it looks."""
    return patch.object(validation, "IGNORE_INDEX", -1)


@in_train_py("dp2", "validation", ("validation loss", "validate"), dims=("dp_shard",))
def validation_of_one_rank():
    """Each rank has the validation loss of its own rows, and rank 0 logs it: it depends on the layout, and on who got
    the padding."""
    return patch.object(validation, "dist", SimpleNamespace(all_reduce=lambda tensor, group: None))


@in_train_py("one rank", "validation", ("validation loss", "validate"))
def validation_on_training_documents():
    """What is validated on was trained on: overfitting is never seen."""
    return train_py_with('config.training.dataset, "held_out")', 'config.training.dataset, "train")')


@in_train_py("pp2 GPipe", "validation", ("validation loss", "validate"))
def last_held_out_batch_left_out():
    """The incomplete batch at the end is dropped, as data loaders do by default: the loss is that of other documents
    whenever the batch size changes."""
    return train_py_with("range(held_out.n_batches)", "range(held_out.n_batches - 1)")


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


@in_train_py("dp2", "loss", ("loss", "train_step"))
def validation_moves_the_weights():
    """A validation that steps: the held-out documents are trained on, a little, at each validation."""
    original = validation.validate

    def nudging(run, *args):
        validated = original(run, *args)
        for parameter in run.parameters.values():
            parameter.data.mul_(0.999)
        return validated

    return patch.object(validation, "validate", nudging)
