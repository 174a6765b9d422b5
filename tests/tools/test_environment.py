"""Test that environment.py finds or creates a Python with the packages, whatever state earlier starts have left. No
network is used.

`mine` is the Python that starts environment.py: an environment without packages. A stub replaces venv, and creates
environments without pip. A stub replaces pip: it records its arguments and writes the files by which importlib.metadata
finds a package.
"""

import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from functools import partial
from pathlib import Path

import packaging
import pytest
from marks import each_row
from packaging.requirements import Requirement
from programs import PIPES, run_python
from test_run_train import Checkout as RunCheckout

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.reader import load_toml
from torchtitan_lite.tools import environment

STUB_VENV = """
import os, sys
if "venv" in os.environ["FAILING"]:
    os.makedirs(sys.argv[1])
    sys.exit(1)
with open(os.environ["CALLS"], "a") as calls:
    print("venv", *sys.argv[2:], file=calls)
sys.path.remove(os.environ["STUBS"])
del sys.modules["venv"]
import venv
venv.main(["--without-pip", *sys.argv[1:]])
"""
STUB_PIP = """
import os, re, sys, sysconfig, time
from pathlib import Path
with open(os.environ["CALLS"], "a") as calls:
    print(Path(sys.prefix).name, *sys.argv[5:], file=calls)
if "pip" in os.environ["FAILING"]:
    sys.exit(1)
time.sleep(float(os.environ["PIP_S"]))
for requirement in sys.argv[5:]:
    info = Path(sysconfig.get_path("purelib"), re.match("[a-z]+", requirement)[0] + "-1.5.dist-info")
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Name: {info.name.split('-')[0]}\\nVersion: 1.5\\n")
"""
NEEDS = 'dependencies = [\n    "alpha>=1,<2",\n]\ntest = [\n    "beta",\n]\n'


class Checkout(RunCheckout):
    """A repository that requires the package alpha. Its extra `test` also requires beta."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        stubs = self.root / "stubs"
        self.write("pyproject.toml", NEEDS)
        self.write("constraints.txt", "alpha==1.5\n")
        self.write("stubs/venv/__init__.py", "")
        self.write("stubs/venv/__main__.py", STUB_VENV)
        self.write("stubs/pip/__init__.py", "")
        self.write("stubs/pip/__main__.py", STUB_PIP)
        (stubs / "packaging").symlink_to(Path(packaging.__file__).parent)
        self.variables |= {"PYTHONPATH": str(stubs), "STUBS": str(stubs), "HOME": str(folder)}
        self.variables |= {"FAILING": "", "PIP_S": "0"}
        self.venv = self.root / ".venv"
        self.mine = folder / "mine"
        venv.create(self.mine)

    def start(self, *args: str, **variables: str) -> subprocess.Popen:
        module = args or ["-m", "torchtitan_lite.tools.environment"]
        command = [str(self.mine / "bin" / "python"), *module]
        return subprocess.Popen(command, env=self.variables | variables, cwd=self.root, **PIPES)

    def find(self, *extras: str, **variables: str) -> subprocess.CompletedProcess:
        return self.run("-m", "torchtitan_lite.tools.environment", *extras, **variables)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def add_package(folder: Path, name: str, version: str) -> str:
    """Write the files by which importlib.metadata finds a package. Return the PYTHONPATH of their folder."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n", encoding="utf-8")
    return str(folder)


def fill(environment: Path, packages: str) -> None:
    """Add packages such as "alpha-1.5" to an environment."""
    variables = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "posix_prefix", variables))
    for package in packages.split():
        add_package(site, *package.split("-"))


def test_requirements_are_read_as_in_pyproject_toml_and_the_tested_versions_satisfy_them():
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


# requirement | installed version | whether it is met
VERSIONS = """
some>=2.11,<2.14 | 2.10.99 | no
some>=2.11,<2.14 | 2.11.0a0+f00d.nv26.04 | yes  # a version in NVIDIA's containers
some>=2.11,<2.14 | 2.13.0+cpu | yes
some>=2.11,<2.14 | 2.14 | no
other; python_version < "3.10" | 1 | yes  # only older Pythons need it
other; python_version < "3.99" | 1 | no
"""


@each_row("requirement, version, is_met", VERSIONS)
def test_a_requirement_is_met_only_if_the_version_is_within_its_bounds(
    tmp_path, monkeypatch, requirement, version, is_met
):
    monkeypatch.syspath_prepend(add_package(tmp_path, "some", version))
    assert environment.is_met(requirement) == (is_met == "yes")


# packages of the Python that starts | of .venv, if it exists | extras | calls | which Python
FOUND = """
alpha-1.9 | absent | | | mine
| absent | | venv, .venv alpha>=1,<2 | .venv
alpha-2.0 | absent | | venv, .venv alpha>=1,<2 | .venv
| absent | test | venv, .venv alpha>=1,<2 beta | .venv
| alpha-1.2 | | | .venv
| alpha-1.2 | test | .venv beta | .venv
| alpha-2.0 | | .venv alpha>=1,<2 | .venv
alpha-1.9 | alpha-1.2 | test | mine beta | mine
alpha-1.9 beta-3 | absent | test | | mine
"""  # version 2.0 is not allowed


@each_row("mine, venv_packages, extras, calls, name", FOUND)
def test_a_python_that_can_train_is_used_and_only_missing_packages_are_installed(
    checkout, mine, venv_packages, extras, calls, name
):
    calls = calls.split(", ") if calls else []
    extras = extras.split()
    fill(checkout.mine, mine)
    if venv_packages != "absent":
        venv.create(checkout.venv)
        fill(checkout.venv, venv_packages)
    answer = checkout.find(*extras)
    assert answer.stdout.endswith(f"/{name}/bin/python"), answer.stderr
    assert checkout.calls() == calls
    assert (answer.stderr == "") == (calls == [])
    for line in calls:
        if line != "venv":
            assert line.split()[-1] in answer.stderr
    # alpha-2.0 is still there, because the stub of pip removes nothing
    if calls and "alpha-2.0" not in (mine, venv_packages):
        assert checkout.find(*extras).stdout == answer.stdout
        assert checkout.calls() == calls


@each_row("package, flags", [("torch", " --system-site-packages"), ("beta", "")])
def test_only_a_torch_that_the_machine_comes_with_is_shared_with_the_venv(checkout, package, flags):
    checkout.write(
        "pyproject.toml", NEEDS.replace("alpha>=1,<2", "torch>=1").replace("]", '"tt",\n]', 1)
    )
    fill(checkout.mine, f"{package}-99.0")
    checkout.find()
    assert checkout.calls()[0] == f"venv{flags}"


FAILURES = {  # what goes wrong -> words of the message, which is one sentence
    "venv": "apt install python3-venv",
    "pip": "To use versions other than the tested ones, run: {venv}/bin/python -m pip install 'alpha>=1,<2'",
    "the folder is read-only": "{venv} cannot be used: [Errno 21] Is a directory",
}


@each_row("failing", FAILURES)
def test_a_failure_prints_one_sentence_and_the_next_start_tries_again(checkout, failing):
    lock = checkout.root / ".venv.lock"
    if failing not in ("venv", "pip"):
        lock.mkdir()
    answer = checkout.find(FAILING=failing)
    assert answer.returncode == 1 and answer.stdout == ""
    assert FAILURES[failing].format(venv=checkout.venv) in answer.stderr.splitlines()[-1]
    assert "Traceback" not in answer.stderr
    shutil.rmtree(lock, ignore_errors=True)
    assert checkout.find().stdout == str(checkout.venv / "bin" / "python")


# name, MiB and driver of a GPU | words of the message
GPUS = """
NVIDIA H100 80GB HBM3, 81559, 535.104.05 | 535.104.05 580 PIP_EXTRA_INDEX_URL whl/cu126
Tesla V100-SXM2-16GB, 16384, 580.95.05 | V100 PIP_EXTRA_INDEX_URL whl/cu126
NVIDIA B200, 183359, 570.10 | 570.10 580 Update
"""


@each_row("gpu, words", GPUS)
def test_a_torch_that_the_driver_or_the_gpu_cannot_run_is_not_installed(checkout, gpu, words):
    checkout.write("pyproject.toml", NEEDS.replace("alpha", "torch"))
    checkout.write("stubs/nvidia-smi", f"#!/bin/sh\necho {gpu}\n")
    path = {"PATH": f"{checkout.root}/stubs:/usr/bin:/bin"}
    answer = checkout.find(**path)
    assert answer.returncode == 1
    assert all(word in answer.stderr for word in words.split()), answer.stderr
    assert not any("torch" in call for call in checkout.calls())
    assert checkout.find(**path, PIP_EXTRA_INDEX_URL="https://mirror.test/cu126").returncode == 0


@each_row("received, by_run_train", [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_while_packages_are_installed_ends_pip_and_prints_one_sentence(
    checkout, received, by_run_train
):
    """bash does not forward signals to a process that it waits for."""
    checkout.write("pyproject.toml", NEEDS.replace("alpha", "torch"))
    start = partial(RunCheckout.start, checkout) if by_run_train else checkout.start
    process = start(PYTHON=str(checkout.mine / "bin" / "python"), PIP_S="99")
    while len(checkout.calls()) < 2:
        time.sleep(0.01)
    process.send_signal(received)
    _, said = process.communicate(timeout=60)  # the pipes end when pip ends
    status = -received if by_run_train else 128 + received
    assert process.returncode == status and "Traceback" not in said
    first, *size, last = said.splitlines()
    assert first.startswith("Installing once") and last.startswith(f"stopped by {received.name}")
    assert "about 5 GB" in size[0] and "PIP_EXTRA_INDEX_URL" in size[1]
    assert checkout.find().returncode == 0
    assert checkout.calls()[2:] == [".venv torch>=1,<2"]


def test_a_command_continues_in_the_python_that_has_the_packages(checkout):
    code = "import sys; from torchtitan_lite.tools import environment as e; e.continue_with_packages(); "
    answer = checkout.run("-c", code + "print(sys.executable, *sys.argv)", "a  b")
    assert answer.stdout == f"{checkout.venv}/bin/python -c a  b"


# ---------------------------------------------------------------- a Python without packages

BARE = """--help
check
check --keys optimizer.lr
plan --config llama3_8b --gpus 8
plan --config llama3_8b --gpus 8 --search
lab
lab 1
verify --help"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """Make a clone in which no environment can be made, and a Python without packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "mine")
    for name in ("torchtitan_lite", "configs", "assets/tokenizer", "assets/labs"):
        shutil.copytree(REPOSITORY / name, folder / name)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    (folder / ".venv.lock").mkdir()
    return folder


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 needs tomli to read TOML")
@each_row("command", BARE.splitlines())
def test_tools_that_need_no_torch_run_without_any_package(bare, command):
    words = [bare / "mine" / "bin" / "python", "-m", "torchtitan_lite", *command.split()]
    variables = {"PATH": "/usr/bin:/bin"}
    answer = subprocess.run(words, cwd=bare, env=variables, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_python_without_a_toml_reader_says_so():
    code = "import sys; sys.modules |= {'tomllib': None, 'tomli': None}\n"
    code += "from torchtitan_lite.__main__ import main; sys.exit(main(['check']))"
    answer = run_python("-c", code)
    assert answer.returncode == 2
    assert f"{sys.executable} -m pip install tomli" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_python_that_is_too_old_is_refused():
    pretend = "import sys; sys.version_info = (3, 9, 2); exec(open(sys.argv[1]).read())"
    answer = run_python("-c", pretend, REPOSITORY / "torchtitan_lite" / "__init__.py")
    assert answer.returncode == 1 and "3.10 or newer" in answer.stderr and "is 3.9" in answer.stderr
