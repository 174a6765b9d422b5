"""Train a model: check the config, start the ranks of this host with torchrun, and wait. run_train.sh calls this.

    launcher  ->  fork server: imports train.py once  ->  rank 0, rank 1, ...     forks that share its memory

SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded to the ranks, which finish a step, save and exit
(components/shutdown.py). Copies of the signal within 5 s are ignored; a later signal kills the ranks, and so does the
first one if a step hangs.

If a rank fails, torchrun ends the others. Each failed rank writes why (run_rank). The launcher prints the traceback of
the first one. The last line says which rank it was, why, in which line of code, and how to resume from the newest
checkpoint. On several hosts, the other launchers print the last line too.

If NNODES is a range such as 2:4, torchrun restarts the ranks on the hosts that are left after a loss, and on all hosts
when one joins. A host joins after the step that is running is saved: torchrun sends SIGTERM to the ranks.

Environment: NGPU (ranks of this host), LOG_RANK (ranks whose output is shown, default 0), MAX_RESTARTS; for several
hosts NNODES, NODE_RANK (0 on the host that MASTER_ADDR names), MASTER_ADDR, MASTER_PORT (default 29500).
Exit status: 0 trained or already finished, 2 refused by check, 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP,
131 by SIGQUIT, 1 otherwise.
"""

import faulthandler
import importlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torchtitan_lite import REPOSITORY
from torchtitan_lite.checkpoint.format import find_steps
from torchtitan_lite.components.shutdown import (
    COPIES_ARRIVE_WITHIN_S,
    SIGNALS,
    STOPPED_BY,
    StopRequest,
    describe_newest,
    handle_signals,
    write_ending,
)
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.reader import flatten_table, read_config
from torchtitan_lite.data.corpus_folder import CorpusError, check_prepared, list_named
from torchtitan_lite.dump_folder import HANG
from torchtitan_lite.run_spec import RunSpec
from torchtitan_lite.tools.check import check, choose_host, describe_spec
from torchtitan_lite.tools.corpora.command import prepare_dataset
from torchtitan_lite.tools.corpora.text_files import PreparationError
from torchtitan_lite.tools.faults import hang
from torchtitan_lite.tools.hosts import (
    STORE_TIMEOUT_S,
    agree_on_cause,
    claim_cause,
    end_if_cut_off,
    find_master,
    is_first_host,
    meet_hosts,
    read_hosts,
    read_number,
)
from torchtitan_lite.tools.progress import watch_saves

STOPPED = tuple(128 + number for number in SIGNALS)  # exit statuses of a rank that a signal stopped
STOP_FILE = "stopped"  # in the launch folder; after a signal, it has the exit status
ERROR = "error.txt"  # in the folder of a rank (see find_last_start): the traceback of an exception
RANK = "rank"  # in the same folder: the global rank
N_LINES = 60  # of the hidden stderr of a rank that was killed: the stacks of its threads
RESTART_WITHIN_S = 10.0  # torchrun looks for new hosts once a second


def main(options: Namespace, work: Callable[[list[str], Path, RunSpec], int] | None = None) -> int:
    """Train. Return the exit status. `work`: what each rank calls instead of `train_rank`. Raises UserError."""
    args = options.config_args
    try:
        machine, n_ranks, n_hosts = choose_host()
        if n_hosts > 1:
            find_master()  # raises UserError if MASTER_ADDR is missing
        is_first = is_first_host()
        spec = check(args, machine, n_ranks, n_hosts)
        if is_first:
            print(
                spec.finished or describe_spec(spec, n_hosts),
                file=sys.stderr,
                flush=True,
            )
        if spec.finished:
            return export_last_checkpoint(spec) if is_first else 0
        try:
            check_prepared(spec.config, spec.tokenizer)
        except CorpusError:
            cache_folder = Path(spec.config.training.cache_folder)
            for name, dataset_path in sorted(list_named(spec.config)):
                prepare_dataset(name, spec.tokenizer, cache_folder, dataset_path)
            spec = check(args, machine, n_ranks, n_hosts)  # reads the documents too, now
    except PreparationError as error:
        remedy = "Options named here belong to `prepare`: prepare the corpus with it, then start this run"
        raise PreparationError(f"{error}. {remedy}") from None
    except OSError as error:
        print(f"This run cannot start:\n{error}", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="torchtitan_lite."))
    # a run that writes nothing must not read the hang reports of an earlier one
    signals = Signals(folder, (spec.written_folder or folder) / HANG)
    status, reason = run_ranks(work or train_rank, args, spec, n_hosts, signals)
    if status == 1 and spec.config.checkpoint.enable:
        checkpoints = spec.dump_folder / spec.config.checkpoint.folder
        for step in find_steps(checkpoints)[-1:]:
            newest = checkpoints / f"step-{step}"
            n_each = os.environ.get("NGPU")
            is_own = step > spec.resumed_step
            reason += f"; {describe_newest(newest, spec.config, args, n_each, is_own=is_own)}"
    if status == 0 and is_first:
        status = export_last_checkpoint(spec)
    handle_signals(signal.SIG_IGN)  # another copy of the signal must not change the exit status
    last = find_last_start(folder)
    if status == 1 and last and len(list(last.iterdir())) > 1:
        said = f"What the other ranks wrote is in {last}: RANK/{ERROR}, RANK/stderr.log."
        print(said, file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # /tmp may have been cleaned during a long run
    if reason:
        print(f"run_train.sh: {reason}", file=sys.stderr)
    return status


def export_last_checkpoint(spec: RunSpec) -> int:
    """Convert the last checkpoint to a Hugging Face folder if last_save_in_hf is set. Return the exit status."""
    section = spec.config.checkpoint
    step = max(spec.config.training.steps, spec.resumed_step)
    last = spec.dump_folder / section.folder / f"step-{step}"
    out = f"{last}-hf"
    if not (section.enable and section.last_save_in_hf) or os.path.exists(out):
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there are no ranks to forward it to
    convert = [sys.executable, "-m", "torchtitan_lite", "convert", last, out]
    return subprocess.call([*convert, "--dtype", section.export_dtype])


class Signals:
    """Forwards the signals that this launcher receives to the ranks of this host.

    `folder` has torchrun's files of this start; ranks that hang write into `hangs`.
    """

    def __init__(self, folder: Path, hangs: Path):
        self.folder = folder
        self.hangs = hangs
        self.received: list[int] = []
        self.received_at_s = 0.0  # time of the first signal
        self.has_killed = False  # ranks ended because of this launcher
        self.may_interrupt = True  # False: ranks may be half-forked

    def pass_on(self, number: int, frame: object) -> None:
        """Handle a signal. Raises KeyboardInterrupt if there are no ranks yet."""
        now_s = time.monotonic()
        if self.received and now_s - self.received_at_s <= COPIES_ARRIVE_WITHIN_S:
            return
        self.received_at_s = self.received_at_s or now_s
        self.received.append(number)
        # For ranks that start later, for example after a failure.
        with suppress(FileNotFoundError):  # /tmp was cleaned
            (self.folder / STOP_FILE).write_text(str(128 + number))
        if self.may_interrupt and not multiprocessing.active_children():
            raise KeyboardInterrupt
        is_hanging = any(self.hangs.glob(f"restart-{self.count_starts() - 1}/rank-*.json"))
        if is_hanging or len(self.received) > 1:
            number = signal.SIGKILL
        self.end_ranks(number)

    def count_starts(self) -> int:
        """Return how often the ranks of this host have been started."""
        return max(map(os.path.getsize, self.folder.glob("starts-*")), default=1)

    def end_ranks(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.has_killed = True
        for rank in multiprocessing.active_children():
            with suppress(ProcessLookupError):  # the rank has just exited
                os.kill(rank.pid, number)

    def report_hang(self, text: str) -> None:
        if is_first_host():
            print(text, file=sys.stderr, flush=True)
        if self.received:
            self.end_ranks(signal.SIGKILL)


def run_ranks(
    work: Callable, args: list[str], spec: RunSpec, n_hosts: int, signals: Signals
) -> tuple[int, str]:
    """Call `work(args, folder, spec)` on each rank of this host. Return the exit status, and the reason if not 0."""
    handle_signals(signals.pass_on)
    hang_options = (signals.hangs, signals.report_hang)
    threading.Thread(target=hang.watch, args=hang_options, name="hangs", daemon=True).start()
    if is_first_host() and sys.stderr.isatty():
        saved = spec.dump_folder / spec.config.checkpoint.folder
        threading.Thread(target=watch_saves, args=(saved,), name="saves", daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if n_hosts == 1 and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    n_local = spec.layout.world_size // n_hosts
    store = None
    try:
        if n_hosts > 1:
            # a host that joins later has a checkpoint to resume, so its resolved config may differ
            config = dict(flatten_table(asdict(read_config(args).config)))
            config["NGPU"] = n_local
            store = meet_hosts(importlib.import_module("torch.distributed"), config)
            timeout_s = spec.config.comm.train_timeout_seconds
            if not is_first_host():
                threading.Thread(target=end_if_cut_off, args=(timeout_s,), daemon=True).start()
        start_fork_server()
        run = (work, args, signals.folder, spec)
        ending = run_torchrun(run, n_local, n_hosts, signals, store)
    except UserError as error:
        return 2, str(error)
    except KeyboardInterrupt:
        status = 128 + signals.received[0]
        ending = Ending(status, name_signal(signals.received[0]))
    agreed = (ending.status, ending.reason)
    if store:
        agreed = agree_on_cause(store, *agreed)
    if agreed[1].startswith(ending.reason):  # otherwise another host shows its traceback
        show(ending.details)
    return agreed


class Ending(NamedTuple):
    """How the ranks of this host have ended."""

    status: int  # exit status of the run
    reason: str  # one line; empty if the run was trained
    details: str = ""  # several lines about the rank that failed first: its traceback, or the end of its stderr


def show(details: str) -> None:
    if details:
        print(details, file=sys.stderr, flush=True)


def run_torchrun(run: tuple, n_local: int, n_hosts: int, signals: Signals, store: Any) -> Ending:
    """Start the ranks, which call `run_rank(*run)`, and wait. `store` is shared by several hosts; None on one host."""
    # These imports load torch, which takes 1.5 s. Meanwhile the fork server imports train.py.
    torchrun = importlib.import_module("torch.distributed.run")
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    config = make_launch_config(torchrun, n_local, n_hosts, signals.folder)
    if config.max_restarts == 0:  # hide torchrun's long failure report
        logging.disable(logging.ERROR)
    else:
        show_restarts(signals, store)
    signals.may_interrupt = n_hosts > 1  # it may wait for other hosts
    try:
        statuses = torchrun.elastic_launch(config, run_rank)(*run)
    except errors.ChildFailedError as error:
        _, failure = error.get_first_failure()
        return explain_failure(failure.local_rank, failure.exitcode, signals)
    except Exception as error:  # hosts cannot connect, or a port is in use
        return Ending(1, f"torchrun failed: {type(error).__name__}: {error}")
    status = max(statuses.values())
    return Ending(status, name_signal(status - 128) if status else "")


def show_restarts(signals: Signals, store: Any) -> None:
    """Make torchrun report the first failure when it restarts the ranks. `store` is shared by hosts."""
    failures: list[Ending] = []

    def note(record: logging.LogRecord) -> bool:
        """Replace torchrun's report of a rank that has ended."""
        if record.msg.startswith("failed (exitcode"):
            exitcode, local_rank = record.args[:2]
            failures.append(explain_failure(local_rank, exitcode, signals))
        return False

    def show_failure(record: logging.LogRecord) -> bool:
        """Show the line about a restart, below the failure that causes it."""
        if "will restart" not in record.msg:
            return False
        own = failures.pop() if failures else Ending(0, "")  # another host failed, or joins
        reason = own.reason
        if store:
            reason = claim_cause(store, f"cause of restart {signals.count_starts()}", reason)
        if reason.startswith(own.reason):
            show(own.details)
        if reason:
            show(f"run_train.sh: {reason}")
        return True

    elastic = "torch.distributed.elastic"
    logging.getLogger(f"{elastic}.multiprocessing.api").addFilter(note)
    agent = logging.getLogger(f"{elastic}.agent.server.api")
    agent.setLevel(logging.INFO)
    agent.addFilter(show_failure)


def name_signal(number: int) -> str:
    return f"{STOPPED_BY}{signal.Signals(number).name}"


def explain_failure(local_rank: int, exitcode: int, signals: Signals) -> Ending:
    """Return the first cause on this host: an error, or a signal. torchrun reports this rank and its exit status.

    If ranks end together, torchrun reports any of them, so the first ending that a rank wrote decides. A rank that was
    killed, or returned a status, writes none.
    """
    received = signals.received
    is_own = signals.has_killed or -exitcode in received or exitcode in STOPPED
    start = find_last_start(signals.folder) or signals.folder  # /tmp may have been cleaned
    own = start / str(local_rank)
    endings = sorted(start.glob("*/error.json"), key=os.path.getmtime)
    if endings and (exitcode in STOPPED or own / "error.json" in endings):
        ending = json.loads(endings[0].read_text())
        return Ending(ending["status"], ending["message"], read_if_any(endings[0].with_name(ERROR)))
    if received and is_own:
        return Ending(128 + received[0], name_signal(received[0]))
    details = ""
    if exitcode not in (1, -signal.SIGKILL):  # 1: train.py has logged why
        details = "\n".join(read_if_any(own / "stderr.log").splitlines()[-N_LINES:])
    if exitcode == -signal.SIGABRT:  # gloo does so if calls differ
        _, text = hang.explain_newest(signals.hangs, "failed")
        details = f"{details}\n{text}".strip()
    rank = read_if_any(own / RANK) or local_rank
    return Ending(1, f"rank {rank} {describe_exit(exitcode)}", details)


def find_last_start(folder: Path) -> Path | None:
    """Return where torchrun has put one folder for each local rank, when it started the ranks for the last time.

    None: torchrun has started no rank.
    """
    return max(folder.glob("*/attempt_*"), key=os.path.getmtime, default=None)


def read_if_any(path: Path) -> str:
    return path.read_text(errors="replace").rstrip() if path.exists() else ""


def start_fork_server() -> None:
    """Start the fork server, which imports train.py once and forks the ranks.

    It blocks all signals, and new ranks inherit this, so a signal stays pending until the rank can handle it.
    """
    tools = "torchtitan_lite.tools"
    multiprocessing.set_forkserver_preload([f"{tools}.fork_server", f"{tools}.train_file"])
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()  # starting it later would unblock the signals, as it does here
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    folder = os.getcwd()
    os.chdir(REPOSITORY)  # train_file.py imports train.py from there
    forkserver.ensure_running()
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def make_launch_config(torchrun: ModuleType, n_local: int, n_hosts: int, folder: Path) -> object:
    """Return torchrun's settings for this host, from the environment variables."""
    shown = {int(rank) for rank in (os.environ.get("LOG_RANK") or "0").split(",")}
    hidden = set(range(n_local)) - shown
    address = "127.0.0.1:0"  # port 0: any free port
    local_address = "127.0.0.1"
    if n_hosts > 1:
        address = "{}:{}".format(*find_master())
        local_address = os.environ.get("PET_LOCAL_ADDR")
        # torchrun makes a new store after each restart
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        number_host()
    return torchrun.LaunchConfig(
        min_nodes=read_hosts()[0],
        max_nodes=n_hosts,
        nproc_per_node=n_local,
        logs_specs=torchrun.DefaultLogsSpecs(
            str(folder), redirects=dict.fromkeys(hidden, torchrun.Std.ERR), local_ranks_filter=shown
        ),
        run_id="torchtitan_lite",
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint=address,
        rdzv_configs={
            "is_host": is_first_host(),
            "read_timeout": STORE_TIMEOUT_S,
            "last_call_timeout": 10,  # for more hosts than the smallest number in NNODES
        },
        local_addr=local_address,
        max_restarts=read_number("MAX_RESTARTS"),
        start_method="forkserver",
        signals_to_handle="SIGUSR2",  # torchrun needs one; we forward SIGNALS ourselves
    )


def run_rank(work: Callable, args: list[str], folder: Path, spec: RunSpec) -> int:
    """Return the status of `work(args, folder, spec)`: one rank. If it fails, write why, and end the process."""
    faulthandler.enable()  # a crash prints the stacks of all threads
    own = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    rank = os.environ["RANK"]
    (own / RANK).write_text(rank)
    status = 1
    try:
        status = work(args, folder, spec)
        if status in (0, *STOPPED):
            return status
    except UserError as error:
        write_ending(1, f"the run stopped: {error}")
    except Exception as error:
        own.mkdir(parents=True, exist_ok=True)  # /tmp may have been cleaned
        (own / ERROR).write_text(traceback.format_exc())
        file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
        what = traceback.format_exception_only(error)[0].splitlines()[0]
        write_ending(1, f"rank {rank} failed: {what} ({file}:{line})")
    # torchrun's SIGTERM must end a failed rank
    handle_signals(signal.SIG_DFL)
    # torchrun reports the first rank to exit: let the rank that caused the failure exit first
    time.sleep(1)
    sys.exit(status)


def number_host() -> None:
    """Make torchrun see different hosts in two containers of one hostname, whose launchers have the same process id.

    torchrun names a host by hostname, process id, and a number that counts the rendezvous of a process (torch 2.13).
    """
    rendezvous = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
    handler = importlib.import_module(rendezvous).DynamicRendezvousHandler
    handler._node_desc_generator._local_id = read_number("NODE_RANK")


def train_rank(args: list[str], folder: Path, spec: RunSpec) -> int:
    """Train as one rank. Return the status of train.py."""
    stop = StopRequest(os.environ["RANK"])
    stop.listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if (folder / STOP_FILE).exists():
        sys.exit(int((folder / STOP_FILE).read_text()))
    # One byte a start. torchrun itself only counts restarts after a failure on this host, not for a host that joins
    with open(folder / f"starts-{os.environ['LOCAL_RANK']}", "a") as starts:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(starts.tell())
        starts.write(".")
    status = importlib.import_module("train").main(args, stop, spec)  # imported by the fork server
    if status not in (0, *STOPPED):
        return status
    # A host joins if this host was not told to stop: torchrun then restarts the ranks, and ends them first by SIGTERM.
    # The torchrun of one host notices the new host first, and so stops the ranks of all hosts. On the others, a rank
    # must not return before its own torchrun notices, because the run would end there.
    is_elastic = ":" in os.environ.get("NNODES", "")
    may_restart = is_elastic and status in STOPPED and not (folder / STOP_FILE).exists()
    # If a late signal killed a rank that is done, the launcher would hang.
    handle_signals(signal.SIG_DFL if may_restart else signal.SIG_IGN)
    if may_restart and stop.received is None:
        time.sleep(RESTART_WITHIN_S)
    elif may_restart:
        time.sleep(1)  # as in run_rank
        sys.exit(status)
    return status


def describe_exit(exitcode: int) -> str:
    """Describe how a rank ended that has written nothing. `exitcode`: as in multiprocessing."""
    if exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL, as Linux does when memory runs out, and so left no traceback"
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"exited with status {exitcode}"
