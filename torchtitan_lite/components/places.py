"""Which line of code an operator comes from, seen while it runs: read off Python's stack.

    llama3.py:118     x = x + self.attention(...)         the innermost line of our code: the cause
    module.py         _call_impl                          of which module: its name
    DTensor           redistribute                        the part of torch in between
    operator          _c10d_functional.all_gather_into_tensor

In backward the stack ends in autograd's engine. But its nodes are numbered in the order in which forward made them: who
remembers where forward was at each number knows whose backward it is.
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

PACKAGE = Path(__file__).resolve().parent.parent
WATCHERS = ("components/places.py", "components/diagnosis.py", "plan/meter.py", "plan/dry_run.py", "plan/fake_world.py")
OF_PYTHON = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"], "<")

PARTS_OF_TORCH = {  # in a file's path -> what works there
    "/distributed/fsdp/": "FSDP",
    "/distributed/pipelining/": "pipeline",
    "/distributed/tensor/": "DTensor",
}


@dataclass(frozen=True)
class Place:
    """What an operator belongs to."""

    line: str = ""  # "step.py:112"
    function: str = ""  # "train_step"
    module: str = ""  # FQN of the module that computes: "layers.3.attention"
    through: str = ""  # the part of torch between the line and the operator: of PARTS_OF_TORCH
    walk: str = ""  # forward, recompute, backward; "" outside of the model
    reduces: bool = False  # FSDP works on gradients


class Places:
    """Finds places. It must be asked at every operator, so that it knows the order of the forward."""

    def __init__(self):
        self.names: dict[int, str] = {}  # id of a module -> FQN
        self._nodes: list[int] = []  # autograd's counter, rising, and ...
        self._places: list[Place] = []  # ... where forward was when it stood there

    def name_modules(self, parts: list[nn.Module]) -> None:
        self.names |= {id(module): fqn for part in parts for fqn, module in part.named_modules()}

    def find(self) -> Place:
        """The place of the operator that is running."""
        node = torch._C._current_autograd_node()
        place, in_engine = self._read_stack()
        if in_engine and node is not None:
            made = self.place_of(node)
            return replace(
                made, through=place.through, module=place.module or made.module, walk="backward", reduces=place.reduces
            )
        if node is None and not place.module:
            return place
        if place.reduces:  # what FSDP does once the engine is done
            return replace(place, walk="backward")
        place = replace(place, walk="forward" if node is None else "recompute")
        counter = torch.autograd._get_sequence_nr()
        if not self._nodes or counter > self._nodes[-1]:
            self._nodes.append(counter)
            self._places.append(place)
        return place

    def _read_stack(self) -> tuple[Place, bool]:
        """The innermost place, and whether autograd's engine stands between it and the operator."""
        frame, line, function, module, through = sys._getframe(2), "", "", "", ""
        in_engine = reduces = False
        while frame and not (line and module):
            kind = describe_code(frame.f_code)
            if kind.line and not line:
                line, function = f"{kind.line}:{frame.f_lineno}", frame.f_code.co_name
            if not line and not in_engine:
                through = through or kind.through
                reduces = reduces or kind.reduces
                in_engine = in_engine or kind.is_engine
            if kind.is_call and not module:
                owner = frame.f_locals["self"]
                module = self.names.get(id(owner), "") if isinstance(owner, nn.Module) else owner._module_fqn or ""
            if kind.is_engine and line:
                break  # what called backward computes nothing itself
            frame = frame.f_back
        return Place(line, function, module, through, reduces=reduces), in_engine

    def place_of(self, node: torch.autograd.graph.Node) -> Place:
        """Where forward made a node: its counter had just passed the node's number."""
        at = bisect_left(self._nodes, node._sequence_nr() + 1)
        return self._places[at] if at < len(self._places) else Place()


@dataclass(frozen=True)
class CodeKind:
    """What a function on the stack says about those it calls."""

    line: str  # file within the package, if its lines may be causes
    through: str
    is_engine: bool
    is_call: bool  # its `self` knows the module
    reduces: bool


@cache
def describe_code(code: CodeType) -> CodeKind:
    path = Path(code.co_filename)
    ours = not code.co_filename.startswith(OF_PYTHON) and not code.co_filename.endswith(WATCHERS)
    name = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else path.name
    through = next((part for within, part in PARTS_OF_TORCH.items() if within in code.co_filename), "")
    is_param_group = path.name == "_fsdp_param_group.py" and code.co_varnames[:1] == ("self",)
    return CodeKind(
        line=name if ours else "",
        through=through,
        is_engine=code.co_name == "_engine_run_backward",
        is_call=code.co_name == "_call_impl" or is_param_group,
        reduces=through == "FSDP" and "post_backward" in code.co_name or code.co_name == "perform_reduce_grad",
    )
