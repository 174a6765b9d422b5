"""Kill ranks of a run at random moments, and print a table: `python3 -m assets.benchmarks.random_kills`.

    dp4, pp2 x dp2 x tp2    one launcher
    two hosts               two launchers, of two ranks each, on 127.0.0.1 and 127.0.0.2

Each layout trains twice: once undisturbed, and once with a kill every few steps. A kill "during a restart" ends a rank
that is starting again after the previous kill. "back after" is the number of seconds from the kill until the run logs a
step again. At the end, weights and optimizer state must be bitwise identical to the state of the undisturbed run. Linux
only. Arguments choose layouts by name.
"""

import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from assets.benchmarks.signal_phases import REPOSITORY, Run, list_children
from torchtitan_lite.tools.faults.drill import read_shards

N_STEPS = 200
N_KILLS = 40  # per layout
N_IN_RESTART = 10
LONGEST_S = 900.0
KEYS = [
    f"--training.steps={N_STEPS}",
    "--training.seq_len=64",
    "--checkpoint.interval=2",
]
RESTART = "All ranks start again"
STEP = r"step +\d+/"
BACK = rf"{RESTART}(?s:.*?){STEP}"


class Layout(NamedTuple):
    keys: list[str]
    n_ranks: int  # ranks per host
    n_hosts: int


class Kill(NamedTuple):
    moment: str
    killed_s: float
    n_printed: int  # number of characters that the run had printed before the kill


LAYOUTS = {
    "dp4": Layout(["--training.local_batch_size=2"], 4, 1),
    "pp2 x dp2 x tp2": Layout(["--config=debug_3d"], 8, 1),
    "two hosts": Layout(["--training.local_batch_size=2"], 2, 2),
}


def start(layout: Layout, folder: Path) -> list[Run]:
    """Start the launcher of each host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    hosts = []
    for n in range(layout.n_hosts):
        variables = {"NGPU": str(layout.n_ranks), "MAX_RESTARTS": "50"}
        if layout.n_hosts > 1:
            variables |= {"NNODES": str(layout.n_hosts), "NODE_RANK": str(n)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables |= {"GLOO_SOCKET_IFNAME": "lo", "PET_LOCAL_ADDR": f"127.0.0.{n + 1}"}
        hosts.append(Run(folder, REPOSITORY, [*layout.keys, *KEYS], variables))
    return hosts


def wait_for(hosts: list[Run], is_ready: Callable[[], bool]) -> bool:
    """Wait until `is_ready` returns true. Return False if the run ends first."""
    deadline_s = time.monotonic() + LONGEST_S
    while not is_ready():
        if any(host.process.poll() is not None for host in hosts):
            return False
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"nothing happens:\n{hosts[0].output[-3000:]}")
        time.sleep(0.005)
    return True


def count(run: Run, pattern: str) -> int:
    return len(re.findall(pattern, run.output))


def has_forked(host: Run, before: set[int], n_ranks: int) -> bool:
    return len(set(list_ranks(host)) - before) == n_ranks


def is_back_after(kill: Kill, first_host: Run) -> bool:
    return re.search(BACK, first_host.output[kill.n_printed :]) is not None


def list_ranks(host: Run) -> list[int]:
    return [rank for child in list_children(host.process.pid) for rank in list_children(child)]


def kill_ranks(name: str, hosts: list[Run], draw: random.Random) -> None:
    """Kill ranks of one run, and print a row of the table for each kill."""
    layout = LAYOUTS[name]
    in_restart = [True] * N_IN_RESTART + [False] * (N_KILLS - 2 * N_IN_RESTART)
    draw.shuffle(in_restart)
    for is_twice in in_restart:
        n_steps = count(hosts[0], STEP) + draw.randint(1, 4)
        if not wait_for(hosts, lambda n=n_steps: count(hosts[0], STEP) >= n):
            return
        victim = draw.choice(hosts)
        before = set(list_ranks(victim))
        step = re.findall(STEP, hosts[0].output)[-1].strip("/")
        back = kill_one(hosts, victim, f"{{:.2f}} s after {step}", draw.uniform(0, 1), draw)
        if is_twice:
            print_row(name, back.moment, "see below")
            wait_for(hosts, partial(has_forked, victim, before, layout.n_ranks))
            moment = "during a restart, {:.2f} s after the fork"
            back = kill_one(hosts, victim, moment, draw.uniform(0, 3), draw)
        is_back = wait_for(hosts, partial(is_back_after, back, hosts[0]))
        seconds = f"{time.monotonic() - back.killed_s:.1f}"
        print_row(name, back.moment, seconds if is_back else "NEVER")


def kill_one(
    hosts: list[Run], victim: Run, moment: str, delay_s: float, draw: random.Random
) -> Kill:
    """Kill a rank of the host `victim` after a delay."""
    time.sleep(delay_s)
    kill = Kill(moment.format(delay_s), time.monotonic(), len(hosts[0].output))
    os.kill(draw.choice(list_ranks(victim)), signal.SIGKILL)
    return kill


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} | {os.getloadavg()[0]:.0f} |", flush=True)


def main() -> None:
    draw = random.Random(0)
    print("| layout | killed | back after (s) | load |\n|---|---|---|---|", flush=True)
    for name in sys.argv[1:] or list(LAYOUTS):
        layout = LAYOUTS[name]
        folder = Path(tempfile.mkdtemp(prefix="kills."))
        shards = []
        for kind in ("undisturbed", "killed"):
            hosts = start(layout, folder / kind)
            if kind == "killed":
                kill_ranks(name, hosts, draw)
            statuses = [host.process.wait(LONGEST_S) for host in hosts]
            (folder / f"{kind}.txt").write_text("\n".join(host.output for host in hosts))
            shards.append(read_shards(folder / kind / "checkpoint" / f"step-{N_STEPS}"))
        is_equal = shards[0] == shards[1] != {} and statuses == [0] * layout.n_hosts
        print_row(name, "end of the run", "bit-equal" if is_equal else f"DIFFERENT, see {folder}")
        if is_equal:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
