"""Train a model, for run_train.sh: check the config, start the ranks of this host with torchrun, and wait until the
ranks end.

    launcher  ->  fork server, which imports train.py once  ->  rank 0, rank 1, ...: forks that share its memory

SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 are forwarded to the ranks, which finish a step, save and exit
(components/signals.py). Further signals are ignored for 5 s; after that, a signal kills the ranks. If a step hangs,
the first signal kills the ranks. With several hosts, a signal to one launcher reaches all launchers through the store
that they share (hosts.py).

If a rank fails, torchrun ends the other ranks. Each failed rank writes the reason to a file (agent.py). The launcher
prints the traceback of the rank that failed first. The last line names the rank, the reason, the line of code, and the
command that resumes from the newest checkpoint. With several hosts, all launchers print this last line.

If NNODES is a range such as 2:4, torchrun restarts the ranks on the remaining hosts when a host is lost, and on all
hosts when a host joins. Before a host joins, torchrun sends SIGTERM to the ranks, which finish their step and save.

Environment: NGPU (ranks of this host), LOG_RANK (ranks whose output is shown, default 0), MAX_RESTARTS; for several
hosts NNODES, NODE_RANK (0 on the host that MASTER_ADDR names), MASTER_ADDR, MASTER_PORT (default 29500).
Exit status: 0 trained or already finished, 2 refused by check, 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP,
131 by SIGQUIT, 138 by SIGUSR1, 1 otherwise.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from torchtitan_lite import REPOSITORY
from torchtitan_lite.checkpoint.format import CheckpointError, find_steps
from torchtitan_lite.components.earlier_records import read_record
from torchtitan_lite.components.endings import describe_newest
from torchtitan_lite.components.signals import STOPPED, describe_signal, handle_signals
from torchtitan_lite.config.messages import UserError, tell
from torchtitan_lite.config.reader import flatten_table, read_config
from torchtitan_lite.data.corpus_folder import DATASETS, list_corpora
from torchtitan_lite.dump_folder import HANG, METRICS, lock_folder
from torchtitan_lite.preflight import RunSpec
from torchtitan_lite.tools.check import check, choose_host, describe_spec
from torchtitan_lite.tools.corpora.command import prepare_dataset
from torchtitan_lite.tools.corpora.text_files import PreparationError
from torchtitan_lite.tools.hosts import (
    Ending,
    agree_on_cause,
    find_master,
    is_first_host,
    join_hosts,
    read_hosts,
    tell_refusal,
    tell_signal,
)
from torchtitan_lite.tools.local_ranks import Signals, find_last_start
from torchtitan_lite.tools.processes import start_fork_server
from torchtitan_lite.tools.progress import watch_saves


def main(options: Namespace, work: Callable[[list[str], Path, RunSpec], int] | None = None) -> int:
    """Train. Return the exit status. Each rank calls `work`, by default `train_rank`. Raises UserError."""
    args = options.config_args
    signals = Signals()
    handle_signals(signals.pass_on)
    try:
        with signals.interrupting():
            spec = check_run(args)
            # assets/slurm/train.sbatch sets this variable
            is_first = is_first_host()
            saved_file = is_first and os.environ.get("SAVED_FILE")
            if saved_file:
                open(saved_file, "a").close()  # raises OSError if the file cannot be written
    except KeyboardInterrupt:
        ending = tell_signal(signals)
        tell(f"run_train.sh: {ending.reason}")
        return ending.status
    except UserError as error:
        tell_refusal(error, signals)
        handle_signals(signal.SIG_IGN)  # a signal from Slurm must not change the exit status
        raise
    except OSError as error:
        tell(f"This run cannot start:\n{error}")
        return 1
    if spec.finished:
        return export_last_checkpoint(spec) if is_first else 0
    checkpoints = spec.dump_folder / spec.config.checkpoint.folder
    saved_before = list_saved(checkpoints)
    if is_first and sys.stderr.isatty():
        threading.Thread(target=watch_saves, args=(checkpoints,), name="saves", daemon=True).start()
    folder = Path(tempfile.mkdtemp(prefix="torchtitan_lite."))
    # if this run writes no files, it must not read the hang reports of an earlier run
    signals.watch_hangs((spec.written_folder or folder) / HANG)
    status, reason, details = run_ranks(work, args, spec, folder, signals)
    tell(details)
    if status == 1 and spec.written_folder and is_first:
        record_cause(spec.written_folder, reason)
    for newest, saved_at_ns in list_saved(checkpoints)[-1:]:
        is_own = (newest, saved_at_ns) not in saved_before
        if status == 1 and spec.config.checkpoint.enable:
            reason += f"; {describe_newest(newest, spec.config, args, is_own=is_own)}"
        if is_own and saved_file:
            Path(saved_file).write_text(f"{newest}\n")
    if status == 0 and is_first:
        status = export_last_checkpoint(spec)
        if status in STOPPED:
            reason = describe_signal(status)
    handle_signals(signal.SIG_IGN)  # another copy of the signal must not change the exit status
    last = find_last_start(folder)
    if status == 1 and last and len(list(last.iterdir())) > 1:
        said = f"Files of the other ranks are in {last}: RANK/error.json, RANK/stderr.log."
        tell(said)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # /tmp may have been cleaned during a long run
    if reason:
        tell(f"run_train.sh: {reason}")
    return status


def record_cause(folder: Path, cause: str) -> None:
    """Append the reason for a failure to metrics.jsonl and log.txt in the run's `folder`, unless another run writes to
    it.

    Rank 0 may have recorded nothing, or only that it lost its peers. The launcher knows which rank failed first.
    """
    records = folder / METRICS
    now = datetime.now(timezone.utc)
    with suppress(OSError, CheckpointError):
        lines = ["", *records.read_text(encoding="utf-8").splitlines()]
        last = read_record(lines[-1])
        stop = {
            "kind": "stop",
            "step": last["step"] if last else 0,
            "time": now.isoformat(timespec="milliseconds"),
            "reason": cause,
        }
        with lock_folder(folder), records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(stop) + "\n")
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            local = now.astimezone()
            log.write(f"{local:%Y-%m-%d %H:%M:%S} {cause}\n")


def check_run(args: list[str]) -> RunSpec:
    """Check the config, describe the run, and prepare its corpora.

    Raises UserError, or OSError if a corpus cannot be written.
    """
    machine, n_ranks, n_hosts = choose_host()
    if n_hosts > 1:
        find_master()  # raises UserError if MASTER_ADDR is missing
    spec = check(args, machine, n_ranks, n_hosts)
    if is_first_host():
        tell(spec.finished or describe_spec(spec, n_hosts))
    if not spec.finished and prepare_corpora(spec):
        spec = check(args, machine, n_ranks, n_hosts)  # check again, because the corpora now exist
    return spec


def prepare_corpora(spec: RunSpec) -> bool:
    """Prepare the missing corpora of a run. Return whether any were missing. Raises PreparationError, OSError."""
    cache_folder = Path(spec.config.training.cache_folder)
    was_missing = False
    try:
        for _, name, _, dataset_path in list_corpora(spec.config):
            if name in DATASETS:
                was_missing |= prepare_dataset(name, spec.tokenizer, cache_folder, dataset_path)
    except PreparationError as error:
        raise PreparationError(
            f"{error}. Options in this message are options of `prepare`: run `prepare` first, then start this run"
        ) from None
    return was_missing


def list_saved(checkpoints: Path) -> list[tuple[Path, int]]:
    """Return each complete checkpoint and the time at which it was saved."""
    steps = [checkpoints / f"step-{step}" for step in find_steps(checkpoints)]
    return [(step, step.stat().st_mtime_ns) for step in steps]


def export_last_checkpoint(spec: RunSpec) -> int:
    """Convert the last checkpoint to a Hugging Face folder if last_save_in_hf is set. Return the exit status."""
    section = spec.config.checkpoint
    step = max(spec.config.training.steps, spec.resumed_step)
    last = spec.dump_folder / section.folder / f"step-{step}"
    out = f"{last}-hf"
    if not (section.enable and section.last_save_in_hf):
        return 0
    if os.path.exists(out):
        tell(f"{out} already exists. To convert {last} again, delete it and repeat this command")
        return 0
    convert = [sys.executable, "-m", "torchtitan_lite", "convert", last, out]
    with subprocess.Popen([*convert, "--dtype", section.export_dtype]) as process:
        handle_signals(lambda number, frame: process.send_signal(number))
        status = process.wait()
    return 128 - status if status < 0 else status


def run_ranks(
    work: Callable | None,
    args: list[str],
    spec: RunSpec,
    folder: Path,
    signals: Signals,
) -> Ending:
    """Run the ranks of this host, as described in `main`."""
    handle_signals(signals.pass_on)
    n_hosts = read_hosts()[1]
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
    if n_hosts == 1 and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    here = os.getcwd()
    os.chdir(REPOSITORY)  # train_file.py imports train.py from there
    start_fork_server(["torchtitan_lite.tools.train_file"])
    os.chdir(here)
    # This import loads torch, which takes 1.5 s. Meanwhile the fork server imports train.py.
    if n_hosts == 1:
        signals.importing = folder
        signals.react()
    agent = importlib.import_module("torchtitan_lite.tools.agent")
    signals.importing = None
    n_local = spec.layout.world_size // n_hosts
    store = None
    try:
        if n_hosts > 1:
            # The hosts compare unresolved configs, because a host that joins later may resolve the config of the
            # resumed run to different values than the first hosts.
            config = dict(flatten_table(asdict(read_config(args).config)))
            config["NGPU"] = n_local
            store = join_hosts(config, spec.config.comm.train_timeout_seconds, signals)
    except UserError as error:
        return Ending(2, str(error))
    except KeyboardInterrupt:
        return tell_signal(signals)
    run = (work or agent.train_rank, args, folder, spec)
    ending = agent.run_agent(run, n_local, signals, store)
    return agree_on_cause(store, ending) if store else ending
