"""Test assets/slurm/train.sbatch with stubs of srun, scontrol and scancel: a job is interrupted, requeued and
continued."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from marks import each_row
from programs import Stubs
from warm_start import STREAMS, finish, read_until

from torchtitan_lite.checkpoint.format import find_steps
from torchtitan_lite.config.reader import REPOSITORY

SCRIPT = REPOSITORY / "assets" / "slurm" / "train.sbatch"
STEPS = 40
JOB = str(os.getpid())  # the port depends on it, so two of these tests can run at the same time
KEYS = f"""
--training.steps={STEPS} --training.global_batch_size=4 --training.local_batch_size=2
--checkpoint.interval=1000 --validation.no_enable --job.overwrite
""".split()
RUN = """#!/bin/bash
((STATUS != 143)) || echo -n "$SAVED" > "$SAVED_FILE"
trap 'kill $!; exit $STATUS' TERM
sleep 100 &
echo ready
((STATUS != 2)) || kill $$
wait
"""

STUBS = {
    # Start two tasks on this host. Like Slurm's srun, the stub does not pass SIGTERM on to the tasks.
    "srun": """#!/bin/bash
echo "srun $*" >> "$CALLS"
trap 'echo "srun got SIGTERM" >> "$CALLS"; kill -KILL $(cat "$TASKS")' TERM
while [[ $1 != bash ]]; do shift; done
export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST="node[07-08]"
SLURM_NODEID=0 "$@" & tasks=$!
(sleep "${LATE_S:-0}"; SLURM_NODEID=1 exec "$@") & tasks="$tasks $!"
echo "$tasks" > "$TASKS"
highest=0
for task in $tasks; do
    wait -n $tasks; status=$?
    ((status <= highest)) || highest=$status
    ((status == 0)) || kill -TERM $tasks 2>/dev/null # --kill-on-bad-exit
done
exit $highest
""",
    "scontrol": """#!/bin/bash
if [[ $* == "show hostnames node[07-08]" ]]; then
    printf 'localhost\\nlocalhost\\n'
else
    echo "scontrol $*" >> "$CALLS"
fi
""",
    "scancel": """#!/bin/bash
echo "scancel $*" >> "$CALLS"
[[ $* != "--signal=TERM $SLURM_JOB_ID" ]] || kill -TERM $(cat "$TASKS")
""",
}


class Cluster(Stubs):
    """Stubs of Slurm's commands, and the environment variables of a job of two nodes."""

    def __init__(self, folder: Path):
        super().__init__(folder, folder / "calls")
        for name, text in STUBS.items():
            self.write(f"bin/{name}", text)
        self.variables = {
            **os.environ,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "TASKS": str(folder / "tasks"),
            "REPOSITORY": str(REPOSITORY),
            "PYTHON": sys.executable,
            "NGPU": "1",  # on each node
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NUM_NODES": "2",
            "GLOO_SOCKET_IFNAME": "lo",
            "PET_LOCAL_ADDR": "127.0.0.1",
        }

    def start(self, *keys: str, **variables: str) -> subprocess.Popen:
        command = ["bash", str(SCRIPT), "--config", "debug", *keys]
        return subprocess.Popen(command, env=self.variables | variables, **STREAMS)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_a_job_that_comes_near_its_time_limit_saves_and_is_requeued(cluster, letters, tmp_path):
    folder = tmp_path / "job"
    job = cluster.start(*KEYS, *letters, f"--job.dump_folder={folder}")
    read_until(job, r"step +3/")
    job.send_signal(signal.SIGUSR1)  # the signal goes only to the script, as with --signal=B:USR1
    output = finish(job, status=143)
    called, cancelled, requeued = cluster.calls()
    assert called.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1")
    assert (cancelled, requeued) == (f"scancel --signal=TERM {JOB}", f"scontrol requeue {JOB}")
    assert output.count("run_train.sh: stopped by SIGTERM") == 2 and "Traceback" not in output
    (saved,) = find_steps(folder / "checkpoint")
    assert 3 < saved < STEPS


def test_a_job_that_slurm_requeues_resumes_with_any_options(cluster, tmp_path):
    cluster.write("run_train.sh", '#!/bin/bash\necho "$@"\n')
    told = ["--config", "debug", "--job.overwrite", "--checkpoint.load_step=3"]
    for count, added in (("0", []), ("1", ["--job.no_overwrite", "--checkpoint.load_step=-1"])):
        job = cluster.start(*told[2:], REPOSITORY=str(tmp_path), SLURM_RESTART_COUNT=count)
        assert finish(job).split() == [*told, "--checkpoint.enable", *added]


# signal | exit status of the run | what it has saved | calls of Slurm
ENDS = """
SIGUSR1 | 143 | step-7 | scontrol requeue
SIGUSR1 | 143 | |  # because nothing was saved, a requeued job would repeat the same steps forever
SIGUSR1 | 1 | step-7 |  # the save failed
SIGTERM | 143 | step-7 |  # scancel, or an operator
SIGCONT | 2 | |  # refused by check
"""


@each_row("received, status, saved, calls", ENDS)
def test_on_one_node_the_launcher_gets_the_signal_and_only_the_limit_queues_the_job_again(
    cluster, tmp_path, received, status, saved, calls
):
    cluster.write("run_train.sh", RUN)
    variables = {"REPOSITORY": str(tmp_path), "SLURM_JOB_NUM_NODES": "1"}
    job = cluster.start(**variables, STATUS=status, SAVED=saved)
    read_until(job, "ready")
    job.send_signal(signal.Signals[received])
    said = finish(job, int(status))
    assert cluster.calls() == [f"{call} {JOB}" for call in calls.splitlines()]
    assert ("saved no step" in said) == (received == "SIGUSR1" and not saved)


def test_a_refused_config_on_two_nodes_gives_status_2_although_slurm_kills_one_node(cluster):
    job = cluster.start("--training.no_such_key=1", LATE_S="2")
    output = finish(job, status=2)
    assert output.count("training.no_such_key") >= 2 and "Traceback" not in output


def test_a_wrong_repository_path_ends_the_job_with_status_127(cluster, tmp_path):
    job = cluster.start(REPOSITORY=str(tmp_path), SLURM_JOB_NUM_NODES="1")
    output = finish(job, status=127)
    assert "run_train.sh: No such file" in output
    assert "numeric argument" not in output
