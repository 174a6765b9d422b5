"""Each kind of hang in a run of its own: the launcher names the rank that the others wait for, and its process."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import warm_start
from marks import choose_fast

from torchtitan_lite import REPOSITORY

TESTS = REPOSITORY / "tests"
KEYS = [
    "--config=debug",
    "--training.steps=50",
    "--training.local_batch_size=4",
    "--training.global_batch_size=12",
    "--checkpoint.interval=2",
    "--validation.no_enable",
    "--comm.hang_seconds=3",
    "--comm.train_timeout_seconds=10",
]
SHORT = "--comm.init_timeout_seconds=16"
VALIDATES = ("--validation.enable", "--validation.freq=2", "--validation.steps=3")
IN_STEP = "HANG in step 4"
FAILED = "(HANG|FAILED) in step 4"
OTHER_CALL = "(is missing from call|made call)"


class Hang(NamedTuple):
    kind: str  # of hanging.py, or a fault of the drill
    says: str  # pattern: when it happens
    does: str  # pattern: why this rank, and what it does
    keys: tuple[str, ...] = ()
    rank: int = 1
    n_ranks: int = 3


HANGS = {
    "a pipeline rank does not send": Hang(
        "no_send",
        IN_STEP,
        "has computed the output of microbatch",
        ("--parallelism.pipeline_parallel_degree=2",),
        rank=0,
        n_ranks=2,
    ),
    "an extra collective": Hang("extra", FAILED, OTHER_CALL),
    "another shape": Hang("shape", FAILED, "made call"),
    "a dead rank": Hang("dead", "run_train.sh", "was killed by SIGKILL"),
    "a slow rank": Hang("slow", IN_STEP, "it is in hanging.py"),
    "a stopped rank": Hang("stop", IN_STEP, "it is stopped"),
    "data": Hang("data", IN_STEP, "dataset.py:[0-9]+ prefetch"),
    "a save": Hang("save", "HANG in step 2", "write_slices", (SHORT,)),
    "an asynchronous save": Hang(
        "save", IN_STEP, "write_slices", (SHORT, "--checkpoint.async_mode=async")
    ),
    "the first validation": Hang(
        "first validation", "HANG in step 1", "sum_nats", (SHORT, *VALIDATES)
    ),
    "a later validation": Hang("validation", "HANG in step 2", "sum_nats", VALIDATES),
    "before the ranks connect": Hang(
        "start", "run_train.sh", "has not started within comm.init_timeout_seconds = 16", (SHORT,)
    ),
    "before the first step": Hang(
        "set-up", "HANG before the first step", "has not built its model yet", (SHORT,)
    ),
    "the first step": Hang("first step", "HANG in step 1", "it is in hanging.py", (SHORT,)),
}
FAST = ("another shape", "a stopped rank", "a later validation")


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Function: kind, rank that hangs, ranks, keys, variables -> launcher. At the end, all processes are killed."""
    keys = [*warm_start.write_letters(tmp_path / "letters"), *KEYS]
    keys += [f"--job.dump_folder={tmp_path / 'run'}", f"--training.cache_folder={tmp_path}"]
    launchers = []

    def start(kind: str, rank: int, n_ranks: int, *own: str, **variables: str) -> subprocess.Popen:
        command = [sys.executable, TESTS / "hanging.py", kind, str(rank), *keys, *own]
        path = f"{REPOSITORY}:{TESTS}"
        environment = {**os.environ, "PYTHONPATH": path, "NGPU": str(n_ranks), **variables}
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, **warm_start.STREAMS
        )
        launchers.append(process)
        return process

    yield start
    for process in launchers:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def read_report(launcher: subprocess.Popen, hang: Hang, rank: int) -> str:
    """Return the line that reports a hang, if it names the rank."""
    line = warm_start.read_until(launcher, hang.says).splitlines()[-1]
    named = f"(, .* began)?[.:]( the run stopped:)? rank {rank} .*{hang.does}"
    assert re.search(hang.says + named, line), line
    return line


@pytest.mark.parametrize("name", choose_fast(HANGS, FAST))
def test_a_hang_is_reported_with_the_rank_that_the_others_wait_for(start, name):
    hang = HANGS[name]
    launcher = start(hang.kind, hang.rank, hang.n_ranks, *hang.keys)
    warm_start.read_until(launcher, "nothing found wrong")
    line = read_report(launcher, hang, hang.rank)
    if hang.says.startswith("HANG"):
        assert f"Its process is {warm_start.list_ranks(launcher)[hang.rank]}." in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "load"])
def test_a_hang_after_a_resume_on_fewer_ranks_is_reported_with_the_new_rank(start, kind):
    warm_start.finish(start("dead", 2, 3), status=1)
    launcher = start(kind, 1, 2, SHORT, "--training.local_batch_size=6")
    hang = Hang(kind, "HANG in step 6", "is stopped")
    if kind == "load":
        hang = Hang(kind, "HANG before the first step", "start.py:[0-9]+ restore_run")
    line = read_report(launcher, hang, 1)
    assert f"Its process is {warm_start.list_ranks(launcher)[1]}." in line


@pytest.mark.slow
@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_hang_on_another_host_is_reported_with_its_only_rank(start, is_cut_off):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables["GLOO_SOCKET_IFNAME"] = "lo"
    kind = "none" if is_cut_off else "stop"
    hosts = []
    for n in range(2):
        own = {"NODE_RANK": str(n), "PET_LOCAL_ADDR": f"127.0.0.{n + 1}"}
        rows = "--training.local_batch_size=6"
        hosts.append(start(kind, 1 - 2 * is_cut_off, 1, rows, **variables, **own))
    warm_start.read_until(hosts[0], "step +3/")
    (stopped,) = warm_start.list_ranks(hosts[1])
    if is_cut_off:
        os.kill(stopped, signal.SIGSTOP)
        os.kill(hosts[1].pid, signal.SIGSTOP)
    hang = Hang(kind, "HANG in step [0-9]+", "is missing from call")
    assert f"Its process is {stopped}." in read_report(hosts[0], hang, 1)
    os.kill(hosts[1].pid, signal.SIGCONT)
    reason = warm_start.finish(hosts[1], status=1).splitlines()[-1]
    assert reason.startswith("run_train.sh: ") and "NODE_RANK=0" in reason
