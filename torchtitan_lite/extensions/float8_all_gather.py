"""Let FSDP all-gather the weights of float8 layers in float8 (drawn for dp_shard=2).

    wq.weight (N, K)   rank 0              rank 1
    sharded            rows [:N/2], fp32   rows [N/2:], fp32     for the optimizer and checkpoints
    all-reduce         max |w| over both ranks, 4 bytes          so that both round with the same scale
    all-gather         all rows in float8, one scale             N*K bytes, half as much as in bf16
    unsharded          all rows in float8                        forward and backward use the rounded values

By default, each all-gather of a weight needs an all-reduce of max |w|. With precomputed scales, a single all-reduce
over dp_shard x cp follows each optimizer step. This all-reduce has 4 bytes for each weight matrix.

Sources: TorchTitan arXiv:2410.06511; FSDP2's extension hooks, torch.distributed.fsdp.
Effect: FSDP all-gathers through hooks on the local shards. FQNs, parameters and checkpoints do not change.
"""

from collections.abc import Callable
from math import ceil, inf

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from torchtitan_lite.config.schema import Float8
from torchtitan_lite.model.float8_linear import E4M3, Float8Linear, cast, choose_scale

aten = torch.ops.aten


def gather_in_float8(
    parts: list[nn.Module], section: Float8, mesh: DeviceMesh
) -> list[Callable[[], None]]:
    """Make FSDP all-gather the weights of `parts` in float8. The parts must be allocated.

    Returns the functions to call after each optimizer step. If a pipeline stage has a single rank, FSDP does not shard
    the weights, so this function does not change them.
    """
    hooks = []
    for module in nn.ModuleList(parts).modules():
        if isinstance(module, Float8Linear) and isinstance(module.weight, DTensor):
            # FSDP2 looks for the two hooks on this tensor object, so a view of the tensor would not work.
            hook = Float8AllGatherHook(module.weight._local_tensor)
            hook.shard.fsdp_pre_all_gather = hook.pre_all_gather
            hook.shard.fsdp_post_all_gather = hook.post_all_gather
            hooks.append(hook)
    if not hooks or not section.precompute_float8_dynamic_scale_for_fsdp:
        return []
    return [PrecomputedScales(hooks, mesh)]


class PrecomputedScales:
    """Computes the scales of all weights for the next step. Call it after each step."""

    def __init__(self, hooks: list["Float8AllGatherHook"], mesh: DeviceMesh):
        self.hooks = hooks
        self.mesh = mesh

    @torch.no_grad()
    def __call__(self) -> None:
        """Compute all scales. All-reduces 4 bytes per weight over dp_shard x cp."""
        amax = torch.stack([find_amax(hook.shard) for hook in self.hooks])
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.mesh.get_group(self.mesh.ndim - 1))
        scales = choose_scale(amax, E4M3)
        for hook, scale in zip(self.hooks, scales, strict=True):
            hook.scale = scale


class Float8AllGatherHook:
    """This rank's rows of a weight, with the hooks that FSDP2 calls before and after the all-gather.

    This is not a tensor subclass, because the optimizer and checkpoints would have to support the subclass.
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
        """Return (tensors to all-gather, metadata for post_all_gather). FSDP2 calls this hook before the all-gather."""
        scale = self.scale
        if scale is None:
            amax = find_amax(self.shard)
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
            scale = choose_scale(amax, E4M3)
        data = cast(self.shard, scale, E4M3).view(torch.uint8)  # no backend all-gathers float8
        n_rows = ceil(outer_size[0] / mesh.size())  # the last ranks may have fewer than n_rows rows
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
        """Run after FSDP2's all-gather. Return the full weight, or reuse `out`, the result of an earlier all-gather."""
        (data,) = gathered
        (scale,) = metadata
        if scale.is_cuda:
            # The scale was allocated on the all-gather's copy-in stream, and is read on the current stream.
            scale.record_stream(torch.cuda.current_stream())
        if out is None:
            data8 = data.view(E4M3)
            return Float8GatheredWeight(data8, scale, dtype), (data8,)
        out.scale = scale


def find_amax(shard: Tensor) -> Tensor:
    """Return the largest magnitude, () fp32, or 0 if the shard has no rows. Unlike abs().amax(), this function
    allocates no copy."""
    return torch.linalg.vector_norm(shard, inf) if len(shard) else shard.new_zeros(())


VIEWS = (aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default)


class Float8GatheredWeight(Tensor):
    """A weight that FSDP all-gathered in float8. To FSDP and autograd, this weight and its gradient have the dtype
    `dtype`."""

    @staticmethod
    def __new__(cls, data8: Tensor, scale: Tensor, dtype: torch.dtype):
        return Tensor._make_wrapper_subclass(
            cls,
            data8.shape,
            strides=data8.stride(),
            dtype=dtype,
            device=data8.device,
        )

    def __init__(self, data8: Tensor, scale: Tensor, dtype: torch.dtype):
        self.data8 = data8
        self.scale = scale

    def to_dtype(self) -> Tensor:
        """Return the values in `dtype`, as a plain tensor."""
        return (self.data8.float() / self.scale).to(self.dtype)

    def __tensor_flatten__(self):
        return ["data8", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner, dtype, size, stride):
        return Float8GatheredWeight(inner["data8"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, op, types, args, kwargs=None):
        kwargs = kwargs or {}
        if op in VIEWS:
            weight, *others = args
            data8 = op(weight.data8, *others, **kwargs)
            view = Float8GatheredWeight(data8, weight.scale, weight.dtype)
            return return_and_correct_aliasing(op, args, kwargs, view)
        # Operators that are not in VIEWS, such as zeros_like for a gradient, receive a plain tensor with the values in
        # `dtype`.
        inputs = args, kwargs
        args, kwargs = pytree.tree_map_only(
            Float8GatheredWeight, Float8GatheredWeight.to_dtype, inputs
        )
        return op(*args, **kwargs)
