"""run_train.sh: what it starts, with which arguments, and which exit status comes back.

In a copy of the checkout, stubs replace `check`, launch.py, srun and scontrol, and record how they were called. One
test starts the real torchrun; how its runs end is in test_endings.py.
"""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
VARIABLES = ["GLOO_SOCKET_IFNAME", "MASTER_ADDR", "NNODES", "NODE_RANK", "OMP_NUM_THREADS"]

STUB = f"""
import json, os, sys
call = dict(name=NAME, pid=os.getpid(), folder=os.getcwd(), args=sys.argv[1:])
call["variables"] = {{name: os.environ.get(name) for name in {VARIABLES}}}
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps(call), file=calls)
"""
STUB_CHECK = f"""{STUB.replace("NAME", "'check'", 1)}
print("the report", file=sys.stderr)
status = int(os.environ.get("CHECK_STATUS", "0"))
if status == 0:
    print(2)
sys.exit(status)
"""
STUB_LAUNCH = STUB.replace("NAME", "'torchrun'", 1)
STUB_SRUN = """#!/bin/sh
echo "$@" > "$SRUN_CALL"
while [ "$1" != bash ]; do shift; done
for SLURM_NODEID in 0 1; do
    export SLURM_NODEID SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST="node[07-08]"
    "$@" || exit
done
"""
STUB_SCONTROL = """#!/bin/sh
[ "$1 $2 $3" = "show hostnames node[07-08]" ] && printf 'node07\\nnode08\\n'
"""


SPEAK_AND_FAIL = """
import os, sys
if __name__ == "__main__":  # the launcher imports train.py once, before it starts the ranks
    rank = os.environ["RANK"]
    print("out", rank, sys.stdout.isatty())
    print("err", rank, file=sys.stderr)
    if rank == "1":
        open("gate").read()  # torchrun stops all ranks when one fails: not before rank 0 has spoken
        sys.exit(1)
    open("gate", "w").close()
"""


class Checkout:
    """A copy of the checkout with stubs, in a folder whose name has a space, and a working directory elsewhere."""

    def __init__(self, folder: Path):
        self.root = folder / "check out"
        self.folder = folder / "work here"
        self.calls_file = folder / "calls"
        self.srun_file = folder / "srun"
        self.temporary = folder / ("of job 1234567 " * 8)  # longer than the path of a socket may be
        self.folder.mkdir(parents=True)
        self.temporary.mkdir()
        self.write("run_train.sh", (REPOSITORY / "run_train.sh").read_text(encoding="utf-8"), executable=True)
        self.take_real("torchtitan_lite/tools/environment.py")
        self.write("pyproject.toml", "dependencies = [\n]\n")  # the Python of these tests will do
        self.write("train.py", "")
        self.take_real("torchtitan_lite/__init__.py")
        self.write("torchtitan_lite/__main__.py", STUB_CHECK)
        self.write("torchtitan_lite/tools/launch.py", STUB_LAUNCH)
        self.write("bin/srun", STUB_SRUN, executable=True)
        self.write("bin/scontrol", STUB_SCONTROL, executable=True)
        self.variables = {
            "PATH": f"{self.root}/bin{os.pathsep}{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "TMPDIR": str(self.temporary),
            "CALLS": str(self.calls_file),
            "SRUN_CALL": str(self.srun_file),
        }

    def write(self, name: str, text: str, *, executable: bool = False) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if executable else 0o644)

    def take_real(self, name: str) -> None:
        self.write(name, (REPOSITORY / name).read_text(encoding="utf-8"))

    def take_package(self) -> None:
        shutil.rmtree(self.root / "torchtitan_lite")
        for name in ("torchtitan_lite", "configs", "assets"):
            shutil.copytree(REPOSITORY / name, self.root / name)

    def start(self, *args: str, stdout=subprocess.PIPE, **variables: str) -> subprocess.Popen:
        command = [str(self.root / "run_train.sh"), *args]
        options = {"cwd": self.folder, "env": self.variables | variables, "stdout": stdout}
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)

    def run(self, *args: str, **options) -> subprocess.CompletedProcess:
        process = self.start(*args, **options)
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out.strip(), err)

    def calls(self) -> list[dict]:
        """What ran, in this order: check and torchrun."""
        return [json.loads(line) for line in self.calls_file.read_text(encoding="utf-8").splitlines()]

    def torchrun(self) -> dict:
        """The one call of torchrun, its options as a dict and the training script with its arguments as `script`."""
        (call,) = [call for call in self.calls() if call["name"] == "torchrun"]
        at = call["args"].index(str(self.root / "train.py"))
        options = dict(zip(call["args"][:at:2], call["args"][1:at:2], strict=True))
        return call | {"options": options, "script": call["args"][at:]}


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_help_names_every_environment_variable_and_starts_nothing(checkout):
    answer = checkout.run("--config", "debug", "--help")
    assert answer.returncode == 0 and not checkout.calls_file.exists()
    script = (REPOSITORY / "run_train.sh").read_text(encoding="utf-8")
    read = set(re.findall(r"\$\{([A-Z_]+):[-=]", script)) - {"SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"}
    for name in read - {"SLURM_JOB_NUM_NODES", "PYTHONPATH"} | {"NGPU", "MASTER_PORT", "srun", "--config"}:
        assert name in answer.stdout, name


def test_arguments_reach_check_and_train_unchanged_and_torchrun_replaces_the_script(checkout):
    """CONFIG_FILE comes before the arguments, so that --config wins. Signals reach torchrun, which keeps the pid."""
    args = ["--config", "my config.toml", "--job.description", "a  *", "--training.steps=20"]
    process = checkout.start(*args, CONFIG_FILE="my a.toml")
    process.communicate()
    check, torchrun = checkout.calls()
    assert check["args"] == ["check", "--launch", "--config", "my a.toml", *args]
    assert checkout.torchrun()["script"] == [str(checkout.root / "train.py"), "--config", "my a.toml", *args]
    assert check["folder"] == torchrun["folder"] == str(checkout.folder)
    assert (process.returncode, torchrun["pid"]) == (0, process.pid)


LOOPBACK = "lo" if Path("/sys/class/net/lo").exists() else None
TWO_HOSTS = {"NNODES": "2", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("given", "options", "variables"),
    [
        ({}, {"--nnodes": "1", "--nproc-per-node": "2", "--rdzv-endpoint": "127.0.0.1:0", "--max-restarts": "0",
              "--local-ranks-filter": "0"}, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}),
        ({"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth1"}, {},
         {"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth1"}),
        ({"LOG_RANK": "0,1", "MAX_RESTARTS": "3"}, {"--local-ranks-filter": "0,1", "--max-restarts": "3"}, {}),
        ({**TWO_HOSTS, "NODE_RANK": "0"}, {"--nnodes": "2", "--rdzv-endpoint": "10.0.0.5:1234",
         "--rdzv-conf": "is_host=1"}, {"GLOO_SOCKET_IFNAME": None}),
        ({**TWO_HOSTS, "NODE_RANK": "1"}, {"--nnodes": "2", "--rdzv-endpoint": "10.0.0.5:1234",
         "--rdzv-conf": "is_host=0"}, {"GLOO_SOCKET_IFNAME": None}),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "1", "NNODES": "1"}, {"--rdzv-endpoint": "127.0.0.1:0"}, {}),
    ],
)  # fmt: skip
def test_torchrun_gets_what_the_environment_says(checkout, given, options, variables):
    answer = checkout.run(**given)
    torchrun = checkout.torchrun()
    assert torchrun["options"] | options == torchrun["options"]
    assert torchrun["variables"] | variables == torchrun["variables"]
    assert checkout.calls()[0]["variables"]["NNODES"] == given.get("NNODES", "1"), "check must know the number of hosts"
    assert answer.stderr.count("the report") == int(given.get("NODE_RANK", "0") == "0"), "once is enough"
    assert not checkout.srun_file.exists()


STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "16", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"CHECK_STATUS": "1"}, 1, "the report"),
        ({"CHECK_STATUS": "2"}, 2, "the report"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.5", "CHECK_STATUS": "2"}, 2, "the report"),
        ({"NNODES": "2", "NODE_RANK": "0"}, 1, "MASTER_ADDR"),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "1", "CHECK_STATUS": "2"}, 2, "the report"),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "1", **STEP}, 1, "--ntasks-per-node=1"),
        ({"without": "train.py"}, 1, "--wrap"),
    ],
)
def test_what_cannot_start_ends_with_its_status_before_torchrun(checkout, given, status, said):
    if "without" in given:
        (checkout.root / "train.py").unlink()
    answer = checkout.run(**given)
    assert answer.returncode == status and said in answer.stderr
    assert not checkout.calls_file.exists() or "torchrun" not in [call["name"] for call in checkout.calls()]


# --- Slurm ---


def test_in_a_slurm_allocation_it_starts_itself_once_on_each_node(checkout):
    answer = checkout.run("--config", "my config", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="34567")
    assert answer.returncode == 0, answer.stderr
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in checkout.srun_file.read_text(encoding="utf-8")
    calls = checkout.calls()
    assert [call["name"] for call in calls] == ["check", "torchrun"] * 2
    for node_rank, call in enumerate(calls[1::2]):
        options = " ".join(call["args"])
        assert "--nnodes 2" in options and f"is_host={1 - node_rank}" in options
        assert "--rdzv-endpoint node07:24567" in options, "first host of the allocation, a port of this job"
        assert call["args"][-2:] == ["--config", "my config"]


# --- without stubs ---


def test_a_bare_config_name_is_found_and_a_misspelt_key_refused_by_the_real_check(checkout):
    checkout.take_package()
    checkout.write("torchtitan_lite/tools/launch.py", STUB_LAUNCH)
    checkout.variables["CUDA_VISIBLE_DEVICES"] = ""
    answer = checkout.run("--config", "debug.toml", "--training.step", "20")
    assert answer.returncode == 2 and "training.steps" in answer.stderr
    answer = checkout.run("--config", "debug.toml", NGPU="2")
    assert answer.returncode == 0, answer.stderr
    assert checkout.torchrun()["options"]["--nproc-per-node"] == "2"


def test_the_terminal_shows_one_rank_plainly_and_no_stderr_is_lost(checkout):
    checkout.take_package()
    checkout.write("train.py", SPEAK_AND_FAIL)
    os.mkfifo(checkout.folder / "gate")
    terminal, end_of_ranks = pty.openpty()
    process = checkout.start(stdout=end_of_ranks)
    os.close(end_of_ranks)
    with ThreadPoolExecutor(1) as reader:  # at once: a terminal may drop what nobody read before its last writer ended
        out = reader.submit(read_all, terminal)
        err = process.communicate()[1]
    assert process.returncode == 1, "rank 1 has failed"
    assert out.result().splitlines() == ["out 0 True"], err
    assert "err 0" in err and "err 1" not in err
    (log_folder,) = re.findall(r"The stderr of every rank is in (.+)\.\n", err)
    kept = {path.parent.name: path.read_text().strip() for path in Path(log_folder).rglob("stderr.log")}
    assert kept == {"0": "err 0", "1": "err 1"}


def read_all(terminal: int) -> str:
    """What was written at the other end, until nobody holds it any more: Linux reports that as an error."""
    read = b""
    with suppress(OSError):
        while chunk := os.read(terminal, 1000):
            read += chunk
    os.close(terminal)
    return read.decode()
