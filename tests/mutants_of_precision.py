"""Mutants that round otherwise: bfloat16 and float8."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import CHUNKS, CP, FAST, GATHER, PRECOMPUTE, RING, TP, Row
from mutant_table import CP2, mutant
from mutants_of_updates import in_place_of
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from torchtitan_lite import step
from torchtitan_lite.model.moe import MoE
from torchtitan_lite.parallel import float8, fsdp, parallelize, ring_attention, tensor_parallel

ANGLES, REDUCTION = ("rotary angles", "layers.0"), ("gradient reduction", "output.weight")
EXPERT_REDUCTION = ("gradient reduction", "layers.1.feed_forward.experts.w3")
BLOCK = ("module output", "layers.0")

# ---------------------------------------------------------------- bfloat16

in_bfloat16, replacing = partial(mutant, trial="bfloat16"), partial(in_place_of, trial="bfloat16")


@replacing(parallelize, "apply_fsdp", "dp2", "gradient reduction", REDUCTION)
def gradients_reduced_in_bfloat16(apply, part, mesh, **options):
    """FSDP adds the gradients of the ranks in the compute dtype. With two ranks nobody sees it; with a thousand, small
    gradients vanish beside the sum of the others."""
    apply(part, mesh, **{**options, "reduce_dtype": torch.bfloat16})


@in_bfloat16(FAST["experts, dp2"], "gradient reduction", EXPERT_REDUCTION)
def gradients_of_experts_reduced_in_bfloat16():
    """The MoE layer is sharded by a call of its own, which lacks the dtype of the reduction: its gradients are added in
    the compute dtype, and those of all else in fp32."""
    original = fsdp.fully_shard

    def shard(module, *, mp_policy, **options):
        if isinstance(module, MoE):
            mp_policy = replace(mp_policy, reduce_dtype=torch.bfloat16)
        return original(module, mp_policy=mp_policy, **options)

    return patch.object(fsdp, "fully_shard", shard)


@in_bfloat16(Row(4, {TP: 2}), "gradient reduction", REDUCTION)
def gradients_reduced_in_bfloat16_beside_tp():
    """The same beside tensor parallelism, whose partial sums are rounded too, rightly."""
    return gradients_reduced_in_bfloat16()


@replacing(fsdp, "MixedPrecisionPolicy", "one rank", "rotary angles", ANGLES)
def rotary_angles_cast_to_bfloat16(make_policy, **options):
    """FSDP casts what enters a block, as it does by default, and cosines and sines with it. Neighbouring tokens of a
    long text can no longer be told apart; short texts are read as ever."""
    return make_policy(**{**options, "cast_forward_inputs": True})


@in_bfloat16("tp2", "rotary angles", ANGLES)
def rotary_angles_cast_to_bfloat16_under_tp():
    """The same on ranks that share heads."""
    return rotary_angles_cast_to_bfloat16()


@replacing(step, "shard_for_cp", Row(2, CP2), "rotary angles", ANGLES)
def positions_rounded_to_bfloat16(shard, run, batch):
    """Positions travel as floating-point numbers and are rounded like those: from 256 on every second one is another,
    from 8,192 on each stands for 64. Models that were trained on short sequences notice nothing."""
    pieces = shard(run, batch)
    return replace(pieces, positions=pieces.positions.bfloat16().long())


@in_bfloat16("dp2 accumulation 4 ZeRO-1", "gradient reduction", REDUCTION)
def microbatches_accumulated_in_bfloat16():
    """What one rank's microbatches contribute is added in the compute dtype, and in fp32 only between ranks. The more
    a run accumulates, the less its last microbatches count."""
    return patch.object(FSDPParam, "to_accumulated_grad_if_needed", lambda parameter: None)


@replacing(F, "rms_norm", Row(2, {TP: 2}), "block outputs", BLOCK, dims=("tp",))
def norms_computed_in_bfloat16_on_one_rank(normalize, x, shape, weight, eps):
    """One tensor-parallel rank squares and adds in bf16 before it takes the root, so that norms of its tokens are off
    in the third digit. The loss is as before within its noise."""
    if dist.get_rank() == 0:
        return normalize(x, shape, weight, eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@replacing(ring_attention, "merge_into", Row(4, {CP: 4, **RING}), "block outputs", BLOCK)
def attention_merged_in_bfloat16(merge, out, lse, new_out, new_lse):
    """Around the ring the attention to each rank's keys is added to what there is, which is kept in bf16: rounded once
    for each rank instead of once. The longer the ring, the coarser."""
    merge(out, lse, new_out, new_lse)
    out.copy_(out.bfloat16())


@replacing(tensor_parallel.ShardedLoss, "combine", Row(2, {TP: 2, **CHUNKS}), "loss", ("loss", "sum_losses"))
def softmax_normalised_in_bfloat16(combine, loss, log_total, of_target):
    """The logarithm of the sum over the vocabulary is exchanged in bf16: a loss of 11 is known to 0.03, and gradients
    of all logits of a token are too large or too small by as much."""
    log_total, of_target = combine(loss, log_total, of_target)
    return log_total.bfloat16().float(), of_target


# ---------------------------------------------------------------- float8

in_float8 = partial(mutant, trial="float8")
AllGatherHook = float8.Float8AllGatherHook


@in_place_of(AllGatherHook, "post_all_gather", Row(4, {TP: 2, **GATHER}), "block outputs", BLOCK, trial="float8")
def scale_set_beside_the_weight(post_all_gather, weight, gathered, told, dtype, *, out=None):
    """Under TP the gathered weight is a DTensor, and the new scale is set on it instead of inside. Blocks multiply by
    new weights with the scale of the first step. The loss falls, and less and less."""
    if out is None:
        return post_all_gather(weight, gathered, told, dtype)
    (out.scale,) = told


@in_float8(Row(2, GATHER), "block outputs", BLOCK)
def ranks_round_with_scales_of_their_own():
    """The largest weight is looked for among a rank's own rows. Each rank then takes all rows to be rounded as its own
    were: rows from other ranks are some percent too large or too small, differently on each rank."""
    alone = SimpleNamespace(all_reduce=lambda *args, **options: None, ReduceOp=dist.ReduceOp)
    return patch.object(float8, "dist", alone)


@in_float8(Row(2, PRECOMPUTE), "block outputs", BLOCK)
def scales_of_the_step_before():
    """Scales are computed before the optimizer step. Nothing is seen while weights shrink; where they grow, the largest
    are cut off."""
    original = step.sum_losses

    def compute_too_early(run, local_loss):
        float8.precompute_scales(run.float8_weights, run.mesh.fsdp_mesh)
        return original(run, local_loss)

    patches = ExitStack()
    patches.enter_context(patch.object(step, "precompute_scales", lambda *args: None))
    patches.enter_context(patch.object(step, "sum_losses", compute_too_early))
    return patches


@in_float8(Row(2, GATHER), "block outputs", BLOCK)
def weights_travel_unscaled():
    """Weights of about 0.02 are rounded as they are: to where float8 has a step of 0.002."""
    return patch.object(float8, "choose_scale", lambda amax, dtype: torch.ones_like(amax))
