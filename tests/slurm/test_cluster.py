"""assets/slurm/train.sbatch on a real Slurm: a controller and two nodes on the loopback of this host, without munge.

Needs the daemons of Slurm, such as Debian's package slurm-wlm, built so that one host can be several nodes.
"""

import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import warm_start
from warm_start import list_differences

from torchtitan_lite.checkpoint.manifest import find_steps
from torchtitan_lite.config.reader import REPOSITORY

MOST_SECONDS = 600
STEPS, RANKS = 60, 2
KEYS = [f"--training.steps={STEPS}", "--training.global_batch_size=4", "--training.local_batch_size=2"]
KEYS += ["--checkpoint.interval=1000", "--validation.no_enable"]

CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
MailProg=/bin/true
FirstJobId={first_job}
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=1
PartitionName=all Nodes={nodes} Default=YES MaxTime=60 State=UP
"""


def choose_ports(n: int) -> range:
    """Ports in a row that are free now."""
    while True:
        ports = range(start := random.randint(30000, 60000), start + n)
        with suppress(OSError):
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
            return ports


class Cluster:
    """Starts the daemons; the first node has this host's name, because other nodes look it up. Context manager."""

    def __init__(self, folder: Path):
        host, ports = socket.gethostname(), choose_ports(3)
        self.nodes = [host, f"{host}-second"]
        names = {"host": host, "user": getpass.getuser(), "folder": folder, "nodes": ",".join(self.nodes)}
        names |= {"port": ports[0], "first_port": ports[1], "last_port": ports[2]}
        (folder / "state").mkdir()
        for node in self.nodes:
            (folder / f"spool-{node}").mkdir()
        config = folder / "slurm.conf"
        config.write_text(CONFIG.format(**names, first_job=random.randint(1, 9999)))  # MASTER_PORT follows from it
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(config),
            "REPOSITORY": str(REPOSITORY),
            "PYTHON": sys.executable,
            "NGPU": "1",  # on each node
            "GLOO_SOCKET_IFNAME": "lo",
            "PET_LOCAL_ADDR": "127.0.0.1",
        }
        self.daemons: list[subprocess.Popen] = []

    def __enter__(self) -> "Cluster":
        for command in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in self.nodes)):
            self.daemons.append(subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL))
        wait_until(lambda: self.ask("sinfo", "--noheader", "--format=%D %t") == "2 idle\n")
        return self

    def __exit__(self, *exception) -> None:
        self.ask("scancel", f"--user={getpass.getuser()}")
        wait_until(lambda: self.ask("squeue", "--noheader") == "")
        for daemon in self.daemons:
            daemon.terminate()
            daemon.wait()

    def ask(self, *command: str) -> str:
        """Standard output; empty where the controller does not answer yet."""
        return subprocess.run(command, env=self.environment, stdout=-1, stderr=subprocess.DEVNULL, text=True).stdout


def wait_until(holds) -> None:
    end_s = time.monotonic() + MOST_SECONDS
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.2)


@pytest.mark.skipif(
    not (shutil.which("slurmctld") and shutil.which("slurmd")),
    reason="needs the daemons of Slurm (apt-get install slurm-wlm)",
)
def test_a_job_before_its_limit_saves_is_queued_again_and_ends_bit_equal_to_the_unbroken_run(pool, tmp_path):
    keys = [*KEYS, *warm_start.write_letters(tmp_path / "letters"), f"--training.cache_folder={tmp_path / 'cache'}"]
    unbroken, folder, log = tmp_path / "unbroken", tmp_path / "job", tmp_path / "log"
    assert pool.run(warm_start.start, RANKS, [*keys, f"--job.dump_folder={unbroken}"]) == [0] * RANKS
    log.touch()

    def said(pattern: str) -> bool:
        return re.search(pattern, log.read_text()) is not None

    with Cluster(tmp_path) as cluster:
        script = str(REPOSITORY / "assets" / "slurm" / "train.sbatch")
        options = ["--parsable", "--nodes=2", "--time=30", f"--output={log}"]
        job = cluster.ask("sbatch", *options, script, "--config=debug", *keys, f"--job.dump_folder={folder}").strip()
        wait_until(lambda: said(r"step +3/"))
        cluster.ask("scancel", f"--signal={signal.SIGTERM.name}", "--batch", job)  # as --signal=B:TERM does
        wait_until(lambda: cluster.ask("squeue", "--noheader", "--format=%T") == "PENDING\n")
        assert log.read_text().count("run_train.sh: stopped by SIGTERM") == 2
        (saved,) = find_steps(folder / "checkpoint")
        assert 3 < saved < STEPS
        cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait for two minutes
        wait_until(lambda: cluster.ask("squeue", "--noheader") == "")
    assert said(f"resumed from {folder}/checkpoint/step-{saved},") and said(f"trained {STEPS} steps")
    assert list_differences(folder, unbroken, STEPS) == []
