"""After SIGKILL of torchrun no rank trains on, also one that is stopped or holds the GIL."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_start
from warm_start import MARK, read_until

from torchtitan_lite import REPOSITORY


def list_processes(dump_folder: Path) -> list[int]:
    """Return the pids of a run: its launcher, fork server and ranks."""
    mark = f"{MARK}={dump_folder}".encode()
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if mark in read_environment(path)
    ]


def read_environment(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


@pytest.mark.parametrize("start", ["run_train.sh", "a bare torchrun"])
def test_no_rank_lives_on_after_torchrun_was_killed(tmp_path, start):
    folder = tmp_path / "run"
    keys = [
        *warm_start.write_letters(tmp_path / "letters"),
        "--training.steps=5000",
        "--checkpoint.no_enable",
    ]
    if start == "run_train.sh":
        process = warm_start.launch(folder, tmp_path, *keys, "--validation.no_enable", n_ranks=2)
    else:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "train.py",
            *keys,
        ]
        command += [f"--job.dump_folder={folder}", "--validation.no_enable"]
        environment = {
            **os.environ,
            MARK: str(folder),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, start_new_session=True, **streams
        )
    try:
        read_until(process, "step +3/")
        assert len(list_processes(folder)) >= 3
        ranks = set(list_processes(folder)) - {process.pid}
        os.kill(max(ranks), signal.SIGSTOP)
        process.kill()
        process.wait()
        deadline_s = time.monotonic() + 10
        while list_processes(folder) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert list_processes(folder) == []
    finally:
        for pid in list_processes(folder):
            os.kill(pid, signal.SIGKILL)
