"""Bytes that this rank really moves over each mesh axis, counted for one step where every collective passes.

    step.py, FSDP, pipeline     dist.all_gather_into_tensor, group.send ...     \\
    DTensor, compiled code      _c10d_functional.reduce_scatter_tensor ...      -> c10d::send ... -> gloo, NCCL
                                                                                   ^ counted here

Whatever asks for a collective, torch in the end calls one of a few operators of the library c10d. For one step each of
them is given a kernel that counts, and calls the one of the device. Nothing else is watched: compiled code stays
compiled, which it would not under a TorchDispatchMode. It costs some 20 us a call.

Effect: none outside of `count_traffic`. Bytes are counted as in plan/traffic.py, which forecasts them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchtitan_lite.config.layout import MESH_DIMS, Layout
from torchtitan_lite.plan.traffic import Moved, name_axis, share_moved

OPERATIONS = {  # operator of c10d -> ours
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}


FRONT = torch.DispatchKey.BackendSelect  # comes before the kernels of all devices, and c10d has none there


class TrafficCount:
    """Of this rank. `besides`: a group whose calls belong to no step."""

    def __init__(self, layout: Layout, besides: dist.ProcessGroup):
        self.layout, self.besides = layout, besides.group_name
        self.moved: dict[str, Moved] = {}  # axis -> all calls over it
        self._axes: dict[str, str] = {}  # of groups, by name

    def take(self, name: str, keys: torch.DispatchKeySet, *args):
        """What the operator of this name runs before its kernel."""
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        if group.size() > 1 and group.group_name != self.besides:
            self._add(OPERATIONS[name], group, args)
        # redispatch lets other threads have Python meanwhile; gloo's need it before this call can end.
        return getattr(torch.ops.c10d, name).default.redispatch(keys.remove(FRONT), *args)

    def _add(self, operation: str, group: dist.ProcessGroup, args: tuple) -> None:
        name = group.group_name
        if name not in self._axes:
            self._axes[name] = name_axis(self.layout, dist.get_process_group_ranks(group))
        # The larger side of the call, what goes in or what comes out, is the whole tensor.
        sides = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
        whole_bytes = max(sum(tensor.nbytes for tensor in side) for side in sides)
        splits = args[4] if operation == "all-to-all" and len(args) > 4 else ()
        before = self.moved.get(self._axes[name], Moved(0, 0.0))
        n_bytes = whole_bytes * share_moved(operation, group.size(), group.rank(), splits)
        self.moved[self._axes[name]] = Moved(before.n_calls + 1, before.n_bytes + n_bytes)


@contextmanager
def count_traffic(layout: Layout, *, besides: dist.ProcessGroup) -> Iterator[TrafficCount]:
    """Counts the calls of this rank inside."""
    count = TrafficCount(layout, besides)
    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name in OPERATIONS:
            library.impl(name, partial(count.take, name), FRONT.name, with_keyset=True)
        yield count


def find_most_moved(moved: dict[str, Moved], group: dist.ProcessGroup) -> dict[str, Moved]:
    """Over each axis what the rank moves that moves most over it.

    Two all-reduces of 248 bytes in `group`: all ranks, by gloo. Each rank may know other axes.
    """
    axes = [" x ".join(dims) for n in range(1, len(MESH_DIMS) + 1) for dims in combinations(MESH_DIMS, n)]
    own = [moved.get(axis, Moved(0, 0.0)) for axis in axes]
    own_bytes = torch.tensor([each.n_bytes for each in own], dtype=torch.float64)
    most_bytes = own_bytes.clone()
    dist.all_reduce(most_bytes, dist.ReduceOp.MAX, group=group)
    n_calls = torch.tensor([each.n_calls for each in own]) * (own_bytes == most_bytes)
    dist.all_reduce(n_calls, dist.ReduceOp.MAX, group=group)
    most = zip(axes, n_calls.tolist(), most_bytes.tolist(), strict=True)
    return {axis: Moved(calls, n_bytes) for axis, calls, n_bytes in most if calls}
