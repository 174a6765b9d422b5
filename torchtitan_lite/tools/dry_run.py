"""Runs step.py as one rank of any world, without that world: a fake process group, and tensors without storage.

    plan, explain   ->   dry_run(config, ..., pp_rank)   ->   build_parts, start_run, train_step   under a Meter

What is planned is what will run, line by line: the same functions with the same arguments. Only the groups answer at
once, and the tensors have shapes and no numbers. So 16,384 ranks cost no more than one, and ranks that differ in their
pipeline stage alone need one run each.

Of many microbatches all but the first and last are alike, so that by default a FEW are run and counted as often as they
come: in the order of the real schedule, each adding the activations that it adds, on top of those then in flight.
`whole=True` runs them all. Schedules in which microbatches of one kind differ are always run whole (`is_uniform`).

For a GPU, kernels are chosen as the GPU would: no mask of S x S, norms in one kernel. compile is off: what it fuses is
known on the device alone, and what is told here is an upper bound for it.
"""

from collections import Counter
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
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite import step as stepping
from torchtitan_lite.components.data import Batch
from torchtitan_lite.config import Config
from torchtitan_lite.layout import MESH_DIMS, Layout
from torchtitan_lite.model import document_attention
from torchtitan_lite.parallel import context_parallel, pipeline
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.schedule_order import list_rows
from torchtitan_lite.pipeline_plan import splits_backward
from torchtitan_lite.sizes import Shape
from torchtitan_lite.tools.meter import Collective, Meter, find_peak, sum_by_kind
from torchtitan_lite.tools.ranks import forget_groups

FEW = 3  # microbatches that are run: the first, one like all others, and the last
CPU = torch.device("cpu")  # where fake tensors say they are: torch has CUDA kernels only where there is CUDA
BLOCK_BYTES = {"cuda": 512, "cpu": 1}  # of the allocator
MOST_ACTIVE_STAGES = 3  # of a rank: with more of them, torch's runtime frees parameters between its actions


@dataclass(frozen=True)
class DryRun:
    """What one step costs one rank, from the second step on."""

    pp_rank: int
    memory: dict[str, int]  # bytes by kind (KINDS in meter.py) at the moment when all together are most
    collectives: list[tuple[Collective, int]]  # in the order of the first time, and how often
    n_flops: int
    run: stepping.Run  # of tensors without storage

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Stretch:
    """From one mark to the next."""

    name: str
    change: Counter  # bytes by kind that remain
    peak: Counter  # bytes by kind, above those before, when most
    collectives: list[Collective]
    n_flops: int


def dry_run(
    config: Config,
    shape: Shape,
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
    name_axis = partial(name_dims, list(layout.degrees.values()))
    meter = Meter(name_axis, block_bytes=BLOCK_BYTES[device_type])
    with fake_group(layout.world_size, rank=pp_rank * (layout.world_size // layout.pp)), ExitStack() as stack:
        mesh = build_mesh(layout, CPU.type)
        parts = stepping.build_parts(config, shape, short, mesh)
        stack.enter_context(static_stages(config, shape, short, meter))
        if device_type == "cuda":
            stack.enter_context(kernels_of_gpus())
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
        at_rest = sum_by_kind(meter.events[: meter.marks[0].n_events])
        at_rest += sum_by_kind(event for event in meter.events if event[0].kind == "optimizer")
    sequence = stretches
    if short.n_microbatches < layout.n_microbatches:
        sequence = lengthen(config, layout, pp_rank, stretches)
    return DryRun(
        pp_rank=pp_rank,
        memory=dict(find_most(at_rest, sequence, layout.n_microbatches / short.n_microbatches)),
        collectives=count_collectives(stretches, sequence, layout.n_microbatches, short.n_microbatches),
        n_flops=sum(stretch.n_flops for stretch in sequence),
        run=run,
    )


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


def name_dims(degrees: list[int], ranks: list[int]) -> str:
    """Mesh dims along which these ranks lie: those in which the first and the last of them differ."""
    first, last, dims = ranks[0], ranks[-1], []
    for dim, degree in zip(reversed(MESH_DIMS), reversed(degrees), strict=True):  # innermost first
        dims = [dim] * (first % degree != last % degree) + dims
        first, last = first // degree, last // degree
    return " x ".join(dims)


def make_batch(layout: Layout, seq_len: int) -> Batch:
    """A rank's rows of a step. What they hold changes nothing."""
    shape = (layout.global_batch_size // layout.dp, seq_len)
    return Batch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(4)))


def shorten(layout: Layout, n_microbatches: int) -> Layout:
    """The same ranks and stages with fewer microbatches."""
    rows = layout.global_batch_size * n_microbatches // layout.n_microbatches
    return replace(layout, global_batch_size=rows, n_microbatches=n_microbatches)


@contextmanager
def static_stages(config: Config, shape: Shape, layout: Layout, meter: Meter) -> Iterator[None]:
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
        patch.object(document_attention, "attend_within_documents", attend_without_mask),
        patch.object(context_parallel, "attend_within_documents", attend_without_mask),
        patch.object(F, "rms_norm", normalize_in_one_kernel),
    ):
        yield


def attend_without_mask(query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor, **places: Tensor) -> Tensor:
    """In the place of flex attention: keeps what that keeps, and looks into all blocks, as it does at worst."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def normalize_in_one_kernel(x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]


# ---------------------------------------------------------------- from a few microbatches to all


def is_uniform(config: Config, layout: Layout) -> bool:
    """Whether all microbatches but the first and the last are alike, in whatever order they come."""
    section = config.parallelism
    if layout.pp == 1:
        return True
    resharded = layout.zero_stage == 3 and layout.dp_shard * layout.cp > 1  # an action finds what the one before left
    crowded = len(layout.stages) > MOST_ACTIVE_STAGES * layout.pp
    return not (resharded or crowded or section.pipeline_parallel_schedule_csv or splits_backward(section))


def list_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def cut(meter: Meter) -> list[Stretch]:
    """The run between its marks. The optimizer's state, made in the first step, is there in all later ones."""
    stretches = []
    for mark, after in zip(meter.marks, meter.marks[1:], strict=False):
        events = meter.events[mark.n_events : after.n_events]
        events = [event for event in events if event[0].kind != "optimizer"]
        collectives = meter.collectives[mark.n_collectives : after.n_collectives]
        stretches.append(
            Stretch(mark.name, sum_by_kind(events), find_peak(events), collectives, after.n_flops - mark.n_flops)
        )
    return stretches


def lengthen(config: Config, layout: Layout, pp_rank: int, stretches: list[Stretch]) -> list[Stretch]:
    """The stretches of the whole step, from those of a few microbatches, in the order of the schedule."""
    begin, *others = stretches
    if layout.pp == 1:
        first, between, last = others
        return [begin, first, *[between] * (layout.n_microbatches - 2), last]
    seen: Counter[str] = Counter()
    sequence = [begin]
    for action in list_rows(config.parallelism, layout)[pp_rank]:
        name = f"{action.kind}{action.stage}"
        alike = [stretch for stretch in others if stretch.name == name]
        sequence.append(alike[min(seen[name], 1)])
        seen[name] += 1
        if action.kind == "B" and seen[name] == layout.n_microbatches:
            sequence += [stretch for stretch in others if stretch.name == f"reduce{action.stage}"]
    return sequence


def find_most(at_rest: Counter, sequence: list[Stretch], longer: float) -> Counter:
    """Bytes by kind when all together are most. `at_rest`: between two steps."""
    live, most = at_rest.copy(), at_rest.copy()
    # Rows of the batch, and what a pipeline receives into, are there for all microbatches from the beginning.
    live["data"] += round((longer - 1) * sequence[0].change["data"])
    for stretch in sequence:
        if live.total() + stretch.peak.total() > most.total():
            most = live.copy()
            most.update(stretch.peak)
        live.update(stretch.change)
    return most


def count_collectives(
    stretches: list[Stretch], sequence: list[Stretch], n_microbatches: int, n_run: int
) -> list[tuple[Collective, int]]:
    """Each collective that was seen, and how often it comes in `sequence`.

    Sends and receives do not keep to the borders of stretches. But each comes once with every microbatch: of n_run that
    are alike, each stands for its share of n_microbatches.
    """
    times = Counter(id(stretch) for stretch in sequence)
    seen: Counter[tuple] = Counter()
    counted = []
    for stretch in stretches:
        for collective in stretch.collectives:
            n = times[id(stretch)]
            if collective.place.through == "pipeline":
                key = collective.operation, collective.shape
                at = seen[key] % n_run
                n = n_microbatches * (at + 1) // n_run - n_microbatches * at // n_run
                seen[key] += 1
            counted.append((collective, n))
    return counted
