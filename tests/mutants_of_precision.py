"""Mutants that round otherwise: bfloat16 and float8."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts import CHUNKS, GATHER, PRECOMPUTE, TP, Row
from mutant_table import CP2, RING, mutant
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from torchtitan_lite import step
from torchtitan_lite.parallel import (
    context_parallel,
    float8,
    fsdp,
    parallelize,
    tensor_parallel,
)

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
    original = step.shard_for_cp

    def rounded(run, batch):
        pieces = original(run, batch)
        return replace(pieces, positions=pieces.positions.bfloat16().long())

    return patch.object(step, "shard_for_cp", rounded)


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
    original = context_parallel.merge_into

    def coarse(out, lse, new_out, new_lse):
        original(out, lse, new_out, new_lse)
        out.copy_(out.bfloat16())

    return patch.object(context_parallel, "merge_into", coarse)


@mutant(Row(2, {TP: 2, **CHUNKS}), "loss", ("loss", "sum_losses"), trial="bfloat16")
def softmax_normalised_in_bfloat16():
    """The logarithm of the sum over the vocabulary is exchanged in bf16: a loss of 11 is known to 0.03, and gradients
    of all logits of a token are too large or too small by as much."""
    original = tensor_parallel.ShardedLoss.combine

    def coarse(loss, log_total, of_target):
        log_total, of_target = original(loss, log_total, of_target)
        return log_total.bfloat16().float(), of_target

    return patch.object(tensor_parallel.ShardedLoss, "combine", coarse)


# ---------------------------------------------------------------- float8


@mutant(Row(4, {TP: 2, **GATHER}), "block outputs", BLOCK, trial="float8")
def scale_set_beside_the_weight():
    """Under TP the gathered weight is a DTensor, and the new scale is set on it instead of inside. Blocks multiply by
    new weights with the scale of the first step. The loss falls, and less and less."""
    original = float8.Float8AllGatherHook.post_all_gather

    def beside(weight, gathered, told, dtype, *, out=None):
        if out is None:
            return original(weight, gathered, told, dtype)
        (out.scale,) = told

    return patch.object(float8.Float8AllGatherHook, "post_all_gather", beside)


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
        float8.precompute_scales(run.float8_weights, run.mesh.fsdp_mesh)
        return original(run, local_loss)

    return applied()


@mutant(Row(2, GATHER), "block outputs", BLOCK, trial="float8")
def weights_travel_unscaled():
    """Weights of about 0.02 are rounded as they are: to where float8 has a step of 0.002."""
    return patch.object(float8, "choose_scale", lambda amax, dtype: torch.ones_like(amax))
