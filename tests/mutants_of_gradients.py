"""Mutants that the wide trial sees: norm, loss, gradients, pieces, positions, masks."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import CHUNKS, COMPILED, DOCUMENTS, MODE, PP, RING, SCHEDULE, TP, TWO_LAYERS, ZERO, Row
from mutant_table import CP2, HEAD, HEAD_GRADIENT, INNER, NORM, mutant
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lite import step
from torchtitan_lite.components import optim
from torchtitan_lite.config import layout
from torchtitan_lite.model import llama3
from torchtitan_lite.model.head import count_valid_tokens
from torchtitan_lite.parallel import (
    activation_checkpoint,
    exchange,
    fsdp,
    initial_weights,
    parallelize,
    pipeline,
    ring_attention,
    tensor_parallel,
)


@mutant("pp2 1F1B", "grad_norm", NORM, dims=("pp",))
def clip_norm_forgets_pp():
    """Each stage clips by the norm of its own gradients. The loss falls; deep stages just learn at another rate."""
    return patch.object(optim, "dist", SimpleNamespace(all_reduce=lambda tensor: None))


@mutant("tp2", "grad_norm", NORM, at=(optim, "count_copies"))
def norm_counts_every_copy(original, tensor):
    """What several ranks hold, norm weights under tp, counts once on each of them. Clipping sets in a little too early,
    and earlier the more ranks there are."""
    return 1


@mutant(
    "tp2",
    "initial",
    ("initial weights", "tok_embeddings.weight"),
    cause="the rule of the initial weights",
    at=(initial_weights, "copy_local_shard"),
)
def ranks_drawn_alike(original, parameter, full):
    """Every rank draws its own slice from the same seed, so the slices are copies: half of the heads are one
    head twice. Training works, and the model is worth one of half the width."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    local = parameter.to_local()
    local.copy_(full.flatten()[: local.numel()].view_as(local))


@mutant(
    "dp2", "gradient", ("counted tokens", "count_global_tokens"), dims=("dp_shard",), at=(step, "count_global_tokens")
)
def loss_averaged_per_rank(original, run, batch):
    """Each rank divides by its own number of tokens, and the ranks are averaged. Tokens on ranks with much padding
    count for more. The loss curve looks as always."""
    return (count_valid_tokens(batch.targets) * run.layout.dp).clamp(min=1)


@mutant("dp4", "gradient", HEAD_GRADIENT, at=(fsdp.FSDPModule, "set_gradient_divide_factor"))
def gradients_averaged_instead_of_summed(original, module, factor):
    """FSDP's default divides by the number of ranks, after the loss was already divided by all tokens. AdamW hides the
    constant factor; only the gradient norm, and so the clipping, depends on the number of ranks."""
    return None


@mutant("accumulation 2", "gradient", ("microbatches", "tok_embeddings"), at=(step.Batch, "split"))
def last_microbatch_dropped(original, batch, n):
    """An off-by-one in the accumulation loop: a part of every batch is never learned from. Throughput looks better."""
    return original(batch, n)[: n - 1] if n > 1 else [batch]


@mutant("pp2 GPipe", "gradient", HEAD_GRADIENT)
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


@mutant("pp2 1F1B", "loss", ("loss", "sum_losses"), dims=("pp",), at=(step, "sum_losses"))
def loss_not_summed_over_pp(original, run, local_loss):
    """Rank 0 holds no head and logs a loss of zero, or each stage logs its own idea of it."""
    return local_loss.clone()


@mutant("one rank", "gradient", ("counted tokens", "count_global_tokens"), at=(step, "count_valid_tokens"))
def masked_targets_counted(original, targets):
    """Padding counts in the denominator: batches with much padding weigh too little, on every layout alike."""
    return torch.tensor(targets.numel())


@mutant("tp2", "gradient", ("gradient", "norm.weight"), at=(exchange.Gather, "backward"))
def gathered_sequence_keeps_its_own_gradient(original, ctx, grad):
    """What was gathered is read by every tensor-parallel rank, and each forms a part of its gradient; backward keeps
    the own part instead of adding them up. Loss and head are right, everything below learns from a half."""
    return grad.chunk(ctx.ranks.n, dim=1)[ctx.ranks.own], None, None


@mutant(
    Row(2, {TP: 2, **COMPILED, **TWO_LAYERS}),
    "loss",
    ("module output", "tok_embeddings"),
    at=(exchange, "reduce_scatter"),
)
def partial_sums_averaged(original, whole, ranks, dim):
    """Partial sums are averaged, as gradients of replicas are. The loss falls, with a residual stream of half the
    size."""
    return original(whole, ranks, dim) / ranks.n


@mutant("ddp2", "gradient", HEAD_GRADIENT, dims=("dp_replicate",), at=(parallelize, "apply_fsdp"))
def replicas_not_reduced(original, part, mesh, **options):
    """The all-reduce over dp_replicate is left out: every replica learns from its own data and they drift apart. The
    logged loss is their mean and falls nicely; a checkpoint holds one of them."""
    original(part, mesh[mesh.mesh_dim_names[-1]], **options)


@mutant(
    "full recompute",
    "gradient",
    ("gradient", "layers.3.feed_forward.w2.weight"),
    at=(activation_checkpoint, "recomputed"),
)
def recompute_forgets_an_input(original, forward, **options):
    """The recomputed block sees positions that start elsewhere: forward and loss are right, gradients are not."""
    calls = iter(range(1 << 30))

    def drifting(x, rotation, doc_ids):
        return forward(x, rotation if next(calls) % 2 == 0 else rotation.roll(1, dims=1), doc_ids)

    return original(drifting, **options)


@mutant(Row(2, {**CP2, **RING}), "gradient", INNER, at=(ring_attention, "visible_of_one"))
def zig_zag_forgotten(original, rank, source, half):
    """The ring reckons as if all that an earlier rank holds came earlier, while the pieces lie head and tail. Some
    tokens see their future: the loss is a little too good, and generation is poor."""
    return (slice(None), slice(None)) if source < rank else original(rank, source, half)


@mutant(Row(2, CP2), "gradient", ("positions", "shard_for_cp"), at=(step, "shard_for_cp"))
def positions_not_sharded(original, run, batch):
    """Each context-parallel rank counts the positions of its tokens from 0. The model learns to read the folded
    sequence, with a slightly higher loss, and fails at inference, where sequences are not folded."""
    pieces = original(run, batch)
    return replace(pieces, positions=batch.positions[:, : pieces.tokens.shape[1]])


@mutant(Row(2, CP2), "gradient", HEAD_GRADIENT, at=(fsdp.FSDPModule, "set_gradient_divide_factor"))
def gradients_averaged_over_cp(original, module, factor):
    """Context-parallel ranks share a sequence, so their gradients are shares of a sum; averaging them halves all.
    AdamW hides it, but for clipping, which then comes too late."""
    original(module, 2.0)


@mutant(Row(2, {PP: 2, **DOCUMENTS}), "loss", ("documents", "layers.2"), at=(llama3.Llama3, "forward"))
def documents_lost_after_the_first_stage(original, part, x, *, positions, doc_ids=None, targets=None):
    """Later stages are not told where documents begin, so that half of the layers attend across borders. The loss is a
    little lower or higher; answers leak from one document into the next."""
    if part.tok_embeddings is None:
        doc_ids = torch.zeros_like(doc_ids)
    return original(part, x, positions=positions, doc_ids=doc_ids, targets=targets)


@mutant("dp2 tied", "gradient", ("gradient", "tok_embeddings.weight"), at=(step, "forward_backward"))
def tied_gradient_counted_twice(original, run, batch, n_tokens):
    """The shared matrix is listed as embedding and as head, and each adds the whole gradient. Loss and all other
    gradients are right; the embedding just learns twice as fast."""
    loss = original(run, batch, n_tokens)
    run.parameters["tok_embeddings.weight"].grad.mul_(2)
    return loss


@mutant("tp2", "replicas", ("replicas", "layers.0.attention_norm.weight"), dims=("tp",), at=(step, "update_weights"))
def norm_updated_on_one_rank_only(original, optimizer, grad_norm, max_norm):
    """Norm weights are copied on each tensor-parallel rank, and one rank forgets to step them. Every gradient of the
    first step is right. The copies drift apart, and a checkpoint holds whichever is saved."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.dim() == 1]
    before = [parameter.to_local().detach().clone() for parameter in parameters]
    finite = original(optimizer, grad_norm, max_norm)
    if dist.get_rank() == 1:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.to_local().detach().copy_(old)
    return finite


@mutant("tp2", "loss", HEAD, at=(tensor_parallel.SplitHead, "compute"))
def loss_counted_by_every_tp_rank(original, style, module, ranks, *inputs):
    """All tensor-parallel ranks hold the same loss and it is added up over them. The logged loss is twice what it is,
    which looks like a bad start; gradients are too."""
    return original(style, module, ranks, *inputs) * ranks.n


@mutant("tp2", "loss", INNER, at=(llama3.F, "scaled_dot_product_attention"))
def causal_mask_lost_on_one_rank(original, query, key, value, *, is_causal, enable_gqa):
    """Half of the heads, those of one rank, see the future. The loss falls wonderfully, to near zero in the end."""
    return original(query, key, value, is_causal=is_causal and dist.get_rank() == 0, enable_gqa=enable_gqa)


@mutant("pp2 1F1B", "loss", ("module input", "layers.2"), at=(llama3.Llama3, "forward"))
def hidden_states_rounded_between_stages(original, part, x, **inputs):
    """Hidden states travel in bf16 while the model computes in fp32. Every curve looks right, one digit too coarse."""
    hidden = original(part, x, **inputs)
    return hidden if part.output is not None else hidden.bfloat16().float()


@mutant(
    "pp2 1F1B",
    "initial",
    ("initial weights", "layers.2.attention.wq.weight"),
    cause="the rule of the initial",
    at=(initial_weights, "seed_of"),
)
def stages_number_their_layers_from_zero(original, seed, fqn):
    """Each stage draws its layers by their place in the stage, so that layer 2 is born a copy of layer 0. The run
    trains; it only differs from the same run on other layouts, which nobody compares."""
    later = {"layers.2.": "layers.0.", "layers.3.": "layers.1."}
    return original(seed, later.get(fqn[:9], fqn[:9]) + fqn[9:])


@mutant(
    Row(4, {PP: 2, SCHEDULE: "DualPipeV", ZERO: 3, MODE: "none"}),
    "gradient",
    ("gradient", "layers.4.feed_forward.w2.weight"),
    cause="a split backward with resharding",
    at=(layout, "find_refused"),
)
def refused_combination_run(original, *args):
    """A fork takes a row out of the table of refused combinations. Loss and gradient norm look plausible; gradients of
    weights are computed after their parameters were freed."""
    return []


@mutant(Row(2, {TP: 2, **CHUNKS}), "loss", HEAD, at=(tensor_parallel.ShardedLoss, "combine"))
def softmax_over_a_share_of_the_vocabulary(original, loss, log_total, of_target):
    """Each tensor-parallel rank normalises over its own tokens of the vocabulary only. The loss starts at the logarithm
    of half of the vocabulary and falls; the model never learns to choose between the halves."""
    return log_total, original(loss, log_total, of_target)[1]


@mutant("tp2", "gradient", ("gradient", "norm.weight"), dims=("tp",))
def norm_gradient_of_own_tokens():
    """Each tensor-parallel rank has a norm weight's gradient of its own tokens, and nobody adds them: the copies get
    other updates and drift apart."""
    return patch.object(tensor_parallel, "Partial", Replicate)


@mutant(
    Row(2, {TP: 2, "flavor.norm_eps": 1e-6}),
    "gradient",
    ("module output", "layers.0.attention_norm"),
    at=(F, "rms_norm"),
)
def norm_with_an_eps_of_its_own(original, x, shape, weight, eps):
    """Under tensor parallelism a norm is computed without the eps of the model, by torch's own default. Tokens with
    small embeddings are normed a little more; on one device, in generation, the model is another one."""
    return original(x, shape, weight)


@mutant(Row(1, CHUNKS), "gradient", HEAD_GRADIENT, at=(torch.Tensor, "addmm_"))
def gradients_of_the_last_chunk_kept(original, total, one, other):
    """The head's gradient is overwritten by every chunk instead of added up. Loss and all other gradients are right;
    the head just learns from a few tokens of each batch."""
    return total.copy_(one @ other)


@mutant(Row(2, CP2), "gradient", ("pieces", "tokens"), at=(step, "shard_sequence"))
def wrong_zig_zag_pieces(original, whole, mesh):
    """Each context-parallel rank takes one half of a sequence, while attention takes it for head and tail of a zig-zag.
    Tokens of the first half see tokens of the second: the loss is a little too good."""
    return whole.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


@mutant("tp2", "gradient", ("module output", "layers.0.feed_forward.w1"), at=(parallelize, "apply_tensor_parallel"))
def small_error_from_layer_0(original, part, mesh, plan):
    """One matrix of the first layer is 0.1 % too large on one tensor-parallel rank. No curve shows it, and all that
    later layers compute is a little wrong."""
    original(part, mesh, plan)
    if mesh.get_local_rank() == 1:
        part.layers["0"].feed_forward.w1.register_forward_hook(lambda module, args, output: output * 1.001)


@mutant("tp2", "gradient", ("module output", "layers.0"), at=(llama3.TransformerBlock, "forward"))
def residual_scaled_from_layer_0(original, block, x, rotation, doc_ids=None):
    """Each block adds 0.1 % too much of its feed-forward part. Every single module is right; the error grows with
    depth, and is larger than rounding in the third layer only."""
    x = x + block.attention(block.attention_norm(x), rotation, doc_ids)
    return x + 1.001 * block.feed_forward(block.ffn_norm(x))


@mutant(Row(2, CP2), "gradient", ("rotary angles", "layers.0"), at=(llama3, "rotary_angles"))
def angles_in_bfloat16(original, positions, shape):
    """Rotary angles are computed in bf16, which has 8 bits: neighbouring tokens further on stand at the same place.
    Short sequences hardly show it."""
    return original(positions, shape).bfloat16().float()


@mutant(Row(2, {PP: 2, **DOCUMENTS}), "gradient", ("positions", "layers.2"), at=(step, "stage_kwargs"))
def later_stages_count_as_another_row(original, batch):
    """Later stages get the positions of the row before. They restart where that row's documents begin, so that tokens
    of one document seem to be far apart, or at the same place."""
    positions = batch.positions.roll(1, 0) if dist.get_rank() == 1 else batch.positions
    return {**original(batch), "positions": positions}


@mutant(Row(2, {**CP2, **DOCUMENTS}), "gradient", ("documents", "tok_embeddings"), at=(step, "stage_kwargs"))
def documents_of_another_row(original, batch):
    """Rows get the documents of their neighbours: attention stops where another row's documents end. Every loss is
    plausible."""
    return {**original(batch), "doc_ids": batch.doc_ids.roll(1, 0)}


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
