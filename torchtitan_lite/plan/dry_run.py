"""Runs step.py as one rank of any world, without that world: a fake process group, and tensors without storage.

    plan, explain   ->   dry_run(config, ..., pp_rank)   ->   build_parts, start_run, train_step   under a Meter

What is planned is what will run, line by line: the same functions with the same arguments. Only the groups answer at
once, and the tensors have shapes and no numbers. So 16,384 ranks cost no more than one, and ranks that differ in their
pipeline stage alone need one run each.

Of many microbatches a few are run and counted as often as they come (stretches.py); `whole=True` runs them all.

What a kernel takes for itself while it runs is not seen: no operator puts it out. Of CPU kernels it grows with their
threads, not with the run: nothing beside the peak with one thread a rank, as run_train.sh has it, and half as much
again with 16 (oneDNN's matmul in bf16; the last rows of tests/measure_memory.py).

For a GPU, kernels are chosen as the GPU would: no mask of S x S, norms in one kernel. compile is off: what it fuses is
known on the device alone, and what is told here is an upper bound for it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B
from torch.distributed.tensor import DTensor, Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite import step as stepping
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.model import attention
from torchtitan_lite.parallel import context_parallel, pipeline
from torchtitan_lite.parallel.mesh import build_mesh, forget_groups
from torchtitan_lite.plan.meter import Collective, Meter
from torchtitan_lite.plan.stretches import FEW, count_collectives, cut, find_at_rest, find_most, is_uniform, lengthen
from torchtitan_lite.plan.traffic import name_axis

CPU = torch.device("cpu")  # where fake tensors say they are: torch has CUDA kernels only where there is CUDA
BLOCK_BYTES = {"cuda": 512, "cpu": 1}  # of the allocator


@dataclass(frozen=True)
class Spread:
    """A parameter, and how it lies on the mesh. A DTensor would hold the mesh, which is large: lists of all ranks."""

    shape: tuple[int, ...]  # of the whole
    degrees: dict[str, int]  # mesh dims that it lies on; none if it is on every rank
    placements: tuple[Placement, ...]  # one for each


@dataclass(frozen=True)
class DryRun:
    """What one step costs one rank, from the second step on."""

    pp_rank: int
    memory: dict[str, int]  # bytes by kind (KINDS in meter.py) at the moment when all together are most
    collectives: list[tuple[Collective, int]]  # in the order of the first time, and how often
    n_flops: int
    parameters: dict[str, Spread]  # by FQN

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


def dry_run(
    config: Config,
    shape: ModelArgs,
    layout: Layout,
    *,
    pp_rank: int = 0,
    device_type: Literal["cuda", "cpu"] = "cpu",
    whole: bool = False,
) -> DryRun:
    """One optimizer step of the first rank of a pipeline stage. `config` is resolved."""
    config = replace(config, compile=replace(config.compile, enable=False))
    n_run = layout.n_microbatches if whole or not is_uniform(config, layout) else FEW
    short = shorten(layout, min(n_run, layout.n_microbatches))
    meter = Meter(partial(name_axis, layout), block_bytes=BLOCK_BYTES[device_type])
    with fake_group(layout.world_size, rank=pp_rank * (layout.world_size // layout.pp)), ExitStack() as stack:
        mesh = build_mesh(layout, CPU.type)
        parts = stepping.build_parts(config, shape, short, mesh)
        stack.enter_context(static_stages(config, shape, short, meter))
        if device_type == "cuda":
            stack.enter_context(kernels_of_gpus())
        # Drawing weights tells nothing of a step, and takes as long as a microbatch of it.
        stack.enter_context(patch.object(stepping, "initialize_weights", leave_as_they_are))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter.watching())
        run = stepping.start_run(parts, config, short, mesh, CPU)
        meter.places.name_modules(parts)
        parameters = list(run.parameters.values())
        meter.assign("parameters", parameters)
        meter.mark("begin")
        batch = make_batch(short, config.training.seq_len)
        meter.assign("data", vars(batch).values())
        stepping.train_step(run, batch)
        meter.mark("done")
        meter.assign("parameters", parameters)
        meter.assign("gradients", [parameter.grad for parameter in parameters])
        meter.assign("optimizer", list_state(run.optimizer))
        stretches = cut(meter)
        at_rest = find_at_rest(meter)
    sequence = stretches
    if short.n_microbatches < layout.n_microbatches:
        sequence = lengthen(config, layout, pp_rank, stretches)
    return DryRun(
        pp_rank=pp_rank,
        memory=dict(find_most(at_rest, sequence, layout.n_microbatches / short.n_microbatches)),
        collectives=count_collectives(stretches, sequence, layout.n_microbatches, short.n_microbatches),
        n_flops=sum(stretch.n_flops for stretch in sequence),
        parameters={fqn: describe_spread(parameter) for fqn, parameter in run.parameters.items()},
    )


def describe_spread(parameter: Tensor) -> Spread:
    if not isinstance(parameter, DTensor):
        return Spread(tuple(parameter.shape), {}, ())
    mesh = parameter.device_mesh
    degrees = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return Spread(tuple(parameter.shape), degrees, tuple(parameter.placements))


# ---------------------------------------------------------------- the world that is not there


@contextmanager
def fake_group(world_size: int, *, rank: int) -> Iterator[None]:
    """A process group that has all ranks and no processes: its collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_groups()


def leave_as_they_are(*args) -> None:
    """In the place of the rule for initial weights."""


def list_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def make_batch(layout: Layout, seq_len: int) -> Batch:
    """A rank's rows of a step. What they hold changes nothing."""
    shape = (layout.global_batch_size // layout.dp, seq_len)
    return Batch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(4)))


def shorten(layout: Layout, n_microbatches: int) -> Layout:
    """The same ranks and stages with fewer microbatches."""
    rows = layout.global_batch_size * n_microbatches // layout.n_microbatches
    return replace(layout, global_batch_size=rows, n_microbatches=n_microbatches)


@contextmanager
def static_stages(config: Config, shape: ModelArgs, layout: Layout, meter: Meter) -> Iterator[None]:
    """Has microbatches marked; pipeline stages are told what they receive, for nobody is there to tell them."""
    hidden = torch.empty(
        (layout.microbatch_size, config.training.seq_len // layout.cp // layout.tp, shape.dim),
        dtype=getattr(torch, config.training.mixed_precision_param),
        device="meta",
        requires_grad=True,
    )
    prepare = stepping.prepare_microbatch

    def mark_and_prepare(*args, **kwargs) -> None:
        meter.mark("microbatch")
        prepare(*args, **kwargs)

    with (
        patch.object(stepping, "prepare_microbatch", mark_and_prepare),
        # 1F1B asks for as many microbatches as there are stages, only to be worth its while.
        patch.object(Schedule1F1B, "__init__", PipelineScheduleSingle.__init__),
        patch.object(pipeline, "Stage", partial(StaticStage, hidden=hidden, meter=meter)),
    ):
        yield


class StaticStage(pipeline.Stage):
    """A stage that knows its shapes, and marks what it does."""

    def __init__(self, part, index, n_stages, device, *, group, hidden: Tensor, meter: Meter):
        tokens = torch.empty(hidden.shape[:1], dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        received, sent = tokens if index == 0 else hidden, loss if index == n_stages - 1 else hidden
        super().__init__(part, index, n_stages, device, input_args=received, output_args=sent, group=group)
        self.meter = meter

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1)  # all stages know their shapes

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1)

    def forward_one_chunk(self, *args, **kwargs):
        self.meter.mark(f"F{self.stage_index}")
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args, full_backward: bool = True, **kwargs):
        self.meter.mark(f"{'B' if full_backward else 'I'}{self.stage_index}")
        return super().backward_one_chunk(*args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, *args, **kwargs):
        self.meter.mark(f"W{self.stage_index}")
        return super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args, **kwargs):
        self.meter.mark(f"reduce{self.stage_index}")
        return super().perform_reduce_grad(*args, **kwargs)


@contextmanager
def kernels_of_gpus() -> Iterator[None]:
    """Where a CPU would take another way than CUDA: document attention by a mask, a norm in many steps."""
    with (
        patch.object(attention, "attend_within_documents", attend_without_mask),
        patch.object(context_parallel, "attend_within_documents", attend_without_mask),
        patch.object(F, "rms_norm", normalize_in_one_kernel),
    ):
        yield


def attend_without_mask(query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor, **places: Tensor) -> Tensor:
    """In the place of flex attention: keeps what that keeps, and looks into all blocks, as it does at worst."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def normalize_in_one_kernel(x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    return FusedNorm.apply(x, weight)


class FusedNorm(torch.autograd.Function):
    """What CUDA's RMS norm makes and keeps. A CPU has no such kernel: there torch takes it apart into steps, which keep
    three more tensors of the size of x for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        per_token = x.sum(-1, dtype=torch.float32)  # in the place of 1 / rms
        ctx.save_for_backward(x, weight, per_token)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), gradient.flatten(0, -2).sum(0, dtype=weight.dtype)
