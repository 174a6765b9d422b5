"""The world of a dry run: a process group without processes, stages without neighbors, kernels as on a GPU.

    dist.init_process_group("fake")    all ranks, no processes: collectives return at once
    StaticStage                        a pipeline stage that knows what it receives
    kernels_of_gpus                    what CUDA's kernels keep for backward, on fake CPU tensors
    loaded_experts                     rows of an MoE layer for a stated load, and its matmuls by any dtype

Effect: none outside of the context managers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model import attention, moe
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel import context_parallel, expert_parallel, pipeline
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


def make_batch(layout: Layout, seq_len: int) -> Batch:
    """Return a rank's rows of a step. Their values do not matter."""
    shape = (layout.global_batch_size // layout.dp, seq_len)
    return Batch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(4)))


@contextmanager
def static_stages(config: Config, model_args: ModelArgs, layout: Layout) -> Iterator[None]:
    """Context manager: pipeline stages know their shapes without asking a neighbor."""
    hidden = torch.empty(
        (layout.microbatch_size, config.training.seq_len // layout.cp // layout.tp, model_args.dim),
        dtype=getattr(torch, config.training.mixed_precision_param),
        device="meta",
        requires_grad=True,
    )
    with (
        # 1F1B refuses fewer microbatches than stages, though it runs with them.
        patch.object(Schedule1F1B, "__init__", PipelineScheduleSingle.__init__),
        patch.object(pipeline, "Stage", partial(StaticStage, hidden=hidden)),
    ):
        yield


class StaticStage(pipeline.Stage):
    """A stage that knows its shapes."""

    def __init__(self, part, index, n_stages, device, *, group, hidden: Tensor):
        tokens = torch.empty(hidden.shape[:1], dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        received, sent = tokens if index == 0 else hidden, loss if index == n_stages - 1 else hidden
        super().__init__(part, index, n_stages, device, input_args=received, output_args=sent, group=group)

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1)  # all stages know their shapes

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1)


@contextmanager
def kernels_of_gpus() -> Iterator[None]:
    """Context manager: attention without a mask and fused norms, as on CUDA; a CPU has other kernels."""
    with (
        patch.object(attention, "attend_within_documents", attend_without_mask),
        patch.object(context_parallel, "attend_within_documents", attend_without_mask),
        patch.object(F, "rms_norm", lambda x, shape, weight, eps: FusedNorm.apply(x, weight)),
    ):
        yield


@contextmanager
def loaded_experts(workload: Workload) -> Iterator[None]:
    """Context manager: rank 0 of `ep`, as which a dry run runs, receives `imbalance` times the mean of the rows.

    Fake routes have no values. torch's own shape function of grouped_mm takes bfloat16 only (torch 2.13).
    """
    each, n_rows, ep = workload.n_rows // max(1, workload.layout.ep), workload.n_rows, workload.layout.ep
    sent = [each, *((n_rows - each + other) // (ep - 1) for other in range(ep - 1))]
    with (
        patch.object(expert_parallel, "read_splits", lambda ours, theirs: (sent, [each] * ep)),
        patch.object(moe, "multiply_groups", lambda rows, matrices, ends: GroupedProduct.apply(rows, matrices)),
    ):
        yield


class GroupedProduct(torch.autograd.Function):
    """The tensors and FLOPs of grouped_mm: all rows times one matrix."""

    @staticmethod
    def forward(ctx, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows @ matrices[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, matrices = ctx.saved_tensors
        of_matrices = torch.empty_like(matrices)
        torch.mm(rows.T, grad, out=of_matrices[0])
        return grad @ matrices[0].T, of_matrices


def attend_without_mask(query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor, **places: Tensor) -> Tensor:
    """Replace flex attention: the same tensors for backward, and the FLOPs of its worst case, all blocks."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


class FusedNorm(torch.autograd.Function):
    """The tensors of CUDA's RMS norm. A CPU has no such kernel: its steps keep three more tensors of the size of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        per_token = x.sum(-1, dtype=torch.float32)  # stands for 1 / rms
        ctx.save_for_backward(x, weight, per_token)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), gradient.flatten(0, -2).sum(0, dtype=weight.dtype)
