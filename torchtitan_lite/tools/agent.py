"""Start the ranks of this host by torchrun's agent, restart them after a failure, and explain how they ended.

    Agent       torchrun's agent: joins the rendezvous of all hosts, forks the ranks, restarts all ranks if one fails
    start N     FOLDER/*/attempt_N/LOCAL_RANK/    error.json  status, reason and traceback with which the rank ended
                                                  stderr.log  stderr of the rank, if LOG_RANK hides it

This module adds features that torchrun lacks. It finds the first failure across all hosts, names the failed rank, and
shows only the traceback of this rank. The agent forwards only the first of several copies of a signal, and exits with
the status of that signal.

The launcher of a host passes N, the number of the start, to all its ranks. torchrun's own count does not include
restarts that other hosts cause by failing or joining.

If NNODES is a range, torchrun restarts the ranks of all hosts when a host joins. Before the restart, torchrun ends the
ranks by SIGTERM. When the first agent notices the new host, the ranks of all hosts stop after the same step. A rank
that stops without having received SIGTERM waits until its own agent notices the new host too. If such a rank returned
at once, the run would end on the host of this rank.
"""

import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from torchtitan_lite.components.signals import (
    SIGNALS,
    STOPPED,
    StopFlag,
    describe_signal,
    handle_signals,
    write_ending,
)
from torchtitan_lite.config.messages import UserError, join_lines, tell
from torchtitan_lite.preflight import RunSpec
from torchtitan_lite.tools.faults import hang
from torchtitan_lite.tools.hosts import (
    N_HOSTS,
    STORE_TIMEOUT_S,
    Ending,
    claim_cause,
    find_master,
    is_first_host,
    read_hosts,
    read_number,
)
from torchtitan_lite.tools.local_ranks import (
    ASK_EVERY_S,
    Signals,
    find_last_start,
)

PCI = Path("/sys/bus/pci/devices")
# number of lines to show from the end of a killed rank's hidden stderr; they contain the stacks of its threads
N_LINES = 60
JOIN_WITHIN_S = 10.0  # much longer than 0.1 s, the interval at which an agent checks for new hosts


class Starts(DefaultLogsSpecs):
    """Assigns a number and a folder to each start of the ranks."""

    n_starts = 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environment in envs.values():
            # the fork server was started before GLOO_SOCKET_IFNAME was known
            environment.update(os.environ | environment)
            environment["TORCHELASTIC_RESTART_COUNT"] = str(self.n_starts)
        self.n_starts += 1
        return super().reify(envs)


class Agent(LocalElasticAgent):
    """torchrun's agent. Before a restart, the agent prints the root cause of the failure. After a signal, the agent
    starts no ranks."""

    def __init__(
        self, spec: WorkerSpec, starts: Starts, folder: Path, signals: Signals, store: Any
    ):
        """`store` is the store of all hosts, or None with a single host."""
        super().__init__(spec, starts, start_method="forkserver")
        self.folder = folder  # contains the files of all starts
        self.signals = signals
        self.store = store
        self.ending: Ending | None = None  # how the last start ended

    def _rendezvous(self, worker_group: Any) -> None:
        with self.signals.interrupting():
            super()._rendezvous(worker_group)
        if self.store:
            self.store.set(N_HOSTS, str(worker_group.group_world_size))

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        self.signals.started_at_s = time.time()
        self.signals.react()  # handle a signal that arrived before the fork
        return pids

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result = super()._monitor_workers(worker_group)
        for rank, failure in result.failures.items():
            self.ending = self.explain(rank, failure)
        return result

    def _restart_workers(self, worker_group: Any) -> None:
        cause = self.ending or Ending(0, "")  # another host failed or joins
        if self.store:
            # A host that joined later has counted fewer starts than the other hosts. Therefore use torchrun's store,
            # which is new for each start.
            cause = claim_cause(worker_group.store, cause)
        if cause.status in STOPPED:
            self.ending = cause
            raise KeyboardInterrupt
        self.ending = None
        tell(cause.details)
        n_left = f"{self._remaining_restarts} of {read_number('MAX_RESTARTS')} restarts are left"
        why = cause.reason or "another host joins or has failed"
        tell(f"run_train.sh: {why}\nAll ranks start again. {n_left}.")
        super()._restart_workers(worker_group)

    def explain(self, rank: int, failure: ProcessFailure) -> Ending:
        """Return the root cause of a failure on this host: an error or a signal. `rank` is the rank that torchrun
        reports.

        If several ranks end together, torchrun may report any of them, so the oldest error.json is used. A rank that
        was killed, or that returned an exit status, writes no error.json.
        """
        exitcode = failure.exitcode
        received = self.signals.received
        start = find_last_start(self.folder) or self.folder  # /tmp may have been cleaned
        own = start / str(failure.local_rank)
        endings = sorted(start.glob("*/error.json"), key=os.path.getmtime)
        if endings and (exitcode in STOPPED or own / "error.json" in endings):
            ending = json.loads(endings[0].read_text())
            return Ending(ending["status"], ending["message"], ending["details"])
        if received and (self.signals.has_killed or -exitcode in received or exitcode in STOPPED):
            return self.signals.ending
        if exitcode in STOPPED:
            return Ending(exitcode, describe_signal(exitcode))
        details = ""
        hidden = own / "stderr.log"
        # status 1 means that train.py has logged the reason
        if exitcode not in (1, -signal.SIGKILL) and hidden.exists():
            details = "\n".join(hidden.read_text(errors="replace").splitlines()[-N_LINES:])
        # gloo aborts a rank if the calls of ranks differ. Printing the stacks of threads during the abort may crash.
        if exitcode in (-signal.SIGABRT, -signal.SIGSEGV):
            _, text = hang.explain_newest(self.signals.hangs, "failed")
            details = f"{details}\n{text}".strip()
        how = f"exited with status {exitcode}"
        if exitcode < 0:  # as in multiprocessing, -n means that signal n ended the rank
            how = f"was killed by {signal.Signals(-exitcode).name}"
        if exitcode == -signal.SIGKILL:
            how += ", as Linux does when memory runs out, and so left no traceback"
        return Ending(1, f"rank {rank} {how}", details)


def run_agent(run: tuple, n_local: int, signals: Signals, store: Any) -> Ending:
    """Call `run_rank(*run)` on each rank of this host. `store` is the store of all hosts, or None with a single
    host."""
    logging.disable(logging.ERROR)  # silence torchrun's long reports
    # This variable cannot be empty. The launcher forwards SIGNALS itself.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    address = "127.0.0.1:0"  # port 0: any free port
    local_address = "127.0.0.1"
    if store:
        address = "{}:{}".format(*find_master())
        local_address = os.environ.get("PET_LOCAL_ADDR")
        # make torchrun create a new store after each restart
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        number_host()
    n_needed, n_hosts = read_hosts()
    meeting = RendezvousParameters(
        "c10d",
        address,
        run_id="torchtitan_lite",
        min_nodes=n_needed,
        max_nodes=n_hosts,
        local_addr=local_address,
        is_host=is_first_host(),
        read_timeout=STORE_TIMEOUT_S,
        last_call_timeout=10,  # seconds to wait for further hosts once the smallest number in NNODES has joined
    )
    folder = run[2]
    shown = {int(rank) for rank in (os.environ.get("LOG_RANK") or "0").split(",")}
    hidden = dict.fromkeys(set(range(n_local)) - shown, Std.ERR)
    starts = Starts(str(folder), redirects=hidden, local_ranks_filter=shown)
    agent = None
    try:
        workers = WorkerSpec(
            "rank",
            n_local,
            get_rendezvous_handler(meeting),
            entrypoint=run_rank,
            args=run,
            max_restarts=read_number("MAX_RESTARTS"),
            monitor_interval=0.1,
            local_addr=local_address,
        )
        agent = Agent(workers, starts, folder, signals, store)
        try:
            result = agent.run()
        finally:
            workers.rdzv_handler.shutdown()
    except KeyboardInterrupt:
        return agent.ending or signals.ending
    except Exception as error:  # hosts cannot connect, or a port is in use
        # a signal may have stopped another host, which then ended the rendezvous
        time.sleep(2 * ASK_EVERY_S)
        if signals.received:
            return signals.ending
        return Ending(1, f"torchrun failed: {type(error).__name__}: {error}")
    if agent.ending:
        return agent.ending
    status = max(result.return_values.values())
    return Ending(status, describe_signal(status) if status else "")


def number_host() -> None:
    """Make torchrun distinguish containers with equal hostnames whose launchers have equal process ids.

    torchrun identifies a host by hostname, process id, and a counter of rendezvous in this process (torch 2.13). This
    function sets the counter to NODE_RANK.
    """
    DynamicRendezvousHandler._node_desc_generator._local_id = read_number("NODE_RANK")


# ---------------------------------------------------------------- in a rank


def run_rank(work: Callable, args: list[str], folder: Path, spec: RunSpec) -> int:
    """Call `work(args, folder, spec)` in this rank, and return its status. If the rank fails, write the reason to a
    file and end the process."""
    status = 1
    try:
        status = work(args, folder, spec)
        if status in (0, *STOPPED):
            return status
    except UserError as error:
        write_ending(1, f"the run stopped: {error}")
    except Exception as error:
        file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
        what = join_lines(traceback.format_exception_only(error)[0])
        reason = f"rank {os.environ['RANK']} failed: {what} ({file}:{line})"
        write_ending(1, reason, traceback.format_exc().rstrip())
    # SIGTERM from torchrun must end a failed rank
    handle_signals(signal.SIG_DFL)
    # torchrun reports the rank that exits first. Wait here, because a killed rank cannot report itself.
    time.sleep(1)
    sys.exit(status)


def train_rank(args: list[str], folder: Path, spec: RunSpec) -> int:
    """Train as one rank. Return the status of train.py."""
    if torch.cuda.is_available():
        bind_to_gpu(int(os.environ["LOCAL_RANK"]))
    stop = StopFlag(os.environ["RANK"])
    stop.listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # the fork server has imported train already
    status = importlib.import_module("train").main(args, stop, spec)
    if status in STOPPED and ":" in os.environ.get("NNODES", ""):
        handle_signals(signal.SIG_DFL)
        if not stop.received:
            time.sleep(JOIN_WITHIN_S)  # if a host joins, the agent sends SIGTERM
        sys.exit(status)  # torchrun does not restart ranks that returned
    if status in (0, *STOPPED):
        # The launcher would hang if a late signal killed a finished rank.
        handle_signals(signal.SIG_IGN)
    return status


def bind_to_gpu(index: int) -> None:
    """Bind this process to the CPUs of its GPU's NUMA node. If the host has a single NUMA node, the binding has no
    effect, because this node has all CPUs.

    torchrun also has an option for this binding, but that option needs the program numactl. This function does nothing
    if the host does not report the CPUs of the node, or does not allow this process to use them. Never run on a GPU.
    """
    gpu = torch.cuda.get_device_properties(index)
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        mask = (PCI / address / "local_cpus").read_text()
        near = int(mask.replace(",", ""), 16)  # one bit per CPU
        os.sched_setaffinity(0, [cpu for cpu in os.sched_getaffinity(0) if near >> cpu & 1])
    except (OSError, ValueError, AttributeError):
        return
