"""Run step.py as one rank of any world, without that world: a fake process group, and tensors without storage.

    plan, explain   ->   plan_run(arguments), dry_run(config, ..., pp_rank)   ->   start_run, train_step under a Meter

The functions are those of the run, with the same arguments, so plan and run cannot differ. The groups answer at once
and tensors have shapes but no numbers (fake_world.py), so 16,384 ranks cost no more than one, and each kind of pipeline
stage needs one run.

Of many microbatches a few are run, and the result is extended to all of them; `whole=True` runs them all:

    run, of 8 microbatches   begin  F B  F B  F B                        the first, one of the middle, the last: FEW
    reported                 begin  F F F B F B F B F B F B F B B B      every microbatch, in the schedule's order
    memory in each segment   bytes between steps + remains of earlier segments + its own peak: the largest is reported

All microbatches but the first and last are alike: in the first, gradients are made, and in the last they are reduced.
Schedules in which microbatches of one kind differ are run whole (`is_uniform`).

A kernel's own scratch memory is not seen: no operator returns it. For CPU kernels it grows with their threads: none
beside the peak with one thread a rank, as run_train.sh has it, and half as much again with 16 (oneDNN's matmul, bf16).

For a GPU, kernels are chosen as the GPU would: no mask of S x S, norms in one kernel. compile is off: only the device
knows what it fuses, and the result is an upper bound for it.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Placement

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schedule import splits_backward
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.preflight import choose_n_ranks, read_run_config
from torchtitan_lite.tools.plan.fake_world import fake_group, kernels_of_gpus, loaded_experts, make_batch, static_stages
from torchtitan_lite.tools.plan.memory import weigh_waiting
from torchtitan_lite.tools.plan.meter import Meter, Segment, sum_by_kind
from torchtitan_lite.tools.plan.simulator import count_in_flight, plan_order
from torchtitan_lite.tools.plan.traffic import Collective, Moved, max_moved, sum_moved
from torchtitan_lite.tools.plan.workload import Workload, count_rows, describe_workload

ANY_CPU = Machine("cpu", 1, 0, "CPU")
CPU = torch.device("cpu")  # the device of fake tensors: torch has CUDA kernels only where there is CUDA
BLOCK_BYTES = {"cuda": 512, "cpu": 1}  # of the allocator
FEW = 3  # microbatches that are run: the first, one of the middle, the last
MOST_ACTIVE_STAGES = 3  # of a rank: with more of them, torch's runtime frees parameters between its actions


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
    memory: dict[str, int]  # bytes by kind (KINDS in meter.py) at the peak
    collectives: list[tuple[Collective, int]]  # and how often, in the order of their first call
    n_flops: int
    parameters: dict[str, Sharding]  # by FQN

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


def dry_run(
    config: Config,
    model_args: ModelArgs,
    layout: Layout,
    *,
    pp_rank: int = 0,
    device_type: Literal["cuda", "cpu"] = "cpu",
    whole: bool = False,
    imbalance: float = 1.0,
) -> DryRun:
    """Run one optimizer step of the first rank of a pipeline stage. `config` is resolved.

    `imbalance`: rows of an MoE layer that this rank receives, over the mean of its ep group.
    """
    config = with_value(config, "compile.enable", False)
    n_run = layout.n_microbatches if whole or not is_uniform(config, layout) else FEW
    short = shorten(layout, min(n_run, layout.n_microbatches))
    meter = Meter(layout, block_bytes=BLOCK_BYTES[device_type])
    with fake_group(layout.world_size, rank=pp_rank * (layout.world_size // layout.pp)), ExitStack() as stack:
        mesh = build_mesh(layout, CPU.type)
        parts = build.build_parts(config, model_args, short, mesh)
        stack.enter_context(static_stages(config, model_args, short, meter))
        if device_type == "cuda":
            stack.enter_context(kernels_of_gpus())
        if model_args.moe:
            n_rows = count_rows(model_args, layout, config.training.seq_len)
            stack.enter_context(loaded_experts(n_rows, layout.ep, imbalance))
        # Initial weights do not matter here, and take as long as a microbatch.
        stack.enter_context(patch.object(build, "initialize_weights", lambda *args: None))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter.watching())
        run = build.start_run(parts, config, short, mesh, CPU)
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
        for state in run.optimizer.state.values():
            meter.assign("optimizer", [value for value in state.values() if isinstance(value, Tensor)])
        setup, *segments, _ = meter.segments  # from "begin" to "done"
        # Between two steps: what existed before the first one, and the optimizer's state.
        events = [event for segment in meter.segments for event in segment.events]
        at_rest = sum_by_kind(setup.events) + sum_by_kind(event for event in events if event[0].kind == "optimizer")
    sequence = segments
    if short.n_microbatches < layout.n_microbatches:
        sequence = lengthen(config, layout, pp_rank, segments)
    return DryRun(
        pp_rank=pp_rank,
        memory=dict(find_peak_of_step(at_rest, sequence, layout.n_microbatches / short.n_microbatches)),
        collectives=count_collectives(segments, sequence, layout.n_microbatches, short.n_microbatches),
        n_flops=sum(segment.n_flops for segment in sequence),
        parameters={fqn: describe_sharding(parameter) for fqn, parameter in run.parameters.items()},
    )


def sum_traffic(runs: dict[int, DryRun], key: Callable[[Collective], Hashable]) -> dict[Hashable, Moved]:
    """Return what the rank moves in a step that moves most, by a key of the collective."""
    return max_moved(
        sum_moved((key(call), times, times * call.n_bytes) for call, times in run.collectives) for run in runs.values()
    )


def describe_sharding(parameter: Tensor) -> Sharding:
    if not isinstance(parameter, DTensor):
        return Sharding(tuple(parameter.shape), {}, ())
    mesh = parameter.device_mesh
    degrees = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return Sharding(tuple(parameter.shape), degrees, tuple(parameter.placements))


# ---------------------------------------------------------------- the ranks that differ


@dataclass(frozen=True)
class PlannedRun:
    """A run on other machines, whose config is sound."""

    config_name: str
    config: Config  # resolved
    model_args: ModelArgs
    layout: Layout
    device_type: Literal["cuda", "cpu"]
    imbalance: float = 1.0  # of the rows of the most loaded of ep ranks

    def dry_run(self, pp_rank: int = 0, *, whole: bool = False) -> DryRun:
        """Run one step of the first rank of a pipeline stage."""
        run = self.config, self.model_args, self.layout
        options = {"device_type": self.device_type, "whole": whole, "imbalance": self.imbalance}
        return dry_run(*run, pp_rank=pp_rank, **options)

    def describe_workload(self) -> Workload:
        return describe_workload(self.config, self.model_args, self.layout, imbalance=self.imbalance)


def plan_run(
    args: list[str], n_gpus: int | None, device_type: Literal["cuda", "cpu"], *, imbalance: float = 1.0
) -> PlannedRun:
    """Return the run of these arguments of a config. Raises ConfigError with every problem.

    Without n_gpus: the product of the degrees, or two where one of them is automatic. Files, memory and GPUs of this
    machine are not checked.
    """
    reading = read_run_config(args)
    if reading.problems:
        raise ConfigError(reading.problems)
    model_args = resolve_model(reading.config.model)
    layout = plan_layout(reading.config, model_args, n_gpus or choose_n_ranks(reading.config.parallelism, ANY_CPU, 1))
    config = resolve_config(reading.config, layout, device_type)
    most = max(1, layout.ep)
    if imbalance > most:
        why = f"parallelism.expert_parallel_degree = {most}: no rank can compute more than {most} times the mean"
        remedy = f"Use {f'1 to {most}' if most > 1 else '1'}, or a larger parallelism.expert_parallel_degree"
        raise ConfigError([Problem("--imbalance", imbalance, why, remedy)])
    return PlannedRun(reading.config_name, config, model_args, layout, device_type, imbalance)


def group_pp_ranks(planned: PlannedRun) -> dict[int, list[int]]:
    """Return pp rank -> pp ranks with equal stages, itself included: as many layers, and the same other modules.

    They differ in their microbatches in flight; the key is the one that holds most.
    """
    layout = planned.layout
    alike: dict[tuple, list[int]] = {}
    for rank in range(layout.pp):
        stages = [layout.stages[index] for index in layout.stages_of(rank)]
        costs = tuple(tuple(name_alike(fqn, planned.model_args) for fqn in stage) for stage in stages)
        alike.setdefault(costs, []).append(rank)
    section, weight = planned.config.parallelism, 1.0
    if splits_backward(section):
        weight = weigh_waiting(describe_workload(planned.config, planned.model_args, layout))
    counts = [count_in_flight(row, weight) for row in plan_order(section, layout)]
    held = [sum(n * (weight if action == "I" else 1) for (_, action), n in count.items()) for count in counts]
    return {max(ranks, key=held.__getitem__): ranks for ranks in alike.values()}


def name_alike(fqn: str, model_args: ModelArgs) -> str:
    """Return the same name for modules that cost the same."""
    if not fqn.startswith("layers."):
        return fqn
    return "MoE layer" if model_args.is_moe(int(fqn.removeprefix("layers."))) else "dense layer"


# ---------------------------------------------------------------- from a few microbatches to all


def shorten(layout: Layout, n_microbatches: int) -> Layout:
    """Return the same ranks and stages with fewer microbatches."""
    rows = layout.global_batch_size * n_microbatches // layout.n_microbatches
    return replace(layout, global_batch_size=rows, n_microbatches=n_microbatches)


def is_uniform(config: Config, layout: Layout) -> bool:
    """Return whether all microbatches but the first and the last are alike, in any order."""
    section = config.parallelism
    if layout.pp == 1:
        return True
    resharded = layout.zero_stage == 3 and layout.dp_shard * layout.cp > 1  # an action depends on the one before
    crowded = len(layout.stages) > MOST_ACTIVE_STAGES * layout.pp
    return not (resharded or crowded or section.pipeline_parallel_schedule_csv or splits_backward(section))


def lengthen(config: Config, layout: Layout, pp_rank: int, segments: list[Segment]) -> list[Segment]:
    """Return the segments of the whole step, in the order of the schedule, from those of a few microbatches."""
    begin, *others = segments
    if layout.pp == 1:
        first, between, last = others
        return [begin, first, *[between] * (layout.n_microbatches - 2), last]
    seen: Counter[str] = Counter()
    sequence = [begin]
    for action in plan_order(config.parallelism, layout)[pp_rank]:
        name = f"{action.kind}{action.stage}"
        alike = [segment for segment in others if segment.name == name]
        sequence.append(alike[min(seen[name], 1)])
        seen[name] += 1
        if action.kind == "B" and seen[name] == layout.n_microbatches:
            sequence += [segment for segment in others if segment.name == f"reduce{action.stage}"]
    return sequence


def find_peak_of_step(at_rest: Counter, sequence: list[Segment], longer: float) -> Counter:
    """Return the bytes by kind at the peak. `longer`: microbatches of the step over those that were run."""
    live, most = at_rest.copy(), at_rest.copy()
    # Rows of the batch and receive buffers exist for all microbatches from the start.
    live["data"] += round((longer - 1) * sequence[0].change["data"])
    for segment in sequence:
        if live.total() + segment.peak.total() > most.total():
            most = live.copy()
            most.update(segment.peak)
        live.update(segment.change)
    return most


def count_collectives(
    segments: list[Segment], sequence: list[Segment], n_microbatches: int, n_run: int
) -> list[tuple[Collective, int]]:
    """Return each recorded collective, and how often it comes in `sequence`.

    Sends and receives cross the borders of segments. But each comes once a microbatch, so n_run recorded ones are
    counted as n_microbatches.
    """
    times = Counter(id(segment) for segment in sequence)
    seen: Counter[tuple] = Counter()
    counted = []
    for segment in segments:
        for collective in segment.collectives:
            n = times[id(segment)]
            if collective.place.through == "pipeline":
                key = collective.operation, collective.shape
                at = seen[key] % n_run
                n = n_microbatches * (at + 1) // n_run - n_microbatches * at // n_run
                seen[key] += 1
            counted.append((collective, n))
    return counted
