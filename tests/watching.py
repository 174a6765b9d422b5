"""Define dispatch modes that see every operator, including operators that context parallel calls inside its own
operators."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_lite.extensions.ring_attention import IMPLEMENTATIONS

aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Calls `note(func, args, outputs)` of its subclass after each operator on ordinary tensors.

    `known`: tensors that existed before.
    """

    def __init__(self, known: Sequence[Tensor] = ()):
        super().__init__()
        self.known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(
            issubclass(one, Tensor) and one not in (Tensor, torch.nn.Parameter) for one in types
        ):
            # the argument is a DTensor, which then calls the operators on its local tensors
            return NotImplemented
        if func in IMPLEMENTATIONS:
            with self:
                return IMPLEMENTATIONS[func](*args, **(kwargs or {}))
        outputs = func(*args, **(kwargs or {}))
        self.note(func, args, [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)])
        return outputs


class PeakMemory(Watch):
    """Measures the peak bytes of the storages that are allocated inside the context."""

    live_bytes = 0
    peak_bytes = 0

    def note(self, func, args, outputs):
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage not in self.known:
                self.known.add(storage)
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def free(self, n_bytes: int) -> None:
        self.live_bytes -= n_bytes

    def result(self) -> int:
        return self.peak_bytes


class AttentionWork(Watch):
    """Counts the pairs of query and key that attention kernels compute in forward."""

    n_pairs = 0

    def note(self, func, args, outputs):
        if func != aten._scaled_dot_product_flash_attention_for_cpu.default:
            return
        n_rows, n_heads, n_queries, _ = args[0].shape
        n_keys = args[1].shape[2]
        n_pairs = n_queries * n_keys
        if args[4:5] == (True,):  # causal; defaults are not passed
            assert n_queries == n_keys
            n_pairs = n_queries * (n_queries + 1) // 2
        self.n_pairs += n_pairs * n_rows * n_heads

    def result(self) -> int:
        return self.n_pairs
