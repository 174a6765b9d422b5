"""Find the line of code and the module that called an operator, by walking Python's stack while the operator runs.

    FSDPParamGroup.unshard      `self.modules` are the modules            -> module
    nn.Module._call_impl        `self` is the module                      -> module, phase
    models/llama3/modules.py:96         the innermost frame of this package       -> line
    _engine_run_backward        autograd                                  -> phase

In backward, the stack ends in autograd's engine. Autograd numbers its nodes in the order in which forward creates
them, so the sequence number of the running node identifies the call site in forward.
"""

import sys
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from torchtitan_lite import PACKAGE

CALL, ENGINE = nn.Module._call_impl.__code__, torch.autograd.graph._engine_run_backward.__code__
# A pipeline schedule calls these outside of the model.
FSDP = {"unshard": "forward", "post_backward": "backward"}
# Helpers, whose callers are shown
NO_CALL_SITES = ("parallel/exchange.py", "parallel/tensor_parallel.py", "tools/")


@dataclass(frozen=True)
class CallSite:
    """The line, the module and the phase in which an operator was called."""

    line: str = ""  # "step.py:112"
    module: str = ""  # FQN: "layers.3.attention"
    phase: str = "between"  # forward, recompute, backward; between: outside of the model


class CallSites:
    """Finds call sites. Call `find` for every operator: backward needs the call sites of forward."""

    def __init__(self):
        self.names: dict[int, str] = {}  # id of a module -> FQN
        # By autograd's sequence number, ascending
        self._in_forward: list[tuple[int, CallSite]] = [(-1, CallSite())]

    def name_modules(self, parts: list[nn.Module]) -> None:
        """Register the FQNs of all modules in these model parts."""
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
                    break  # the frames that called backward() are not of interest
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
        site = CallSite(line, module, phase or outside or "between")
        if phase == "backward" and node is not None:
            # The first call site in forward after autograd numbered the node
            at = bisect_left(self._in_forward, node._sequence_nr() + 1, key=itemgetter(0))
            if at < len(self._in_forward):
                _, forward = self._in_forward[at]
                site = CallSite(line or forward.line, module or forward.module, phase)
        counter = torch.autograd._get_sequence_nr()
        if phase in ("forward", "recompute") and counter > self._in_forward[-1][0]:
            self._in_forward.append((counter, site))
        return site


@cache
def name_file(code: CodeType) -> str:
    """Return the path of a call site within this package, such as "step.py"; "" for other code and NO_CALL_SITES."""
    path = Path(code.co_filename)
    name = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""
    return "" if name.startswith(NO_CALL_SITES) else name
