"""If torchrun is killed, all ranks end, even a stopped rank. test_hangs.py tests our launcher."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from warm_start import MARK, STREAMS, read_until

from torchtitan_lite import REPOSITORY


def list_processes(dump_folder: Path) -> list[int]:
    """Return the pids of a run: its launcher, fork server and ranks."""
    mark = f"{MARK}={dump_folder}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has ended, or belongs to a different user
            if mark in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def check_that_all_end(dump_folder: Path) -> None:
    """Check that the processes of a run end. Its launcher was killed."""
    deadline_s = time.monotonic() + 10
    try:
        while list_processes(dump_folder) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert list_processes(dump_folder) == []
    finally:
        for pid in list_processes(dump_folder):
            os.kill(pid, signal.SIGKILL)


def test_no_rank_survives_if_torchrun_without_our_launcher_is_killed(letters, tmp_path):
    folder = tmp_path / "run"
    command = f"{sys.executable} -m torch.distributed.run --nproc-per-node=2 train.py"
    keys = [*letters, "--training.steps=5000", "--checkpoint.no_enable", "--validation.no_enable"]
    process = subprocess.Popen(
        [*command.split(), *keys, f"--job.dump_folder={folder}"],
        cwd=REPOSITORY,
        env={**os.environ, MARK: str(folder), "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
        **STREAMS,
    )
    read_until(process, "step +3/")
    pids = list_processes(folder)
    assert len(pids) == 3
    os.kill(max(pids), signal.SIGSTOP)  # the newest process is a rank
    process.kill()
    process.wait()
    check_that_all_end(folder)
