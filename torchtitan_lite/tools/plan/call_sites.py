"""Find the line of code and the module that an operator belongs to, while it runs: read from Python's stack.

    llama3.py:118     x = x + self.attention(...)         innermost frame of our code: `line`
    module.py         _call_impl                          its `self` is the module: `module`
    DTensor           redistribute                        part of torch in between: `through`
    operator          _c10d_functional.all_gather_into_tensor

In backward the stack ends in autograd's engine. But autograd numbers its nodes in the order in which forward makes
them: the number of the node that runs leads back to the call site in forward.
"""

import sys
import sysconfig
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType

import torch
from torch import nn

from torchtitan_lite import PACKAGE

NO_CALL_SITES = (  # files of this package that exchange what the model hands over, or observe operators
    "parallel/exchange.py",
    "parallel/tensor_parallel.py",
    "plan/call_sites.py",
    "components/diagnosis.py",
    "plan/meter.py",
    "plan/dry_run.py",
    "plan/fake_world.py",
)
OF_PYTHON = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"], "<")

PARTS_OF_TORCH = {  # in a file's path -> part
    "/distributed/fsdp/": "FSDP",
    "/distributed/pipelining/": "pipeline",
    "/distributed/tensor/": "DTensor",
}


@dataclass(frozen=True)
class CallSite:
    """Where an operator was called."""

    line: str = ""  # "step.py:112"
    function: str = ""  # "train_step"
    module: str = ""  # FQN of the module that computes: "layers.3.attention"
    through: str = ""  # the part of torch between the line and the operator: of PARTS_OF_TORCH
    walk: str = ""  # pass through the model: forward, recompute, backward; "" outside of it
    reduces: bool = False  # FSDP works on gradients


class CallSites:
    """Finds call sites. Call `find` at every operator, so that the order of forward is known in backward."""

    def __init__(self):
        self.names: dict[int, str] = {}  # id of a module -> FQN
        self._counters: list[int] = []  # autograd's counter of nodes, rising, and ...
        self._sites: list[CallSite] = []  # ... the call site in forward at which it had that value

    def name_modules(self, parts: list[nn.Module]) -> None:
        """Take the names of the modules of these model parts."""
        self.names |= {id(module): fqn for part in parts for fqn, module in part.named_modules()}

    def find(self) -> CallSite:
        """Return the call site of the operator that is running."""
        node = torch._C._current_autograd_node()
        site, in_engine = self._read_stack()
        if in_engine and node is not None:
            forward = self.find_forward(node)
            module = site.module or forward.module
            return replace(forward, through=site.through, module=module, walk="backward", reduces=site.reduces)
        if node is None and not site.module:
            return site
        if site.reduces:  # FSDP reduces the last gradients when the engine is done
            return replace(site, walk="backward")
        site = replace(site, walk="forward" if node is None else "recompute")
        counter = torch.autograd._get_sequence_nr()
        if not self._counters or counter > self._counters[-1]:
            self._counters.append(counter)
            self._sites.append(site)
        return site

    def find_forward(self, node: torch.autograd.graph.Node) -> CallSite:
        """Return the call site that made a node in forward: autograd's counter had just passed the node's number."""
        at = bisect_left(self._counters, node._sequence_nr() + 1)
        return self._sites[at] if at < len(self._sites) else CallSite()

    def _read_stack(self) -> tuple[CallSite, bool]:
        """Return the innermost call site, and whether autograd's engine is between it and the operator."""
        frame, line, function, module, through = sys._getframe(2), "", "", "", ""
        in_engine = reduces = False
        while frame and not (line and module):
            kind = describe_code(frame.f_code)
            if kind.file and not line:
                line, function = f"{kind.file}:{frame.f_lineno}", frame.f_code.co_name
            if not line and not in_engine:
                through = through or kind.through
                reduces = reduces or kind.reduces
                in_engine = in_engine or kind.is_engine
            if kind.names_module and not module:
                owner = frame.f_locals["self"]
                module = self.names.get(id(owner), "") if isinstance(owner, nn.Module) else owner._module_fqn or ""
            if kind.is_engine and line:
                break  # the caller of backward computes nothing itself
            frame = frame.f_back
        return CallSite(line, function, module, through, reduces=reduces), in_engine


@dataclass(frozen=True)
class CodeKind:
    """What a function on the stack says about the operators that it calls."""

    file: str  # within the package, if it may be a call site
    through: str
    reduces: bool
    is_engine: bool
    names_module: bool  # its `self` is the module, or FSDP's group of the module's parameters


@cache
def describe_code(code: CodeType) -> CodeKind:
    path = Path(code.co_filename)
    is_ours = not code.co_filename.startswith(OF_PYTHON) and not code.co_filename.endswith(NO_CALL_SITES)
    name = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else path.name
    through = next((part for within, part in PARTS_OF_TORCH.items() if within in code.co_filename), "")
    is_param_group = path.name == "_fsdp_param_group.py" and code.co_varnames[:1] == ("self",)
    return CodeKind(
        file=name if is_ours else "",
        through=through,
        reduces=through == "FSDP" and "post_backward" in code.co_name or code.co_name == "perform_reduce_grad",
        is_engine=code.co_name == "_engine_run_backward",
        names_module=code.co_name == "_call_impl" or is_param_group,
    )
