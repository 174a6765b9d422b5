"""Test run_train.sh: which program it starts, with which arguments and variables, and its exit status.

In a copy of the checkout, a stub replaces the launcher. See also test_endings.py for the ends of runs, and
test_slurm.py for Slurm.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import PIPES, Stubs, run_python

from torchtitan_lite import REPOSITORY
from torchtitan_lite.tools import agent, launch

STUB_PACKAGE = """
import json, os, sys
call = dict(parent=os.getppid(), folder=os.getcwd(), args=sys.argv[1:])
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps(call), file=calls)
sys.exit(int(os.environ.get("STATUS", "0")))
"""
# files that are not replaced with stubs
REAL = """
run_train.sh torchtitan_lite/__init__.py torchtitan_lite/components/signals.py torchtitan_lite/config/machine.py
torchtitan_lite/tools/detect.py torchtitan_lite/tools/environment.py torchtitan_lite/faults/processes.py
"""


class Checkout(Stubs):
    """A copy of the checkout with stubs, in a folder whose name has a space. The copy is not the working directory."""

    def __init__(self, folder: Path):
        super().__init__(folder / "check out", folder / "calls")
        self.folder = folder / "work here"
        self.folder.mkdir()
        for name in REAL.split():
            self.write(name, (REPOSITORY / name).read_text(encoding="utf-8"))
        self.write("pyproject.toml", "dependencies = [\n]\n")  # any Python will do
        self.write("train.py", "")
        self.write("torchtitan_lite/__main__.py", STUB_PACKAGE)
        self.variables = {
            "PATH": os.environ["PATH"],
            "PYTHON": sys.executable,
            "CALLS": str(self.calls_file),
        }

    def start(self, *args: str, **variables: str) -> subprocess.Popen:
        command = [str(self.root / "run_train.sh"), *args]
        environment = self.variables | variables
        return subprocess.Popen(command, cwd=self.folder, env=environment, **PIPES)

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess:
        """Run the script to its end."""
        process = self.start(*args, **variables)
        out, err = process.communicate()
        return subprocess.CompletedProcess(args, process.returncode, out.strip(), err)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


READ = re.compile(
    r"""\$\{([A-Z_]+):[-=]|(?:environ(?:\.get\(|\[|\.setdefault\()|read_number\()"([A-Z_]+)"""
)
INTERNAL = set(
    """
    RANK LOCAL_RANK PYTHONPATH TORCH_DISABLE_SHARE_RDZV_TCP_STORE TORCHELASTIC_RESTART_COUNT
    TORCHELASTIC_ERROR_FILE TORCHELASTIC_SIGNALS_TO_HANDLE NGPU
    SLURM_JOB_NUM_NODES SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS
    """.split()
)


def test_help_names_every_environment_variable_and_starts_nothing(checkout):
    answer = checkout.run("--config", "debug", "--help")
    assert answer.returncode == 0 and not checkout.calls()
    files = [REPOSITORY / "run_train.sh", Path(launch.__file__), Path(agent.__file__)]
    script = "".join(file.read_text() for file in files)
    read = {bash or python for bash, python in READ.findall(script)}
    assert read > {"NNODES", "PYTHON", "MAX_RESTARTS", "LOG_RANK"}
    for name in read - INTERNAL:
        assert name in answer.stdout, name


def test_arguments_reach_the_launcher_unchanged_and_the_launcher_replaces_the_script(checkout):
    """Signals reach the launcher, because the script replaces itself with the launcher (exec)."""
    args = ["--config", "my config.toml", "--job.description", "a  *", "--training.steps=20"]
    answer = checkout.run(*args, STATUS="143")
    (call,) = map(json.loads, checkout.calls())
    assert call["args"] == ["train", *args]
    assert call["folder"] == str(checkout.folder)
    assert (call["parent"], answer.returncode) == (os.getpid(), 143)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_a_package_of_the_same_name_in_the_users_folder_is_not_run(checkout):
    for name in ("torchtitan_lite", "tests"):
        (checkout.folder / name).mkdir()
        (checkout.folder / name / "__init__.py").write_text("1 / 0")
    assert checkout.run().returncode == 0
    assert len(checkout.calls()) == 1


USERS = """
import sys
sys.path.insert(0, sys.argv[1])  # as in the fork server of Python 3.14
import torchtitan_lite.tools.train_file
import train
print(train.NAME)
"""


def test_the_fork_server_imports_train_py_by_its_path(tmp_path):
    for name in ("the user's", "the checkout's"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(f"NAME = {name!r}")
    folder = tmp_path / "the checkout's"
    answer = run_python("-c", USERS, tmp_path / "the user's", folder=folder)
    assert answer.stdout == "the checkout's\n", answer.stderr


NODES = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "1"}
STEP = NODES | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "16"}


def test_a_script_that_cannot_start_prints_the_reason(checkout):
    said = ["--ntasks-per-node=1", "--wrap"]
    for variables, words in zip((STEP, {}), said, strict=True):
        answer = checkout.run(**variables)
        assert answer.returncode == 1 and words in answer.stderr
        # the next run finds no train.py beside the script
        (checkout.root / "train.py").unlink(missing_ok=True)
    assert not checkout.calls()


def test_in_a_slurm_allocation_nnodes_1_keeps_the_run_on_this_node(checkout):
    assert checkout.run(**NODES, NNODES="1").returncode == 0
    assert len(checkout.calls()) == 1
