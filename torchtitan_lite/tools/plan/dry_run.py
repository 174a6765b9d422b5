"""Run step.py as one rank of any world, without that world: a fake process group, and tensors without storage.

    plan --dry-run, explain   ->   dry_run(planned, pp_rank)   ->   start_run, train_step under a Meter

The functions are those of the run, with the same arguments, so they prove the closed form: same collectives, memory
within a few percent. The groups answer at once and tensors have shapes but no numbers (fake_world.py), so 16,384 ranks
cost no more than one. A step with many microbatches is run with a few of them (`shorten`): compare it with the closed
form of the same short step.

A kernel's own scratch memory is not seen: no operator returns it. For a GPU, kernels are chosen as the GPU would: no
mask of S x S, norms in one kernel. compile is off: only the device knows what it fuses, so memory is an upper bound.
"""

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Placement

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.config.schema import with_value
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.plan.fake_world import fake_group, kernels_of_gpus, loaded_experts, make_batch, static_stages
from torchtitan_lite.tools.plan.meter import Collective, Meter
from torchtitan_lite.tools.plan.planned_run import PlannedRun
from torchtitan_lite.tools.plan.transfers import Moved, sum_moved

CPU = torch.device("cpu")  # the device of fake tensors: torch has CUDA kernels only where there is CUDA
BLOCK_BYTES = {"cuda": 512, "cpu": 1}  # of the allocator


@dataclass(frozen=True)
class Sharding:
    """How a parameter is sharded. (A DTensor would hold its mesh, which lists all ranks.)"""

    shape: tuple[int, ...]  # of the whole parameter
    degrees: dict[str, int]  # its mesh dims; none if every rank has the whole
    placements: tuple[Placement, ...]  # one for each dim


@dataclass(frozen=True)
class DryRun:
    """Costs of one step of one rank, from the second step on."""

    pp_rank: int
    peak_bytes: int
    collectives: list[Collective]  # in the order of the calls
    parameters: dict[str, Sharding]  # by FQN

    def sum_traffic(self, key: Callable[[Collective], Hashable]) -> dict[Hashable, Moved]:
        """Return what the rank moves in the step, by a key of the collective."""
        return sum_moved((key(call), 1, call.n_bytes) for call in self.collectives)


def shorten(planned: PlannedRun, n_microbatches: int) -> PlannedRun:
    """Return the same run with at most this number of microbatches in a step."""
    layout = planned.layout
    n = min(n_microbatches, layout.n_microbatches)
    rows = layout.global_batch_size * n // layout.n_microbatches
    return replace(planned, layout=replace(layout, global_batch_size=rows, n_microbatches=n))


def dry_run(planned: PlannedRun, pp_rank: int = 0) -> DryRun:
    """Run one optimizer step of the first rank of a pipeline stage, with all its microbatches."""
    config, model_args, layout = with_value(planned.config, "compile.enable", False), planned.model_args, planned.layout
    meter = Meter(layout, block_bytes=BLOCK_BYTES[planned.device_type])
    with fake_group(layout.world_size, rank=pp_rank * (layout.world_size // layout.pp)), ExitStack() as stack:
        mesh = build_mesh(layout, CPU.type)
        parts = build.build_parts(config, model_args, layout, mesh)
        stack.enter_context(static_stages(config, model_args, layout))
        if planned.device_type == "cuda":
            stack.enter_context(kernels_of_gpus())
        if model_args.moe:
            stack.enter_context(loaded_experts(planned.workload))
        # Initial weights do not matter here, and take as long as a microbatch.
        stack.enter_context(patch.object(build, "initialize_weights", lambda *args: None))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter.watching())
        run = build.start_run(parts, config, layout, mesh, CPU)
        meter.places.name_modules(parts)
        make_optimizer_state(run)  # a second step would find it
        meter.restart()
        batch = make_batch(layout, config.training.seq_len)
        meter.note(vars(batch).values())
        stepping.train_step(run, batch)
        parameters = {fqn: describe_sharding(parameter) for fqn, parameter in run.parameters.items()}
        return DryRun(pp_rank, meter.peak_bytes, list(meter.collectives), parameters)


def make_optimizer_state(run: build.Run) -> None:
    """Step on gradients of zero."""
    for parameter in run.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step()
    run.optimizer.zero_grad()


def describe_sharding(parameter: Tensor) -> Sharding:
    if not isinstance(parameter, DTensor):
        return Sharding(tuple(parameter.shape), {}, ())
    mesh = parameter.device_mesh
    degrees = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return Sharding(tuple(parameter.shape), degrees, tuple(parameter.placements))
