"""Let the launchers of several hosts meet before torchrun starts, and agree on the cause if the run fails.

    NODE_RANK=0    opens a TCPStore at MASTER_ADDR:MASTER_PORT, which torchrun's rendezvous uses too
    other hosts    compare a hash of their settings with NODE_RANK=0's; if it differs, they read its settings
    NODE_RANK=0    tells every host which hosts have different settings, and the first setting that differs
    all hosts      make gloo use the network interface of this connection
    on a signal    a host that receives a signal before it has met the other hosts connects to tell them
    at the end     the first host that fails writes the cause to the store, and the other hosts print it too

With NNODES=2:4, ranks start when two hosts have met, and a host may join later. Therefore only the host with different
settings is refused. With a fixed number of hosts, all hosts end with the reason and the exit status of the refused
host. If they waited instead, Slurm would end them by a signal and report 143, because it reports the largest status.
"""

import hashlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from torchtitan_lite import PACKAGE
from torchtitan_lite.components.signals import describe_signal, handle_signals
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.files import hash_file

MEET_WITHIN_S = 600.0
SAY_AFTER_S = 10.0
CONNECT_EVERY_S = 5.0
STORE_TIMEOUT_S = 20
N_HOSTS = "hosts"  # key in the store: the number of hosts in the last start and of waiting hosts
SIGNAL = "signal"  # key in the store: the first signal that a host has received
TELL_WITHIN_S = 2.0
END_WITHIN_S = 10.0  # the store ends with NODE_RANK=0, so this host waits for the others


def read_number(name: str, default: int = 0) -> int:
    """Return an environment variable of the launcher as a number."""
    return int(os.environ.get(name) or default)


def read_hosts() -> tuple[int, int]:
    """Return the smallest and the largest number of hosts in NNODES. They differ only if NNODES is a range."""
    numbers = os.environ.get("NNODES") or "1"
    hosts = sorted(map(int, numbers.split(":")))
    return hosts[0], hosts[-1]


def join_store(timeout_s: float) -> Any:
    """Return the TCPStore that all hosts share. Its server runs on NODE_RANK=0. The first call imports torch."""
    c10d = importlib.import_module("torch.distributed")
    return c10d.TCPStore(
        *find_master(),
        is_master=is_first_host(),
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )


def open_store() -> Any:
    """Wait for NODE_RANK=0, write the address of this host to its store, and return the store. Raises UserError."""
    node_rank = read_number("NODE_RANK")
    address, port = find_master()
    place = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    try:
        family, *_, endpoint = socket.getaddrinfo(address, port)[0]
        if node_rank == 0:
            socket.create_server(endpoint[:2], family=family).close()
    except OSError as error:
        raise UserError(f"NODE_RANK={node_rank} cannot use {place}: {error.strerror}") from None
    own_address = ""
    if node_rank > 0:
        own_address = wait_until(connect, f"NODE_RANK=0 at {place}")
    store = join_store(STORE_TIMEOUT_S)
    store.add(N_HOSTS, 1)
    if own_address:
        store.set("address", own_address)
    return store


def meet_hosts(store: Any, config: dict[str, object]) -> None:
    """Wait for all hosts, and compare their settings.

    If NNODES is a range, wait for the smallest number of hosts. `config` has the value of each key. Raises UserError on
    every host if the settings of one host differ, or if a host cannot be reached.
    """
    n_needed, n_hosts = read_hosts()
    address, _ = find_master()
    facts = list_facts(config)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    verdict = ""
    if is_first_host():
        store.set("facts", json.dumps(facts))
        store.set("hash", digest)
    elif read_when_set(store, "hash", "NODE_RANK=0") != digest:
        verdict = describe_difference(json.loads(store.get("facts")), facts)
    if n_needed == n_hosts:
        verdict = share_verdict(store, verdict)
    if verdict:
        store.add(N_HOSTS, -1)
        wait_for_readers(store)
        raise UserError(verdict)
    store.add("arrived", 1)
    if is_first_host():
        n_first = max(2, n_needed)  # a second host must send its address
        wait_until(lambda: store.add("arrived", 0) >= n_first, f"{n_first} hosts")
        address = store.get("address").decode()
    with suppress(FileNotFoundError):  # a container may lack the command `ip`
        route = subprocess.run(["ip", "route", "get", address], capture_output=True, text=True)
        if interface := re.search(r" dev (\S+)", route.stdout):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface[1])


def wait_for_readers(store: Any) -> None:
    """Wait until all hosts have read why the run cannot start, a signal arrives, or END_WITHIN_S have passed."""
    # RuntimeError: the store has ended with NODE_RANK=0
    with suppress(RuntimeError, KeyboardInterrupt, UserError):
        store.add("told", 1)
        n_hosts = read_hosts()[1]
        wait_until(lambda: store.add("told", 0) >= n_hosts, "all hosts", END_WITHIN_S)


def tell_refusal(error: UserError) -> None:
    """Tell the other hosts why this host is refused. Afterwards, signals cannot change the exit status."""
    n_needed, n_hosts = read_hosts()
    if not os.environ.get("MASTER_ADDR") or n_needed < n_hosts or n_hosts == 1:
        return
    # while torch is imported, an exception in a signal handler would abort this process
    handle_signals(signal.SIG_IGN)
    importlib.import_module("torch.distributed")
    handle_signals(signal.default_int_handler)
    with suppress(RuntimeError, KeyboardInterrupt):  # MASTER_ADDR cannot be reached
        store = join_store(END_WITHIN_S)
        name = name_host()
        key = f"verdict of {name}"
        if is_first_host():  # the other hosts read these two keys first
            store.set("facts", "{}")
            store.set("hash", "")
            key = "verdict"
        store.set(key, f"{name} cannot start:\n{error}")
        wait_for_readers(store)
    handle_signals(signal.SIG_IGN)


def tell_signals() -> None:
    """Let a signal from now on end this launcher and the other hosts. Otherwise they would wait for this host."""

    def end(number: int, frame: object) -> NoReturn:
        status = 128 + number
        os.write(2, f"run_train.sh: {describe_signal(status)}\n".encode())
        tell_signal(number)
        os._exit(status)

    if read_hosts()[1] > 1:
        handle_signals(end)


def tell_signal(number: int) -> None:
    """Tell the other hosts about a signal that arrived before the hosts have met. Gives up after TELL_WITHIN_S."""
    handle_signals(signal.SIG_IGN)
    with suppress(RuntimeError, UserError):  # MASTER_ADDR cannot be reached
        store = join_store(TELL_WITHIN_S)
        store.set(SIGNAL, str(number))
        if is_first_host():  # the store ends with this host
            time.sleep(TELL_WITHIN_S)


def list_facts(config: dict[str, object]) -> dict[str, object]:
    """Return what must be equal on all hosts: launcher variables, the config, and hashes of the package's files."""
    facts = {name: os.environ.get(name) for name in ("NNODES", "MAX_RESTARTS")} | config
    for path in PACKAGE.rglob("*.py"):
        facts[str(path.relative_to(PACKAGE))] = hash_file(path)
    return facts


def read_when_set(store: Any, key: str, what: str) -> str:
    """Wait until the store has `key`, and return its value. `what` describes the writer. Raises UserError."""
    try:
        wait_until(partial(store.check, [key]), what)
        return store.get(key).decode()
    except RuntimeError:
        raise UserError("NODE_RANK=0, which has the store of the hosts, has ended") from None


def share_verdict(store: Any, own: str) -> str:
    """Wait for all hosts. Return why the first host that is refused cannot start, or "" if all hosts can start."""
    if not is_first_host():
        store.set(f"verdict of {name_host()}", own)
        return read_when_set(store, "verdict", "NODE_RANK=0, which waits for all hosts")
    different = {}
    for other in range(1, read_hosts()[1]):
        name = f"NODE_RANK={other}"
        if verdict := read_when_set(store, f"verdict of {name}", name):
            different[name] = verdict
    first = next(iter(different.values()), "")
    if len(different) > 1:
        first += f". {len(different)} hosts differ: {', '.join(different)}"
    store.set("verdict", first)
    return first


def describe_difference(first: dict[str, object], own: dict[str, object]) -> str:
    """Return a text about the first setting that differs from NODE_RANK=0, or ""."""
    for key in [*first, *own]:
        there = first.get(key)
        here = own.get(key)
        if json.dumps(here) != json.dumps(there):
            return f"{key} is {there} on NODE_RANK=0, but {here} on {name_host()}"
    return ""


def name_host() -> str:
    return f"NODE_RANK={read_number('NODE_RANK')}"


def is_first_host() -> bool:
    return read_number("NODE_RANK") == 0


def find_master() -> tuple[str, int]:
    """Return address and port of the host with NODE_RANK=0. Raises UserError."""
    address = os.environ.get("MASTER_ADDR")
    if not address:
        why = "needs MASTER_ADDR, the name of the host with NODE_RANK=0"
        raise UserError(f"NNODES={os.environ.get('NNODES')} {why}")
    return address, read_number("MASTER_PORT", 29500)


def connect() -> str:
    """Return the address of this host on a connection to NODE_RANK=0, or "" if NODE_RANK=0 cannot be reached."""
    try:
        with socket.create_connection(find_master(), timeout=5) as connection:
            return connection.getsockname()[0]
    except OSError:
        return ""


def end_if_cut_off(timeout_s: float) -> None:
    """End this launcher and its ranks if NODE_RANK=0 cannot be reached for `timeout_s`. Runs in a thread.

    Without this, torchrun waits forever: its time-out needs an answer from the host with the store (torch 2.13).
    """
    reached_at_s = time.monotonic()
    while time.monotonic() - reached_at_s < timeout_s:
        time.sleep(CONNECT_EVERY_S)
        if connect():
            reached_at_s = time.monotonic()
    lost = f"{socket.gethostname()} has not reached NODE_RANK=0 for {timeout_s:g} s"
    print(f"run_train.sh: {lost}, and ends", file=sys.stderr, flush=True)
    os._exit(1)


def wait_until(is_ready: Callable[[], Any], what: str, within_s: float = MEET_WITHIN_S) -> Any:
    """Call `is_ready` until its result is true, and return the result. Raises UserError after `within_s`.

    After SAY_AFTER_S, print that this host waits for `what`.
    """
    host = socket.gethostname()
    started_s = time.monotonic()
    is_said = False
    while not (result := is_ready()):
        waited_s = time.monotonic() - started_s
        if waited_s > within_s:
            raise UserError(f"{host} has waited {within_s:g} s for {what}")
        if waited_s > SAY_AFTER_S and not is_said:
            print(f"{host} waits for {what}", file=sys.stderr, flush=True)
            is_said = True
        time.sleep(0.5)
    return result


def claim_cause(store: Any, key: str, status: int, reason: str) -> tuple[int, str]:
    """Return the exit status and the reason of the first host that gave a reason for `key`.

    `status` and `reason` belong to this host, and are returned if no host gave a reason. A returned reason names its
    host.
    """
    own = ""
    if reason:  # containers can share a hostname
        host = f"{socket.gethostname()}, {name_host()}"
        own = json.dumps([status, f"{reason} (on {host})"])
    first = store.compare_set(key, "", own).decode()
    return tuple(json.loads(first)) if first else (status, reason)


def agree_on_cause(store: Any, status: int, reason: str) -> tuple[int, str]:
    """Return the exit status and the reason of the host that failed first, or of this host if no host failed."""
    # RuntimeError: NODE_RANK=0 has ended, or cannot be reached. UserError: the other hosts are late
    with suppress(RuntimeError, UserError):
        first, cause = claim_cause(store, "cause", status, reason if status == 1 else "")
        if first == 1 and status:
            status = 1
            reason = cause
        store.add("ended", 1)
        n_needed, _ = read_hosts()
        wait_s = END_WITHIN_S
        if int(store.get(N_HOSTS)) < n_needed:  # a signal came before all hosts met
            wait_s = TELL_WITHIN_S

        def have_ended() -> bool:
            return store.add("ended", 0) >= max(n_needed, int(store.get(N_HOSTS)))

        if is_first_host():
            wait_until(have_ended, "the other hosts", wait_s)
    return status, reason
