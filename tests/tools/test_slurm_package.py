"""assets/slurm/train.sbatch under Slurm itself: one controller and two nodes on this machine.

Needs root and the packages slurmctld, slurmd, slurm-client and munge (Debian's names).
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_slurm import KEYS
from warm_start import read_losses, write_letters

from torchtitan_lite.checkpoint.format import find_steps
from torchtitan_lite.config.reader import REPOSITORY

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"missing: {MISSING}, or root"),
]
CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort=17100
SlurmUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node-%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SchedulerParameters=batch_sched_delay=1,sched_interval=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17101
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17102
PartitionName=all Nodes=n1,n2 Default=YES
"""
START = """
munged --key-file={folder}/key --socket={folder}/munge.sock --pid-file={folder}/munge.pid \\
    --log-file={folder}/munge.log --seed-file={folder}/seed --force
mount --bind {folder}/hosts /etc/hosts
slurmctld -f {folder}/slurm.conf
for node in n1 n2; do slurmd -f {folder}/slurm.conf -N $node; done
"""
STEPS = 400


class Slurm:
    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        (folder / "hosts").write_text("127.0.0.1 localhost n1 n2\n")
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        self.variables = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "REPOSITORY": str(REPOSITORY),
            "PYTHON": sys.executable,
            "NGPU": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PET_LOCAL_ADDR": "127.0.0.1",
        }
        subprocess.run(["unshare", "--mount", "sh", "-ec", START.format(folder=folder)], check=True)
        wait_for(lambda: "idle" in self.ask("sinfo"), 30)

    def ask(self, *command: str) -> str:
        return subprocess.run(command, env=self.variables, capture_output=True, text=True).stdout

    def submit(self, *keys: str) -> str:
        script = str(REPOSITORY / "assets" / "slurm" / "train.sbatch")
        options = ["--parsable", "--nodes=2", "--time=10", f"--output={self.folder}/%j.txt"]
        return self.ask("sbatch", *options, script, "--config", "debug", *keys).strip()

    def read_output(self, job: str) -> str:
        path = self.folder / f"{job}.txt"
        return path.read_text() if path.exists() else ""

    def wait_until_said(self, job: str, pattern: str) -> None:
        wait_for(lambda: re.search(pattern, self.read_output(job)), 90, self.read_output(job))

    def wait_for_end(self, job: str) -> tuple[str, int, int]:
        """Return the job's state, exit status and number of restarts."""
        wait_for(lambda: not self.ask("squeue", "--noheader", f"--jobs={job}").strip(), 120)
        shown = self.ask("scontrol", "show", "job", job)
        state, status, restarts = (
            re.search(rf"{name}=(\w+)", shown)[1] for name in ("JobState", "ExitCode", "Restarts")
        )
        return state, int(status), int(restarts)

    def stop(self) -> None:
        self.ask("scancel", "--user=root")
        time.sleep(1)
        for path in self.folder.glob("*.pid"):
            subprocess.run(["kill", path.read_text().strip()], check=False)


def wait_for(is_true: Callable[[], object], seconds: float, why: str = "") -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, why
        time.sleep(0.2)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def keys(tmp_path):
    steps = f"--training.steps={STEPS}"
    return [
        steps,
        *KEYS,
        *write_letters(tmp_path / "letters"),
        f"--job.dump_folder={tmp_path / 'job'}",
    ]


def count_ranks(folder: str) -> int:
    return len(subprocess.run(["pgrep", "-f", folder], capture_output=True).stdout.split())


def test_a_job_near_its_limit_saves_is_requeued_and_resumes(slurm, keys, tmp_path):
    job = slurm.submit(*keys)
    slurm.wait_until_said(job, r"step +9/")
    slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@120 does
    assert slurm.wait_for_end(job) == ("COMPLETED", 0, 1)
    output = slurm.read_output(job)
    assert "resumed from the checkpoint" in output and "Traceback" not in output
    assert list(read_losses(tmp_path / "job")) == [*range(1, STEPS + 1)]


def test_a_cancelled_job_saves_and_leaves_no_process_within_ten_seconds(slurm, keys, tmp_path):
    job = slurm.submit(*keys)
    slurm.wait_until_said(job, r"step +9/")
    start = time.monotonic()
    slurm.ask("scancel", job)
    wait_for(lambda: not count_ranks(str(tmp_path / "job")), 20)
    assert time.monotonic() - start < 10
    assert slurm.wait_for_end(job)[0] == "CANCELLED"
    (saved,) = find_steps(tmp_path / "job" / "checkpoint")
    assert 9 <= saved < STEPS
