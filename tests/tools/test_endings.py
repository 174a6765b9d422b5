"""Test the end of a run: one clear last line, the right exit status, and no remaining process or temporary folder."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from marks import each_row, read_lines
from programs import start_python
from warm_start import STREAMS, finish, read_records, read_until

from torchtitan_lite import REPOSITORY
from torchtitan_lite.tools import local_ranks

# ---------------------------------------------------------------- the launcher, with a stub of train.py

TRAIN = """
import os, signal, sys, time
import torchtitan_lite.tools.agent  # once in the fork server, as by the real train.py, instead of on each rank
from torchtitan_lite.components.signals import Phase
FOLDER = "outputs/debug"
SAVED = f"{FOLDER}/checkpoint/step-4"

def wait(stop):
    print("ready", flush=True)
    while not stop.received:
        time.sleep(0.01)
    return 128 + stop.received

def main(args, stop, spec):
    rank = os.environ["RANK"]
    assert spec.layout.world_size == 2
    print("stdout of", rank, flush=True)
    print("stderr of", rank, file=sys.stderr, flush=True)
    if rank == "0":
        os.makedirs(FOLDER)
        open(f"{FOLDER}/metrics.jsonl", "w").write('{"kind": "step", "step": 4, "time": ""}\\n')
    path = os.path.abspath("act.py")
    source = open(path).read()
    if "return wait(stop)" in source:
        stop.follow(lambda: Phase.STEPS)
    open(f"rank {rank} listens", "w")
    while not os.path.exists(f"rank {1 - int(rank)} listens"):
        time.sleep(0.01)
    exec(compile(source, path, "exec"), globals())
    return act(rank, stop)
"""
ACT = "def act(rank, stop):\n    {}\n    {}\n"
# One process launches all runs one after another, because importing torch takes most of the time of a run.
LAUNCH = """
import json, os, signal, sys
from pathlib import Path
from torchtitan_lite.tools import command_lines, launch, local_ranks
launch.REPOSITORY = Path.cwd() / "repository"
for line in sys.stdin:
    folder, copies_arrive_within_s, *keys = json.loads(line)
    os.chdir(folder)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the end of a run ignores it
    local_ranks.COPIES_ARRIVE_WITHIN_S = copies_arrive_within_s
    status = launch.main(command_lines.parse_command("train", keys))
    print(f"status {status}", flush=True)
"""
# what happens | what the ranks do; \\n begins a line | the launcher's signals, one per second | status | last line
ENDINGS = r"""
SIGTERM, and the temporary folder is gone | if rank == '0': \
    import glob, shutil; shutil.rmtree(*glob.glob(f'{os.environ["TMPDIR"]}/torchtitan_lite.*')) \
    | SIGTERM | 143 | stopped by SIGTERM
a closed terminal | | SIGHUP | 129 | stopped by SIGHUP
a warning before the time limit | | SIGUSR1 | 138 | stopped by SIGUSR1
SIGTERM, and the peer of a failed rank ends first | wait(stop)\n    if rank == '1': raise OSError('disk full')\n \
       time.sleep(0.5); stop.end(signal.SIGTERM, 'because it has lost a peer') \
    | SIGTERM | 1 | rank 1 failed: OSError: disk full
SIGTERM to one rank, and its peer fails | if rank == '1': stop.end(signal.SIGTERM, 'before its first step')\n \
       time.sleep(0.2); raise RuntimeError('Connection closed by peer') | | 143 | stopped by SIGTERM
copies | wait(stop); time.sleep(2); print('saved', flush=True) | SIGTERM SIGTERM | 143 | stopped
Ctrl-C twice, and ranks do not listen | stop.note = print | SIGINT SIGINT | 130 | stopped by SIGINT
SIGTERM, and the save fails | wait(stop); raise OSError('disk full') | SIGTERM | 1 | rank
a rank raises, and its peer loses it | if rank == '1': raise OSError('no disk 7')\n \
       time.sleep(0.2); raise OSError('Connection closed') | | 1 | rank 1 failed: OSError: no disk 7 ({act}:2)
two ranks raise | time.sleep(0.1 * int(rank)); raise OSError(f'disk {rank} is full\\nsecond line') \
    | | 1 | rank 0 failed: OSError: disk 0 is full second line ({act}:2)
a user's mistake | from torchtitan_lite.config.messages import UserError; raise UserError('There is no disk. Buy one') \
    | | 1 | the run stopped: There is no disk. Buy one
a rank crashes | if rank == '1': os.kill(os.getpid(), 11) | | 1 | rank 1 was killed by SIGSEGV
a rank ends | if rank == '0': return int(os.environ['OMP_NUM_THREADS']) | | 1 | rank 0 exited with status 1
a rank is killed | if rank == '1': \
    os.makedirs(SAVED); open(SAVED + '/manifest.json', 'w'); os.kill(os.getpid(), 9)\n \
       time.sleep(0.05); raise OSError('my peer is gone') | | 1 | rank 1 was killed by SIGKILL, as Linux does when \
    memory runs out, and so left no traceback; newest checkpoint outputs/debug/checkpoint/step-4; to continue: \
    NGPU=2 {run_train} --model.dim=64
"""
ENDINGS = {row[0]: row[1:] for row in read_lines(re.sub(r" *\\\n +", " ", ENDINGS))}


SHOWN = {  # text that is printed for the rank that failed first; nothing is printed for other ranks
    "SIGTERM, and the peer of a failed rank ends first": "OSError: disk full",
    "SIGTERM, and the save fails": "OSError: disk full",
    "a rank raises, and its peer loses it": "OSError: no disk 7",
    "two ranks raise": "OSError: disk 0 is full\nsecond line",
    "a rank crashes": '  File "{act}", line 2 in act',
}
SLOW = ("a closed terminal", "SIGTERM, and the save fails", "two ranks raise")


class Launcher(NamedTuple):
    process: subprocess.Popen
    # a folder for temporary files, because tmp_path is too long for a socket of multiprocessing
    temporary: Path
    keys: list[str]


@pytest.fixture(scope="module")
def launcher(letters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("launcher")
    (folder / "repository").mkdir()
    (folder / "repository" / "train.py").write_text(TRAIN)
    temporary = Path(tempfile.mkdtemp())
    variables = {
        "PYTHONPATH": str(REPOSITORY),
        "NGPU": "2",
        "TMPDIR": str(temporary),
        "SAVED_FILE": "",
        "OMP_NUM_THREADS": "",
    }
    command = [sys.executable, "-c", LAUNCH]
    environment = os.environ | variables
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, **STREAMS
    ) as process:
        keys = [*letters, "--validation.no_enable"]
        yield Launcher(process, temporary, keys)
        finish(process)
    assert list(temporary.iterdir()) == []
    temporary.rmdir()


@each_row("name", ENDINGS, slow=SLOW)
def test_the_last_line_says_how_the_run_has_ended(launcher, tmp_path, name):
    process, temporary, keys = launcher
    action, signals, status, last_line = ENDINGS[name]
    action = re.sub("\n +", "\n    ", action.encode().decode("unicode_escape"))
    last_line = last_line.format(act=tmp_path / "act.py", run_train=REPOSITORY / "run_train.sh")
    # If the launcher gets no signal, ranks sleep until SIGTERM from torchrun ends them before their first step.
    end = "return wait(stop)" if signals else "time.sleep(60)"
    act = tmp_path / "act.py"
    act.write_text(ACT.format(action, end))
    (tmp_path / "train.py").write_text("1 / 0  # a program of the user's")
    copies_arrive_within_s = 5.0 if "copies" in name else 0.5
    print(
        json.dumps([str(tmp_path), copies_arrive_within_s, *keys]), file=process.stdin, flush=True
    )
    output = read_until(process, "ready") if signals else ""
    for n, received in enumerate(signals.split()):
        time.sleep(min(n, 1))
        process.send_signal(signal.Signals[received])
    *lines, ended = (output + read_until(process, "^status ")).splitlines()
    output = "\n".join(lines)
    assert ended == f"status {status}", output
    assert lines[-1].startswith(f"run_train.sh: {last_line}"), output
    folder = tmp_path / "outputs" / "debug"
    last = read_records(folder)[-1]
    assert (last["kind"], last["step"]) == ("stop" if status == "1" else "step", 4)
    if status == "1":
        assert lines[-1].startswith(f"run_train.sh: {last['reason']}")
        assert last["reason"] in (folder / "log.txt").read_text()
    for line in SHOWN.get(name, "Traceback").format(act=act).splitlines():
        assert (line in lines) == (name in SHOWN), output
    assert output.count("Traceback (most recent call last)") == ("Error" in SHOWN.get(name, ""))
    assert "Connection closed" not in output and "my peer is gone" not in output
    assert ("saved" in output) == ("saved" in action), "a copy of the signal has killed the ranks"
    assert "stdout of 0" in output and "stderr of 0" in output and "stdout of 1" not in output
    assert ("stderr of 1" in output) == ("crashes" in name)
    assert ("torch/distributed" in output) == ("crashes" in name)
    kept = list(temporary.glob("torchtitan_lite.*"))
    assert len(kept) == (status == "1")
    for folder in kept:
        assert f"Files of the other ranks are in {folder}/" in output
        (text,) = [path.read_text() for path in folder.rglob("stderr.log")]
        assert text.startswith("stderr of 1\n")
        shutil.rmtree(folder)


def ignore_sigterm(is_ready) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_ready.set()
    time.sleep(60)


@pytest.fixture
def ranks(monkeypatch) -> list:
    """Return the list of children that the launcher sees. The list is empty, because the launcher must not kill the
    ranks of the test pool."""
    found: list = []
    monkeypatch.setattr(local_ranks.multiprocessing, "active_children", lambda: found)
    return found


def test_one_signal_kills_ranks_that_hang(tmp_path, ranks):
    context = multiprocessing.get_context("fork")
    is_ready = context.Event()
    rank = context.Process(target=ignore_sigterm, args=(is_ready,))
    rank.start()
    ranks.append(rank)
    is_ready.wait()
    # A hang that was reported before this start does not count. The report is recognized by its time, because the
    # number in the folder's name comes from a host that may have started more often.
    before = tmp_path / "restart-1" / "rank-00000.json"
    before.parent.mkdir(parents=True)
    before.touch()
    signals = local_ranks.Signals()
    signals.hangs = tmp_path  # `watch_hangs` would start a thread that outlives this test
    signals.started_at_s = time.time() + 1
    signals.pass_on(signal.SIGTERM, None)
    rank.join(0.2)
    assert rank.is_alive()
    signals.report_hang("HANG in step 7")
    rank.join(10)
    assert rank.exitcode == -signal.SIGKILL


def test_ctrl_c_interrupts_the_launcher_only_before_it_forks_ranks(ranks):
    """If the exception arrived during os.fork, the fork server or a rank would print a traceback."""
    signals = local_ranks.Signals()
    with pytest.raises(KeyboardInterrupt), signals.interrupting():
        signals.pass_on(signal.SIGINT, None)
    signals = local_ranks.Signals()
    signals.pass_on(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt), signals.interrupting():
        time.sleep(60)


# ---------------------------------------------------------------- tools with workers

WORKERS = """
import os, signal
from torchtitan_lite.tools.verify.ranks import RankPool
def work(rank, world_size):
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
if __name__ == "__main__":
    RankPool().run(work, 2)
"""


def test_workers_end_if_their_tool_is_killed(tmp_path):
    (tmp_path / "tool.py").write_text(WORKERS)
    tool = start_python(tmp_path / "tool.py")
    workers = [int(tool.stdout.readline()) for _ in range(2)]
    try:
        tool.kill()
        tool.communicate(timeout=60)  # the pipes end when no process has them open
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
