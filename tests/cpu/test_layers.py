"""Test the layers of the code: files import only from lower layers, only `__main__` imports tools, and no import is
inside a function."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

from marks import read_lines
from programs import run_python

from torchtitan_lite import REPOSITORY

# Prefix of a module's name -> layer of the module; the longest prefix that matches counts. A module may import from
# lower layers, and from modules under the same prefix. Modules under different prefixes of the same layer never import
# each other.
FLOORS = {
    prefix: int(layer)
    for prefix, layer in read_lines("""
torchtitan_lite.config.model_rows | -2  # the types of the rows below
torchtitan_lite.models | -1  # the tables of the models
torchtitan_lite.config | 0
torchtitan_lite.dtensor | 1
torchtitan_lite.files | 1
torchtitan_lite.model | 1
torchtitan_lite.models.NAME.hugging_face | 1  # NAME: any folder of models/
torchtitan_lite.models.NAME.modules | 2
torchtitan_lite.parallel | 2
torchtitan_lite.data | 2
torchtitan_lite.checkpoint | 2
torchtitan_lite.components | 2
torchtitan_lite | 3  # the modules directly in the package
torchtitan_lite.faults | 4
torchtitan_lite.extensions | 5  # loaded by name, from config/extensions.py
train | 5
torchtitan_lite.tools | 6
torchtitan_lite.__main__ | 7
""")
}
# modules that call importlib in a function
IMPORT_BY_NAME = {
    module
    for (module,) in read_lines("""
torchtitan_lite.files  # import_extra: optional packages
torchtitan_lite.config.extensions  # load_module
torchtitan_lite.__main__  # picks its tool
torchtitan_lite.tools.environment  # packaging, which may be missing
torchtitan_lite.tools.hosts
torchtitan_lite.tools.launch  # imports torch after the fork server has started
torchtitan_lite.tools.agent  # imports train.py, which the fork server has loaded already
torchtitan_lite.tools.faults.drill  # only its ranks need torch
""")
}
# Besides config/ and the tables of models/, `check` needs these modules, so none of them imports torch.
WITHOUT_TORCH = set(
    """
torchtitan_lite.__main__ torchtitan_lite.files torchtitan_lite.preflight
torchtitan_lite.from_weights torchtitan_lite.notices torchtitan_lite.dump_folder torchtitan_lite.extensions.overwrite
torchtitan_lite.extensions.read_only torchtitan_lite.extensions.software
torchtitan_lite.extensions.byte_level_bpe torchtitan_lite.extensions.checkpoint_format_3
torchtitan_lite.extensions.hugging_face_config torchtitan_lite.extensions.hugging_face_export
torchtitan_lite.extensions.hugging_face_folder torchtitan_lite.extensions.tokenizer_json
torchtitan_lite.extensions.torchtitan_keys torchtitan_lite.extensions.muon_rounds
torchtitan_lite.extensions.families torchtitan_lite.extensions.hub_names
torchtitan_lite.tools.check torchtitan_lite.tools.command_lines
torchtitan_lite.tools.detect torchtitan_lite.tools.host_rules torchtitan_lite.models.llama3.hugging_face
""".split()
)


def name_module(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = [REPOSITORY / "train.py", *(REPOSITORY / "torchtitan_lite").rglob("*.py")]
TREES = {name_module(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def list_imports(tree: ast.AST) -> set[str]:
    """Return the full names of the modules that a file imports. For `from package import module`, the name is
    package.module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & TREES.keys() or {
                node.module
            }
    return names


# torchtitan_lite itself is left out: its __init__.py has a few paths and imports nothing of the package.
IMPORTS = {
    module: list_imports(tree) & TREES.keys() - {"torchtitan_lite"}
    for module, tree in TREES.items()
}


def find_row(module: str) -> str:
    module = re.sub(r"(models)\.\w+\.(modules|hugging_face)", r"\1.NAME.\2", module)
    return max((row for row in FLOORS if module == row or module.startswith(f"{row}.")), key=len)


def test_modules_import_only_from_lower_layers():
    upwards = []
    for module, imports in IMPORTS.items():
        row = find_row(module)
        for imported in imports:
            other = find_row(imported)
            if other != row and FLOORS[other] >= FLOORS[row]:
                upwards.append(f"{module} imports {imported}")
    assert not upwards
    assert not IMPORTS["torchtitan_lite"], "every module imports it"


def test_no_import_is_circular():
    TopologicalSorter(IMPORTS).prepare()  # raises CycleError


def test_config_and_check_do_not_import_torch():
    for module in WITHOUT_TORCH | {module for module in TREES if FLOORS[find_row(module)] <= 0}:
        packages = {name.split(".")[0] for name in list_imports(TREES[module])}
        assert not packages & {"torch", "numpy", "tiktoken", "safetensors", "tensorboard"}, module


def test_no_import_is_inside_a_function():
    for module, tree in TREES.items():
        for function in (
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)
        ):
            called = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            assert not list_imports(function), f"{module}, line {function.lineno}"
            assert (
                not called & {"importlib", "import_module", "__import__"}
                or module in IMPORT_BY_NAME
            ), module


LOADED = """
import sys
from torchtitan_lite.__main__ import main
assert main("check --config=debug_3d --gpus=8 --job.dump_folder=nowhere".split()) == 0
print([name for name in sys.modules if ".extensions." in name])
assert main("train --training.stepz 3".split()) == 2
print({"torch", "numpy", "tensorboard"} & {*sys.modules})
import train
print("torch._inductor.ir" in sys.modules)
"""


def test_a_run_imports_only_the_extensions_that_it_uses_and_a_refused_run_does_not_import_torch():
    """torch.compile loads inductor when it is called, which takes a second and 50 MB on every rank."""
    answer = run_python("-c", LOADED)
    assert answer.stdout.splitlines()[-3:] == ["[]", "set()", "False"], answer.stderr
