"""Mutants that round to bfloat16 or float8 where they must not."""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch.distributed as dist
from mutant_table import mutant
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from torchtitan_lite import step
from torchtitan_lite.extensions import float8_all_gather
from torchtitan_lite.parallel import fsdp, parallelize, pipeline


@mutant("dp2", "reduced in float32", "FSDP", at=(parallelize, "apply_fsdp"), trial="bfloat16")
def gradients_reduced_in_bfloat16(apply, part, mesh, expert_mesh, section, layout):
    """FSDP adds the gradients of the ranks in the compute dtype instead of fp32."""
    apply(part, mesh, expert_mesh, replace(section, mixed_precision_reduce="bfloat16"), layout)


@mutant(
    "one rank", "rotary angles", "layers.0", at=(fsdp, "MixedPrecisionPolicy"), trial="bfloat16"
)
def rotary_angles_cast_to_bfloat16(make_policy, **options):
    """By default, FSDP casts all inputs of a block, including the cosines and sines of the positions."""
    return make_policy(**{**options, "cast_forward_inputs": True})


@mutant("dp2 accumulation 4 ZeRO-1", "gradients", "output.weight", trial="bfloat16")
def microbatches_accumulated_in_bfloat16():
    """The gradients of one rank's microbatches are added in the compute dtype. Only sums over ranks are in fp32."""
    return patch.object(FSDPParam, "to_accumulated_grad_if_needed", lambda parameter: None)


@mutant(
    "4 | PP=2 TP=2 SCHEDULE=InterleavedZeroBubble MODE=none",
    "sum of microbatches",
    "layers.1.feed_forward.w3.weight",
    at=(pipeline, "accumulate_weight_gradients"),
    trial="bfloat16",
)
def weight_halves_added_in_bfloat16_under_tp(accumulate, part):
    """If backward is split into an input half and a weight half, torch accumulates weight gradients in the compute
    dtype. Under tp, a comparison with one rank cannot find this bug."""


# ---------------------------------------------------------------- float8

PrecomputedScales = float8_all_gather.PrecomputedScales


@mutant("2 | GATHER ADAMW", "loss", "reduce_scalars", trial="float8")
def ranks_round_with_scales_of_their_own():
    """Each rank computes the scale from the largest weight of its own rows only."""
    alone = SimpleNamespace(all_reduce=lambda *args, **options: None, ReduceOp=dist.ReduceOp)
    return patch.object(float8_all_gather, "dist", alone)


@mutant("2 | PRECOMPUTE", "scales", "precompute_scales", trial="float8")
def scales_of_the_step_before():
    """Scales are computed before the optimizer step, so they belong to the previous weights."""
    original = step.compute_gradients
    compute = PrecomputedScales.__call__

    def compute_too_early(run, batch):
        local_loss = original(run, batch)
        for scales in run.after_update:
            compute(scales)
        return local_loss

    patches = ExitStack()
    patches.enter_context(patch.object(PrecomputedScales, "__call__", lambda scales: None))
    patches.enter_context(patch.object(step, "compute_gradients", compute_too_early))
    return patches
