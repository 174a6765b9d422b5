"""How a run ends: one clear last line and the exit status; no process and no temporary folder stays behind."""

import os
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
from kill_while_training import finish
from kill_while_training import launch as launch_run
from test_run_train import REPOSITORY, Checkout

from torchtitan_lite import launch
from torchtitan_lite.checkpoint.manifest import CheckpointError, find_steps
from torchtitan_lite.config.schema import Config
from torchtitan_lite.dump_folder import check_still_held, hold, open_dump_folder

# ---------------------------------------------------------------- the launcher, with a script in place of train.py

RANK = """
import os, signal, sys
def wait_for_the_end(): print("ready", flush=True); signal.pause()
rank = os.environ["RANK"]
"""
FAIL = f"""{RANK}
from torch.distributed.elastic.multiprocessing.errors import record
def main(): raise OSError("disk 7 is gone")
record(main)() if rank == "1" else wait_for_the_end()
"""
SPEAK = 'sys.exit("the reason") if rank == "0" else wait_for_the_end()'
DIE = 'os.kill(os.getpid(), signal.SIGKILL) if rank == "1" else wait_for_the_end()'
ENDINGS = {  # what ranks do, the signal that run_train.sh gets, the last line, whether stderr is kept
    "trained": (f"{RANK}print('a warning', file=sys.stderr)", None, None, False),
    "a rank that is not shown fails": (FAIL, None, "rank 1 failed: OSError: disk 7 is gone", True),
    "rank 0 says why": (f"{RANK}{SPEAK}", None, "rank 0 ended with exit status 1: see above", True),
    "a rank is killed": (f"{RANK}{DIE}", None, "rank 1 was killed by SIGKILL, as Linux does", False),
    "SIGTERM": (f"{RANK}wait_for_the_end()", signal.SIGTERM, "stopped by SIGTERM", False),
    "Ctrl-C": (f"{RANK}wait_for_the_end()", signal.SIGINT, "stopped by Ctrl-C", False),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_last_line_says_how_the_run_has_ended(tmp_path, name):
    script, number, expected, is_kept = ENDINGS[name]
    checkout = Checkout(tmp_path)
    checkout.take_real("torchtitan_lite/launch.py")
    checkout.write("train.py", script)
    process = checkout.start()
    if number is not None:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
    err = process.communicate()[1]
    assert process.returncode == int(expected is not None), err
    if expected:
        assert err.splitlines()[-1].startswith(f"run_train.sh: {expected}"), err
    assert "Traceback" not in err and "torch/distributed" not in err
    kept = re.findall(r"The stderr of every rank is in (.+)\.\n", err)
    assert kept == [str(folder) for folder in tmp_path.glob("torchtitan_lite.*")]
    assert bool(kept) == is_kept


def test_a_master_port_that_is_taken_is_named_at_once(monkeypatch, capsys):
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", launch.PASSED_ON)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        args = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "is_host=1", "train.py"]
        assert launch.main(args) == 1
    assert capsys.readouterr().err.startswith(f"run_train.sh: MASTER_PORT={port} is taken on this host by another")


# ---------------------------------------------------------------- train.py

KEYS = ["--training.seq_len=32", "--model.n_layers=2", "--training.global_batch_size=2", "--metrics.log_freq=1"]
KEYS += ["--training.local_batch_size=1", "--checkpoint.enable", "--validation.no_enable"]


def read_until(process: subprocess.Popen, pattern: str) -> str:
    """The first line of output that matches."""
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"the run ended without {pattern!r}")


def test_a_folder_has_one_run_and_what_is_deleted_under_it_is_noticed(tmp_path):
    folder, cache = tmp_path / "run", tmp_path / "cache"
    keys = [*KEYS, "--training.steps=100000", "--checkpoint.interval=100000"]
    first = launch_run(folder, cache, *keys, "--checkpoint.enable_first_step_checkpoint", n_ranks=2)
    try:
        read_until(first, r"saved checkpoint .*/step-1$")
        second = launch_run(folder, cache, *keys, n_ranks=2, LOG_RANK="0,1")
        said = finish(second, must_succeed=False)
        assert second.returncode == 1 and str(folder) in said
        assert "Connection closed" not in said and "Traceback" not in said

        shutil.rmtree(folder / "checkpoint")
        lost = read_until(first, r"was deleted or moved")
        assert "ERROR" in lost and str(folder / "checkpoint" / "step-") in lost and "nothing is saved" in lost
        read_until(first, r"step .*/100000")  # written, and the next one is far
        os.rename(folder, tmp_path / "deleted")
        said = finish(first, must_succeed=False)
    finally:
        first.terminate()
        first.wait()
    assert first.returncode == 1
    assert f"This run stops: the dump folder {folder} was deleted or moved" in said
    assert "Traceback" not in said and said.splitlines()[-1].startswith("run_train.sh: rank 0 ended with exit status 1")


def test_a_run_that_goes_on_without_its_checkpoints_says_so_at_its_end(tmp_path):
    folder = tmp_path / "run"
    keys = [*KEYS, "--training.steps=40", "--checkpoint.interval=2", "--checkpoint.on_save_error=continue"]
    process = launch_run(folder, tmp_path / "cache", *keys, n_ranks=2)
    read_until(process, r"saved checkpoint .*/step-2$")
    (folder / "checkpoint" / "step-0.tmp").write_text("")  # no save can sweep away a file: it expects a folder
    said = finish(process, must_succeed=False)
    newest = find_steps(folder / "checkpoint")[-1]
    assert process.returncode == 1 and newest < 40
    assert f"ERROR trained 40 steps, and nothing since step {newest} is saved: rank 0: NotADirectoryError" in said


CHANGES = {
    "deleted": lambda folder: shutil.rmtree(folder),
    "moved": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "made anew": lambda folder: (shutil.rmtree(folder), hold(folder).close()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_knows_that_its_dump_folder_is_not_the_one_it_began_in(tmp_path, change):
    with open_dump_folder(tmp_path / "run", Config(), starting_over=True) as lock:
        check_still_held(lock)
        CHANGES[change](tmp_path / "run")
        with pytest.raises(CheckpointError, match=f"the dump folder {tmp_path / 'run'} was deleted or moved"):
            check_still_held(lock)


# ---------------------------------------------------------------- tools with workers

WORKERS = {  # script of a tool whose two workers name themselves, the signal that ends it
    "plan --search": (
        """
from torchtitan_lite.plan import search_report
def work(number, candidate):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
search_report.compare_with_dry_run = work
if __name__ == "__main__":
    search_report.choose_by_dry_run([(None, None)] * 2, None, 2)
""",
        signal.SIGTERM,
    ),
    "verify": (
        """
from torchtitan_lite.verify.ranks import RankPool
def work(rank, world_size):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
if __name__ == "__main__":
    RankPool(2).run(work, 2)
""",
        signal.SIGKILL,
    ),
}


@pytest.mark.parametrize("name", WORKERS)
def test_workers_end_with_their_tool(tmp_path, name):
    text, number = WORKERS[name]
    script = tmp_path / "tool.py"
    script.write_text(f"import os, time\n{text}")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    tool = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    workers = [int(tool.stdout.readline()) for _ in range(2)]
    tool.send_signal(number)
    tool.wait()
    deadline = time.monotonic() + 30
    while alive := [pid for pid in workers if is_alive(pid)]:
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{len(alive)} workers of {name} go on without it")
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
