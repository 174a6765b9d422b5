"""Fully sharded data parallel: every rank keeps 1/n of each parameter, gradient and optimizer state (drawn for n=2).

    wq.weight (H*E, D)    rank 0               rank 1
    at rest               rows [:H*E/2]        rows [H*E/2:]         Shard(0), fp32
    while its block runs  all rows, compute dtype (bf16)             all-gather just before, freed just after
    its gradient          of rank 0's tokens   of rank 1's tokens    reduce-scatter: sums, keeps the own rows, fp32

Traffic per block, P = bytes of its parameters in compute dtype: one all-gather in forward, one in backward (none with
reshard_after_forward off), one reduce-scatter of the gradients in backward, each P(n-1)/n per rank. All three are
prefetched and hide behind the neighbouring block's compute if that takes longer. A 2-D mesh (replicate, shard) adds an
all-reduce of the own rows' gradients over `replicate` (HSDP); with a shard dim of 1 that is plain data parallel.

With TP below, rows are split twice: tp rank t holds block t of the rows, and of that dp rank s holds slice s. DTensor
prints the data-parallel dim as `_StridedShard`: in the order of the mesh (shard, tp) the rows of a rank are strided.

Sources: ZeRO arXiv:1910.02054; FSDP arXiv:2304.11277; HSDP: MiCS arXiv:2205.00119.
Effect: parameters are DTensors over `parameters` (x tp); FQNs do not change. Applied on one rank too, so that mixed
precision means the same everywhere.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def plan_fsdp_groups(part: nn.Module) -> list[list[nn.Module]]:
    """Modules whose parameters travel together, in forward order: the unit of all-gather and reduce-scatter."""
    first = [part.tok_embeddings] if part.tok_embeddings is not None else []
    last = [part.norm, part.output] if part.output is not None else []
    blocks = [[block] for block in part.layers.values()]
    if first and last and part.shape.tie_embeddings:  # one matrix can only be in one group
        return [*blocks, first + last]
    return [group for group in ([first] + blocks + [last]) if group]


def apply_fsdp(
    part: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shards `part` (on meta) over `mesh`, group by group.

    Gradients are summed, not averaged: each loss is already divided by the tokens of the whole global batch.
    """
    # Inputs are not cast: hidden states have the compute dtype already, and rotary angles must stay in fp32.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    groups = plan_fsdp_groups(part)
    for group in groups:
        # The head's backward follows its forward at once: freeing it between would gather it twice in a row.
        reshard = reshard_after_forward and part.output not in group
        fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum; gloo has no other way to a factor of 1
