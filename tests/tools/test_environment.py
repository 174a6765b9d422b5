"""environment.py finds or makes a Python that has the packages, whatever happened before. No network is used.

Stubs replace `python -m venv` and pip, and record their arguments.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_run_train import Checkout as RunCheckout

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.reader import load_toml
from torchtitan_lite.tools import environment

# A stub of the venv module: the Python that it makes is a script, with a stub of pip.
STUB_VENV = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[-1])
with open(os.environ["CALLS"], "a") as calls:
    print("venv", *sys.argv[1:-1], file=calls)
(folder / "bin").mkdir(parents=True, exist_ok=True)
python = folder / "bin" / "python"
python.write_text(f'''#!/bin/sh
echo "$@" >> "$CALLS"
''')
python.chmod(0o755)
"""


class Checkout(RunCheckout):
    """A repository that needs the package alpha, and beta with the extra `test`."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.write(
            "pyproject.toml", 'dependencies = [\n    "alpha>=1,<2",\n]\ntest = [\n    "beta",\n]\n'
        )
        self.write("constraints.txt", "alpha==1.5\n")
        self.write("stubs/venv/__init__.py", "")
        self.write("stubs/venv/__main__.py", STUB_VENV)
        self.variables["PYTHONPATH"] = str(self.root / "stubs")
        self.variables["HOME"] = str(folder)
        self.venv = self.root / ".venv"
        self.python = str(self.venv / "bin" / "python")

    def start(self, *args: str, **variables: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "torchtitan_lite.tools.environment", *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self.variables | variables, cwd=self.root, **pipes)

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def add_package(folder: Path, name: str, version: str) -> str:
    """Write what importlib.metadata finds of an installed package. Return a PYTHONPATH that holds it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n", encoding="utf-8")
    return str(folder)


def test_requirements_are_read_as_toml_has_them_and_the_tested_versions_meet_them():
    project = load_toml(REPOSITORY / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    named = {"dependencies": project["dependencies"], **extras}
    requirements = []
    for name in ("dependencies", "wandb", "test"):
        assert environment.read_requirements(name) == named[name]
        requirements += map(Requirement, named[name])
    tested = {}
    for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line[0] != "#":
            pin = Requirement(line)
            tested[pin.name] = pin.specifier
    for requirement in requirements:
        (pin,) = tested.pop(requirement.name)
        assert requirement.specifier.contains(pin.version), requirement
    assert not tested, "constraints.txt pins only what pyproject.toml names"


@pytest.mark.parametrize(
    ("requirement", "version", "is_met"),
    [
        ("some>=2.11,<2.14", "2.10.99", False),
        ("some>=2.11,<2.14", "2.11.0a0+f00d.nv26.04", True),  # in NVIDIA's containers
        ("some>=2.11,<2.14", "2.13.0+cpu", True),
        ("some>=2.11,<2.14", "2.14", False),
        ('other; python_version < "3.10"', "1", True),  # only older Pythons need it
        ('other; python_version < "3.99"', "1", False),
    ],
)
def test_a_package_counts_only_within_its_bounds(
    tmp_path, monkeypatch, requirement, version, is_met
):
    monkeypatch.syspath_prepend(add_package(tmp_path, "some", version))
    assert environment.is_met(requirement) == is_met


def test_this_python_is_taken_if_it_has_the_packages(checkout, tmp_path):
    answer = checkout.run(PYTHONPATH=add_package(tmp_path / "site", "alpha", "1.9"))
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, sys.executable, "")
    assert not checkout.venv.exists()


def test_a_venv_is_made_once_and_only_what_it_lacks_is_added(checkout, tmp_path):
    checkout.variables["PYTHONPATH"] += os.pathsep + add_package(
        tmp_path / "site", "alpha", "2.0"
    )  # out of bounds
    install = f"-m pip --disable-pip-version-check install -c {checkout.root}/constraints.txt"
    for _ in range(2):
        answer = checkout.run()
        assert (answer.returncode, answer.stdout) == (0, checkout.python)
    assert checkout.calls() == ["venv", f"{install} alpha>=1,<2"]
    assert checkout.run("test").stdout == checkout.python
    assert checkout.calls()[3:] == [f"{install} beta"]


@pytest.mark.parametrize(
    ("package", "flags"), [("torch", " --system-site-packages"), ("alpha", "")]
)
def test_only_a_torch_that_the_machine_comes_with_is_shared_with_the_venv(
    checkout, tmp_path, package, flags
):
    checkout.write("pyproject.toml", 'dependencies = [\n    "torch>=99",\n    "alpha",\n]\n')
    checkout.variables["PYTHONPATH"] += os.pathsep + add_package(tmp_path / "site", package, "99.0")
    checkout.run()
    assert checkout.calls()[0] == f"venv{flags}"


def test_a_command_continues_in_the_python_that_has_the_packages(checkout):
    shutil.copytree(
        REPOSITORY / "torchtitan_lite", checkout.root / "torchtitan_lite", dirs_exist_ok=True
    )
    command = [sys.executable, "-m", "torchtitan_lite", "verify", "--ranks", "2"]
    answer = subprocess.run(
        command, cwd=checkout.root, env=checkout.variables, capture_output=True, text=True
    )
    assert checkout.calls()[-1] == " ".join(command[1:])
    (line,) = answer.stderr.splitlines()
    assert line.startswith("Setting up ") and "once, as ./run_train.sh does" in line


def test_a_python_that_is_too_old_is_refused():
    pretend = "import sys; sys.version_info = (3, 9, 2); exec(open(sys.argv[1]).read())"
    package = REPOSITORY / "torchtitan_lite" / "__init__.py"
    answer = subprocess.run(
        [sys.executable, "-c", pretend, package], capture_output=True, text=True
    )
    assert answer.returncode == 1 and "3.10 or newer" in answer.stderr and "is 3.9" in answer.stderr
