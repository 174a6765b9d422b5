"""Record what one rank's code does, operator by operator: live memory, collectives, FLOPs, and the lines behind them.

    train_step(run, batch)  ->  operators  ->  Meter records  ->  the same operators, on fake or on real tensors

Memory is a list of events (a storage is made, resized, freed), so the peak and its parts can be read off any segment,
once the run is over: a storage may change its kind. Backward's output becomes a gradient when FSDP takes it.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.parallel.ring_attention import IMPLEMENTATIONS as CONTEXT_ATTENTION
from torchtitan_lite.tools.plan.call_sites import CallSite, CallSites
from torchtitan_lite.tools.plan.traffic import OPERATIONS, Collective, CollectiveReader

# gathered: FSDP's whole parameters; data: the batch, and a pipeline's receive buffers
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "loss", "data")

WAIT = torch.ops._c10d_functional.wait_tensor.default
aten = torch.ops.aten
READ = aten._local_scalar_dense.default  # the host reads a number, by .item() or bool()
DEVICE = torch.ops.prim.device.default  # `tensor.device`: for fake tensors an operator, and half of all calls
FLOPS = {  # torch counts attention of CUDA kernels only
    aten.addmm_: lambda total, left, right: 2 * left.shape[0] * left.shape[1] * right.shape[1],
    aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_: sdpa_flop_count(
        query.shape, key.shape, value.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *_: (
        sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    ),
}


class Storage:
    """The size and the kind of a tensor's memory."""

    __slots__ = ("kind", "n_bytes", "reference")

    def __init__(self, kind: str, reference: weakref.ref):
        self.kind, self.n_bytes, self.reference = kind, 0, reference


@dataclass
class Segment:
    """What ran between two marks. The optimizer's state is left out of memory: later steps find it already made."""

    name: str
    events: list[tuple[Storage, int]] = field(default_factory=list)  # (storage, bytes more or fewer)
    collectives: list[Collective] = field(default_factory=list)
    n_flops: int = 0

    @cached_property
    def change(self) -> Counter:
        """Bytes by kind that remain."""
        return sum_by_kind(self._list_kept())

    @cached_property
    def peak(self) -> Counter:
        """Live bytes by kind at the peak, less those before the segment."""
        n_bytes = most = most_at = 0
        kept = self._list_kept()
        for at, (_, change) in enumerate(kept, 1):
            n_bytes += change
            if n_bytes > most:
                most, most_at = n_bytes, at
        return sum_by_kind(kept[:most_at])

    def _list_kept(self) -> list[tuple[Storage, int]]:
        return [event for event in self.events if event[0].kind != "optimizer"]


class Meter(TorchDispatchMode):
    """Records what runs `with meter.watching()`. An allocator hands out whole blocks: 512 bytes on CUDA."""

    def __init__(self, layout: Layout, *, block_bytes: int = 1):
        super().__init__()
        self.reader, self.block_bytes = CollectiveReader(layout), block_bytes
        self.places = CallSites()
        self.segments = [Segment("")]  # the last one is running
        self._storages: dict[int, Storage] = {}
        self._is_paused = False

    def mark(self, name: str) -> None:
        """End the current segment of the run and start the one called `name`."""
        self.segments.append(Segment(name))

    def assign(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the kind of these tensors' storages."""
        for tensor in tensors:
            if tensor is not None and (storage := self._note(tensor, kind)):
                storage.kind = kind

    # ---------------------------------------------------------------- watching

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: records everything inside. Enter it inside the fake mode, if there is one."""
        self._is_fake = active_fake_mode() is not None
        resize, infer = torch.UntypedStorage.resize_, "_propagate_tensor_meta_non_cached"
        infer_shapes = getattr(ShardingPropagator, infer)

        def resize_and_note(storage: torch.UntypedStorage, n_bytes: int) -> None:
            resize(storage, n_bytes)
            if known := self._storages.get(storage._cdata):
                self._note_size(known, storage.nbytes())

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
        if func._schema.name in OPERATIONS and (call := self.reader.read(func._schema.name, args, result, place)):
            self.segments[-1].collectives.append(call)
        if count := FLOPS.get(func._overloadpacket):
            self.segments[-1].n_flops += count(*args)
        elif count := flop_registry.get(func._overloadpacket):
            self.segments[-1].n_flops += count(*args, **kwargs, out_val=result)
        if place.reduces:
            self._find_gradients(args)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, kind_of(place))
        return result

    def _find_gradients(self, args: tuple) -> None:
        """Mark FSDP's inputs as gradients: backward made them like any other tensor."""
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor) and (known := self._storages.get(tensor.untyped_storage()._cdata)):
                if known.kind in ("activations", "loss"):
                    known.kind = "gradients"

    def _note(self, tensor: Tensor, kind: str) -> Storage | None:
        """Return the storage of a tensor; a new one gets `kind`."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if not isinstance(tensor, FakeTensor) and tensor.is_meta:
            return None
        if is_traceable_wrapper_subclass(tensor):  # a weight gathered in float8: its own storage holds nothing
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
            self.segments[-1].events.append((storage, n_bytes - storage.n_bytes))
            storage.n_bytes = n_bytes

    def _forget(self, key: int) -> None:
        self._note_size(self._storages.pop(key), 0)


def kind_of(place: CallSite) -> str:
    """Return the kind of a new storage from the place of its operator."""
    if place.through == "FSDP":
        return "gradients" if place.reduces else "gathered"
    if place.through == "pipeline":
        return "data"
    return "loss" if place.module.startswith("output") else "activations"


def sum_by_kind(events: Iterable[tuple[Storage, int]]) -> Counter:
    """Return the change of live bytes, by kind."""
    total: Counter = Counter()
    for storage, n_bytes in events:
        total[storage.kind] += n_bytes
    return total
