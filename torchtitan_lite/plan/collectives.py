"""Describe collectives: operation, mesh axis, bytes that this rank moves. The one counter of dry runs and real runs.

    where it is asked for                                                 who sees it
    tensor, context parallel    _c10d_functional.reduce_scatter_tensor    Meter (meter.py), in a dry run
    step.py, FSDP, pipeline     dist.all_gather_into_tensor, send ...     Meter
    everything                  c10d::_allgather_base_ -> gloo, NCCL      count_traffic, in one step of a real run

Bytes are counted per rank, P = bytes of the whole tensor, n ranks: an all-gather, reduce-scatter or all-to-all moves
P(n-1)/n, an all-reduce 2P(n-1)/n, a broadcast, send or receive P.

A real run is not watched by a TorchDispatchMode, because compiled code would run uncompiled under it. Instead, for one
step, every operator of the library c10d gets a kernel that counts the call and then runs the device's kernel, for some
20 us a call.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchtitan_lite.components.call_sites import CallSite
from torchtitan_lite.config.layout import MESH_DIMS, Layout

OPERATIONS = {  # torch's name of a collective -> ours
    "c10d::allreduce_": "all-reduce",
    "c10d::allreduce_coalesced_": "all-reduce",
    "c10d::_allgather_base_": "all-gather",
    "c10d::allgather_": "all-gather",
    "c10d::allgather_into_tensor_coalesced_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::reduce_scatter_": "reduce-scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "c10d::alltoall_base_": "all-to-all",
    "c10d::alltoall_": "all-to-all",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "_c10d_functional::all_reduce": "all-reduce",
    "_c10d_functional::all_reduce_": "all-reduce",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_to_all_single": "all-to-all",
    "_dtensor::shard_dim_alltoall": "all-to-all",
}
# Positions of the input and of its splits among the arguments
INPUT_SPLITS = {"c10d::alltoall_base_": (1, 4), "_c10d_functional::all_to_all_single": (0, 2)}
GROUPS_OF_EXPERTS = {"mesh_efsdp": "efsdp", "mesh_ep": "ep"}  # DeviceMesh's description of a group -> mesh dim
AXES = [*(" x ".join(dims) for n in range(1, len(MESH_DIMS) + 1) for dims in combinations(MESH_DIMS, n)), "efsdp", "ep"]
FRONT = torch.DispatchKey.BackendSelect  # runs before the kernels of all devices; c10d has no kernels there


@dataclass(frozen=True)
class Collective:
    """One call that moves bytes between this rank and others."""

    operation: str
    axis: str  # mesh dims of the group: "tp", "dp_shard x cp"
    n_ranks: int
    stride: int  # from one rank of the group to the next
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    n_bytes: float  # that this rank moves
    place: CallSite


@dataclass(frozen=True)
class Moved:
    """What one rank moves in a step, over a mesh axis for instance."""

    n_calls: int
    n_bytes: float


def sum_moved(calls: Iterable[tuple[Hashable, float, float]]) -> dict[Hashable, Moved]:
    """Return key -> the sum of one rank's calls: (key, number of calls, bytes of all of them)."""
    moved: dict[Hashable, Moved] = {}
    for key, n_calls, n_bytes in calls:
        before = moved.get(key, Moved(0, 0))
        moved[key] = Moved(before.n_calls + n_calls, before.n_bytes + n_bytes)
    return moved


def max_moved(ranks: Iterable[dict[Hashable, Moved]]) -> dict[Hashable, Moved]:
    """Return key -> what the rank moves that moves most bytes of this key."""
    most: dict[Hashable, Moved] = {}
    for moved in ranks:
        for key, each in moved.items():
            if key not in most or each.n_bytes > most[key].n_bytes:
                most[key] = each
    return most


def fraction_moved(operation: str, n_ranks: int, rank: int = 0, splits: Sequence[int] = ()) -> float:
    """Return the fraction of the whole tensor's bytes that one rank of a group moves.

    `splits`: rows that this `rank` of an all-to-all has for each rank; empty: equally many.
    """
    if operation == "all-to-all" and splits:
        return 1 - splits[rank] / max(1, sum(splits))
    ring = (n_ranks - 1) / n_ranks
    return {"all-reduce": 2 * ring, "broadcast": 1, "send": 1, "receive": 1}.get(operation, ring)


def name_axis(layout: Layout, ranks: list[int]) -> str:
    """Return the mesh dims of a group: those in which its first and last rank differ."""
    first, last, dims = ranks[0], ranks[-1], []
    for dim in reversed(MESH_DIMS):  # innermost first
        degree = layout.degrees[dim]
        dims = [dim] * (first % degree != last % degree) + dims
        first, last = first // degree, last // degree
    return " x ".join(dims)


class CollectiveReader:
    """Read a collective off the operator's name, arguments and result."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self._groups: dict[str, tuple[str, int]] = {}  # name of a group -> axis, and stride of its ranks

    def read(self, name: str, args: tuple, result: object = None, place: CallSite | None = None) -> Collective | None:
        """Return what this rank moves; None for a group of one rank. `name`: a key of OPERATIONS."""
        group, operation = find_group(args), OPERATIONS[name]
        n = group.size()
        if n == 1:
            return None
        if group.group_name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            # Groups of the experts' mesh may have the ranks of another group.
            axis = GROUPS_OF_EXPERTS.get(group.group_desc) or name_axis(self.layout, ranks)
            self._groups[group.group_name] = axis, ranks[1] - ranks[0]
        axis, stride = self._groups[group.group_name]
        # The larger side of the call, an argument or the result, is the whole tensor; of rows that are split unevenly
        # it is what this rank sends.
        sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in (*args, result)]
        whole = max(sides, key=lambda side: sum(tensor.numel() for tensor in side))
        given, at = INPUT_SPLITS.get(name, (0, len(args)))
        splits = args[at] if len(args) > at and isinstance(args[at], list) else []
        if splits:
            whole = sides[given]
        fraction = fraction_moved(operation, n, group.rank(), splits)
        return Collective(
            operation=operation,
            axis=axis,
            n_ranks=n,
            stride=stride,
            shape=tuple(whole[0].shape),
            dtype=str(whole[0].dtype).removeprefix("torch."),
            n_bytes=sum(tensor.numel() * tensor.element_size() for tensor in whole) * fraction,
            place=place or CallSite(),
        )


def find_group(args: tuple) -> dist.ProcessGroup:
    """Return the process group among a collective's arguments: an object, or the name in the last string."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    return dist.distributed_c10d._resolve_process_group([arg for arg in args if isinstance(arg, str)][-1])


# ---------------------------------------------------------------- one step of a real run


class TrafficCount:
    """Collectives of this rank by axis. Calls in the group `besides` are not counted: another thread makes them."""

    def __init__(self, layout: Layout, besides: dist.ProcessGroup):
        self.reader, self.besides = CollectiveReader(layout), besides.group_name
        self.moved: dict[str, Moved] = {}  # axis -> all calls over it

    def take(self, name: str, keys: torch.DispatchKeySet, *args):
        """Count a call of the c10d operator `name`, then run its kernel."""
        if find_group(args).group_name != self.besides and (call := self.reader.read(f"c10d::{name}", args)):
            before = self.moved.get(call.axis, Moved(0, 0.0))
            self.moved[call.axis] = Moved(before.n_calls + 1, before.n_bytes + call.n_bytes)
        # redispatch releases Python's lock; gloo's threads need it before this call can end.
        return getattr(torch.ops.c10d, name).default.redispatch(keys.remove(FRONT), *args)


@contextmanager
def count_traffic(layout: Layout, *, besides: dist.ProcessGroup) -> Iterator[TrafficCount]:
    """Context manager: counts this rank's collectives inside. Outside, c10d's operators are as they were."""
    count = TrafficCount(layout, besides)
    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name in OPERATIONS:
            namespace, operator = name.split("::")
            if namespace == "c10d":
                library.impl(operator, partial(count.take, operator), FRONT.name, with_keyset=True)
        yield count


def find_most_moved(moved: dict[str, Moved], group: dist.ProcessGroup) -> dict[str, Moved]:
    """Return, for each axis, the traffic of the rank that moves most over it.

    Two all-reduces of 264 bytes in `group`: all ranks, by gloo. Each rank may know other axes.
    """
    own = [moved.get(axis, Moved(0, 0.0)) for axis in AXES]
    own_bytes = torch.tensor([each.n_bytes for each in own], dtype=torch.float64)
    most_bytes = own_bytes.clone()
    dist.all_reduce(most_bytes, dist.ReduceOp.MAX, group=group)
    n_calls = torch.tensor([each.n_calls for each in own]) * (own_bytes == most_bytes)
    dist.all_reduce(n_calls, dist.ReduceOp.MAX, group=group)
    most = zip(AXES, n_calls.tolist(), most_bytes.tolist(), strict=True)
    return {axis: Moved(calls, n_bytes) for axis, calls, n_bytes in most if calls}
