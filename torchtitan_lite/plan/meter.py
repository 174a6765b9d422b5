"""What one rank's code does, operator by operator: storage that lives, collectives, FLOPs, and where they come from.

    train_step(run, batch)  ->  operators  ->  Meter notes  ->  the same operators, on fake or on real tensors

Memory is a list of events (a storage made, resized, freed), so that the peak, and what it consists of, can be told of
any stretch; and a storage may learn later what it is for: what a matmul puts out in backward is a gradient once FSDP
takes it up.

Traffic is counted as everywhere here, per rank, P = bytes of the whole tensor, n ranks: an all-gather, reduce-scatter
or all-to-all moves P(n-1)/n, an all-reduce 2P(n-1)/n, a broadcast, send or receive P.
"""

import weakref
from collections import Counter
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchtitan_lite.components.places import Place, Places
from torchtitan_lite.parallel.context_attention import IMPLEMENTATIONS as CONTEXT_ATTENTION
from torchtitan_lite.plan.traffic import share_moved

# gathered: FSDP's whole parameters; data: tokens, targets and the like, and what a pipeline receives into
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "loss", "data")

OPERATIONS = {  # torch's name of a collective -> ours
    "c10d::allreduce_": "all-reduce",
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
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
WAIT = torch.ops._c10d_functional.wait_tensor.default
aten = torch.ops.aten
READ = aten._local_scalar_dense.default  # a number that the host asks for, by .item() or bool()
DEVICE = torch.ops.prim.device.default  # `tensor.device`: of fake tensors it is an operator, and every second one
FLOPS = {  # of attention, torch counts its CUDA kernels only
    aten.addmm_: lambda total, left, right: 2 * left.shape[0] * left.shape[1] * right.shape[1],
    aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_: sdpa_flop_count(
        query.shape, key.shape, value.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_: (
        sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    ),
}


@dataclass(frozen=True)
class Collective:
    """One call that moves bytes between this rank and others."""

    operation: str
    axis: str  # mesh dims along which the group lies: "tp", "dp_shard x cp"
    n_ranks: int
    stride: int  # from one rank of the group to the next
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    n_bytes: float  # that this rank moves
    place: Place


class Storage:
    """A stretch of memory, and what it is for."""

    __slots__ = ("kind", "n_bytes", "reference")

    def __init__(self, kind: str, reference: weakref.ref):
        self.kind, self.n_bytes, self.reference = kind, 0, reference


@dataclass(frozen=True)
class Mark:
    """A moment of the run."""

    name: str
    n_events: int
    n_collectives: int
    n_flops: int


class Meter(TorchDispatchMode):
    """Notes what runs `with meter.watching()`.

    `name_axis` tells the mesh dims along which some ranks lie. Allocators hand out whole blocks: 512 bytes on CUDA.
    """

    def __init__(self, name_axis: Callable[[list[int]], str], *, block_bytes: int = 1):
        super().__init__()
        self.name_axis, self.block_bytes = name_axis, block_bytes
        self._groups: dict[str, tuple[str, int]] = {}  # name -> axis, and ranks from one member to the next
        self.places = Places()
        self.events: list[tuple[Storage, int]] = []  # (storage, bytes more or fewer)
        self.collectives: list[Collective] = []
        self.n_flops = 0
        self.marks: list[Mark] = []
        self._storages: dict[int, Storage] = {}
        self._is_paused = False

    def mark(self, name: str) -> None:
        """Ends a stretch of the run, and begins the one called `name`."""
        self.marks.append(Mark(name, len(self.events), len(self.collectives), self.n_flops))

    def assign(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Says what these tensors are for."""
        for tensor in tensors:
            if tensor is not None and (storage := self._note(tensor, kind)):
                storage.kind = kind

    # ---------------------------------------------------------------- watching

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes everything inside. To be entered inside the fake mode, where there is one."""
        self._is_fake = active_fake_mode() is not None
        resize, infer = torch.UntypedStorage.resize_, "_propagate_tensor_meta_non_cached"
        infer_shapes = getattr(ShardingPropagator, infer)

        def resize_and_note(storage: torch.UntypedStorage, n_bytes: int) -> None:
            resize(storage, n_bytes)
            if known := self._storages.get(storage._cdata):
                self._note_size(known, storage.nbytes())

        def infer_unseen(*args, **kwargs):
            """DTensor finds shapes by running operators on tensors of the whole shape: nothing of it is allocated."""
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
            return NotImplemented  # they take themselves apart first, and come again as plain tensors
        kwargs = kwargs or {}
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if self._is_paused:
            return func(*args, **kwargs)
        if self._is_fake and func is READ:
            return True if args[0].dtype is torch.bool else 1  # a fake tensor knows no answer; this one goes on
        if self._is_fake and func is WAIT:
            return args[0]  # as on a device: the tensor itself
        place = self.places.find()
        if func in CONTEXT_ATTENTION:
            with self:
                return CONTEXT_ATTENTION[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if func._schema.name in OPERATIONS:
            self._note_collective(func, args, result, place)
        if count := FLOPS.get(func._overloadpacket):
            self.n_flops += count(*args)
        elif count := flop_registry.get(func._overloadpacket):
            self.n_flops += count(*args, **kwargs, out_val=result)
        if place.reduces:
            self._find_gradients(args)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, kind_of(place))
        return result

    def _find_gradients(self, args: tuple) -> None:
        """What FSDP reduces was put out by backward like any other tensor."""
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor) and (known := self._storages.get(tensor.untyped_storage()._cdata)):
                if known.kind in ("activations", "loss"):
                    known.kind = "gradients"

    def _note(self, tensor: Tensor, kind: str) -> Storage | None:
        """The storage of a tensor; a new one is `kind`."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if not isinstance(tensor, FakeTensor) and tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = Storage(kind, weakref.ref(storage, lambda _: self._forget(key)))
        self._note_size(known, storage.nbytes())
        return known

    def _note_size(self, storage: Storage, n_bytes: int) -> None:
        n_bytes = -(-n_bytes // self.block_bytes) * self.block_bytes
        if n_bytes != storage.n_bytes:
            self.events.append((storage, n_bytes - storage.n_bytes))
            storage.n_bytes = n_bytes

    def _forget(self, key: int) -> None:
        self._note_size(self._storages.pop(key), 0)

    def _note_collective(self, func, args: tuple, result, place: Place) -> None:
        group = find_group(args)
        n, operation = group.size(), OPERATIONS[func._schema.name]
        if n == 1:
            return
        if group.group_name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[group.group_name] = self.name_axis(ranks), ranks[1] - ranks[0]
        axis, stride = self._groups[group.group_name]
        # The larger side of the call is the whole tensor.
        tensors = [tensor for tensor in tree_leaves((args, result)) if isinstance(tensor, Tensor)]
        whole = max(tensors, key=Tensor.numel)
        splits = args[2] if operation == "all-to-all" and isinstance(args[2], list) else ()
        share = share_moved(operation, n, group.rank(), splits)
        self.collectives.append(
            Collective(
                operation=operation,
                axis=axis,
                n_ranks=n,
                stride=stride,
                shape=tuple(whole.shape),
                dtype=str(whole.dtype).removeprefix("torch."),
                n_bytes=whole.numel() * whole.element_size() * share,
                place=place,
            )
        )


def kind_of(place: Place) -> str:
    """What a storage is for, by where it is made."""
    if place.through == "FSDP":
        return "gradients" if place.reduces else "gathered"
    if place.through == "pipeline":
        return "data"
    return "loss" if place.module.startswith("output") else "activations"


def find_group(args: tuple) -> dist.ProcessGroup:
    """The group among the arguments of a collective: itself, or, last, by name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    return dist.distributed_c10d._resolve_process_group([arg for arg in args if isinstance(arg, str)][-1])


def sum_by_kind(events: Iterable[tuple[Storage, int]]) -> Counter:
    """Bytes more or fewer, by kind."""
    total: Counter = Counter()
    for storage, n_bytes in events:
        total[storage.kind] += n_bytes
    return total


def find_peak(events: list[tuple[Storage, int]]) -> Counter:
    """Bytes by kind, above those at the beginning, when all together are most."""
    n_bytes = most = most_at = 0
    for at, (_, change) in enumerate(events, 1):
        n_bytes += change
        if n_bytes > most:
            most, most_at = n_bytes, at
    return sum_by_kind(events[:most_at])
