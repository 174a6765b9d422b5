"""Stop a run by one SIGTERM in each of its phases, and print a table: `python assets/benchmarks/signal_phases.py`.

    launcher    the signal goes to the launcher alone, as from `kill PID`
    group       the signal goes to the launcher, the fork server and the ranks, as from `timeout`, systemd and scancel

Each row has the seconds from the signal until the launcher ends, the exit status, the two newest checkpoints, the
number of processes that still run one second later, and how many tracebacks and restarts were printed after the signal.
Linux only. Arguments choose phases by name.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "SIGNAL_PHASE"  # environment variable that all processes of a run have
WAIT_S = 300.0
KEYS = [
    "--config=debug",
    "--training.steps=3000",
    "--metrics.log_freq=1",
    "--checkpoint.interval=5000",
    "--validation.no_enable",
]


class Run:
    """A run, with its output and its processes."""

    def __init__(self, folder: Path, repository: Path, keys: list[str], variables: dict[str, str]):
        self.folder = folder
        own = {MARK: str(folder), "NGPU": "2", "MAX_RESTARTS": "9", "PYTHON": sys.executable}
        keys = [*KEYS, f"--job.dump_folder={folder}", *keys]
        self.process = subprocess.Popen(
            [repository / "run_train.sh", *keys],
            env={**os.environ, **own, **variables},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.output += line

    def has_printed(self, pattern: str) -> bool:
        return re.search(pattern, self.output) is not None

    def list_commands(self) -> dict[int, str]:
        """Return the command line of each process."""
        mark = f"{MARK}={self.folder}".encode()
        commands = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # if a process has ended
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                    commands[int(path.name)] = command.decode()
        return commands

    def is_running(self, part: str) -> bool:
        return any(part in command for command in self.list_commands().values())

    def count_ranks(self) -> int:
        """Return the number of processes that the fork server has forked."""
        for pid, command in self.list_commands().items():
            if "multiprocessing.forkserver" in command and list_children(pid):
                return len(list_children(pid))
        return 0

    def is_saving(self) -> bool:
        return any(self.folder.glob("checkpoint/*.tmp"))


def list_children(pid: int) -> list[int]:
    with suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


class Phase(NamedTuple):
    has_begun: Callable[[Run], bool]
    delay_s: float = 0.0
    keys: tuple[str, ...] = ()
    hosts: str = "1"


def prints(pattern: str) -> Callable[[Run], bool]:
    return lambda run: run.has_printed(pattern)


SHORT = ("--training.steps=2", "--checkpoint.last_save_in_hf")
LONG_STEP = ("--training.global_batch_size=4096",)
PHASES = {
    "pip in run_train.sh": Phase(prints("Looking in indexes")),
    "packages": Phase(lambda run: run.is_running("tools.environment")),
    "check": Phase(lambda run: run.is_running("torchtitan_lite train")),
    "prepare": Phase(prints("Encoding"), 0.3, ("--training.cache_folder=CACHE",)),
    "rendezvous of hosts": Phase(prints("waits for NODE_RANK=1"), hosts="2"),
    "fork server": Phase(lambda run: run.is_running("multiprocessing.forkserver")),
    "fork": Phase(lambda run: run.count_ranks() > 0),
    "0.3 s after fork": Phase(lambda run: run.count_ranks() > 0, 0.3),
    "1 s after fork": Phase(lambda run: run.count_ranks() > 0, 1.0),
    "compiling": Phase(prints("data: "), 6.0, ("--compile.enable",)),
    "first step": Phase(prints("data: "), 1.0, LONG_STEP),
    "step": Phase(prints("step +4/")),
    "save": Phase(Run.is_saving, 0.0, ("--checkpoint.interval=1",)),
    "validation": Phase(
        prints("step +2/"),
        1.0,
        ("--validation.enable", "--validation.freq=1", "--validation.steps=100"),
    ),
    "export": Phase(lambda run: run.is_running("convert"), 0.0, SHORT),
    "1 s into export": Phase(lambda run: run.is_running("convert"), 1.0, SHORT),
    "end": Phase(prints("trained 2 steps"), 0.0, SHORT[:1]),
}


def copy_repository(folder: Path) -> Path:
    """Copy the files that run_train.sh needs. The copy then creates its own .venv."""
    names = subprocess.check_output(["git", "ls-files"], cwd=REPOSITORY, text=True).split()
    for name in names:
        if not name.startswith(("tests/", "assets/")):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, target)
    return folder


def stop_run(name: str, whom: str, folder: Path) -> list[str]:
    """Start a run, send it a SIGTERM in the phase `name`, and return a row of the table."""
    phase = PHASES[name]
    keys = [key.replace("CACHE", str(folder / "cache")) for key in phase.keys]
    variables = {"NNODES": phase.hosts}
    if phase.hosts != "1":
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    repository = REPOSITORY
    silent = socket.create_server(("127.0.0.1", 0))  # a package index that never answers
    if name.startswith("pip"):
        repository = copy_repository(folder / "repository")
        empty = folder / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True)
        index = f"http://127.0.0.1:{silent.getsockname()[1]}"
        variables |= {"PYTHON": str(empty / "bin" / "python"), "PIP_INDEX_URL": index}
    run = Run(folder / "run", repository, keys, variables)
    started_s = time.monotonic()
    while not phase.has_begun(run):
        if run.process.poll() is not None or time.monotonic() - started_s > WAIT_S:
            raise RuntimeError(f"{name} was not reached:\n{run.output}")
        time.sleep(0.002)
    time.sleep(phase.delay_s)
    n_printed = len(run.output)
    send = os.killpg if whom == "group" else os.kill
    signaled_s = time.monotonic()
    send(run.process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        run.process.wait(60)
    seconds = time.monotonic() - signaled_s
    time.sleep(1)
    left = run.list_commands()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    silent.close()
    saved = sorted(path.name for path in run.folder.glob("checkpoint/*"))
    after = run.output[n_printed:]
    n_tracebacks = after.count("Traceback")
    n_restarts = after.count("All ranks start again")
    status = run.process.returncode
    if status is not None and status < 0:
        status = 128 - status  # as a shell reports it
    notes = []
    if n_tracebacks:
        notes.append(f"{n_tracebacks} tracebacks")
    if n_restarts:
        notes.append(f"{n_restarts} restarts")
    (folder / "output").write_text(run.output)
    newest = ", ".join(saved[-2:]) or "nothing"
    return [name, whom, f"{seconds:.1f}", str(status), newest, str(len(left)), ", ".join(notes)]


def main() -> None:
    names = sys.argv[1:] or list(PHASES)
    print("| phase | signal to | seconds | status | saved | processes left | other |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        for whom in ("launcher", "group"):
            folder = Path(tempfile.mkdtemp(prefix="phase."))
            row = stop_run(name, whom, folder)
            print(f"| {' | '.join(row)} |", flush=True)
            shutil.rmtree(folder) if row[3] == "143" and row[5] == "0" else print(folder)


if __name__ == "__main__":
    main()
