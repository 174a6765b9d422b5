"""environment.py finds or makes a Python that has the packages, whatever happened before. No network is used.

In all tests but one, stubs replace `python -m venv` and pip, and record their arguments.
"""

import errno
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
from test_run_train import REPOSITORY
from test_run_train import Checkout as RunCheckout

from torchtitan_lite import environment
from torchtitan_lite.__main__ import TOOLS
from torchtitan_lite.config.reader import load_toml

# A stub of the venv module: the Python that it makes is a script, with a stub of pip that can be held and can fail.
STUB_VENV = """
import os, shutil, sys
from pathlib import Path
folder = Path(sys.argv[-1])
with open(os.environ["CALLS"], "a") as calls:
    print("venv", *sys.argv[1:-1], file=calls)
if os.environ.get("VENV_FAILS"):
    sys.exit(1)
shutil.rmtree(folder, ignore_errors=True)
(folder / "bin").mkdir(parents=True)
(folder / "site").mkdir()
python = folder / "bin" / "python"
python.write_text(f'''#!/bin/sh
if [ "$2" = pip ]; then
    echo "$@" >> "$CALLS"
    if [ -n "$HOLD" ]; then echo started > "$HOLD"; read go < "$HOLD.go"; fi
    if [ -n "$PIP_FAILS" ]; then echo "no such package"; exit 1; fi
    for package in alpha beta; do
        mkdir -p "{folder}/site/$package-1.5.dist-info"
        printf 'Name: %s\\nVersion: 1.5\\n' $package > "{folder}/site/$package-1.5.dist-info/METADATA"
    done
    exit 0
fi
PYTHONPATH="{folder}/site" exec "{sys.executable}" "$@"
''')
python.chmod(0o755)
"""


class Checkout(RunCheckout):
    """A repository that needs the package alpha, and beta with the extra `test`."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.write("pyproject.toml", 'dependencies = [\n    "alpha>=1,<2",\n]\ntest = [\n    "beta",\n]\n')
        self.write("constraints.txt", "alpha==1.5\n")
        self.variables["HOME"] = str(folder)
        self.venv = self.root / ".venv"
        self.python = str(self.venv / "bin" / "python")
        self.started: list[subprocess.Popen] = []

    def start(self, *args: str, command: list[str] | None = None, **variables: str) -> subprocess.Popen:
        command = command or [sys.executable, "-m", "torchtitan_lite.tools.environment", *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.root}
        self.started.append(subprocess.Popen(command, env=self.variables | variables, start_new_session=True, **pipes))
        return self.started[-1]

    def calls(self) -> list[str]:
        return self.calls_file.read_text(encoding="utf-8").splitlines() if self.calls_file.exists() else []


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
    """What importlib.metadata finds of an installed package. Returns a PYTHONPATH that holds it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n", encoding="utf-8")
    return str(folder)


# --- what is needed ---


def test_requirements_are_read_as_toml_has_them_and_the_tested_versions_meet_them():
    project = load_toml(REPOSITORY / "pyproject.toml")["project"]
    requirements, extras = environment.read_requirements(["wandb", "test"]), project["optional-dependencies"]
    assert requirements == project["dependencies"] + extras["wandb"] + extras["test"]
    assert project["requires-python"] == ">=3.10"  # what the first lines of environment.py ask for
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = {pin.name: pin.specifier for pin in map(Requirement, (line for line in lines if line[0] != "#"))}
    for requirement in map(Requirement, requirements):
        (pin,) = tested.pop(requirement.name)
        assert requirement.specifier.contains(pin.version), requirement
    assert not tested, "constraints.txt pins only what pyproject.toml names"


@pytest.mark.parametrize(
    ("requirement", "version", "is_met"),
    [
        ("some>=2.11,<2.14", "2.10.99", False),
        ("some>=2.11,<2.14", "2.11.0", True),
        ("some>=2.11,<2.14", "2.11.0a0+f00d.nv26.04", True),  # so NVIDIA's containers name their 2.11
        ("some>=2.11,<2.14", "2.13.0+cpu", True),
        ("some>=2.11,<2.14", "2.14", False),
        ("some", "2.14", True),
        ('other; python_version < "3.10"', "1", True),  # only older Pythons need it
        ('other; python_version < "3.99"', "1", False),
    ],
)
def test_a_package_counts_only_within_its_bounds(tmp_path, monkeypatch, requirement, version, is_met):
    monkeypatch.syspath_prepend(add_package(tmp_path, "some", version))
    assert environment.is_met(requirement) == is_met


# --- which Python ---


def test_this_python_is_taken_if_it_has_the_packages(checkout, tmp_path):
    answer = checkout.run(PYTHONPATH=add_package(tmp_path / "site", "alpha", "1.9"))
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, sys.executable, "")
    assert not checkout.venv.exists()


def test_a_venv_is_made_once_and_only_what_it_lacks_is_added(checkout, tmp_path):
    checkout.variables["PYTHONPATH"] += os.pathsep + add_package(tmp_path / "site", "alpha", "2.0")  # out of bounds
    install = f"-m pip --disable-pip-version-check install -c {checkout.root}/constraints.txt"
    first, second = checkout.run(), checkout.run()
    assert (first.returncode, first.stdout) == (second.returncode, second.stdout) == (0, checkout.python)
    assert checkout.calls() == ["venv --clear", f"{install} alpha>=1,<2"]
    shutil.rmtree(checkout.venv / "site" / "beta-1.5.dist-info")
    assert checkout.run("--extra", "test").stdout == checkout.python
    assert checkout.calls()[2:] == [f"{install} beta"]


@pytest.mark.parametrize(("package", "flags"), [("torch", " --system-site-packages"), ("alpha", "")])
def test_only_a_torch_that_the_machine_comes_with_is_shared_with_the_venv(checkout, tmp_path, package, flags):
    toml = checkout.root / "pyproject.toml"
    toml.write_text('dependencies = [\n    "torch>=99",\n    "alpha",\n]\n', encoding="utf-8")
    checkout.variables["PYTHONPATH"] += os.pathsep + add_package(tmp_path / "site", package, "99.0")
    checkout.run()
    assert checkout.calls()[0] == f"venv --clear{flags}"


def test_a_real_venv_gets_the_tested_version_by_pip(bare_checkout, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("1.5", "1.6"):
        info = f"alpha-{version}.dist-info"
        with zipfile.ZipFile(wheels / f"alpha-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: alpha\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels.as_uri(), "PIP_CONFIG_FILE": os.devnull}
    answer = bare_checkout.run(**offline)
    assert answer.stdout == bare_checkout.python, answer.stderr
    ask = "from importlib import metadata; print(metadata.version('alpha'))"
    assert subprocess.check_output([answer.stdout, "-c", ask], text=True).strip() == "1.5"


# --- every door ---


# At its start, a Python of .venv says what it was asked to run, unless that is whether it lacks packages.
SAY_AND_END = """
import os, sys
if "--missing" not in sys.orig_argv:
    print(*sys.orig_argv[1:], flush=True)
    os._exit(0)
"""
ARGUMENTS = {  # tool -> those that its parser asks for
    **dict.fromkeys(TOOLS.keys() - {"check", "train"}, ""),  # check needs no packages, and train is run_train.sh
    "prepare": "notes.txt --out made",
    "verify": "--ranks 2",
    "convert": "source out",
    "generate": "source",
    "eval": "source --data text",
    "bench": "step",
}


def test_every_command_of_a_python_without_packages_continues_in_the_one_that_has_them(checkout):
    shutil.copytree(REPOSITORY / "torchtitan_lite", checkout.root / "torchtitan_lite", dirs_exist_ok=True)
    shutil.copy(REPOSITORY / "train.py", checkout.root)
    assert checkout.run().stdout == checkout.python
    (checkout.venv / "site" / "sitecustomize.py").write_text(SAY_AND_END)
    commands = [f"-m torchtitan_lite {tool} {args}".strip() for tool, args in ARGUMENTS.items()]
    for command in [*commands, "train.py --config debug"]:
        answer = checkout.run(command=[sys.executable, *command.split()])
        assert answer.stdout == command, f"{answer.stderr}: .venv runs the same command"


@pytest.mark.parametrize("tool", TOOLS)
def test_help_needs_no_packages(tool):
    command = [sys.executable, "-S", "-E", "-m", "torchtitan_lite", tool, "--help"]  # -S: without site-packages
    answer = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"usage: python -m torchtitan_lite {tool}") and "xit status" in answer.stdout
    assert "\nconfig:" in answer.stdout
    builds_a_run = tool in ("check", "train", "verify", "plan", "explain")
    assert ("--config NAME_OR_PATH" in answer.stdout) == builds_a_run


# --- what can go wrong ---


def hold_pip(folder: Path) -> Path:
    """A named pipe that says when pip has started; `.go` lets pip continue."""
    gate = folder / "gate"
    os.mkfifo(gate)
    os.mkfifo(f"{gate}.go")
    return gate


def test_a_second_start_waits_for_the_one_that_makes_the_venv(checkout, tmp_path):
    gate = hold_pip(tmp_path)
    first = checkout.start(HOLD=str(gate))
    gate.read_text()  # the first one is in the middle of pip
    second = checkout.start()
    assert "waiting" in second.stderr.readline()
    Path(f"{gate}.go").write_text("go\n")
    for process in (first, second):
        out, err = process.communicate()
        assert (process.returncode, out.strip()) == (0, checkout.python), err
    assert len(checkout.calls()) == 2, "one venv, one pip"


def test_an_interrupted_venv_is_made_anew(checkout, tmp_path):
    gate = hold_pip(tmp_path)
    first = checkout.start(HOLD=str(gate))
    gate.read_text()
    first.kill()  # and not its pip
    first.wait()
    (checkout.venv / "leftover").touch()
    answer = checkout.run()
    assert (answer.returncode, answer.stdout) == (0, checkout.python), answer.stderr
    assert not (checkout.venv / "leftover").exists()
    assert [call.split()[0] for call in checkout.calls()] == ["venv", "-m", "venv", "-m"]


@pytest.mark.parametrize(("failing", "said"), [("PIP_FAILS", "no such package"), ("VENV_FAILS", "-venv`")])
def test_a_failing_set_up_is_shown_and_the_next_start_tries_again(checkout, failing, said):
    answer = checkout.run(**{failing: "1"})
    assert (answer.returncode, answer.stdout) == (1, "") and said in answer.stderr
    assert checkout.run().stdout == checkout.python


@pytest.mark.parametrize("has_python", [False, True])
def test_a_venv_that_somebody_else_made_is_never_removed(checkout, has_python):
    (checkout.venv / "bin").mkdir(parents=True)
    (checkout.venv / "mine").touch()
    if has_python:
        Path(checkout.python).write_text("#!/bin/sh\necho broken >&2; exit 1\n")
        Path(checkout.python).chmod(0o755)
    answer = checkout.run()
    assert answer.returncode == 1 and f"Remove {checkout.venv}" in answer.stderr
    assert (checkout.venv / "mine").exists()


def test_a_file_system_without_locks_is_no_obstacle(monkeypatch, capsys):
    def refuse(file, operation):
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(environment.fcntl, "flock", refuse)
    environment.wait_for(sys.stdin)
    assert "cannot be locked" in capsys.readouterr().err


def test_a_python_that_is_too_old_is_refused():
    pretend = "import sys; sys.version_info = (3, 9, 2); exec(open(sys.argv[1]).read())"
    package = REPOSITORY / "torchtitan_lite" / "__init__.py"
    answer = subprocess.run([sys.executable, "-c", pretend, package], capture_output=True, text=True)
    assert answer.returncode == 1 and "3.10 or newer" in answer.stderr and "is 3.9" in answer.stderr
