"""Train a model: check the config, then start the ranks of this host with torchrun and wait. run_train.sh calls it.

    launcher  ->  fork server: imports train.py once  ->  rank 0, rank 1, ...     forks, which share its memory

SIGINT and SIGTERM are passed on to the ranks, which finish a step, save and end (components/shutdown.py). Copies of the
signal within 5 s change nothing; a later signal kills the ranks. If a rank fails, torchrun ends the others, and the
last line says which one failed, why, and how to continue from the newest checkpoint.

Environment: NGPU (ranks of this host), LOG_RANK (ranks whose output is shown, default 0), MAX_RESTARTS; for several
hosts NNODES, NODE_RANK (0 on the host that MASTER_ADDR names), MASTER_ADDR, MASTER_PORT (default 29500).
Exit status: 0 trained or already finished, 2 refused by check, 130 stopped by Ctrl-C, 143 by SIGTERM, 1 anything else.
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
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType

from torchtitan_lite import REPOSITORY
from torchtitan_lite.checkpoint.manifest import find_steps
from torchtitan_lite.components.shutdown import COPIES_ARRIVE_WITHIN_S, SIGNALS, StopRequest, describe_newest
from torchtitan_lite.config.machine import FROM_LAUNCHER
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.preflight import Prepared
from torchtitan_lite.tools.check import check, choose_host, describe
from torchtitan_lite.tools.corpora.named import prepare_datasets

STOPPED = tuple(128 + number for number in SIGNALS)  # exit status of a rank that stopped for a signal
STOP_FILE = "stopped"  # in the folder of the launch: the exit status, once a signal has arrived


def main(options: Namespace) -> int:
    args = options.config_args
    try:
        machine, n_ranks, n_hosts = choose_host()
        prepared = check(args, machine, n_ranks, n_hosts)
        if is_first_host():
            print(prepared.finished or describe(prepared, machine), file=sys.stderr, flush=True)
        if prepared.finished:
            return export_last_checkpoint(prepared) if is_first_host() else 0
        prepare_datasets(prepared.config, prepared.tokenizer)
    except (UserError, ImportError, OSError) as error:
        print(f"This run cannot start:\n{error}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    os.environ[FROM_LAUNCHER] = json.dumps(asdict(machine))
    folder = Path(tempfile.mkdtemp(prefix="torchtitan_lite."))
    status, reason = run_ranks(args, prepared.layout.world_size // n_hosts, n_hosts, folder)
    checkpoints = prepared.dump_folder / prepared.config.checkpoint.folder
    if status == 1 and prepared.config.checkpoint.enable and (steps := find_steps(checkpoints)):
        newest = checkpoints / f"step-{steps[-1]}"
        reason += f"; {describe_newest(newest, prepared.config, args, os.environ.get('NGPU'))}"
    if status == 0 and is_first_host():
        status = export_last_checkpoint(prepared)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a copy must not change the exit status
    if status == 1 and any(path.stat().st_size for path in folder.rglob("stderr.log")):
        print(f"The stderr of the other ranks is in {folder}.", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    if reason:
        print(f"run_train.sh: {reason}", file=sys.stderr)
    return status


def export_last_checkpoint(prepared: Prepared) -> int:
    """Convert the last checkpoint to a Hugging Face folder, if the config asks for that. Return the exit status."""
    section = prepared.config.checkpoint
    step = max(prepared.config.training.steps, prepared.resumed_step)
    last = prepared.dump_folder / section.folder / f"step-{step}"
    out = Path(f"{last}-hf")
    if not (section.enable and section.last_save_in_hf) or out.exists():
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there are no ranks to pass it on to
    options = ["--dtype", section.export_dtype]
    return subprocess.call([sys.executable, "-m", "torchtitan_lite", "convert", str(last), str(out), *options])


def is_first_host() -> bool:
    return int(os.environ.get("NODE_RANK") or 0) == 0


def run_ranks(args: list[str], n_local: int, n_hosts: int, folder: Path) -> tuple[int, str]:
    """Run the ranks of this host to their end. Return the exit status, and the reason if it is not 0."""
    received: list[signal.Signals] = []
    received_at_s = 0.0  # the first one

    def pass_on(number: int, frame: object) -> None:
        nonlocal received_at_s
        now_s = time.monotonic()
        if received and now_s - received_at_s <= COPIES_ARRIVE_WITHIN_S:
            return
        received_at_s = received_at_s or now_s
        received.append(signal.Signals(number))
        (folder / STOP_FILE).write_text(str(128 + number))  # for ranks that start later, after a failure for instance
        ranks = multiprocessing.active_children()
        if not ranks:
            raise KeyboardInterrupt  # the launcher waits for other hosts
        for rank in ranks:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(rank.pid, number if len(received) == 1 else signal.SIGKILL)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if n_hosts == 1 and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        start_fork_server()
        # These load torch, which takes 1.5 s: now, while the fork server imports train.py.
        torchrun = importlib.import_module("torch.distributed.run")
        errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
        config = make_launch_config(torchrun, n_local, n_hosts, folder)
        if config.max_restarts == 0:
            logging.disable(logging.ERROR)  # torchrun's own account of a failure: the last line is shorter
        try:
            statuses = torchrun.elastic_launch(config, run_rank)(args, folder)
        except errors.ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode not in STOPPED and not (received and failure.exitcode < 0):
                return 1, f"rank {rank} {describe_failure(failure)}"
            statuses = {0: failure.exitcode if failure.exitcode in STOPPED else 128 + received[0]}
        except Exception as error:  # the hosts do not meet, or a port is taken
            return 1, f"torchrun failed: {type(error).__name__}: {error}"
    except KeyboardInterrupt:
        statuses = {0: 128 + received[0]}
    status = max(statuses.values())
    return status, f"stopped by {signal.Signals(status - 128).name}" if status else ""


def start_fork_server() -> None:
    """Start the process that imports train.py, and that ranks are forks of.

    It blocks both signals for its whole life, and so do new ranks: a signal waits until a rank can handle it.
    """
    multiprocessing.set_forkserver_preload(["train"])
    resource_tracker.ensure_running()  # unblocks signals when it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    folder = os.getcwd()
    os.chdir(REPOSITORY)  # where the server looks for train.py; the user's folder may have another one
    forkserver.ensure_running()
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def make_launch_config(torchrun: ModuleType, n_local: int, n_hosts: int, folder: Path) -> object:
    """Return torchrun's settings for this host, as the environment says."""
    shown = {int(rank) for rank in os.environ.get("LOG_RANK", "0").split(",")}
    hidden = dict.fromkeys(set(range(n_local)) - shown, torchrun.Std.ERR)  # their stderr goes to files
    address, local_address = "127.0.0.1:0", "127.0.0.1"  # port 0: any free one
    if n_hosts > 1:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '29500')}"
        local_address = os.environ.get("PET_LOCAL_ADDR")
    return torchrun.LaunchConfig(
        min_nodes=n_hosts,
        max_nodes=n_hosts,
        nproc_per_node=n_local,
        logs_specs=torchrun.DefaultLogsSpecs(str(folder), redirects=hidden, local_ranks_filter=shown),
        run_id="torchtitan_lite",
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint=address,
        rdzv_configs={"is_host": is_first_host()},
        local_addr=local_address,
        max_restarts=int(os.environ.get("MAX_RESTARTS", 0)),
        start_method="forkserver",
        signals_to_handle="SIGHUP,SIGQUIT",  # the other two are passed on
    )


def run_rank(args: list[str], folder: Path) -> int:
    """Train as one rank. Return 0, 130 or 143; anything else is a failure, and ends the process."""
    stop = StopRequest(os.environ["RANK"])
    stop.listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if (folder / STOP_FILE).exists():
        sys.exit(int((folder / STOP_FILE).read_text()))
    train = importlib.import_module("train")  # the fork server has imported it
    status = 1
    with suppress(Exception):  # printed, and recorded for describe_failure
        status = train.run_rank(args, stop)
    # A rank that fails ends by torchrun's SIGTERM. The launcher would wait forever for any other that a copy ends now.
    is_failed = status not in (0, *STOPPED)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if is_failed else signal.SIG_IGN)
    if is_failed:
        time.sleep(1)  # torchrun names the rank that ends first: not this one, if it fails because of another
        sys.exit(status)
    return status


def describe_failure(failure: object) -> str:
    """Return how a rank failed. `failure` is torchrun's ProcessFailure."""
    if failure.exitcode < 0:
        by_kernel = ", as Linux does when the memory is used up" if failure.exitcode == -signal.SIGKILL else ""
        return f"was killed by {failure.signal_name()}{by_kernel}"
    if Path(failure.error_file).exists():  # an exception
        message = failure.error_file_data["message"]
        return f"failed: {(message['message'] if isinstance(message, dict) else message).splitlines()[0]}"
    return f"ended with exit status {failure.exitcode}"
