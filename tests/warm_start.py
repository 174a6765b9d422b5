"""Start train.py for tests, kill it, and compare the results of two runs.

start     runs train.py in the workers of a rank pool, and takes a second
launch    runs ./run_train.sh, as users do, and takes five seconds
"""

import gc
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGTERM
from unittest.mock import patch

import pytest
from checkpoints import assemble, list_differing
from made_corpora import write_corpus

import train
from torchtitan_lite import REPOSITORY
from torchtitan_lite.build import Run
from torchtitan_lite.components.signals import StopFlag
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel import process_groups
from torchtitan_lite.step import StepResult, train_step
from torchtitan_lite.tools.verify.train_py import make_environment, process_left_as_it_was

STREAMS = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
SMALL = """
--model.dim=64 --model.n_layers=2 --model.n_heads=4 --model.n_kv_heads=2 --model.head_dim=16 --model.ffn_dim=96
--model.hf_assets_path=bytes --model.vocab_size=264 --training.seq_len=32
--metrics.log_freq=1 --checkpoint.enable
"""
MARK = "RUN_UNDER_TEST"  # environment variable with the dump folder, in every process of a run


def fail_at(rank: int, world_size: int, keys: list[str], place: str, n_hosts: int = 1) -> str:
    """Worker: start a run that fails when it calls the function `place`. Return the error."""
    with patch(place, side_effect=RuntimeError("planted")):
        with pytest.raises(RuntimeError) as error:
            start(rank, world_size, keys, n_hosts=n_hosts)
    message = str(error.value)
    del error
    gc.collect()  # closes the lock of the dump folder, as the end of the process would
    return message


def start(
    rank: int,
    world_size: int,
    keys: list[str],
    n_steps: int = 0,
    restarts: int = 0,
    n_hosts: int = 1,
) -> tuple[int, str]:
    """Worker: run train.py in the process group of this worker. Return its exit status, and this rank's output.

    Rank 0 gets SIGTERM before step number `n_steps` of this start. The run is told that torchrun has restarted it
    `restarts` times, and that its ranks are on `n_hosts` hosts, whose numbers are in GROUP_RANK.
    """
    n_local = world_size // n_hosts
    host, local_rank = divmod(rank, n_local)
    host_ranks = range(host * n_local, (host + 1) * n_local)
    place = process_groups.Place(rank, world_size, local_rank, host_ranks, restarts)
    store = process_groups.dist.distributed_c10d._get_default_store()
    step = partial(step_with_signal, count(1), rank, n_steps)
    with (
        process_left_as_it_was(),
        redirect_stdout(io.StringIO()) as said,
        patch.object(train, "join_job", return_value=(place, store)),
        patch.object(process_groups.dist, "init_process_group"),
        patch.object(process_groups.dist, "destroy_process_group"),
        patch.dict(os.environ, make_environment(rank, world_size, port=0), GROUP_RANK=str(host)),
        patch.object(train, "train_step", step),
    ):
        status = train.main(["--config=debug", *keys], StopFlag())
    return status, said.getvalue()


def step_with_signal(
    steps: Iterator[int], rank: int, n_steps: int, run: Run, batch: Batch, signal: int
) -> StepResult:
    """Make a step, but send SIGTERM to rank 0 before step number `n_steps`."""
    is_stopped = next(steps) == n_steps and rank == 0
    return train_step(run, batch, SIGTERM if is_stopped else signal)


def write_letters(folder: Path) -> list[str]:
    """Write a small corpus of random letters. Return config keys for a run of a small model on this corpus."""
    draw = Random(0)
    documents = [draw.choices(range(97, 123), k=draw.randint(20, 200)) for _ in range(100)]
    write_corpus(folder, [documents[:80]], validation=[documents[80:]])
    return [*SMALL.split(), f"--training.dataset={folder}"]


def launch(
    dump_folder: Path, cache: Path, *keys: str, n_ranks: int, **environment: str
) -> subprocess.Popen:
    """Start ./run_train.sh. The launcher replaces the shell, so the returned process is the launcher."""
    command = [str(REPOSITORY / "run_train.sh"), "--config", "debug"]
    command += ["--job.dump_folder", str(dump_folder), "--training.cache_folder", str(cache), *keys]
    settings = {MARK: str(dump_folder), "NGPU": str(n_ranks), "PYTHON": sys.executable}
    environment = {**os.environ, **settings, **environment}
    return subprocess.Popen(command, env=environment, start_new_session=True, **STREAMS)


def read_until(process: subprocess.Popen, pattern: str) -> str:
    """Return the output up to the first line that matches."""
    output = ""
    for line in process.stdout:
        output += line
        if re.search(pattern, line):
            return output
    raise AssertionError(f"the run ended without {pattern!r}:\n{output}")


def finish(process: subprocess.Popen, status: int | None = 0) -> str:
    """Wait for the end of a run, and return its remaining output. `status`: the required exit status. None: any."""
    output, _ = process.communicate(timeout=300)
    assert status is None or process.returncode == status, output
    return output


def kill_last_rank(process: subprocess.Popen, *, after_step: int) -> None:
    """Wait until a step is logged, then send SIGKILL to the last rank."""
    read_until(process, f"step +{after_step}/")
    os.kill(list_ranks(process)[-1], SIGKILL)


def list_ranks(launcher: subprocess.Popen) -> list[int]:
    """Return the pids of the ranks, in their order. The launcher starts a fork server, which forks the ranks."""
    return [rank for child in list_children(launcher.pid) for rank in list_children(child)]


def list_children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:  # the process has ended
        return []


def read_records(dump_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (dump_folder / "metrics.jsonl").open()]


def read_losses(dump_folder: Path, name: str = "loss") -> dict[int, float]:
    """Return a dict mapping each step to its loss, or to its number `name`."""
    records = read_records(dump_folder)
    numbers = [(record["step"], record[name]) for record in records if name in record]
    assert len(dict(numbers)) == len(numbers), "a step was logged twice"
    return dict(numbers)


def list_differences(one: Path, other: Path, step: int) -> list[str]:
    """Return the names of tensors that differ between two runs at step `step`, and the steps whose losses differ."""
    states = [assemble(folder / "checkpoint" / f"step-{step}") for folder in (one, other)]
    losses, expected = read_losses(one), read_losses(other)
    steps = sorted(losses.keys() | expected.keys())
    return [
        *list_differing(*states),
        *(f"loss of step {s}" for s in steps if losses.get(s) != expected.get(s)),
    ]
