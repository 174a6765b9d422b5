"""Dispatch modes that see every operator, also those inside the operators of context parallel, and memory."""

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_lite.extensions.ring_attention import IMPLEMENTATIONS

aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Calls `note(func, args, outputs)` of its subclass after each operator on ordinary tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(
            issubclass(one, Tensor) and one not in (Tensor, torch.nn.Parameter) for one in types
        ):
            # the argument is a DTensor, which next calls operators on local tensors
            return NotImplemented
        if func in IMPLEMENTATIONS:
            with self:
                return IMPLEMENTATIONS[func](*args, **(kwargs or {}))
        outputs = func(*args, **(kwargs or {}))
        self.note(func, args, [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)])
        return outputs


A_STEP = "a step that is measured"


class PeakMemory(profile):
    """Measures the peak bytes that torch's allocator gives out inside the context, or after its
    `record_function(A_STEP)`.

    torch's profiler can miss a release by another thread. So a tensor counts as released at the latest when a different
    tensor gets its address.
    """

    def __init__(self):
        super().__init__(activities=[ProfilerActivity.CPU], profile_memory=True)

    def result(self) -> int:
        return find_peak(self.profiler.kineto_results.experimental_event_tree())


def find_peak(events: list) -> int:
    """Return the peak bytes, computed from these events."""
    moments = []
    to_do = list(events)
    while to_do:
        event = to_do.pop()
        to_do += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            moments.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == A_STEP:
            moments.append((event.start_time_ns, None, 0))
    n_bytes = 0
    peak = 0
    sizes = {}  # address -> bytes
    for _, address, size in sorted(moments, key=lambda moment: moment[0]):
        if address is None:
            peak = 0
        n_bytes += max(size, 0) - sizes.pop(address, 0)
        if size > 0:
            sizes[address] = size
        peak = max(n_bytes, peak)
    return peak


class AttentionWork(Watch):
    """Counts the pairs of query and key that attention kernels compute in forward."""

    def __init__(self):
        super().__init__()
        self.n_pairs = 0

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
