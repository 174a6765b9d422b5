"""When a GPU is full: what fills it, and which three keys would help most, by how much.

    torch's own message    how much was asked for, and how much is free
    here, beside it        weights, gradients and moments as they lie there now; the rest is activations, gathered
                           weights and logits
    and                    keys with the bytes that each would save this rank, by the arithmetic of memory_levers.py

No rank talks: the others may be waiting in a collective.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.plan.memory_levers import find_memory_options

GIB = 2**30
N_LEVERS = 3


@contextmanager
def explain_out_of_memory(
    config: Config, shape: ModelArgs, layout: Layout, parameters: dict[str, Tensor], optimizer: Optimizer
) -> Iterator[None]:
    """Adds to an OutOfMemoryError that is raised inside what used the memory and what would help."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        weights = [local_tensor(parameter) for parameter in parameters.values()]
        used = {
            "weights": count_bytes(weights),
            "gradients": count_bytes(local_tensor(p.grad) for p in parameters.values() if p.grad is not None),
            "optimizer": count_bytes(
                local_tensor(value) for state in optimizer.state.values() for value in tensors_of(state)
            ),
        }
        if torch.cuda.is_available():
            peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
            used["activations, gathered weights and the rest"] = peak - sum(used.values())
            used["gaps that the allocator could not use"] = torch.cuda.memory_reserved() - peak
        n_parameters = sum(weight.numel() for weight in weights)
        levers = find_memory_options(config, shape, layout, n_parameters)[:N_LEVERS]
        explanation = [
            "Out of memory. What lies there, in GiB:",
            *(f"  {size / GIB:8.2f}  {what}" for what, size in used.items() if size > 0),
            "What would help this rank most, in GiB saved:",
            *(f"  {lever.saved_bytes / GIB:8.2f}  --{lever.key}={lever.value}  ({lever.price})" for lever in levers),
        ]
        raise torch.OutOfMemoryError("\n".join([*explanation, str(error)])) from error


def is_out_of_memory(error: BaseException) -> bool:
    """torch's pipeline runtime wraps what its stages raise."""
    return isinstance(error, torch.OutOfMemoryError) or (
        error.__cause__ is not None and is_out_of_memory(error.__cause__)
    )


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """On a GPU; what is offloaded to the host is not in the way. On a CPU all of it."""
    return sum(tensor.nbytes for tensor in tensors if tensor.is_cuda or not torch.cuda.is_available())


def tensors_of(state: dict[str, object]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]
