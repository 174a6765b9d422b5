"""Float8 on many ranks: local matmuls under TP, weights gathered in float8 under FSDP (drawn for dp_shard=2).

    wq.weight (N, K)   rank 0              rank 1
    at rest            rows [:N/2], fp32   rows [N/2:], fp32     for the optimizer and checkpoints
    all-reduce         max |w| over both, 4 bytes                both must round with the same scale
    all-gather         all rows in float8, one scale             N*K bytes, half as much as bf16
    in its block       all rows in float8                        already rounded, for forward and backward

Each weight needs this all-reduce when it is gathered. With precomputed scales, a single all-reduce after each optimizer
step covers all weights instead: 4 bytes per weight over dp_shard x cp.

Under TP each rank multiplies its local slices of x and w, and rounds each with its own scale, so no traffic is added.
(torch's DTensor does not support rowwise scales over gloo, and would all-reduce every maximum.)

Sources: TorchTitan arXiv:2410.06511; FSDP2's extension hooks, torch.distributed.fsdp.
Effect: linear layers of the plan become Float8Linear; FQNs, parameters and checkpoints do not change.
"""

from math import ceil, inf

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.block import list_linears, plan_float8
from torchtitan_lite.config.schema import Float8
from torchtitan_lite.model.float8_linear import (
    E4M3,
    Float8GatheredWeight,
    Float8Linear,
    cast,
    choose_scale,
    convert_to_float8,
)


def apply_float8(part: nn.Module, section: Float8, tp: int) -> None:
    """Make the linear layers that plan_float8 selects multiply in float8."""
    modules = dict(part.named_modules())
    sizes = list_linears(part.model_args)
    for fqn in plan_float8(sizes, section.filter_fqns, tp, section.recipe_name):
        linear = modules.get(fqn)
        if type(linear) is nn.Linear:  # None: it is on another stage
            convert_to_float8(linear, section.recipe_name, section.emulate)


# ---------------------------------------------------------------- weights gathered in float8


def gather_in_float8(parts: list[nn.Module], section: Float8) -> list["Float8AllGatherHook"]:
    """Make FSDP gather the weights of `parts` (allocated) in float8, if enabled. Return hooks with precomputed scales.

    A rank without FSDP (the only rank of its stage) gathers nothing, so its weights do not change.
    """
    if not section.enable_fsdp_float8_all_gather:
        return []
    hooks = []
    for module in nn.ModuleList(parts).modules():
        if isinstance(module, Float8Linear) and isinstance(module.weight, DTensor):
            # Not a view: FSDP2 looks for the two hooks on this very tensor.
            hook = Float8AllGatherHook(module.weight._local_tensor)
            hook.shard.fsdp_pre_all_gather = hook.pre_all_gather
            hook.shard.fsdp_post_all_gather = hook.post_all_gather
            hooks.append(hook)
    return hooks if section.precompute_float8_dynamic_scale_for_fsdp else []


@torch.no_grad()
def precompute_scales(hooks: list["Float8AllGatherHook"], mesh: DeviceMesh) -> None:
    """Compute the scales of all weights for the next step. All-reduces 4 bytes for each over dp_shard x cp."""
    if not hooks:
        return
    amax = torch.stack([find_amax(hook.shard) for hook in hooks])
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
    scales = choose_scale(amax, E4M3)
    for hook, scale in zip(hooks, scales, strict=True):
        hook.scale = scale


class Float8AllGatherHook:
    """This rank's rows of a weight, with the hooks that FSDP2 calls before and after the all-gather.

    It is not a tensor subclass, because the optimizer and checkpoints would have to support that.
    """

    def __init__(self, shard: Tensor):
        self.shard = shard
        self.scale: Tensor | None = None  # scale of the full weight, if precomputed

    def pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride,
        module,
        mp_policy,
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """FSDP2 hook before the all-gather. Returns (tensors to gather, metadata for the post hook)."""
        scale = self.scale
        if scale is None:
            amax = find_amax(self.shard)
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
            scale = choose_scale(amax, E4M3)
        data = cast(self.shard, scale, E4M3).view(torch.uint8)  # no backend gathers float8
        n_rows = ceil(outer_size[0] / mesh.size())  # the last ranks may have fewer
        data = F.pad(data, (0, 0, 0, n_rows - len(data)))
        return (data,), (scale,)

    def post_all_gather(
        self,
        gathered: tuple[Tensor],
        metadata: tuple[Tensor],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """FSDP2 hook after the all-gather. Returns the full weight. `out`: result of an earlier gather, to reuse."""
        (data,) = gathered
        (scale,) = metadata
        if scale.is_cuda:
            # Allocated on the all-gather's copy-in stream, read on the current stream.
            scale.record_stream(torch.cuda.current_stream())
        if out is None:
            data8 = data.view(E4M3)
            return Float8GatheredWeight(data8, scale, dtype), (data8,)
        if isinstance(out, DTensor):  # under TP; a scale of the DTensor itself would have no effect
            out = out._local_tensor
        out.scale = scale


def find_amax(shard: Tensor) -> Tensor:
    """Return the largest magnitude, () fp32; zero if the rank has no rows. Allocates no copy, unlike abs().amax()."""
    return torch.linalg.vector_norm(shard, inf) if len(shard) else shard.new_zeros(())
