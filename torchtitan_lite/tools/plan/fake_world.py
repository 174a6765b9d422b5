"""Replace the environment for a dry run: a fake process group, fake tensors, and the kernels of a GPU.

fake_group      a process group of all ranks without processes; its collectives return at once
fake_tensors    tensors have a shape and no storage
static_stages   pipeline stages know their shapes in advance
gpu_kernels     operators save the same tensors for backward as CUDA kernels do
even_experts    all ep ranks receive the same number of rows
"""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan_lite import build
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config
from torchtitan_lite.extensions import adamw_bfloat16, windowed_attention
from torchtitan_lite.model import document_attention, moe
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel import expert_parallel, pipeline
from torchtitan_lite.tools.forget_groups import forget_groups
from torchtitan_lite.tools.plan.workload import Workload


@contextmanager
def fake_group(world_size: int, *, rank: int) -> Iterator[None]:
    """Context manager: a process group of `world_size` ranks without processes. Its collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_groups()


class FakeMode(FakeTensorMode):
    """Fake mode in which .item() and bool() return 1 instead of failing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:  # .item(), bool()
            return 1
        if func is torch.ops._c10d_functional.wait_tensor.default:
            # return the input itself, as on a real device; torch's meta function would return a new tensor
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Context manager: new tensors have a shape and no storage."""
    outside = _disable_current_modes()  # the result decorates functions
    with (
        # DTensor infers shapes with fake tensors of the full shape. The meter must not count the tensors of
        # the full shape as memory.
        patch.object(
            ShardingPropagator,
            "_propagate_tensor_meta_non_cached",
            outside(ShardingPropagator._propagate_tensor_meta_non_cached),
        ),
        # fully_shard fails on fake tensors. An extension may also build a second model here.
        patch.object(build, "build_parts", outside(build.build_parts)),
        patch.object(getLogger("torch._subclasses.fake_tensor"), "disabled", True),
        FakeMode(allow_non_fake_inputs=True),
    ):
        yield


def make_fake_batch(layout: Layout, seq_len: int) -> Batch:
    """Return one rank's batch for a step. Its values do not matter."""
    n_rows = layout.global_batch_size // layout.dp
    return Batch(*torch.zeros(4, n_rows, seq_len, dtype=torch.int64))


@contextmanager
def static_stages(config: Config, model_args: ModelArgs, layout: Layout) -> Iterator[None]:
    """Context manager: pipeline stages know their shapes without communication."""
    positions = config.training.seq_len // layout.cp // layout.tp
    shape = (layout.microbatch_size, positions, model_args.dim)
    dtype = getattr(torch, config.training.mixed_precision_param)
    hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(layout.microbatch_size, dtype=torch.int64, device="meta")
    loss = torch.empty((), device="meta", requires_grad=True)
    stage_class = pipeline.PatchedStage

    def make_stage(part, index, n_stages, device, *, group) -> PipelineStage:
        received = tokens if index == 0 else hidden
        sent = loss if index == n_stages - 1 else hidden
        stage = stage_class(
            part, index, n_stages, device, input_args=received, output_args=sent, group=group
        )
        # skip the exchange of shapes
        stage._warmup_forward_vote = lambda *args, **kwargs: torch.ones(1)
        stage._warmup_backward_result = stage._warmup_forward_vote
        return stage

    with patch.object(pipeline, "PatchedStage", make_stage):
        yield


@contextmanager
def even_experts(workload: Workload) -> Iterator[None]:
    """Context manager: all ep ranks exchange the same number of rows, because fake tensors have no values for
    routing."""
    ep = workload.layout.ep
    sent = [(workload.n_rows + rank) // ep for rank in range(ep)]
    received = [workload.n_rows // ep] * ep
    with (
        patch.object(expert_parallel, "read_splits", lambda ours, theirs: (sent, received)),
        patch.object(moe, "multiply_groups", multiply_fake_groups),
    ):
        yield


def multiply_fake_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Call bmm instead of grouped_mm unless the dtype is bfloat16, because torch's meta function accepts only this
    dtype.

    Recompute repeats bmm in the same way as grouped_mm.
    """
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, matrices, offs=ends)
    return torch.bmm(rows[None], matrices[:1])[0]


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Context manager: attention without a mask, fused norms and fused updates, as on CUDA.

    On a CPU, F.rms_norm saves three more tensors of the size of x than on CUDA. Therefore layer norm replaces RMS norm.
    Layer norm is one kernel, and saves its input and two numbers per row. RMS norm on CUDA saves almost the same
    tensors.
    """
    with (
        # attention without a mask is one kernel, which saves the same tensors for backward as flex attention
        patch.object(document_attention, "create_mask", lambda *args, **options: None),
        patch.object(windowed_attention, "attend_with_mask", attend_with_sinks),
        # on CUDA, `move` is one kernel
        patch.object(adamw_bfloat16, "move", lambda *args, **kwargs: None),
        patch.object(
            F, "rms_norm", lambda x, shape, weight=None, eps=None: F.layer_norm(x, shape, weight)
        ),
    ):
        yield


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """Compute attention without a window. This function uses as much memory as flex attention with windows and
    sinks."""
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return out if sinks is None else out * sinks.sigmoid()[:, None, None].to(out.dtype)
