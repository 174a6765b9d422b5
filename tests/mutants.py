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
from layouts import ADAMW, CHUNKS, GATHER, LAYOUTS, MODE, PP, PRECOMPUTE, SCHEDULE, TP, ZERO, Row
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lite import layout, preflight, step, validation
from torchtitan_lite.components import optim
from torchtitan_lite.components.checkpoint import exchange, loading
from torchtitan_lite.components.checkpoint.state import name_weights
from torchtitan_lite.model import llama3
from torchtitan_lite.model.head import count_valid_tokens
from torchtitan_lite.parallel import (
    activation_checkpoint,
    context_attention,
    float8,
    fsdp,
    initial_weights,
    parallelize,
    pipeline,
    tensor_parallel,
    vocabulary_parallel_loss,
)
from torchtitan_lite.tools import train_start

CP2 = {"parallelism.context_parallel_degree": 2}
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


@mutant(Row(2, CP2), "gradient", ("module output", "layers.0.attention.inner"))
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


@mutant(Row(2, {PP: 2, **DOCUMENTS}), "loss", ("module output", "layers.2.attention.inner"))
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


@mutant("pp2 1F1B", "loss", ("module output", "layers.2.attention_norm"))
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
    ("gradient", "layers.3.feed_forward.w2.weight"),
    cause="a split backward with resharding",
)
def refused_combination_run():
    """A fork takes a row out of the table of refused combinations. Loss and gradient norm look plausible; gradients of
    weights are computed after their parameters were freed."""
    return patch.object(layout, "find_refused", lambda *args: [])


# ---------------------------------------------------------------- float8

# Name -> (layout, patch). Float8 rounds more coarsely than `verify` tolerates, so these are caught by comparing the
# weights that blocks multiply by with the trained ones: tests/test_float8.py.
FLOAT8_MUTANTS: dict[str, tuple[Row, Callable]] = {}


def float8_mutant(row: Row):
    def add(function: Callable) -> Callable:
        FLOAT8_MUTANTS[function.__name__] = (row, function)
        return function

    return add


@float8_mutant(Row(4, {TP: 2, **GATHER}))
def scale_set_beside_the_weight():
    """Under TP the gathered weight is a DTensor, and the new scale is set on it instead of inside. Blocks multiply by
    new weights with the scale of the first step. The loss falls, and less and less."""
    original = float8.TravellingWeight.after_gather

    def beside(weight, gathered, told, dtype, *, out=None):
        if out is None:
            return original(weight, gathered, told, dtype)
        (out.scale,) = told

    return patch.object(float8.TravellingWeight, "after_gather", beside)


@float8_mutant(Row(2, GATHER))
def ranks_round_with_scales_of_their_own():
    """The largest weight is looked for among a rank's own rows. Each rank then takes all rows to be rounded as its own
    were: rows from other ranks are some percent too large or too small, differently on each rank."""
    return patch.object(float8.dist, "all_reduce", lambda *args, **kwargs: None)


@float8_mutant(Row(2, PRECOMPUTE))
def scales_of_the_step_before():
    """Scales are computed before the optimizer step. Nothing is seen while weights shrink; where they grow, the largest
    are cut off."""
    original = step.step_if_finite

    def too_early(optimizer, grad_norm):
        original_scales(*late)
        return original(optimizer, grad_norm)

    late: list = []
    original_scales = step.precompute_scales

    def remember(*args):
        late[:] = args

    @contextmanager
    def applied():
        late[:] = ([], None)
        with patch.object(step, "step_if_finite", too_early), patch.object(step, "precompute_scales", remember):
            yield

    return applied()


@float8_mutant(Row(2, GATHER))
def weights_travel_unscaled():
    """Weights of about 0.02 are rounded as they are: to where float8 has a step of 0.002."""
    return patch.object(float8, "choose_scale", lambda amax, dtype: torch.ones_like(amax))


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
