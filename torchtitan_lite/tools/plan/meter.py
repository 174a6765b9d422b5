"""Record what one rank's code does, operator by operator: live memory, collectives, and the lines behind them.

    train_step(run, batch)  ->  operators  ->  Meter records  ->  the same operators, on fake or on real tensors

A storage counts from the operator that returns it until nothing refers to it, as an allocator without gaps counts.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torchtitan_lite.config.layout import MESH_DIMS, Layout
from torchtitan_lite.parallel.ring_attention import IMPLEMENTATIONS as CONTEXT_ATTENTION
from torchtitan_lite.tools.plan.call_sites import CallSite, CallSites
from torchtitan_lite.tools.plan.transfers import fraction_moved

WAIT = torch.ops._c10d_functional.wait_tensor.default
READ = torch.ops.aten._local_scalar_dense.default  # the host reads a number, by .item() or bool()
DEVICE = torch.ops.prim.device.default  # `tensor.device`: for fake tensors an operator, and half of all calls
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


# ---------------------------------------------------------------- collectives


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


def name_axis(layout: Layout, ranks: list[int]) -> str:
    """Return the mesh dims of a group: those in which its first and last rank differ."""
    first, last, dims = ranks[0], ranks[-1], []
    for dim in reversed(MESH_DIMS):  # innermost first
        degree = layout.degrees[dim]
        dims = [dim] * (first % degree != last % degree) + dims
        first, last = first // degree, last // degree
    return " x ".join(dims)


def read_collective(
    name: str, args: tuple, result: object, place: CallSite, axes: Callable[[dist.ProcessGroup], tuple[str, int]]
) -> Collective | None:
    """Read a collective off the operator's name, arguments and result; None for a group of one rank.

    `name`: a key of OPERATIONS. `axes`: axis of a group, and stride of its ranks.
    """
    group, operation = find_group(args), OPERATIONS[name]
    if group.size() == 1:
        return None
    # The larger side of the call, an argument or the result, is the whole tensor; of rows that are split unevenly it is
    # what this rank sends.
    sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in (*args, result)]
    whole = max(sides, key=lambda side: sum(tensor.numel() for tensor in side))
    given, at = INPUT_SPLITS.get(name, (0, len(args)))
    splits = args[at] if len(args) > at and isinstance(args[at], list) else []
    if splits:
        whole = sides[given]
    axis, stride = axes(group)
    dtype, n_bytes = str(whole[0].dtype).removeprefix("torch."), sum(t.numel() * t.element_size() for t in whole)
    n_bytes *= fraction_moved(operation, group.size(), group.rank(), splits)
    return Collective(operation, axis, group.size(), stride, tuple(whole[0].shape), dtype, n_bytes, place)


def find_group(args: tuple) -> dist.ProcessGroup:
    """Return the process group among a collective's arguments: an object, or the name in the last string."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    return dist.distributed_c10d._resolve_process_group([arg for arg in args if isinstance(arg, str)][-1])


# ---------------------------------------------------------------- the meter


class Meter(TorchDispatchMode):
    """Records what runs `with meter.watching()`. An allocator hands out whole blocks: 512 bytes on CUDA."""

    def __init__(self, layout: Layout, *, block_bytes: int = 1):
        super().__init__()
        self.layout, self.block_bytes = layout, block_bytes
        self._axes: dict[str, tuple[str, int]] = {}  # name of a group -> axis, and stride of its ranks
        self.places = CallSites()
        self.collectives: list[Collective] = []
        self.live_bytes = self.peak_bytes = 0
        self._storages: dict[int, tuple[int, weakref.ref]] = {}  # address -> bytes, storage
        self._is_paused = False

    def restart(self) -> None:
        """Forget what was recorded. What is live stays live."""
        self.collectives.clear()
        self.peak_bytes = self.live_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: records everything inside. Enter it inside the fake mode, if there is one."""
        self._is_fake = active_fake_mode() is not None
        resize, infer = torch.UntypedStorage.resize_, "_propagate_tensor_meta_non_cached"
        infer_shapes = getattr(ShardingPropagator, infer)

        def resize_and_note(storage: torch.UntypedStorage, n_bytes: int) -> None:
            resize(storage, n_bytes)
            if storage._cdata in self._storages:
                self._note_storage(storage)

        def infer_unseen(*args, **kwargs):
            """DTensor infers shapes by operators on tensors of the full shape, which a run does not allocate."""
            was_paused, self._is_paused = self._is_paused, True
            try:
                return infer_shapes(*args, **kwargs)
            finally:
                self._is_paused = was_paused

        with (
            patch.object(torch.UntypedStorage, "resize_", resize_and_note),
            patch.object(ShardingPropagator, infer, infer_unseen),
            self,
        ):
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they call the operator again on their plain tensors
        kwargs = kwargs or {}
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if self._is_paused:
            return func(*args, **kwargs)
        if self._is_fake and func is READ:
            return True if args[0].dtype is torch.bool else 1  # a fake tensor has no value; the run takes this one
        if self._is_fake and func is WAIT:
            return args[0]  # a device returns the tensor itself
        place = self.places.find()
        if func in CONTEXT_ATTENTION:
            with self:
                return CONTEXT_ATTENTION[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if func._schema.name in OPERATIONS:
            call = read_collective(func._schema.name, args, result, place, self._find_axis)
            self.collectives += [call] if call else []
        self.note(tree_leaves(result))
        return result

    def _find_axis(self, group: dist.ProcessGroup) -> tuple[str, int]:
        if group.group_name not in self._axes:
            ranks = dist.get_process_group_ranks(group)
            # Groups of the experts' mesh may have the ranks of another group.
            axis = GROUPS_OF_EXPERTS.get(group.group_desc) or name_axis(self.layout, ranks)
            self._axes[group.group_name] = axis, ranks[1] - ranks[0]
        return self._axes[group.group_name]

    def note(self, tensors: Iterable[object]) -> None:
        """Count the storages of these tensors."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            # Not a tensor without storage, nor a weight gathered in float8, whose own storage holds nothing
            is_real = isinstance(tensor, FakeTensor) or isinstance(tensor, Tensor) and not tensor.is_meta
            if is_real and not is_traceable_wrapper_subclass(tensor):
                self._note_storage(tensor.untyped_storage())

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, -(-storage.nbytes() // self.block_bytes) * self.block_bytes
        if key not in self._storages:
            self._storages[key] = 0, weakref.ref(storage, lambda _: self._forget(key))
        before, reference = self._storages[key]
        self._storages[key] = n_bytes, reference
        self.live_bytes += n_bytes - before
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)[0]
