"""The keys that would help: warnings of `plan` with the right number, and what to change when memory ran out.

    warnings         layouts that run but waste time or memory
    out of memory    torch's own message: how much was asked for, and how much is free
                     weights, gradients and optimizer state as they are now; the rest is activations, gathered weights
                     and logits
                     keys with the bytes that each saves this rank. No rank talks: the others may be in a collective

Each key is tried alone or with those before it: the closed form (memory.py) with the key and without.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.checks import check_run
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, plan_layout
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import format_toml
from torchtitan_lite.config.schema import Config, Training, with_value
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.forecast import forecast, list_memory
from torchtitan_lite.tools.plan.memory import Memory
from torchtitan_lite.tools.plan.simulator import plan_order
from torchtitan_lite.tools.plan.workload import Workload, describe_workload

MOST_BUBBLE = 0.15
N_OPTIONS = 3  # that are named when memory ran out
# Changes that free memory, cheapest first
RELIEFS = (("activation_checkpoint.mode", "full"), ("parallelism.zero_stage", 3), ("training.local_batch_size", 1))


def list_memory_of(
    config: Config, model_args: ModelArgs, world_size: int, *, imbalance: float = 1.0
) -> list[Memory] | None:
    """Return the closed form for each pp rank; None where there is none, or where `check` refuses the config."""
    if check_run(config):
        return None
    try:
        layout = plan_layout(config, model_args, world_size)
        workload = describe_workload(config, model_args, layout, imbalance=imbalance)
    except ConfigError:
        return None
    return list_memory(workload, plan_order(config.parallelism, layout))


# ---------------------------------------------------------------- warnings


def list_warnings(config: Config, workload: Workload, cluster: Cluster, *, bubble: float, fits: bool) -> list[str]:
    """Return all warnings, each with its remedy. `config` is resolved."""
    warnings = [
        *warn_of_bubble(config, workload, cluster, bubble),
        *warn_of_few_microbatches(workload.layout),
        *warn_of_groups(workload.layout, cluster),
    ]
    return warnings if fits else [*warnings, warn_of_memory(config, workload, cluster)]


def warn_of_bubble(config: Config, workload: Workload, cluster: Cluster, bubble: float) -> list[str]:
    """The bubble is about (p-1)/(v*m+p-1): it falls with microbatches m and with stages a rank v. Simulated here."""
    layout, pp = workload.layout, workload.layout.pp
    if pp == 1 or bubble <= MOST_BUBBLE:
        return []
    what = f"the pipeline is idle for {bubble:.0%} of a step"
    needed = ceil((pp - 1) * (1 / MOST_BUBBLE - 1))  # v * m, if all stages are alike and sends take no time
    per_rank = len(layout.stages) // pp
    stages = ceil(needed / layout.n_microbatches)
    others = ""
    if per_rank < stages and stages * pp <= workload.args.n_layers + 2:
        others = f", or about {stages} stages a rank (Interleaved1F1B, pipeline_parallel_layers_per_stage)"
    for times in (1, 2, 4, 8):
        n = ceil(needed / per_rank / pp) * pp * times
        if simulate_bubble(config, workload, cluster, n) <= MOST_BUBBLE:
            batch = n * layout.microbatch_size * layout.dp
            return [f"{what}. Use {n} microbatches (training.global_batch_size = {batch}){others}"]
    return [f"{what}, and hardly less with more microbatches: stages are uneven, or sends take long{others}"]


def simulate_bubble(config: Config, workload: Workload, cluster: Cluster, n_microbatches: int) -> float:
    """Return the bubble of the same layout with another number of microbatches."""
    batch = n_microbatches * workload.layout.microbatch_size * workload.layout.dp
    layout = replace(workload.layout, n_microbatches=n_microbatches, global_batch_size=batch)
    return forecast(replace(workload, layout=layout), cluster, plan_order(config.parallelism, layout)).bubble


def warn_of_few_microbatches(layout: Layout) -> list[str]:
    if layout.n_microbatches >= layout.pp:
        return []
    batch = layout.pp * layout.microbatch_size * layout.dp
    return [
        f"{layout.n_microbatches} microbatches never fill a pipeline of {layout.pp} ranks. "
        f"Use training.global_batch_size = {batch} or more, or a smaller microbatch"
    ]


def warn_of_groups(layout: Layout, cluster: Cluster) -> list[str]:
    """Groups that talk in every layer and span nodes; those that span two because no multiple of them is a node."""
    size = cluster.node_size

    def find_inner(degree: int) -> int | None:
        """Return the largest degree that stays inside a node, for one that does not."""
        if degree <= 1 or cluster.find_tier(1, degree) == "node":
            return None
        return max(n for n in range(1, size + 1) if size % n == 0 and degree % n == 0)

    warnings = []
    if inner := find_inner(layout.tp):
        what = f"tp {layout.tp} talks several times a layer across nodes of {size}"
        warnings.append(f"{what}. Use parallelism.tensor_parallel_degree = {inner}")
    for dim in ("tp", "cp"):
        degree, stride = getattr(layout, dim), layout.strides[dim]
        span = stride * degree
        if degree > 1 and span < size and size % span:
            fitting = [n for n in range(1, degree) if degree % n == 0 and size % (stride * n) == 0]
            warnings.append(
                f"groups of {dim} {degree} take {span} GPUs, which do not divide a node of {size}: "
                f"some span two. Use a {dim} of {' or '.join(map(str, fitting[-2:]))}"
            )
    if inner := find_inner(layout.ep):
        what = f"ep {layout.ep} sends tokens four times a layer across nodes of {size}"
        warnings.append(f"{what}. Use parallelism.expert_parallel_degree = {inner}, if its memory suffices")
    return warnings


def warn_of_memory(config: Config, workload: Workload, cluster: Cluster) -> str:
    """Name the first changes that make it fit, by the closed form; else how many times as many GPUs would."""

    def find_needed(config: Config, times: int = 1) -> float:
        """Return the reserved bytes of the rank with the highest peak, on `times` as many GPUs."""
        n_gpus = workload.layout.world_size * times
        memory = list_memory_of(config, workload.args, n_gpus, imbalance=workload.imbalance)
        return max(each.live for each in memory) * cluster.reserve_factor if memory else float("inf")

    tried = []
    what = "it does not fit the memory"
    for key, value in RELIEFS:
        config = with_value(config, key, value)
        tried.append(f"{key} = {format_toml(value)}")
        if (needed := find_needed(config)) <= cluster.memory_bytes:
            return f"{what}. With {' and '.join(tried)} it needs {needed / GIB:.0f} GiB, by the closed form"
    for times in (2, 4, 8, 16, 32, 64):
        shard_degree = workload.layout.dp_shard * times
        wider = with_value(config, "parallelism.data_parallel_shard_degree", shard_degree)
        if find_needed(with_value(wider, "training.global_batch_size", -1), times) <= cluster.memory_bytes:
            n_gpus = workload.layout.world_size * times
            return f"{what}. With {' and '.join(tried)} it fits {n_gpus:,} such GPUs, by the closed form"
    return f"{what}, nor that of 64 times as many GPUs. `--search` looks for another layout"


# ---------------------------------------------------------------- out of memory


@dataclass(frozen=True)
class MemoryOption:
    """A key that would save memory."""

    key: str
    value: object
    saved_bytes: float  # at the peak of one rank
    price: str
    n_gpus: int = 1  # times as many GPUs


def find_memory_options(config: Config, model_args: ModelArgs, layout: Layout, pp_rank: int) -> list[MemoryOption]:
    """Return the keys that save memory on this rank, each alone: those without more GPUs first, then by bytes saved.

    `config` is resolved. Empty where no closed form exists (memory_budget, a model without a row in BLOCKS).
    """
    ranks = list_memory_of(config, model_args, layout.world_size)
    if ranks is None:
        return []
    before = ranks[pp_rank]
    offloads = config.training.enable_cpu_offload
    microbatch_key = "parallelism.pipeline_parallel_microbatch_size" if layout.pp > 1 else "training.local_batch_size"
    shard_degree = 2 * config.parallelism.data_parallel_shard_degree
    tries = [  # key, value, its price, GPUs
        ("activation_checkpoint.mode", "full", "a third more FLOPs", 1),
        ("parallelism.zero_stage", 3, "parameters travel more often", 1),
        ("parallelism.expert_parallel_degree", 2 * layout.ep, "tokens travel to their experts", 1),
        ("optimizer.moments_dtype", "bfloat16", "moments keep 8 bits", 1),
        (microbatch_key, layout.microbatch_size // 2, "smaller matmuls", 1),
        ("training.loss_chunk_tokens", Training.loss_chunk_tokens, "the loss is computed in chunks", 1),
        ("training.enable_cpu_offload", "true", "the optimizer runs on the host, slowly", 1),
        ("parallelism.data_parallel_shard_degree", shard_degree, "twice the GPUs", 2),
        ("parallelism.tensor_parallel_degree", 2 * layout.tp, "twice the GPUs", 2),
    ]
    options = []
    for key, value, price, n_gpus in tries:
        if key == "training.enable_cpu_offload":
            saved = 0.0 if offloads else count_state(before)
        else:
            changed = with_value(config, key, value)
            if changed == config or value == 0:
                continue
            if key == "parallelism.data_parallel_shard_degree":  # each rank keeps its rows
                changed = with_value(changed, "training.global_batch_size", 2 * config.training.global_batch_size)
            if (after := list_memory_of(changed, model_args, n_gpus * layout.world_size)) is None:
                continue
            on_gpu, then_on_gpu = (m.live - offloads * count_state(m) for m in (before, after[pp_rank]))
            saved = on_gpu - then_on_gpu
        if saved > 0:
            options.append(MemoryOption(key, value, saved, price, n_gpus))
    return sorted(options, key=lambda option: (option.n_gpus, -option.saved_bytes))


def count_state(memory: Memory) -> float:
    """Return the bytes that CPU offload keeps on the host."""
    return memory.parameters + memory.gradients + memory.optimizer


@contextmanager
def explain_out_of_memory(
    config: Config, model_args: ModelArgs, layout: Layout, parameters: dict[str, Tensor], optimizer: Optimizer
) -> Iterator[None]:
    """Context manager: adds to an OutOfMemoryError raised inside what uses the memory and what would help."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        state = [value for values in optimizer.state.values() for value in values.values()]
        used = {
            "weights": count_bytes(parameters.values()),
            "gradients": count_bytes(parameter.grad for parameter in parameters.values()),
            "optimizer": count_bytes(value for value in state if isinstance(value, Tensor)),
        }
        if torch.cuda.is_available():
            peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
            used["activations, gathered weights and the rest"] = peak - sum(used.values())
            used["gaps that the allocator could not use"] = torch.cuda.memory_reserved() - peak
        pp_rank = dist.get_rank() * layout.pp // layout.world_size
        options = find_memory_options(config, model_args, layout, pp_rank)[:N_OPTIONS]
        explanation = [
            "Out of memory. What uses it, in GiB:",
            *(f"  {size / GIB:8.2f}  {what}" for what, size in used.items() if size > 0),
            "What would save most on this rank, in GiB:",
            *(f"  {each.saved_bytes / GIB:8.2f}  --{each.key}={each.value}  ({each.price})" for each in options),
        ]
        raise torch.OutOfMemoryError("\n".join([*explanation, str(error)])) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out: torch's pipeline runtime wraps the errors of its stages."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__cause__))


def count_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of local shards on the GPU, or of all of them where there is no GPU."""
    shards = [local_tensor(tensor) for tensor in tensors if tensor is not None]
    return sum(shard.nbytes for shard in shards if shard.is_cuda or not torch.cuda.is_available())
