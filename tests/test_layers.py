"""The floor plan: imports point down only, none hides inside a function, nothing goes round in a circle."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = [REPOSITORY / "train.py", *sorted((REPOSITORY / "torchtitan_lite").rglob("*.py"))]

# Floor of a module by the longest name that it starts with. A module may import from floors below its own, and from its
# own room; rooms on one floor never import each other.
FLOORS = {
    "torchtitan_lite.config": 0,  # no torch, so that it loads in milliseconds
    "torchtitan_lite.tools.environment": 0,
    "torchtitan_lite.tools.processes": 0,
    "torchtitan_lite.model": 1,
    "torchtitan_lite.parallel": 2,
    "torchtitan_lite.data": 2,
    "torchtitan_lite.checkpoint": 2,
    "torchtitan_lite.components": 2,
    "torchtitan_lite": 3,  # preflight and its chapters: what can be wrong with a run. No torch either
    "torchtitan_lite.step": 3,
    "torchtitan_lite.validation": 4,
    "torchtitan_lite.process_setup": 4,  # a door: it reads torchrun's environment
    "torchtitan_lite.tools.verify": 5,
    "torchtitan_lite.tools.plan": 5,
    "torchtitan_lite.tools": 5,
    "torchtitan_lite.tools.eval": 6,  # on the rank pool of verify
    "torchtitan_lite.tools.bench": 6,
    "torchtitan_lite.tools.launch": 6,
    "torchtitan_lite.__main__": 6,
    "train": 6,
}


IMPORTS_LATE = (
    "torchtitan_lite.config.files",  # import_extra: packages that training does without
    "torchtitan_lite.__main__",  # the door picks its tool
    "torchtitan_lite.tools.launch",  # train.py and torch after the fork server has started
    "torchtitan_lite.components.sinks",  # wandb: only with metrics.enable_wandb
)


def name_module(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_module(path): path for path in FILES}


def find_room(module: str) -> str:
    """The row of FLOORS that a module belongs to."""
    rows = [row for row in FLOORS if module == row or module.startswith(row + ".")]
    return max(rows, key=len)


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def list_imports(tree: ast.AST) -> set[str]:
    """Full names of the modules that a file imports: `from package import module` is the module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inner & MODULES.keys()) or {node.module}
    return names


def list_own_imports(module: str) -> set[str]:
    """Without torchtitan_lite itself: its __init__.py holds a few paths, and imports nothing of the package."""
    return {name for name in list_imports(parse(module)) if name.startswith("torchtitan_lite.") or name == "train"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module):
    room = find_room(module)
    for imported in list_own_imports(module):
        other = find_room(imported)
        assert FLOORS[other] < FLOORS[room] or other == room, f"{module} imports {imported}"


def test_no_import_goes_round_in_a_circle():
    assert not list_own_imports("torchtitan_lite"), "every module imports it"
    remaining = {module: list_own_imports(module) - {module} for module in MODULES}
    while free := [module for module, imports in remaining.items() if not imports & remaining.keys()]:
        for module in free:
            del remaining[module]
    assert not remaining, f"these import each other: {sorted(remaining)}"


def test_the_ground_floor_and_the_check_do_not_import_torch():
    ground = [module for module in MODULES if FLOORS[find_room(module)] == 0 or find_room(module) == "torchtitan_lite"]
    assert {"torchtitan_lite.config.layout", "torchtitan_lite.preflight"} <= set(ground)
    for module in [*ground, "torchtitan_lite.__main__", "torchtitan_lite.tools.check"]:
        packages = {name.split(".")[0] for name in list_imports(parse(module))}
        assert not packages & {"torch", "numpy", "tiktoken", "safetensors", "tensorboard"}, module


def test_a_run_that_compiles_nothing_does_not_load_the_compiler():
    """torch.compile loads inductor when it is called: a second and 50 MB, on every rank."""
    code = "import sys, train; print('torch._inductor.ir' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert answer.stdout == "False\n", answer.stderr


@pytest.mark.parametrize("module", MODULES)
def test_no_import_is_made_inside_a_function(module):
    for function in ast.walk(parse(module)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            assert not list_imports(function), f"{module}, line {function.lineno}"
            called = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            assert not called & {"__import__"}
            assert not called & {"importlib", "import_module"} or module in IMPORTS_LATE


@pytest.mark.parametrize("module", [m for m in MODULES if 0 < FLOORS[find_room(m)] < 4])
def test_no_environment_is_read_below_the_doors(module):
    attributes = {node.attr for node in ast.walk(parse(module)) if isinstance(node, ast.Attribute)}
    assert not attributes & {"environ", "getenv"}
