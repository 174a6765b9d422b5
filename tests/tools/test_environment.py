"""environment.py finds or makes a Python that has the packages, whatever happened before. No network is used.

In all tests but one, stubs replace `python -m venv` and pip, and record their arguments.
"""

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_run_train import Checkout as RunCheckout

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.reader import load_toml
from torchtitan_lite.tools import environment

# A stub of the venv module: the Python that it makes is a script, with a stub of pip that can be held and can fail.
STUB_VENV = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[-1])
with open(os.environ["CALLS"], "a") as calls:
    print("venv", *sys.argv[1:-1], file=calls)
if os.environ.get("VENV_FAILS"):
    sys.exit(1)
(folder / "bin").mkdir(parents=True, exist_ok=True)
python = folder / "bin" / "python"
python.write_text(f'''#!/bin/sh
echo "$@" >> "$CALLS"
if [ -n "$HOLD" ]; then echo started > "$HOLD"; read go < "$HOLD.go"; fi
if [ -n "$PIP_FAILS" ]; then echo "no such package"; exit 1; fi
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
        self.variables["HOME"] = str(folder)
        self.venv = self.root / ".venv"
        self.python = str(self.venv / "bin" / "python")
        self.started: list[subprocess.Popen] = []

    def start(self, *args: str, **variables: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "torchtitan_lite.tools.environment", *args]
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "cwd": self.root,
        }
        self.started.append(
            subprocess.Popen(
                command, env=self.variables | variables, start_new_session=True, **pipes
            )
        )
        return self.started[-1]

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def bare_checkout(tmp_path):
    checkout = Checkout(tmp_path)
    yield checkout
    for process in checkout.started:  # with a stub of pip that may still be held
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def checkout(bare_checkout):
    bare_checkout.write("stubs/venv/__init__.py", "")
    bare_checkout.write("stubs/venv/__main__.py", STUB_VENV)
    bare_checkout.variables["PYTHONPATH"] = str(bare_checkout.root / "stubs")
    return bare_checkout


def add_package(folder: Path, name: str, version: str) -> str:
    """Write what importlib.metadata finds of an installed package. Return a PYTHONPATH that holds it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n", encoding="utf-8")
    return str(folder)


def test_requirements_are_read_as_toml_has_them_and_the_tested_versions_meet_them():
    project = load_toml(REPOSITORY / "pyproject.toml")["project"]
    requirements, extras = (
        [
            *environment.read_requirements("dependencies"),
            *environment.read_requirements("wandb"),
            *environment.read_requirements("test"),
        ],
        project["optional-dependencies"],
    )
    assert requirements == project["dependencies"] + extras["wandb"] + extras["test"]
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = {
        pin.name: pin.specifier
        for pin in map(Requirement, (line for line in lines if line[0] != "#"))
    }
    for requirement in map(Requirement, requirements):
        (pin,) = tested.pop(requirement.name)
        assert requirement.specifier.contains(pin.version), requirement
    assert not tested, "constraints.txt pins only what pyproject.toml names"


@pytest.mark.parametrize(
    ("requirement", "version", "is_met"),
    [
        ("some>=2.11,<2.14", "2.10.99", False),
        (
            "some>=2.11,<2.14",
            "2.11.0a0+f00d.nv26.04",
            True,
        ),  # NVIDIA's containers name their 2.11 like this
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
    first, second = checkout.run(), checkout.run()
    assert (
        (first.returncode, first.stdout)
        == (second.returncode, second.stdout)
        == (0, checkout.python)
    )
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


def test_a_real_venv_gets_the_tested_version_by_pip(bare_checkout, tmp_path):
    for version in ("1.5", "1.6"):
        info = f"alpha-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"alpha-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: alpha\nVersion: {version}\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(
                f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
            )
    answer = bare_checkout.run(
        PIP_NO_INDEX="1", PIP_FIND_LINKS=tmp_path.as_uri(), PIP_CONFIG_FILE=os.devnull
    )
    assert answer.stdout == bare_checkout.python, answer.stderr
    ask = "from importlib import metadata; print(metadata.version('alpha'))"
    assert subprocess.check_output([answer.stdout, "-c", ask], text=True).strip() == "1.5"


def test_a_command_continues_in_the_python_that_has_the_packages(checkout):
    shutil.copytree(
        REPOSITORY / "torchtitan_lite", checkout.root / "torchtitan_lite", dirs_exist_ok=True
    )
    command = [sys.executable, "-m", "torchtitan_lite", "verify", "--ranks", "2"]
    pipe = {"stderr": subprocess.PIPE, "text": True}
    answer = subprocess.run(command, cwd=checkout.root, env=checkout.variables, check=True, **pipe)
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
