"""Record the operators that one rank runs: live memory, collectives, and the line of code that called each collective.

    train_step(run, batch)  ->  operator  ->  Meter records it  ->  the same operator, on fake or real tensors

A storage is live from the operator that returns it until it is freed, as in an allocator without fragmentation.

While an operator runs, Python's stack shows who called it:

    FSDPParamGroup.unshard        its `self.modules` are the modules        -> module
    nn.Module._call_impl          its `self` is the module                  -> module, phase
    models/llama3/modules.py:96   the innermost frame of this package       -> line
    _engine_run_backward          the call of autograd                      -> phase

In backward, the stack ends in autograd's engine. Autograd numbers its nodes in the order in which forward creates them.
Therefore the sequence number of the running node identifies the call site in forward.
"""

import sys
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import CodeType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torchtitan_lite import PACKAGE
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.extensions.ring_attention import IMPLEMENTATIONS as CONTEXT_ATTENTION
from torchtitan_lite.tools.plan.transfers import Moved, fraction_moved, name_axis, sum_moved

OPERATIONS = {  # part of an operator's name, without "_" -> operation
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
CALL, ENGINE = nn.Module._call_impl.__code__, torch.autograd.graph._engine_run_backward.__code__
# A pipeline schedule calls these functions outside of the model.
FSDP = {"unshard": "forward", "post_backward": "backward"}
# A call in one of these files is attributed to its caller outside of these files.
NO_CALL_SITES = ("parallel/exchange.py", "parallel/tensor_parallel.py", "tools/")


@dataclass(frozen=True)
class CallSite:
    """The line, the module and the phase in which an operator was called."""

    line: str = ""  # "step.py:112"
    module: str = ""  # FQN: "layers.3.attention"
    phase: str = "between"  # forward, recompute, backward, or between (outside of the model)


@cache
def name_call_site(code: CodeType) -> str:
    """Return the path of a file within this package, such as "step.py". Return "" if the file belongs to another
    package, or is listed in NO_CALL_SITES."""
    path = Path(code.co_filename)
    name = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""
    return "" if name.startswith(NO_CALL_SITES) else name


@dataclass(frozen=True)
class Collective:
    """One call that moves bytes between this rank and other ranks."""

    operation: str
    axis: str  # mesh dims of the group: "tp", "dp_shard x cp"
    shape: tuple[int, ...]  # shape of the full tensor
    dtype: str
    n_bytes: float  # bytes that this rank moves
    site: CallSite


def find_process_group(args: tuple) -> dist.ProcessGroup:
    """Find the process group in a collective's arguments. The group is an object, or a name: the last of the
    arguments that are strings."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in args if isinstance(argument, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1])


class Meter(TorchDispatchMode):
    """Records all operators that run inside `with meter.watching()`."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout
        self._names: dict[int, str] = {}  # id of a module -> FQN
        # (autograd's sequence number, call site) in forward, ascending
        self._in_forward: list[tuple[int, CallSite]] = [(-1, CallSite())]
        self.collectives: list[Collective] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self.parameters: dict[str, Tensor] = {}  # parameters of the dry run, by FQN
        self._sizes: Counter[int] = Counter()  # address of a live storage -> bytes

    @property
    def traffic(self) -> dict[tuple[str, str], Moved]:
        """Calls and bytes of this rank, by (axis, operation)."""
        calls = [((call.axis, call.operation), 1, call.n_bytes) for call in self.collectives]
        return sum_moved(calls)

    @property
    def forward_modules(self) -> list[str]:
        """The FQNs of the modules, in the order of forward."""
        return [site.module for _, site in self._in_forward if site.phase == "forward"]

    def name_modules(self, parts: list[nn.Module]) -> None:
        """Register the FQNs of all modules in these model parts."""
        self._names |= {id(module): fqn for part in parts for fqn, module in part.named_modules()}

    def restart(self) -> None:
        """Clear the collectives and reset the peak. Live storages stay counted."""
        self.collectives.clear()
        self.peak_bytes = self.live_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: record all operators that run inside. Enter a fake mode before this context manager."""
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
            # DTensor and AsyncCollectiveTensor call the operator again on the tensors that they wrap
            return NotImplemented
        # operators without communication need a call site too, because backward looks up the call sites of forward
        site = self._find_site()
        if func in CONTEXT_ATTENTION:
            with self:
                return CONTEXT_ATTENTION[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._record(func, args, result, site)
        for value in tree_leaves(result):
            # A weight that is all-gathered in float8 is a wrapper subclass with an empty storage.
            if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
                continue
            if value.device.type != "meta":
                self._count(value.untyped_storage())
        return result

    def _record(self, func: OpOverload, args: tuple, result: object, site: CallSite) -> None:
        """Record the operator if it moves bytes between ranks."""
        name = func._opname.replace("_", "")
        operation = next((OPERATIONS[part] for part in OPERATIONS if part in name), None)
        if operation is None:
            return
        group = find_process_group(args)
        if group.size() == 1:
            return
        tensors = [leaf for leaf in tree_leaves((result, args)) if isinstance(leaf, Tensor)]
        whole = max(tensors, key=Tensor.numel)
        fraction = fraction_moved(operation, group.size())
        if operation == "all-to-all":
            whole = tensors[-1]  # the input
            *_, n_rows = (argument for argument in args if isinstance(argument, list))
            if n_rows:  # rows for each rank; if empty, each rank gets the same number of rows
                fraction = 1 - n_rows[group.rank()] / max(1, sum(n_rows))
        collective = Collective(
            operation=operation,
            axis=name_axis(self.layout, group.group_desc),
            shape=tuple(whole.shape),
            dtype=str(whole.dtype).removeprefix("torch."),
            n_bytes=whole.nbytes * fraction,
            site=site,
        )
        self.collectives.append(collective)

    def _find_site(self) -> CallSite:
        """Return the call site of the operator that is running."""
        node, frame = torch._C._current_autograd_node(), sys._getframe(1)
        line = module = phase = outside = ""
        while frame and not (line and phase):
            code = frame.f_code
            if code is ENGINE:
                phase = phase or "backward"
                if node is not None:
                    break  # ignore the frames that called backward()
            elif code is CALL and not phase and id(frame.f_locals["self"]) in self._names:
                phase = "forward" if node is None else "recompute"
                module = module or self._names[id(frame.f_locals["self"])]
            elif code.co_filename.endswith("_fsdp_param_group.py"):
                group = getattr(frame.f_locals.get("self"), "modules", ())  # "norm, output"
                module = module or ", ".join(self._names.get(id(each), "") for each in group)
                outside = FSDP.get(code.co_name, outside)
            elif not line and (file := name_call_site(code)):
                line = f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        site = CallSite(line, module, phase or outside or "between")
        if phase == "backward" and node is not None:
            # the first call site that was recorded after forward had created this node
            at = bisect_left(self._in_forward, node._sequence_nr() + 1, key=itemgetter(0))
            if at < len(self._in_forward):
                _, forward = self._in_forward[at]
                site = CallSite(line or forward.line, module or forward.module, phase)
        counter = torch.autograd._get_sequence_nr()
        if phase in ("forward", "recompute") and counter > self._in_forward[-1][0]:
            self._in_forward.append((counter, site))
        return site

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
