"""Let the launchers of several hosts rendezvous before torchrun starts, and report the same cause on every host if the
run fails.

    NODE_RANK=0    listens at MASTER_ADDR:MASTER_PORT with one of torch's stores, which torchrun's rendezvous uses too
    others         connect to NODE_RANK=0, and compare hashes of settings; the settings are read only if a hash differs
    NODE_RANK=0    tells every host which hosts have settings that differ from its own, and the first such setting
    all            let gloo use the network interface of the connection to NODE_RANK=0
    a host that cannot start, or that receives a signal before the rendezvous ends, also connects, and tells the others
    at the end     the first host that fails writes the reason; the other hosts print it too

With NNODES=2:4, the ranks start after two hosts have joined, and another host may join later. Therefore only the host
whose settings differ from those of NODE_RANK=0 exits. With a fixed number of hosts, all hosts exit with the reason and
the exit status of this host. If the other hosts kept waiting, Slurm would end them with a signal. Slurm would then
report 143, because it reports the largest exit status.
"""

import hashlib
import importlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from torchtitan_lite import PACKAGE
from torchtitan_lite.components.signals import STOPPED
from torchtitan_lite.config.messages import UserError, tell
from torchtitan_lite.files import hash_file

MEET_WITHIN_S = 600.0
SAY_AFTER_S = 10.0
CONNECT_EVERY_S = 5.0
STORE_TIMEOUT_S = 20
# store key of the number of hosts in the last start, plus the number of hosts that wait to join
N_HOSTS = "hosts"
SIGNAL = "signal"  # store key of the first signal that a host has received
TELL_WITHIN_S = 2.0
# NODE_RANK=0 hosts the store, so it waits this long for the other hosts to read the store
END_WITHIN_S = 10.0


class Ending(NamedTuple):
    """Exit status and reason with which the ranks of a host ended."""

    status: int  # exit status of the run
    reason: str  # one line; empty if training is complete
    details: str = ""  # several lines about the rank that failed first: its traceback, or the end of its stderr


def read_number(name: str, default: int = 0) -> int:
    """Return an environment variable of the launcher as a number."""
    return int(os.environ.get(name) or default)


def read_hosts() -> tuple[int, int]:
    """Return the smallest and the largest number of hosts in NNODES. The two numbers differ only if NNODES is a
    range."""
    numbers = os.environ.get("NNODES") or "1"
    hosts = sorted(map(int, numbers.split(":")))
    return hosts[0], hosts[-1]


def join_hosts(config: dict[str, object], timeout_s: float, signals: Any) -> Any:
    """Rendezvous with the launchers of the other hosts, and share signals with them from now on. Return the store of
    all hosts.

    Raises UserError if the run cannot start, and KeyboardInterrupt on a signal.
    """
    try:
        with signals.interrupting():
            store = open_store()
            # Not a daemon thread: a daemon thread that uses the store at exit would abort this process
            threading.Thread(target=signals.share, args=(store,), name="signals").start()
            meet_hosts(store, config)
            choose_interface(store)
    except RuntimeError:
        raise UserError(
            "NODE_RANK=0, which has the store of the hosts, has ended. Start all hosts again"
        ) from None
    if not is_first_host():
        threading.Thread(target=end_if_cut_off, args=(timeout_s,), daemon=True).start()
    return store


def open_store(within_s: float = MEET_WITHIN_S) -> Any:
    """Wait for the host with NODE_RANK=0. Return the host's TCPStore, which all hosts share. Raises UserError. Imports
    torch."""
    address, port = find_master()
    place = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    try:
        family, *_, endpoint = socket.getaddrinfo(address, port)[0]
        if is_first_host():
            socket.create_server(endpoint[:2], family=family).close()
        else:
            wait_until(connect, f"NODE_RANK=0 at {place}", within_s)
    except OSError as error:
        raise UserError(
            f"{name_host()} cannot use {place}: {error.strerror}. "
            "Set MASTER_ADDR to the host with NODE_RANK=0, and MASTER_PORT to a free port"
        ) from None
    store = importlib.import_module("torch.distributed").TCPStore(
        address,
        port,
        is_master=is_first_host(),
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
    store.add(N_HOSTS, 1)
    return store


def meet_hosts(store: Any, config: dict[str, object], refusal: str = "") -> None:
    """Wait for all hosts, and compare their settings.

    If NNODES is a range, wait for the smallest number of hosts. `config` has the value of each key. `refusal` is the
    reason if this host cannot start. Raises UserError on every host if a host cannot start, has settings that differ
    from those of NODE_RANK=0, or cannot be reached.
    """
    n_needed, n_hosts = read_hosts()
    facts = json.dumps(list_facts(config))
    digest = hashlib.sha256(facts.encode()).hexdigest()
    if is_first_host():
        store.set("facts", facts)
        store.set("hash", digest)
    elif not refusal and read_when_set(store, "hash", "NODE_RANK=0") != digest:
        refusal = describe_difference(json.loads(store.get("facts")), json.loads(facts))
    if n_needed == n_hosts:
        refusal = share_refusal(store, refusal)
    if refusal:
        store.add(N_HOSTS, -1)
        if n_needed == n_hosts:
            leave(store)
        raise UserError(refusal)
    if is_first_host():
        wait_until(lambda: store.add(N_HOSTS, 0) >= n_needed, f"{n_needed} hosts")


def choose_interface(store: Any) -> None:
    """Let gloo use the network interface of the connection to NODE_RANK=0. Raises UserError."""
    if is_first_host():
        address = read_when_set(store, "address", "a second host")
    else:
        address, first_address = wait_until(connect, "NODE_RANK=0")
        store.set("address", first_address)
    command = ["ip", "-oneline", "address", "show", "to", address]
    with suppress(FileNotFoundError):  # a container may lack the command `ip`
        found = subprocess.run(command, capture_output=True, text=True)
        if interface := re.match(r"\d+: (\S+)", found.stdout):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface[1])


def share_refusal(store: Any, own: str) -> str:
    """Return the reason of the first host that cannot start, or "" if all hosts can start."""
    if not is_first_host():
        store.set(f"refusal of {name_host()}", own)
        return read_when_set(store, "refusal", "NODE_RANK=0, which waits for all hosts")
    refused = {}
    others = [] if own else range(1, read_hosts()[1])
    for name in [f"NODE_RANK={other}" for other in others]:
        if refusal := read_when_set(store, f"refusal of {name}", name):
            refused[name] = refusal
    first = own or next(iter(refused.values()), "")
    if len(refused) > 1:
        first += f". {len(refused)} hosts differ: {', '.join(refused)}"
    store.set("refusal", first)
    return first


def leave(store: Any) -> None:
    """Wait until all hosts know how the run ends, but not longer than END_WITHIN_S."""
    # RuntimeError: NODE_RANK=0, which has the store, has ended
    with suppress(RuntimeError, UserError, KeyboardInterrupt):
        store.add("left", 1)
        n_hosts = max(read_hosts()[0], int(store.get(N_HOSTS)))
        wait_until(lambda: store.add("left", 0) >= n_hosts, "the other hosts", END_WITHIN_S)


def tell_refusal(error: UserError, signals: Any) -> None:
    """Tell the other hosts why this host cannot start. If NNODES is a range, do nothing, because the other hosts start
    without this host."""
    # ValueError: NODE_RANK=0 cannot be reached, or NNODES is not a number. TypeError: MASTER_PORT is not a port
    with suppress(ValueError, RuntimeError, TypeError, KeyboardInterrupt):
        n_needed, n_hosts = read_hosts()
        if n_needed == n_hosts > 1:
            importlib.import_module("torch.distributed")
            with signals.interrupting():
                store = open_store(END_WITHIN_S)
                meet_hosts(store, {}, f"{name_host()} cannot start:\n{error}")


def tell_signal(signals: Any) -> Ending:
    """Tell the other hosts about a signal that arrived before the end of the rendezvous. NODE_RANK=0 may not be
    listening yet."""
    if read_hosts()[1] > 1:
        # open_store fails if MASTER_ADDR is missing or unreachable, or if this host has already opened the store. If
        # the store is already open, a thread already sends signals to the other hosts.
        with suppress(RuntimeError, UserError):
            store = open_store(TELL_WITHIN_S)
            signals.share(store)
            if is_first_host():  # this host has the store
                time.sleep(TELL_WITHIN_S)
    return signals.ending


def list_facts(config: dict[str, object]) -> dict[str, object]:
    """Return the settings that must be equal on all hosts: launcher variables, the config, hashes of the package's
    files."""
    facts = {name: os.environ.get(name) for name in ("NNODES", "MAX_RESTARTS")} | config
    for path in sorted(PACKAGE.rglob("*.py")):
        facts[str(path.relative_to(PACKAGE))] = hash_file(path)
    return facts


def read_when_set(store: Any, key: str, what: str) -> str:
    """Wait until the store has a value, and return the value. `what` describes its writer. Raises UserError."""
    wait_until(partial(store.check, [key]), what)
    return store.get(key).decode()


def describe_difference(first: dict[str, object], own: dict[str, object]) -> str:
    """Describe the first setting that differs from the setting on NODE_RANK=0. Return "" if no setting differs."""
    for key in [*first, *own]:
        if first.get(key) != own.get(key):
            return f"{key} is {first.get(key)} on NODE_RANK=0, but {own.get(key)} on {name_host()}"
    return ""


def name_host() -> str:
    return f"NODE_RANK={read_number('NODE_RANK')}"


def is_first_host() -> bool:
    return read_number("NODE_RANK") == 0


def find_master() -> tuple[str, int]:
    """Return address and port of the host with NODE_RANK=0. Raises UserError."""
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise UserError(
            f"NNODES={os.environ.get('NNODES')} needs MASTER_ADDR, the name of the host with NODE_RANK=0"
        )
    return address, read_number("MASTER_PORT", 29500)


def connect() -> tuple[str, str] | None:
    """Return the addresses of this host and of NODE_RANK=0 on a connection, or None if there is no connection."""
    with suppress(OSError), socket.create_connection(find_master(), timeout=5) as connection:
        return connection.getsockname()[0], connection.getpeername()[0]
    return None


def end_if_cut_off(timeout_s: float) -> None:
    """End this launcher and its ranks if NODE_RANK=0 cannot be reached for `timeout_s`. Runs in a thread.

    Without this function, torchrun would wait forever, because its timeout needs an answer from the host with the store
    (torch 2.13).
    """
    reached_at_s = time.monotonic()
    while time.monotonic() - reached_at_s < timeout_s:
        time.sleep(CONNECT_EVERY_S)
        if connect():
            reached_at_s = time.monotonic()
    lost = f"{socket.gethostname()} has not reached NODE_RANK=0 for {timeout_s:g} s"
    tell(f"run_train.sh: {lost}, and ends")
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
            raise UserError(
                f"{host} has waited {within_s:g} s for {what}. Start all hosts within this time"
            )
        if waited_s > SAY_AFTER_S and not is_said:
            tell(f"{host} waits for {what}")
            is_said = True
        time.sleep(0.5)
    return result


def claim_cause(store: Any, own: Ending) -> Ending:
    """Return the `Ending` of the first host that wrote a reason, or `own` if no host has written a reason.

    The reason names the host that wrote it. Only that host shows the details.
    """
    claimed = ""
    if own.reason:  # different containers can have the same hostname
        host = f"{socket.gethostname()}, {name_host()}"
        claimed = json.dumps([own.status, f"{own.reason} (on {host})"])
    first = store.compare_set("cause", "", claimed).decode()
    if not first:
        return own
    return Ending(*json.loads(first), own.details if first == claimed else "")


def agree_on_cause(store: Any, own: Ending) -> Ending:
    """Return how the run ended on the host that failed first. Return `own` if no host failed, or if this host has
    finished training."""
    with suppress(RuntimeError):  # NODE_RANK=0 has ended, or this host has lost its connection
        if own.status in STOPPED:  # the signal may have reached a rank, but no launcher
            store.set(SIGNAL, str(own.status - 128))
        failed = own if own.status == 1 else Ending(own.status, "")
        first = claim_cause(store, failed)
        if first.status == 1 and own.status:
            own = first
    leave(store)
    return own
