"""Test the rendezvous of several hosts before torchrun starts: launchers name hosts that differ, and agree on why a run
failed."""

import os
import signal
import socket
import time
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist
from marks import each_row
from programs import find_port, start_python
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools import agent, hosts
from torchtitan_lite.tools.local_ranks import Signals

MET = "met over lo"
FIRST = "optimizer.lr is 0.1 on NODE_RANK=0, but 0.2 on NODE_RANK="
# NNODES | learning rate and MAX_RESTARTS of each host | the message of each
HOSTS = f"""
2 | 0.1 1, 0.1 3 | MAX_RESTARTS is 1 on NODE_RANK=0, but 3 on NODE_RANK=1
2:3 | 0.1 1, 0.1 1, 0.2 1 | {MET}; {MET}; {FIRST}2  # a host that joins is refused alone
4 | 0.1 1, 0.2 1, 0.1 1, 0.3 1 | {FIRST}1. 2 hosts differ: NODE_RANK=1, NODE_RANK=3
"""


def meet_as_host(
    rank: int, world_size: int, n_hosts: str, port: str, settings: list[str], log: Path
):
    """Worker: act as one of several hosts, and rendezvous with the others. Return this host's message."""
    rate, restarts = settings[rank].split()
    variables = {"NNODES": n_hosts, "NODE_RANK": str(rank), "MAX_RESTARTS": restarts}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    waits = f"waits for NODE_RANK=0 at MASTER_ADDR=localhost, MASTER_PORT={port}"
    while rank == 0 and not (log.exists() and waits in log.read_text()):
        time.sleep(0.01)
    with (
        patch.dict(os.environ, variables),
        patch.multiple(hosts, SAY_AFTER_S=0.6, END_WITHIN_S=1.0),
        patch.object(hosts, "describe_difference", wraps=hosts.describe_difference) as compared,
        log.open("a") as file,
        redirect_stderr(file),
    ):
        del os.environ["GLOO_SOCKET_IFNAME"]
        said = ""
        try:
            store = hosts.open_store()
            hosts.meet_hosts(store, {"optimizer.lr": float(rate)})
            hosts.choose_interface(store)
        except UserError as error:
            said = str(error)
        # settings are read only if their hashes differ
        assert compared.called == (settings[rank] != settings[0])
        dist.barrier()  # the store must live until refused hosts have read it
        return said or f"met over {os.environ['GLOO_SOCKET_IFNAME']}"


@each_row("n_hosts, settings, said", HOSTS)
def test_hosts_rendezvous_or_each_host_says_which_host_differs(
    pool, tmp_path, n_hosts, settings, said
):
    settings = settings.split(", ")
    said = said.split("; ")
    if len(said) == 1:
        said *= len(settings)  # all say the same
    log = tmp_path / "stderr"
    assert pool.run(meet_as_host, len(said), n_hosts, find_port(), settings, log) == said


def test_a_refused_host_keeps_its_reason_if_the_first_host_ends_before_it(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("NODE_RANK", "1")
    store = Mock()
    store.get.return_value = b"no such key"
    store.add.side_effect = [1, RuntimeError]
    with pytest.raises(UserError, match="^no such key$"):
        hosts.meet_hosts(store, {}, "no such key")


ADDRESSES = [  # MASTER_ADDR, error
    ("192.0.2.1", "Cannot assign requested address"),  # in TEST-NET-1, which no host has
    ("no-such-host.invalid", "(Name or service not known|Temporary failure)"),
    ("127.0.0.1", "Address already in use"),
]


@each_row("address, said", ADDRESSES)
def test_an_address_that_the_first_host_cannot_use_is_refused(monkeypatch, address, said):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        with pytest.raises(
            UserError, match=f"NODE_RANK=0 cannot use MASTER_ADDR={address}.*{said}"
        ):
            hosts.open_store()


CUT_OFF = """
from torchtitan_lite.tools import hosts
hosts.CONNECT_EVERY_S = 0.1
print("watches", flush=True)
hosts.end_if_cut_off(0.5)
"""


def test_a_launcher_that_is_cut_off_from_the_first_host_ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        launcher = start_python("-c", CUT_OFF, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        launcher.stdout.readline()
        for _ in range(10):  # for a second
            server.accept()[0].close()
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "NODE_RANK=0 for 0.5 s" in said


# exit status and reason on each of two hosts | status and reason that both hosts report
ENDINGS = """
1 rank 3 failed, 143 stopped by SIGTERM | 1 rank 3 failed
1 rank 3 failed, 1 rank 0 lost its peer | 1 rank 3 failed
143 stopped by SIGTERM, 143 stopped by SIGTERM | 143 stopped by SIGTERM
0, 0 | 0
"""


@each_row("endings, agreed", ENDINGS)
def test_a_failure_on_another_host_is_reported_instead_of_the_signal_on_this_host(
    monkeypatch, endings, agreed
):
    monkeypatch.setattr(hosts, "END_WITHIN_S", 0.3)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set(hosts.N_HOSTS, "2")
    for host in endings.split(", "):
        store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        status, _, reason = host.partition(" ")
        ending = hosts.agree_on_cause(store, hosts.Ending(int(status), reason))
        told, *_ = ending.reason.split(" (on ")
        assert f"{ending.status} {told}".strip() == agreed


def test_a_signal_to_one_host_reaches_all_hosts_and_a_later_copy_of_it_is_ignored(monkeypatch):
    store = dist.HashStore()
    here, there = [Signals() for _ in range(2)]
    here.received.append(int(signal.SIGHUP))  # as Python calls handlers
    here.share(store)
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    # the real function would end the ranks of the test pool
    monkeypatch.setattr(Signals, "end_ranks", Mock())
    there.share(store)
    assert sent == [signal.SIGHUP]
    # The forwarded signal arrives at 0 s. Then a user signals `there` directly. The first of these signals, and others
    # within 5 s after it, are copies. A later signal counts.
    for now_s, n_received in ((0, 1), (60, 1), (64, 1), (70, 2)):
        monkeypatch.setattr(time, "monotonic", lambda now_s=now_s: 100 + now_s)
        there.pass_on(signal.SIGHUP, None)
        assert len(there.received) == n_received, now_s


def test_launchers_with_one_hostname_and_process_id_are_two_hosts_for_torchrun(monkeypatch):
    """Two containers that use their host's network have the same hostname, and can have the same process id."""
    names = set()
    for node_rank in "01":
        monkeypatch.setenv("NODE_RANK", node_rank)
        agent.number_host()
        generator = dynamic_rendezvous.DynamicRendezvousHandler._node_desc_generator
        names.add(generator.generate("127.0.0.1"))
    assert len(names) == 2


FAR = "1" + ",00000000" * 125  # the mask of CPU 4000


@each_row("listed", ["00000001", f"{FAR[:-1]}1", FAR, "", None])
def test_a_rank_is_bound_to_the_cpus_near_its_gpu_or_not_at_all(listed, tmp_path, monkeypatch):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(agent.torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(agent, "PCI", tmp_path)
    if listed is not None:
        folder = tmp_path / "0000:dc:00.0"
        folder.mkdir()
        (folder / "local_cpus").write_text(f"{listed}\n")
    allowed = os.sched_getaffinity(0)
    try:
        agent.bind_to_gpu(0)
        is_near = bool(listed) and listed.endswith("1")
        assert os.sched_getaffinity(0) == ({0} if is_near else allowed)
    finally:
        os.sched_setaffinity(0, allowed)
