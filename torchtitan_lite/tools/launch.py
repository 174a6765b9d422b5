"""Train a model: check the config, start the ranks of this host with torchrun, and wait. run_train.sh calls this.

    launcher  ->  fork server: imports train.py once  ->  rank 0, rank 1, ...     forks that share its memory

SIGINT and SIGTERM are forwarded to the ranks, which finish a step, save and exit (components/shutdown.py). Copies of
the signal within 5 s are ignored; a later signal kills the ranks. If a rank fails, torchrun ends the others, and the
last line says which rank failed, why, and how to resume from the newest checkpoint.

Environment: NGPU (ranks of this host), LOG_RANK (ranks whose output is shown, default 0), MAX_RESTARTS; for several
hosts NNODES, NODE_RANK (0 on the host that MASTER_ADDR names), MASTER_ADDR, MASTER_PORT (default 29500).
Exit status: 0 trained or already finished, 2 refused by check, 130 stopped by Ctrl-C, 143 by SIGTERM, 1 otherwise.
"""

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
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType

from torchtitan_lite import REPOSITORY
from torchtitan_lite.checkpoint.format import find_steps
from torchtitan_lite.components.shutdown import (
    COPIES_ARRIVE_WITHIN_S,
    SIGNALS,
    StopRequest,
    describe_newest,
)
from torchtitan_lite.config.machine import FROM_LAUNCHER
from torchtitan_lite.data.corpus_folder import list_named
from torchtitan_lite.dump_folder import HANG
from torchtitan_lite.preflight import Prepared
from torchtitan_lite.tools.check import check, choose_host, describe
from torchtitan_lite.tools.corpora.command import prepare_dataset
from torchtitan_lite.tools.corpora.text_files import PreparationError
from torchtitan_lite.tools.faults import hang

STOPPED = tuple(128 + number for number in SIGNALS)  # exit status of a rank that a signal stopped
STOP_FILE = "stopped"  # in the launch folder; after a signal, it has the exit status


def main(options: Namespace, work: Callable[[list[str], Path], int] | None = None) -> int:
    """Train. Return the exit status. `work`: what each rank calls instead of `run_rank`. Raises UserError."""
    args = options.config_args
    is_first = is_first_host()
    try:
        machine, n_ranks, n_hosts = choose_host()
        prepared = check(args, machine, n_ranks, n_hosts)
        if is_first:
            print(prepared.finished or describe(prepared, machine), file=sys.stderr, flush=True)
        if prepared.finished:
            return export_last_checkpoint(prepared) if is_first else 0
        cache_folder = Path(prepared.config.training.cache_folder)
        for name, dataset_path in sorted(list_named(prepared.config)):
            prepare_dataset(name, prepared.tokenizer, cache_folder, dataset_path)
    except PreparationError as error:
        remedy = "Options named here belong to `prepare`: prepare the corpus with it, then start this run"
        raise PreparationError(f"{error}. {remedy}") from None
    except OSError as error:
        print(f"This run cannot start:\n{error}", file=sys.stderr)
        return 1
    os.environ[FROM_LAUNCHER] = json.dumps(asdict(machine))
    if is_first:
        folder = prepared.dump_folder / HANG
        threading.Thread(target=hang.watch, args=(folder,), name="hangs", daemon=True).start()
    folder = Path(tempfile.mkdtemp(prefix="torchtitan_lite."))
    n_local = prepared.layout.world_size // n_hosts
    status, reason = run_ranks(work or run_rank, args, n_local, n_hosts, folder)
    if status == 1 and prepared.config.checkpoint.enable:
        checkpoints = prepared.dump_folder / prepared.config.checkpoint.folder
        for step in find_steps(checkpoints)[-1:]:
            newest = checkpoints / f"step-{step}"
            n_each = os.environ.get("NGPU")
            reason += f"; {describe_newest(newest, prepared.config, args, n_each)}"
    if status == 0 and is_first:
        status = export_last_checkpoint(prepared)
    for number in SIGNALS:  # another copy of the signal must not change the exit status
        signal.signal(number, signal.SIG_IGN)
    if status == 1 and list(folder.rglob("stderr.log")):
        print(f"The stderr of the other ranks is in {folder}.", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    if reason:
        print(f"run_train.sh: {reason}", file=sys.stderr)
    return status


def export_last_checkpoint(prepared: Prepared) -> int:
    """Convert the last checkpoint to a Hugging Face folder if last_save_in_hf is set. Return the exit status."""
    section = prepared.config.checkpoint
    step = max(prepared.config.training.steps, prepared.resumed_step)
    last = prepared.dump_folder / section.folder / f"step-{step}"
    out = f"{last}-hf"
    if not (section.enable and section.last_save_in_hf) or os.path.exists(out):
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there are no ranks to forward it to
    convert = [sys.executable, "-m", "torchtitan_lite", "convert", last, out]
    return subprocess.call([*convert, "--dtype", section.export_dtype])


def is_first_host() -> bool:
    return int(os.environ.get("NODE_RANK") or 0) == 0


def run_ranks(
    work: Callable, args: list[str], n_local: int, n_hosts: int, folder: Path
) -> tuple[int, str]:
    """Call `work(args, folder)` on each rank of this host. Return the exit status, and the reason if it is not 0."""
    received: list[int] = []
    received_at_s = 0.0  # time of the first signal

    def pass_on(number: int, frame: object) -> None:
        nonlocal received_at_s
        now_s = time.monotonic()
        if received and now_s - received_at_s <= COPIES_ARRIVE_WITHIN_S:
            return
        received_at_s = received_at_s or now_s
        received.append(number)
        # For ranks that start later, for example after a failure.
        (folder / STOP_FILE).write_text(str(128 + number))
        ranks = multiprocessing.active_children()
        if not ranks:
            raise KeyboardInterrupt  # the launcher is still waiting for other hosts
        for rank in ranks:
            with suppress(ProcessLookupError):  # the rank has just exited
                os.kill(rank.pid, number if len(received) == 1 else signal.SIGKILL)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if n_hosts == 1 and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        start_fork_server()
        # These imports load torch, which takes 1.5 s. Meanwhile the fork server imports train.py.
        torchrun = importlib.import_module("torch.distributed.run")
        errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
        config = make_launch_config(torchrun, n_local, n_hosts, folder)
        if config.max_restarts == 0:  # hide torchrun's long failure report
            logging.disable(logging.ERROR)
        try:
            statuses = torchrun.elastic_launch(config, work)(args, folder)
        except errors.ChildFailedError as error:
            rank, failure = error.get_first_failure()
            status = failure.exitcode
            if received and status < 0:  # a rank that did not listen
                status = 128 + received[0]
            if status not in STOPPED:
                return 1, f"rank {rank} {describe_failure(failure)}"
            statuses = {0: status}
        except Exception as error:  # hosts cannot connect, or a port is in use
            return 1, f"torchrun failed: {type(error).__name__}: {error}"
    except KeyboardInterrupt:
        statuses = {0: 128 + received[0]}
    status = max(statuses.values())
    return status, f"stopped by {signal.Signals(status - 128).name}" if status else ""


def start_fork_server() -> None:
    """Start the fork server, which imports train.py once and forks the ranks.

    It blocks both signals, and new ranks inherit this, so a signal stays pending until the rank can handle it.
    """
    multiprocessing.set_forkserver_preload(["train", "torchtitan_lite.tools.fork_server"])
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    folder = os.getcwd()  # the user's folder may have another train.py
    os.chdir(REPOSITORY)
    forkserver.ensure_running()
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def make_launch_config(torchrun: ModuleType, n_local: int, n_hosts: int, folder: Path) -> object:
    """Return torchrun's settings for this host, from the environment variables."""
    shown = {int(rank) for rank in os.environ.get("LOG_RANK", "0").split(",")}
    hidden = set(range(n_local)) - shown
    address = "127.0.0.1:0"  # port 0: any free port
    local_address = "127.0.0.1"
    if n_hosts > 1:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '29500')}"
        local_address = os.environ.get("PET_LOCAL_ADDR")
        # torchrun makes a new store after each restart
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return torchrun.LaunchConfig(
        min_nodes=n_hosts,
        max_nodes=n_hosts,
        nproc_per_node=n_local,
        logs_specs=torchrun.DefaultLogsSpecs(
            str(folder), redirects=dict.fromkeys(hidden, torchrun.Std.ERR), local_ranks_filter=shown
        ),
        run_id="torchtitan_lite",
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint=address,
        rdzv_configs={"is_host": is_first_host()},
        local_addr=local_address,
        max_restarts=int(os.environ.get("MAX_RESTARTS", 0)),
        start_method="forkserver",
        signals_to_handle="SIGHUP,SIGQUIT",  # we forward SIGINT and SIGTERM ourselves
    )


def run_rank(args: list[str], folder: Path) -> int:
    """Train as one rank. Return 0, 130 or 143. On failure, end the process with another status."""
    stop = StopRequest(os.environ["RANK"])
    stop.listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if (folder / STOP_FILE).exists():
        sys.exit(int((folder / STOP_FILE).read_text()))
    train = importlib.import_module("train")  # already imported by the fork server
    status = 1
    with suppress(Exception):  # already printed, and recorded for describe_failure
        status = train.run_rank(args, stop)
    # torchrun's SIGTERM must end a failed rank. But if a late signal killed any other rank, the launcher would hang.
    is_failed = status not in (0, *STOPPED)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if is_failed else signal.SIG_IGN)
    if is_failed:
        # torchrun reports the first rank to exit: let the rank that caused the failure exit first.
        time.sleep(1)
        sys.exit(status)
    return status


def describe_failure(failure: object) -> str:
    """Describe how a rank failed. `failure` is torchrun's ProcessFailure."""
    if failure.exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL, as Linux does when memory runs out"
    if failure.exitcode < 0:
        return f"was killed by {failure.signal_name()}"
    if Path(failure.error_file).exists():  # an exception
        message = failure.error_file_data["message"]
        if isinstance(message, dict):
            message = message["message"]
        return f"failed: {message.splitlines()[0]}"
    return f"exited with status {failure.exitcode}"
