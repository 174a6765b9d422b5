"""Explain an out-of-memory error: what fills the GPU, and the three keys that would save most.

    torch's own message    how much was asked for, and how much is free
    added                  weights, gradients and optimizer state as they are now; the rest is activations, gathered
                           weights and logits
    and                    keys with the bytes that each saves this rank: the closed form of config/memory.py, with
                           the key and without

No rank talks: the others may be waiting in a collective.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.case import Case
from torchtitan_lite.config.checks import find_problems
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, plan_layout
from torchtitan_lite.config.memory import Memory, estimate_memory, weigh_waiting
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Config, Training, with_value
from torchtitan_lite.config.workload import describe_workload
from torchtitan_lite.plan.simulator import count_in_flight, plan_order

GIB = 2**30
N_OPTIONS = 3


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
    before = estimate_rank(config, model_args, layout.world_size, pp_rank)
    if before is None:
        return []
    offloads = config.training.enable_cpu_offload
    pipelined = layout.pp > 1
    microbatch_key = "parallelism.pipeline_parallel_microbatch_size" if pipelined else "training.local_batch_size"
    shard_degree = 2 * config.parallelism.data_parallel_shard_degree
    chunk = Training.loss_chunk_tokens
    tries = [  # key, value, its price, GPUs
        ("activation_checkpoint.mode", "full", "a third more FLOPs", 1),
        ("parallelism.zero_stage", 3, "parameters travel more often", 1),
        ("parallelism.expert_parallel_degree", 2 * layout.ep, "tokens travel to their experts", 1),
        ("optimizer.moments_dtype", "bfloat16", "moments keep 8 bits", 1),
        (microbatch_key, layout.microbatch_size // 2, "smaller matmuls", 1),
        ("training.loss_chunk_tokens", chunk, "the loss is computed in chunks", 1),
        ("training.enable_cpu_offload", "true", "the optimizer runs on the host, slowly", 1),
        ("parallelism.data_parallel_shard_degree", shard_degree, "twice the GPUs", 2),
        ("parallelism.tensor_parallel_degree", 2 * layout.tp, "twice the GPUs", 2),
    ]
    options = []
    for key, value, price, n_gpus in tries:
        if key == "training.enable_cpu_offload":
            saved = 0.0 if offloads else before.parameters + before.gradients + before.optimizer
        else:
            changed = with_value(config, key, value)
            if changed == config or value == 0:
                continue
            if key == "parallelism.data_parallel_shard_degree":  # each rank keeps its rows
                changed = with_value(changed, "training.global_batch_size", 2 * config.training.global_batch_size)
            after = estimate_rank(changed, model_args, n_gpus * layout.world_size, pp_rank)
            saved = count_on_gpu(before, offloads) - count_on_gpu(after, offloads) if after else 0.0
        if saved > 0:
            options.append(MemoryOption(key, value, saved, price, n_gpus))
    return sorted(options, key=lambda option: (option.n_gpus, -option.saved_bytes))


def estimate_rank(config: Config, model_args: ModelArgs, world_size: int, pp_rank: int) -> Memory | None:
    """Return the closed form for one rank; None where there is none, or where `check` refuses the config."""
    if find_problems("run", Case(config), key="optimizer.moments_dtype"):
        return None
    try:
        layout = plan_layout(config, model_args, world_size)
        workload = describe_workload(config, model_args, layout)
    except ConfigError:
        return None
    order = plan_order(config.parallelism, layout)
    return estimate_memory(workload, pp_rank, count_in_flight(order[pp_rank], weigh_waiting(workload)))


def count_on_gpu(memory: Memory, offloads: bool) -> float:
    return memory.live - offloads * (memory.parameters + memory.gradients + memory.optimizer)


# ---------------------------------------------------------------- the report


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: torch's pipeline runtime wraps the errors of its stages."""
    return isinstance(error, torch.OutOfMemoryError) or (
        error.__cause__ is not None and is_out_of_memory(error.__cause__)
    )


def count_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of local shards on the GPU, or of all of them where there is no GPU."""
    shards = [local_tensor(tensor) for tensor in tensors if tensor is not None]
    return sum(shard.nbytes for shard in shards if shard.is_cuda or not torch.cuda.is_available())
