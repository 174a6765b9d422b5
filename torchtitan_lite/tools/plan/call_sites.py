"""Find the line of code and the module that an operator belongs to, by reading Python's stack while it runs.

    FSDPParamGroup.unshard      its `self` knows the module               -> module
    nn.Module._call_impl        its `self` is the module that computes    -> module, phase
    model/llama3.py:118         the innermost frame of this package       -> line
    _engine_run_backward        autograd                                  -> phase

In backward the stack ends in autograd's engine. But autograd numbers its nodes in the order in which forward makes
them, so the number of the running node leads back to the call site in forward.
"""

import sys
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from torchtitan_lite import PACKAGE

CALL, ENGINE = nn.Module._call_impl.__code__, torch.autograd.graph._engine_run_backward.__code__
FSDP = {"unshard": "forward", "post_backward": "backward"}  # a pipeline schedule calls them outside of the model
NO_CALL_SITES = ("parallel/exchange.py", "parallel/tensor_parallel.py", "tools/")  # they exchange for others, or record


@dataclass(frozen=True)
class CallSite:
    """Where an operator was called."""

    line: str = ""  # "step.py:112"
    module: str = ""  # FQN of the module that computes: "layers.3.attention"
    phase: str = "between"  # forward, recompute, backward; between: outside of the model


class CallSites:
    """Finds call sites. Call `find` at every operator: backward needs the call sites of forward."""

    def __init__(self):
        self.names: dict[int, str] = {}  # id of a module -> FQN
        self._in_forward: list[tuple[int, CallSite]] = [(-1, CallSite())]  # autograd's counter of nodes, rising

    def name_modules(self, parts: list[nn.Module]) -> None:
        """Register the names of the modules of these model parts."""
        self.names |= {id(module): fqn for part in parts for fqn, module in part.named_modules()}

    def find(self) -> CallSite:
        """Return the call site of the operator that is running."""
        node, frame = torch._C._current_autograd_node(), sys._getframe(1)
        line = module = phase = outside = ""
        while frame and not (line and phase):
            code = frame.f_code
            if code is ENGINE:
                phase = phase or "backward"
                if node is not None:
                    break  # the caller of backward computes nothing itself
            elif code is CALL and not phase and id(frame.f_locals["self"]) in self.names:
                phase = "forward" if node is None else "recompute"
                module = module or self.names[id(frame.f_locals["self"])]
            elif code.co_filename.endswith("_fsdp_param_group.py"):
                group = getattr(frame.f_locals.get("self"), "modules", ())  # "norm, output"
                module = module or ", ".join(self.names.get(id(each), "") for each in group)
                outside = FSDP.get(code.co_name, outside)
            elif not line and (file := name_file(code)):
                line = f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        if phase == "backward" and node is not None:  # autograd's counter had just passed the node's number in forward
            at = bisect_left(self._in_forward, node._sequence_nr() + 1, key=lambda counted: counted[0])
            forward = self._in_forward[at][1] if at < len(self._in_forward) else CallSite()
            return CallSite(line or forward.line, module or forward.module, phase)
        site, counter = CallSite(line, module, phase or outside or "between"), torch.autograd._get_sequence_nr()
        if phase in ("forward", "recompute") and counter > self._in_forward[-1][0]:
            self._in_forward.append((counter, site))
        return site


@cache
def name_file(code: CodeType) -> str:
    """Return the file of a possible call site within this package, "step.py"; empty for other code."""
    path = Path(code.co_filename)
    name = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""
    return "" if name.startswith(NO_CALL_SITES) else name
