"""Fully sharded data parallel: every rank stores 1/n of each parameter, gradient and optimizer state (drawn for n=2).

    wq.weight (H*E, D)    rank 0               rank 1
    sharded               rows [:H*E/2]        rows [H*E/2:]         Shard(0), fp32
    unsharded             all rows, compute dtype (bf16)             all-gathered before its block, freed after it
    its gradient          for rank 0's tokens  for rank 1's tokens   reduce-scatter: sums, keeps local rows, fp32

Traffic per block, P = bytes of its parameters in compute dtype: each all-gather or reduce-scatter moves P(n-1)/n per
rank. Prefetching overlaps this traffic with the compute of the neighboring block. If the compute takes longer than the
traffic, no rank waits for the traffic. In forward, the host queues the next all-gather while the device still computes;
in backward, torch prefetches one group ahead. Prefetching more than one group would help only if the host were slower
than the device. The ZeRO stage determines which tensors stay sharded between the microbatches of a step. With m
microbatches, each block runs this many collectives per step:

    zero_stage   parameters        gradients         all-gathers   reduce-scatters   these two under PP
    3            sharded           sharded           2m            m                 about m, 1 (see below)
    2            unsharded         sharded           1             m                 not supported
    1            unsharded         unsharded         1             1                 1, 1

The optimizer state is always sharded. Under PP, torch's pipeline runtime reduces gradients once per step; with ZeRO
stage 3, parameters are resharded after each forward, but not after each backward. The head is not resharded between its
forward and its backward. An embedding is all-gathered in forward only, unless it is tied to the head. Under PP, with
fp32 and ZeRO stage 1, each model part is a single FSDP group (gathers_whole_parts in config/layout.py). If nothing is
sharded, ZeRO stage 1 avoids copying the gradients of each microbatch. However, at the end of the step, the caching
allocator reserves memory for the gradients twice, once for each CUDA stream: 162 GiB instead of 135 for Llama 3.1 8B on
one GPU.

A 2-D mesh (replicate, shard) adds one all-reduce of the local shard's gradients over `replicate` per block and step
(HSDP). With a shard dim of size 1, this is plain data parallel (DDP).

With training.enable_cpu_offload, shards and optimizer state are in host memory. Each all-gather starts with a copy of
the local shard to the GPU, 4 bytes per parameter, and each reduce-scatter ends with a copy back. Gradients are also
clipped on the host, with collectives on CPU tensors, so the process groups use gloo as well as NCCL.

With TP, the rows of wq are split twice: tp rank t has block t of the rows, and dp rank s has slice s of this block.
DTensor prints the data-parallel dim as `_StridedShard`, because the mesh order is (shard, tp), but tp splits first.

An MoE layer is a separate FSDP group over efsdp (expert_parallel.py), which is prefetched before its block computes.

Sources: ZeRO arXiv:1910.02054; FSDP arXiv:2304.11277; HSDP: MiCS arXiv:2205.00119.
Effect: parameters are DTensors over fsdp_mesh, and also over tp if TP shards them; FQNs do not change. FSDP is applied
even if nothing is sharded, so that all layouts use the same mixed precision. The only exception is a pipeline stage
that runs on a single rank and computes in fp32.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from torchtitan_lite.config.block import list_added_ends
from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.layout import Layout, gathers_whole_parts
from torchtitan_lite.config.schema import Training
from torchtitan_lite.model.head import is_tied_inside
from torchtitan_lite.parallel.exchange import add_tokens, list_ranks


def plan_fsdp_groups(part: nn.Module) -> list[list[nn.Module]]:
    """List the groups of modules that FSDP all-gathers together, in forward order. The root contains all other modules.

    FSDP counts calls per group, so all modules of a group must be called equally often. If the model has additional
    modules outside the blocks, norm and head do not form a group, because the model may call the head twice, or call a
    module only in training.
    """
    blocks = [[block] for block in part.layers.values()]
    first = [part.tok_embeddings]
    last = [part.norm, part.output]
    is_usual = not list_added_ends(part.model_args)
    if not is_usual:
        last = [part.output]
    groups = [first, *blocks, last]
    if is_tied_inside(part):  # a shared matrix can be in only one group
        groups = [*blocks, first + last] if is_usual else blocks
    # a module on a different pipeline stage is None
    return [group for group in groups if None not in group]


def apply_fsdp(
    part: nn.Module,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    section: Training,
    layout: Layout,
) -> None:
    """Shard `part` (on meta) over `mesh`, group by group, and each ep rank's experts over `expert_mesh`.

    Gradients are summed, not averaged: each loss is already divided by the number of tokens in the global batch.
    """
    # Do not cast inputs: hidden states already have the compute dtype, and rotary angles must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, section.mixed_precision_param),
        reduce_dtype=getattr(torch, section.mixed_precision_reduce),
        cast_forward_inputs=False,
    )
    reshard = layout.zero_stage == 3
    usual: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard}
    if section.enable_cpu_offload:
        usual["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")

    def shard(group: list[nn.Module], mesh: DeviceMesh = mesh, **options) -> None:
        fully_shard(group, mesh=mesh, **usual | options)
        if mesh.size() > 1:  # with one rank, FSDP would only copy the gradient
            # Sum gradients without dividing them. The first call is not sufficient with gloo, so the second call is
            # needed too.
            group[0].set_gradient_divide_factor(1.0)
            group[0].set_force_sum_reduction_for_comms(True)

    if layout.ep:
        load_module("parallel.expert_parallel").shard_experts(part, layout, shard, expert_mesh)
    groups = []  # if there are no groups, the root all-gathers all modules at once
    if not gathers_whole_parts(layout, section.mixed_precision_param):
        groups = plan_fsdp_groups(part)
    for group in groups:
        # The head's backward directly follows its forward. Resharding the head between the two would only cause a
        # second all-gather.
        shard(group, reshard_after_forward=reshard and part.output not in group)
    # the backward of an untied embedding does not read the weight
    if [part.tok_embeddings] in groups:
        part.tok_embeddings.set_unshard_in_backward(False)
    shard([part])
    if layout.ep:
        load_module("parallel.expert_parallel").plan_prefetch(part)
    gather_plain(part)


def gather_plain(part: nn.Module) -> None:
    """Make FSDP unshard TP and EP parameters to plain tensors, not to DTensors. A module then reads its rank's shard
    over tp or ep.

    With DTensors, each read of a parameter, each gradient and each sum of gradients would take additional host time.
    Sharded parameters stay DTensors over both meshes. If tp or ep shards a parameter, its gradient is complete; if a
    parameter is replicated, its gradient covers only this rank's tokens.
    """
    for _, group in list_fsdp_groups(part):
        for parameter in group.fsdp_params:
            if parameter.is_dtensor:
                # torch 2.11 has only the name _tp_spec
                spec = getattr(parameter, "_unsharded_dtensor_spec", None) or parameter._tp_spec
                parameter.is_dtensor = False
                parameter._unsharded_dtensor_spec = None
                if not all(placement.is_shard() for placement in spec.placements):
                    # FSDP calls this before it reduces a gradient over data-parallel ranks
                    is_known = hasattr(parameter, "_get_grad_inner_tensor") and spec.is_replicated()
                    assert is_known, (
                        f"the gradient of {parameter} would not be summed over tp or ep"
                    )
                    parameter._get_grad_inner_tensor = partial(add_tokens, list_ranks(spec.mesh))


def list_fsdp_modules(part: nn.Module) -> list[FSDPModule]:
    return [module for module in part.modules() if isinstance(module, FSDPModule)]


def prepare_microbatch(part: nn.Module, *, zero_stage: int, is_last: bool) -> None:
    """Set whether FSDP reshards parameters and reduces gradients in the backward pass of a microbatch. Under PP,
    torch's pipeline runtime decides this."""
    if not isinstance(part, FSDPModule):
        return  # on a single rank, nothing is sharded
    part.set_reshard_after_backward(is_last or zero_stage == 3)
    part.set_requires_gradient_sync(is_last or zero_stage > 1)
    # All-reduce over replicas once per step, even if every microbatch reduce-scatters over shards.
    part.set_requires_all_reduce(is_last)


def accumulate_weight_gradients(part: nn.Module) -> None:
    """Add the weight gradients of a split backward to FSDP's accumulated gradients, which are in fp32 (the reduce
    dtype).

    Call this function after the weight half of a split backward. FSDP accumulates gradients in hooks on the gradients
    of module inputs, but these hooks do not run in the weight half. Without this function, torch 2.13 would sum these
    gradients in the compute dtype until the next hook. No communication.
    """
    for _, group in list_fsdp_groups(part):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "to_accumulated_grad_if_needed"):
                # first add to an existing sum, because the next line would replace this sum
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            # torch 2.15 has neither method, because its autograd adds gradients in the dtype of the reduction


def list_fsdp_groups(part: nn.Module) -> Iterator[tuple[FSDPModule, Any]]:
    """Yield each FSDP module that manages parameters, with its `FSDPParamGroup` (private in torch)."""
    for module in list_fsdp_modules(part):
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:  # None for a root whose parameters are all in other groups
            yield module, group


def free_gathered(part: nn.Module) -> None:
    """Reshard parameters that stayed unsharded after a forward without backward. The next forward all-gathers them
    again.

    Also clears the order of groups that FSDP recorded in this forward. Otherwise, the next backward would prefetch a
    group needlessly.
    """
    if isinstance(part, FSDPModule) and hasattr(part, "reset_iter_state"):
        part.reset_iter_state()
        return
    # older versions of torch cannot clear the order, so they prefetch a group needlessly
    for module in list_fsdp_modules(part):
        module.reshard()
