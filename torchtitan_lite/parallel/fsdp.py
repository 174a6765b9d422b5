"""Fully sharded data parallel: every rank keeps 1/n of each parameter, gradient and optimizer state (drawn for n=2).

    wq.weight (H*E, D)    rank 0               rank 1
    at rest               rows [:H*E/2]        rows [H*E/2:]         Shard(0), fp32
    while its block runs  all rows, compute dtype (bf16)             all-gather just before, freed just after
    its gradient          of rank 0's tokens   of rank 1's tokens    reduce-scatter: sums, keeps the own rows, fp32

Traffic per block, P = bytes of its parameters in compute dtype; each gather or reduce-scatter moves P(n-1)/n per rank.
They are prefetched and hide behind the neighboring block's compute if that takes longer: in forward because the host
queues the next gather while the device still computes, in backward by torch, one group ahead. More could help only
where the host is the slower of the two. What stays sharded between the microbatches of a step is the ZeRO stage; with m
microbatches, per block and step:

    zero_stage   parameters        gradients         all-gathers   reduce-scatters   under PP
    3            sharded           sharded           2m            m                 about m and 1: see below
    2            whole in a step   sharded           1             m                 refused
    1            whole in a step   whole in a step   1             1                 1 and 1

The optimizer state is always sharded. Under PP torch's runtime reduces gradients once per step; with 3 it frees the
parameters after each forward, not after each backward. The head is kept from its forward to its backward. An
embedding is gathered in forward only, unless it is tied to the head.
A 2-D mesh (replicate, shard) adds one all-reduce of the local shard's gradients over `replicate` per block and step
(HSDP). With a shard dim of 1 that is plain data parallel (DDP).

With training.enable_cpu_offload the sharded tensors and the optimizer are in host memory: each gather starts with a
copy of the local shard to the GPU, 4 bytes per parameter, and each reduce-scatter ends with a copy back. Gradients are
clipped on the host too, by collectives of CPU tensors: the process groups then have gloo as well as NCCL.

With TP below, rows are split twice: tp rank t holds block t of the rows, and of that dp rank s holds slice s. DTensor
prints the data-parallel dim as `_StridedShard`: in the order of the mesh (shard, tp) the rows of a rank are strided.

An MoE layer is a group of its own, over efsdp (expert_parallel.py), gathered with its block.

Sources: ZeRO arXiv:1910.02054; FSDP arXiv:2304.11277; HSDP: MiCS arXiv:2205.00119.
Effect: parameters are DTensors over fsdp_mesh (x tp); FQNs do not change. Applied even if nothing is sharded, so that
mixed precision means the same everywhere; left out only if a rank has its stage alone and computes in fp32.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from torchtitan_lite.config.block import find_expert_dim
from torchtitan_lite.model.moe import MoE, list_moes


def plan_fsdp_groups(part: nn.Module) -> list[list[nn.Module]]:
    """List the groups of modules that are gathered together, in forward order."""
    first = [part.tok_embeddings] if part.tok_embeddings is not None else []
    last = [part.norm, part.output] if part.output is not None else []
    blocks = [[block] for block in part.layers.values()]
    if first and last and part.model_args.tie_embeddings:  # one matrix can only be in one group
        return [*blocks, first + last]
    return [group for group in ([first] + blocks + [last]) if group]


def apply_fsdp(
    part: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    zero_stage: int,
    offload: bool = False,
    expert_mesh: DeviceMesh | None = None,
    ep: int = 1,
) -> None:
    """Shard `part` (on meta) over `mesh`, group by group, and the experts of `ep` ranks over `expert_mesh`.

    `offload`: keep the shards on the host (see above).

    Gradients are summed, not averaged: each loss is already divided by the tokens of the whole global batch.
    """
    # Inputs are not cast: hidden states have the compute dtype already, and rotary angles must stay in fp32.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    shard = partial(fully_shard, mp_policy=policy, offload_policy=offload_policy)
    moes = [moe for _, moe in list_moes(part)]
    for moe in moes:
        # 64 ranks cannot share 8 experts equally. In that case every matrix is sharded instead.
        dim = find_expert_dim(part.model_args, ep, expert_mesh.size(expert_mesh.ndim - 1))
        shard(
            moe,
            mesh=expert_mesh,
            reshard_after_forward=zero_stage == 3,
            shard_placement_fn=lambda weight, dim=dim: Shard(dim if weight.dim() == 3 else 0),
        )
    shard = partial(shard, mesh=mesh)
    groups = plan_fsdp_groups(part)
    for group in groups:
        # The head's backward follows its forward at once: freeing it between would gather it twice in a row.
        reshard = zero_stage == 3 and part.output not in group
        shard(group, reshard_after_forward=reshard)
    if [part.tok_embeddings] in groups:  # not tied to the head
        part.tok_embeddings.set_unshard_in_backward(False)  # the backward of an embedding reads no weight
    shard(part, reshard_after_forward=zero_stage == 3)
    if moes:
        plan_prefetch(list(part.layers.values()))
    for module in part.modules():
        of_module = expert_mesh if module in moes else mesh
        if isinstance(module, FSDPModule) and of_module.size() > 1:  # one rank would divide by 1, in a new tensor
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum; gloo has no other way to a factor of 1


def plan_prefetch(blocks: list[nn.Module]) -> None:
    """Let each block gather its MoE layer, and the block that comes next, before it computes.

    torch itself gathers a group when the host gets there, and the host waits in the midst of each MoE layer
    (expert_parallel.py). What is gathered does not change.
    """
    groups = [[block, block.feed_forward] if isinstance(block.feed_forward, MoE) else [block] for block in blocks]
    for before, (block, *moe), after in zip([[], *groups], groups, [*groups[1:], []], strict=False):
        if moe or after:
            block.set_modules_to_forward_prefetch([*moe, *after[:1]])
        if moe or before:
            block.set_modules_to_backward_prefetch([*moe, *before])


def prepare_microbatch(part: nn.Module, *, zero_stage: int, is_last: bool) -> None:
    """Set, before a microbatch, what its backward reshards. Not under PP: torch's runtime has its own rule."""
    if not isinstance(part, FSDPModule):
        return  # one rank, which has everything at hand
    part.set_reshard_after_backward(is_last or zero_stage == 3)
    part.set_requires_gradient_sync(is_last or zero_stage > 1)
    part.set_requires_all_reduce(is_last)  # over replicas once per step, also where the shards are reduced each time


def free_gathered(part: nn.Module) -> None:
    """Free parameters that a forward without backward left gathered; the next forward gathers them again.

    It also clears the order of that forward, by which the next backward would prefetch a group that it does not need.
    """
    if isinstance(part, FSDPModule) and hasattr(part, "reset_iter_state"):
        part.reset_iter_state()
        return
    for module in part.modules():  # an older torch, which prefetches it
        if isinstance(module, FSDPModule):
            module.reshard()
