"""Record the operators that one rank runs: live memory, collectives, and the line of code that called each collective.

    train_step(run, batch)  ->  operator  ->  Meter records it  ->  the same operator, on fake or real tensors

A storage counts from the operator that returns it until it is freed, as in an allocator without fragmentation.
"""

import re
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.parallel.ring_attention import IMPLEMENTATIONS as CONTEXT_ATTENTION
from torchtitan_lite.tools.plan.call_sites import CallSite, CallSites
from torchtitan_lite.tools.plan.transfers import Moved, fraction_moved, sum_moved

OPERATIONS = {  # part of an operator's name, without "_" -> operation
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}


@dataclass(frozen=True)
class Collective:
    """One call that moves bytes between this rank and other ranks."""

    operation: str
    axis: str  # mesh dims of the group: "tp", "dp_shard x cp"
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    n_bytes: float  # that this rank moves
    site: CallSite


def name_operation(func: OpOverload) -> str | None:
    """Return "all-gather" for "c10d::_allgather_base_" or "_c10d_functional::all_gather_into_tensor"; None if local."""
    if func.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
        return None
    name = func._opname.replace("_", "")
    return next((operation for part, operation in OPERATIONS.items() if part in name), None)


def name_axis(layout: Layout, group: dist.ProcessGroup) -> str:
    """Return the mesh dims of a group by its description, e.g. "mesh_dp_shard_cp"; all dims for the default group."""
    dims = "e?fsdp_[a-z]+|pp|dp_replicate|dp_shard|efsdp|ep|cp|tp"
    named = re.findall(dims, group.group_desc.removeprefix("mesh_"))
    return " x ".join(named or [dim for dim, degree in layout.degrees.items() if degree > 1])


def find_group(args: tuple) -> dist.ProcessGroup:
    """Return the process group among a collective's arguments: an object, or the last string, which is its name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in args if isinstance(argument, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1])


def measure(
    operation: str, group: dist.ProcessGroup, args: tuple, result: object
) -> tuple[Tensor, float]:
    """Return the whole tensor of a collective, and the bytes that this rank moves."""
    tensors = [leaf for leaf in tree_leaves((result, args)) if isinstance(leaf, Tensor)]
    whole = max(tensors, key=Tensor.numel)
    n_rows = []
    if operation == "all-to-all":
        whole = tensors[-1]  # the input
        lists = [argument for argument in args if isinstance(argument, list)]
        n_rows = lists[-1]  # sent to each rank
    fraction = fraction_moved(operation, group.size(), group.rank(), n_rows)
    return whole, whole.nbytes * fraction


class Meter(TorchDispatchMode):
    """Records all operators that run inside `with meter.watching()`."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout
        self.sites = CallSites()
        self.collectives: list[Collective] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self.parameters: dict[str, Tensor] = {}  # of a dry run, by FQN
        self._sizes: Counter[int] = Counter()  # address of a live storage -> bytes

    @property
    def traffic(self) -> dict[tuple[str, str], Moved]:
        """(axis, operation) -> calls and bytes of this rank."""
        calls = [((call.axis, call.operation), 1, call.n_bytes) for call in self.collectives]
        return sum_moved(calls)

    def restart(self) -> None:
        """Clear the collectives and reset the peak. Live storages stay counted."""
        self.collectives.clear()
        self.peak_bytes = self.live_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: record everything inside. If there is a fake mode, enter it first."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, n_bytes: int) -> None:
            resize(storage, n_bytes)
            if storage._cdata in self._sizes:
                self._count(storage)

        with patch.object(torch.UntypedStorage, "resize_", resize_and_count), self:
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # these subclasses call the operator again on their plain tensors
        site = self.sites.find()
        if func in CONTEXT_ATTENTION:
            with self:
                return CONTEXT_ATTENTION[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if (operation := name_operation(func)) and (group := find_group(args)).size() > 1:
            whole, n_bytes = measure(operation, group, args, result)
            dtype = str(whole.dtype).removeprefix("torch.")
            axis = name_axis(self.layout, group)
            self.collectives.append(
                Collective(operation, axis, tuple(whole.shape), dtype, n_bytes, site)
            )
        for value in tree_leaves(result):
            # A weight gathered in float8 is a wrapper subclass, whose storage is empty.
            if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
                continue
            if value.device.type != "meta":
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        n_bytes = storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._release, key)
        self.live_bytes += n_bytes - self._sizes[key]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._sizes[key] = n_bytes

    def _release(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)
