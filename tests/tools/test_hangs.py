"""Each kind of hang happens in its own run. The launcher names the rank that the others wait for, and its process."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import warm_start
from marks import each_row, read_lines
from programs import find_port
from test_orphans import check_that_all_end

from torchtitan_lite import REPOSITORY

TESTS = REPOSITORY / "tests"
KEYS = """
--training.steps=50 --training.local_batch_size=4 --training.global_batch_size=24
--checkpoint.interval=2 --validation.no_enable --comm.hang_seconds=3
--comm.train_timeout_seconds=10
""".split()
SHORT = "--comm.init_timeout_seconds=16"
# what is wrong with rank 1 | kind of hang in hanging.py | when the report names rank 1 | how the report describes rank
# 1 | keys. test_faults.py drills ranks that stop, die, send nothing in a pipeline, or make a different collective.
HANGS = f"""
slow | slow | HANG in step 4 | it is in hanging.py |
data | data | HANG in step 4 | dataset.py:[0-9]+ prefetch |
save | save | HANG in step 2 | write_slices | {SHORT}
asynchronous save | save | HANG in step 4 | write_slices | {SHORT} --checkpoint.async_mode=async
validation | validation | HANG in step 2 | validate | --validation.enable --validation.freq=2 --validation.steps=3
does not start | start | run_train.sh | has not started within .* = 16 | {SHORT}
builds | set-up | HANG before the first step | has not built its model yet | {SHORT}
"""
HANGS = {row[0]: row for row in read_lines(HANGS)}


@pytest.fixture
def start(letters, tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Return a function that starts a run with one kind of hang and returns its launcher. When the test ends, all ranks
    are ended."""
    keys = [*letters, *KEYS]
    folder = tmp_path / "run"
    keys += [f"--job.dump_folder={folder}", f"--training.cache_folder={tmp_path}"]

    def start(kind: str, n_ranks: int, *own: str, **variables: str) -> subprocess.Popen:
        command = [sys.executable, TESTS / "hanging.py", kind, "1", *keys, *own]
        path = f"{REPOSITORY}:{TESTS}"
        variables |= {"PYTHONPATH": path, "NGPU": str(n_ranks), warm_start.MARK: str(folder)}
        return subprocess.Popen(command, env=os.environ | variables, **warm_start.STREAMS)

    yield start
    check_that_all_end(folder)


def check_report(launcher: subprocess.Popen, when: str, does: str, process: int = 0) -> None:
    """Wait for the report of a hang, which must name rank 1 and its process. Then kill the launcher."""
    line = warm_start.read_until(launcher, f"^{when}").splitlines()[-1]
    named = f"^{when}(, .* began)?[.:]( the run stopped:)? rank 1 .*{does}"
    assert re.search(named, line), line
    if "HANG in" in line:
        process = process or warm_start.list_ranks(launcher)[1]
        assert f"Its process is {process}." in line
    for rank in warm_start.list_ranks(launcher)[:1]:
        os.kill(rank, signal.SIGSTOP)
    launcher.kill()


@each_row("name", HANGS, fast=["validation"])
def test_a_hang_is_reported_with_the_rank_that_the_others_wait_for(start, name):
    _, kind, when, does, keys = HANGS[name]
    check_report(start(kind, 2, *keys.split()), when, does)


@pytest.mark.slow
@each_row("is_cut_off", [False, True])
def test_the_report_of_a_hang_on_another_host_names_the_rank_there(start, is_cut_off):
    shared = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_port()}
    hosts = []
    for n in range(2):
        own = {"NODE_RANK": str(n), "PET_LOCAL_ADDR": f"127.0.0.{n + 1}"}
        hosts.append(start("none", 1, GLOO_SOCKET_IFNAME="lo", **shared, **own))
    warm_start.read_until(hosts[0], "step +3/")
    (process,) = warm_start.list_ranks(hosts[1])
    os.kill(process, signal.SIGSTOP)
    if is_cut_off:
        hosts[1].send_signal(signal.SIGSTOP)
    check_report(hosts[0], "HANG in step [0-9]+", "is missing from call", process)
    hosts[1].send_signal(signal.SIGCONT)
    reason = warm_start.finish(hosts[1], status=1).splitlines()[-1]
    assert reason.startswith("run_train.sh: ") and "NODE_RANK=0" in reason
