"""Train a model: check the config, then start the ranks of this host and wait for them. run_train.sh calls it.

    this process (without torch)  ->  rank 0, rank 1, ...      train.py, each with the variables that torchrun would set

If a rank fails, the others are ended, and the last line says which one failed first and why. SIGINT and SIGTERM are
passed on to the ranks, which finish a step, save and end (components/shutdown.py); a second signal kills them.

Environment: NGPU (ranks of this host), LOG_RANK (those whose output is shown, default 0), MAX_RESTARTS; for several
hosts NNODES, NODE_RANK (0 on the host that MASTER_ADDR names), MASTER_ADDR, MASTER_PORT (default 29500).
Exit status: 0 trained, 2 refused by check, 130 stopped by Ctrl-C, 143 stopped by SIGTERM, 1 anything else.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.tools.check import check, choose_host, describe
from torchtitan_lite.tools.command_lines import CONFIG, make_parser
from torchtitan_lite.tools.corpora.named import prepare_datasets
from torchtitan_lite.tools.corpora.text_files import PreparationError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = tuple(128 + number for number in SIGNALS)  # exit status of a rank that has stopped for a signal


def main(args: list[str]) -> int:
    make_parser("train", __doc__, CONFIG).parse_known_args(args)
    try:
        machine, n_ranks, n_hosts = choose_host()
        prepared = check(args, machine, n_ranks, n_hosts)
    except ConfigError as error:
        print(f"This run cannot start:\n{error}", file=sys.stderr)
        return 2
    node_rank = int(os.environ.get("NODE_RANK", 0))
    if node_rank == 0:
        print(describe(prepared, machine), file=sys.stderr, flush=True)
    try:
        prepare_datasets(prepared.config, prepared.tokenizer)
    except (PreparationError, ImportError) as error:
        print(f"This run cannot start: {error}", file=sys.stderr)
        return 2
    n_local, status = prepared.layout.world_size // n_hosts, 1
    for attempt in range(1 + int(os.environ.get("MAX_RESTARTS", 0))):
        common = {
            "WORLD_SIZE": str(n_local * n_hosts),
            "LOCAL_WORLD_SIZE": str(n_local),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **choose_address(n_hosts),
        }
        status = run_ranks(args, range(node_rank * n_local, (node_rank + 1) * n_local), common)
        if status != 1:
            break
    return status


def choose_address(n_hosts: int) -> dict[str, str]:
    """Return where rank 0 listens: on a single host any free port of the loopback."""
    if n_hosts > 1:
        return {"MASTER_PORT": os.environ.get("MASTER_PORT", "29500")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return address | ({"GLOO_SOCKET_IFNAME": interface} if Path(f"/sys/class/net/{interface}").exists() else {})


def run_ranks(args: list[str], numbers: range, variables: dict[str, str]) -> int:
    """Run train.py as these ranks. Return the exit status of the run on this host."""
    folder = Path(tempfile.mkdtemp(prefix="torchtitan_lite."))
    ranks: list[subprocess.Popen] = []
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        send(ranks, number if len(received) == 1 else signal.SIGKILL)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    for local_rank, number in enumerate(numbers):
        of_rank = {"RANK": str(number), "LOCAL_RANK": str(local_rank)}
        of_rank["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{local_rank}.json")
        ranks.append(start_rank(args, variables | of_rank, folder))
    if received:  # while they were started
        send(ranks, received[0])

    ends = {0, None, *STOPPED, *(-number for number in SIGNALS)}
    while None in (codes := [rank.poll() for rank in ranks]) and set(codes) <= ends:
        time.sleep(0.1)
    send(ranks, signal.SIGKILL)  # those that wait for one that has failed
    failed = {n: code for n, code in enumerate(codes) if code not in ends}
    if failed:
        print(f"run_train.sh: {describe_failure(failed, numbers, folder)}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    if set(codes) == {0}:
        return 0
    stopped = next((code - 128 for code in codes if code in STOPPED), signal.SIGTERM)
    stopped = signal.Signals(received[0] if received else stopped)
    print(f"run_train.sh: stopped by {stopped.name}", file=sys.stderr)
    return 128 + stopped


def start_rank(args: list[str], variables: dict[str, str], folder: Path) -> subprocess.Popen:
    """Start one rank. If it is not shown, its output is dropped, and its stderr is kept in a file."""
    local_rank = variables["LOCAL_RANK"]
    streams = {}
    if local_rank not in os.environ.get("LOG_RANK", "0").split(","):
        streams = {"stdout": subprocess.DEVNULL, "stderr": open(folder / f"rank-{variables['RANK']}.txt", "wb")}
    command = [sys.executable, REPOSITORY / "train.py", *args]
    # A session of its own: Ctrl-C in a terminal reaches the rank by pass_on alone.
    return subprocess.Popen(command, env=os.environ | variables, start_new_session=True, **streams)


def send(ranks: list[subprocess.Popen], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def describe_failure(failed: dict[int, int], numbers: range, folder: Path) -> str:
    """Return which rank failed first, and why. `failed`: rank of this host -> exit status, -N if signal N ended it."""

    def order(local_rank: int) -> tuple[bool, float]:
        report = folder / f"{local_rank}.json"  # a rank that was killed wrote none; the others fail because of it
        return failed[local_rank] > 0, report.stat().st_mtime if report.exists() else 0.0

    local_rank = min(failed, key=order)
    rank, code, report = numbers[local_rank], failed[local_rank], folder / f"{local_rank}.json"
    kept = f"; the stderr of the other ranks is in {folder}" if len(numbers) > 1 else ""
    if code < 0:
        by_kernel = ", as Linux does when the memory is used up" if code == -signal.SIGKILL else ""
        return f"rank {rank} was killed by {signal.Signals(-code).name}{by_kernel}{kept}"
    if report.exists():  # of `record` in train.py
        message = json.loads(report.read_text())["message"]
        text = message["message"] if isinstance(message, dict) else message
        return f"rank {rank} failed: {text.splitlines()[0]}{kept}"
    return f"rank {rank} ended with exit status {code}{kept}"
