"""How a run ends: one clear last line and the exit status; no process and no temporary folder stays behind."""

import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import warm_start
from kill_while_training import finish
from kill_while_training import launch as launch_run

from torchtitan_lite import launch
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.tools.verify.ranks import PRELOADED

# ---------------------------------------------------------------- the launcher, with a script in place of train.py

RANK = """
import os, signal, sys, time
rank = os.environ["RANK"]
listens = os.path.join(os.path.dirname(sys.argv[0]), "rank 1 listens")
def wait_for_the_end():
    if rank == "1":
        open(listens, "w").close()
    while not os.path.exists(listens):
        time.sleep(0.01)
    print("ready", flush=True)
    signal.pause()
"""
FAIL = f"""{RANK}
from torch.distributed.elastic.multiprocessing.errors import record
def main(): raise OSError("disk 7 is gone")
record(main)() if rank == "1" else wait_for_the_end()
"""
SPEAK = 'sys.exit("the reason") if rank == "0" else wait_for_the_end()'
DIE = 'os.kill(os.getpid(), signal.SIGKILL) if rank == "1" else wait_for_the_end()'
HEAR = "def end(status): signal.signal(signal.SIGTERM, lambda *_: sys.exit(status)); wait_for_the_end()\n"
SAVE = "for n in (2, 15): signal.signal(n, lambda n, _: sys.exit(128 + n))\nwait_for_the_end()"
SAVE_ALONE = "sys.exit(143)"
END, FAIL_LATER = f"{HEAR}end(0)", f"{HEAR}end('no space left')"
IGNORE = "signal.signal(signal.SIGTERM, lambda *_: signal.pause())\n"
IGNORE_ON_0 = f"if rank == '0': {IGNORE}"
ENDINGS = {  # what ranks do, the signals that the launcher gets, its exit status, the last line, whether stderr is kept
    "trained": (f"{RANK}print('a warning', file=sys.stderr)", [], 0, None, False),
    "a rank that is not shown fails": (FAIL, [], 1, "rank 1 failed: OSError: disk 7 is gone", True),
    "rank 0 says why": (f"{RANK}{SPEAK}", [], 1, "rank 0 ended with exit status 1: see above", True),
    "a rank is killed": (f"{RANK}{DIE}", [], 1, "rank 1 was killed by SIGKILL, as Linux does", False),
    "a rank is killed, the others hear no SIGTERM": (f"{RANK}{IGNORE}{DIE}", [], 1, "rank 1 was killed by SIG", False),
    "SIGTERM": (f"{RANK}{SAVE}", [signal.SIGTERM], 143, "stopped by SIGTERM", False),
    "Ctrl-C": (f"{RANK}{SAVE}", [signal.SIGINT], 130, "stopped by SIGINT", False),
    "SIGTERM that comes when the work is done": (f"{RANK}{END}", [signal.SIGTERM], 0, None, False),
    "SIGTERM, and the save fails": (f"{RANK}{FAIL_LATER}", [signal.SIGTERM], 1, "rank 0 ended with exit", True),
    "SIGTERM twice": (f"{RANK}{IGNORE}wait_for_the_end()", [signal.SIGTERM] * 2, 143, "stopped by SIGTERM", False),
    "SIGTERM twice, and one rank has heard it": (
        f"{RANK}{IGNORE_ON_0}wait_for_the_end()",
        [signal.SIGTERM] * 2,
        143,
        "stopped by SIGTERM",
        False,
    ),
    "SIGTERM to one rank": (f"{RANK}{SAVE_ALONE}", [], 143, "stopped by SIGTERM", False),
    "SIGTERM before a rank listens": (f"{RANK}wait_for_the_end()", [signal.SIGTERM], 143, "stopped by SIGTERM", False),
}
OPTIONS = "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 --role rank"
OPTIONS += " --max-restarts 0 --local-ranks-filter 0 --tee 2"  # as run_train.sh gives them


def run_launcher(folder: Path, stdout: Connection) -> None:
    """Worker of a fork server that has imported torch: launch.py as a program, with its files in `folder`."""
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    tempfile.tempdir = str(folder)
    multiprocessing.set_forkserver_preload(["torch.distributed.run"])  # not train.py: this script does not import it
    launch.prepare_forkserver = lambda modules: None
    sys.exit(launch.main([*OPTIONS.split(), str(folder / "script.py")]))


@pytest.mark.parametrize("name", ENDINGS)
def test_the_last_line_says_how_the_run_has_ended(tmp_path, name):
    script, numbers, status, expected, is_kept = ENDINGS[name]
    (tmp_path / "script.py").write_text(script)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # as for the pool of ranks
    stdout, of_ranks = context.Pipe(duplex=False)
    process = context.Process(target=run_launcher, args=(tmp_path, of_ranks))
    process.start()
    of_ranks.close()
    try:
        if numbers:
            assert open(stdout.fileno(), closefd=False).readline() == "ready\n"
        for number in numbers:
            os.kill(process.pid, number)
            process.join(1 if len(numbers) > 1 else None)  # two that arrive together may be one
        process.join()
    finally:
        process.terminate()
    err = (tmp_path / "stderr").read_text()
    assert process.exitcode == status, err
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
        assert launch.refuse_port(Namespace(rdzv_endpoint=args[1], rdzv_conf="is_host=0")) is None  # of another host
    assert capsys.readouterr().err.startswith(f"run_train.sh: MASTER_PORT={port} is taken on this host by another")
    assert "MASTER_PORT=99999" in launch.refuse_port(Namespace(rdzv_endpoint="host:99999", rdzv_conf="is_host=1"))


# ---------------------------------------------------------------- train.py

BATCH = ["--training.global_batch_size=2", "--training.local_batch_size=1", "--validation.no_enable"]


def read_until(process: subprocess.Popen, pattern: str) -> str:
    """The first line of output that matches."""
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"the run ended without {pattern!r}")


def test_a_folder_has_one_run_and_what_is_deleted_under_it_is_noticed(tmp_path):
    folder, cache = tmp_path / "run", tmp_path / "cache"
    keys = [*BATCH, *warm_start.write_letters(tmp_path / "letters"), "--job.no_overwrite"]
    keys += ["--training.steps=100000", "--checkpoint.interval=100000"]
    first = launch_run(folder, cache, *keys, "--checkpoint.enable_first_step_checkpoint", n_ranks=1)
    try:
        read_until(first, r"saved checkpoint .*/step-1$")
        second = launch_run(folder, cache, *keys, n_ranks=2, LOG_RANK="0,1")
        said = finish(second, must_succeed=False)
        assert second.returncode == 1 and str(folder) in said
        assert "Connection closed" not in said and "Traceback" not in said

        shutil.rmtree(folder / "checkpoint")
        lost = read_until(first, r"was deleted or moved")
        assert "ERROR" in lost and str(folder / "checkpoint" / "step-1") in lost and "nothing is saved" in lost
        read_until(first, r"step .*/100000")  # written, and the next one is far
        os.rename(folder, tmp_path / "deleted")
        said = finish(first, must_succeed=False)
    finally:
        first.terminate()
        first.wait()
    assert first.returncode == 1
    assert f"This run stops: the dump folder {folder} was deleted or moved" in said
    assert "Traceback" not in said and said.splitlines()[-1].startswith("run_train.sh: rank 0 ended with exit status 1")


def test_a_run_that_continues_without_its_checkpoints_says_so_at_its_end(pool, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "step-0.tmp").write_text("")  # no save can sweep away a file: it expects a folder
    keys = [*BATCH, *warm_start.write_letters(tmp_path / "letters"), f"--job.dump_folder={tmp_path}"]
    keys += ["--job.no_overwrite", "--training.steps=2", "--checkpoint.on_save_error=continue"]
    assert pool.run(warm_start.start, 2, keys) == [1, 1]
    log = (tmp_path / "log.txt").read_text()
    assert "ERROR trained 2 steps, and nothing is saved: rank 0: NotADirectoryError" in log


# ---------------------------------------------------------------- tools with workers

WORKERS = {  # script of a tool whose two workers name themselves, the signal that ends it
    "plan --search": (
        """
from torchtitan_lite.tools.plan import search_report
def work(number, candidate):
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
search_report.compare_with_dry_run = work
if __name__ == "__main__":
    search_report.choose_by_dry_run([(None, None)] * 2, None, 2)
""",
        signal.SIGTERM,
    ),
    "verify": (
        """
from torchtitan_lite.tools.verify.ranks import RankPool
def work(rank, world_size):
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
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
    script.write_text(f"import os, signal\n{text}")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    tool = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        assert all(int(tool.stdout.readline()) for _ in range(2))
        tool.send_signal(number)
        tool.communicate(timeout=60)  # the pipe ends when nobody holds it any more: neither tool nor worker
    finally:
        with suppress(ProcessLookupError):
            os.killpg(tool.pid, signal.SIGKILL)
