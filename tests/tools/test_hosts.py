"""Launchers of several hosts meet before torchrun starts, name who differs, and agree on the cause of a failure."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools import hosts

MEET = """
import os, sys, torch.distributed
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools import hosts
hosts.SAY_AFTER_S = hosts.END_WITHIN_S = 0.6
try:
    hosts.meet_hosts(torch.distributed, 2, {"optimizer.lr": float(sys.argv[1])})
    print("met over", os.environ["GLOO_SOCKET_IFNAME"])
except UserError as error:
    print(error)
"""


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_host(node_rank: int, port: int, rate: str, restarts: str) -> subprocess.Popen:
    variables = {"NODE_RANK": str(node_rank), "MAX_RESTARTS": restarts}
    return start(MEET, rate, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **variables)


@pytest.mark.parametrize(
    ("rates", "restarts", "said"),
    [
        (("0.1", "0.1"), ("1", "1"), "met over lo"),
        (("0.1", "0.1"), ("1", "3"), "MAX_RESTARTS is 1 on NODE_RANK=0, but 3 on NODE_RANK=1"),
        (("0.1", "0.2"), ("1", "1"), "optimizer.lr is 0.1 on NODE_RANK=0, but 0.2 on NODE_RANK=1"),
    ],
)
def test_hosts_meet_or_each_says_who_differs(rates, restarts, said):
    port = find_port()
    second = start_host(1, port, rates[1], restarts[1])
    assert second.stderr.readline().endswith(
        f"waits for NODE_RANK=0 at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}\n"
    )
    first = start_host(0, port, rates[0], restarts[0])
    for host in (first, second):
        out, _ = host.communicate(timeout=120)
        assert out == f"{said}\n"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("192.0.2.1", "Cannot assign requested address"),  # TEST-NET-1: of no host
        ("no-such-host.invalid", "Name or service not known|Temporary failure"),
        ("127.0.0.1", "Address already in use"),
    ],
)
def test_an_address_that_the_first_host_cannot_use_is_refused(monkeypatch, address, said):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        with pytest.raises(
            UserError, match=f"NODE_RANK=0 cannot use MASTER_ADDR={address}.*({said})"
        ):
            hosts.meet_hosts(dist, 2, {})


CUT_OFF = """
from torchtitan_lite.tools import hosts
hosts.CONNECT_EVERY_S = 0.1
print("watches", flush=True)
hosts.end_if_cut_off(0.5)
"""


def start(program: str, *args: str, **variables: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program, *args], env=environment, **streams)


def test_a_launcher_that_is_cut_off_from_the_first_host_ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        launcher = start(CUT_OFF, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        launcher.stdout.readline()
        for _ in range(10):  # a second
            server.accept()[0].close()
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "has not reached NODE_RANK=0 for 0.5 s" in said


@pytest.mark.parametrize(
    ("endings", "agreed"),
    [
        ([(1, "rank 3 failed"), (143, "stopped by SIGTERM")], (1, "rank 3 failed")),
        ([(1, "rank 3 failed"), (1, "rank 0 lost its peer")], (1, "rank 3 failed")),
        ([(143, "stopped by SIGTERM"), (143, "stopped by SIGTERM")], (143, "stopped by SIGTERM")),
        ([(0, ""), (0, "")], (0, "")),
    ],
)
def test_the_cause_on_another_host_wins_over_the_signal_on_this_one(monkeypatch, endings, agreed):
    monkeypatch.setattr(hosts, "END_WITHIN_S", 0.3)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for status, reason in endings:
        store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        status, reason = hosts.agree_on_cause(store, 2, status, reason)
        assert (status, reason.partition(" (on ")[0]) == agreed
