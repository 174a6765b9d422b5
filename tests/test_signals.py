"""A run that gets SIGINT or SIGTERM: after which step it stops, what it leaves, how it ends.

The default test stops a 3-D run at one instant; KILLS=20 with --all stops it as often as one likes.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import warm_start
from kill_while_training import MARK, finish, launch, list_differences, list_ranks, read_losses

from torchtitan_lite.checkpoint.manifest import find_steps
from torchtitan_lite.components import shutdown
from torchtitan_lite.components.shutdown import COPIES_ARRIVE_WITHIN_S, StopRequest, describe_stop
from torchtitan_lite.config.reader import REPOSITORY, read_config
from torchtitan_lite.config.schema import Config

# ---------------------------------------------------------------- the agreement


class Ended(Exception):
    """Raised in place of the end of the process."""


@pytest.fixture
def requests(monkeypatch) -> list[StopRequest]:
    """Those of three ranks that have met, each at the end of its first step."""

    def end(request, received, when):
        raise Ended(received)

    monkeypatch.setattr(StopRequest, "end", end)
    store = dist.HashStore()
    requests = [StopRequest() for _ in range(3)]
    for request in requests:
        request.wait_for_steps(store)
    return requests


def test_one_rank_stops_all_after_the_same_step(requests):
    """A rank that is slow to ask after step 6, while another is in step 7 already, must not stop there."""
    requests[1].note(signal.SIGTERM)
    for request in requests:
        request.announce(7)
    assert [request.find(6) for request in requests] == [None] * 3
    assert [request.find(7) for request in requests] == [signal.SIGTERM] * 3


def test_of_two_signals_all_ranks_take_the_same(requests):
    requests[2].note(signal.SIGINT)
    requests[0].note(signal.SIGTERM)
    for request in reversed(requests):
        request.announce(7)
    assert [request.find(7) for request in requests] == [signal.SIGINT] * 3


def test_a_second_signal_ends_the_process_but_a_copy_of_the_first_does_not(requests, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: now_s)
    requests[0].note(signal.SIGTERM)
    now_s += COPIES_ARRIVE_WITHIN_S
    requests[0].note(signal.SIGTERM)
    now_s += 0.1
    with pytest.raises(Ended):
        requests[0].note(signal.SIGTERM)


def test_a_signal_in_the_first_step_ends_the_process():
    """Even if the main thread is in C and never returns to Python, as one that waits for a device."""
    program = "import ctypes, os; from torchtitan_lite.components.shutdown import StopRequest\n"
    program += "StopRequest().listen(); print(flush=True); ctypes.CDLL(None).read(os.pipe()[0], ctypes.c_buffer(1), 1)"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=-1)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.count(b"\n") == 1 and b"SIGINT" in err


@pytest.mark.parametrize(
    ("args", "change"),
    [
        (["--job.no_overwrite"], ""),
        (["--job.overwrite"], " --job.no_overwrite"),
        (["--job.no_overwrite", "--checkpoint.load_step=4"], " --checkpoint.load_step=-1"),
    ],
)
def test_the_command_that_continues_neither_starts_over_nor_goes_back(args, change):
    args = ["--config=debug", "--checkpoint.enable", *args]
    line = describe_stop(signal.SIGTERM, 7, read_config(args).config, Path("out/checkpoint/step-7"), args, "8")
    assert line.endswith(f"out/checkpoint/step-7; to continue: NGPU=8 ./run_train.sh {' '.join(args)}{change}")
    assert read_config([*args, *change.split()]).problems == []
    for config, has_remedy in ((read_config(args).config, False), (Config(), True)):  # saved nothing yet; never saves
        line = describe_stop(signal.SIGTERM, 7, config, None, args, None)
        assert ("--checkpoint.enable" in line) == has_remedy and "to continue" not in line


# ---------------------------------------------------------------- a run on pp2 x dp2 x tp2

STEPS, RANKS = 18, 8
KEYS = [
    f"--training.steps={STEPS}",
    "--training.global_batch_size=4",
    "--training.local_batch_size=2",
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.tensor_parallel_degree=2",
    "--validation.freq=5",
    "--validation.steps=2",
    "--checkpoint.interval=4",
    "--job.no_overwrite",
]
LAST_STEP = 10  # after which a signal may come: the run must not end before it
MOST_SECONDS = 30


@pytest.fixture(scope="module")
def unbroken(pool, tmp_path_factory) -> tuple[Path, list[str]]:
    """Dump folder of a run that nothing disturbs, and the keys of its data. Its ranks are the workers of the pool."""
    folder = tmp_path_factory.mktemp("signals")
    keys = [*KEYS, *warm_start.write_letters(folder / "letters"), f"--training.cache_folder={folder / 'cache'}"]
    assert pool.run(warm_start.start, RANKS, [*keys, f"--job.dump_folder={folder}"]) == [0] * RANKS
    return folder, keys


def list_processes(dump_folder: Path) -> list[int]:
    """Pids of all processes of a run: launcher, ranks, and what they have started."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if f"{MARK}={dump_folder}".encode() in read_environment(pid)]


def read_environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return []


def check_stopped(pool, folder: Path, unbroken: tuple[Path, list[str]], received: signal.Signals, output: str) -> int:
    """Check what a stopped run has left and continue it to its end. Returns the step after which it stopped."""
    assert list_processes(folder) == []
    assert "Traceback" not in output
    newest = find_steps(folder / "checkpoint")[-1]
    assert newest == max(read_losses(folder)), "the last step that was made is saved"
    assert f"stopped by {received.name} after step {newest} of {STEPS}; newest checkpoint" in output
    assert not list((folder / "checkpoint").glob("*.tmp"))
    assert pool.run(warm_start.start, RANKS, [*unbroken[1], f"--job.dump_folder={folder}"]) == [0] * RANKS
    assert list_differences(folder, unbroken[0], STEPS) == []
    return newest


def stop_at_random(pool, unbroken: tuple[Path, list[str]], folder: Path, seed: int) -> None:
    """Signals, ways to save, and who gets the signal take turns; every fifth comes before the end of the first step."""
    draw = random.Random(seed)
    received = (signal.SIGTERM, signal.SIGINT)[seed % 2]
    mode = ("disabled", "async")[seed // 2 % 2]
    process = launch(folder, folder / "cache", *unbroken[1], f"--checkpoint.async_mode={mode}", n_ranks=RANKS)
    step, output, started_s = draw.randint(1, LAST_STEP), "", time.monotonic()
    if is_early := seed % 5 == 4:
        step, pattern = 0, "The stderr of every rank on"
    else:
        pattern = f"step +{step}/"
    for line in process.stdout:
        output += line
        if re.search(pattern, line):
            break
    time.sleep(draw.uniform(0, 0.3) if step else draw.uniform(0, time.monotonic() - started_s))
    ranks = list_ranks(process)
    assert len(list_processes(folder)) > len(ranks)
    victim = draw.choice(ranks) if ranks and step and seed % 3 == 2 else process.pid  # one rank is enough
    os.kill(victim, received)
    sent_s = time.monotonic()
    output += finish(process, must_succeed=False)
    seconds = time.monotonic() - sent_s
    assert process.returncode == 128 + received, output
    assert output.splitlines()[-1] == f"run_train.sh: stopped by {received.name}"
    assert seconds < MOST_SECONDS
    whom = "the launcher" if victim == process.pid else "one rank"
    if is_early and not find_steps(folder / "checkpoint"):
        assert "Traceback" not in output and list_processes(folder) == []
        newest = 0
    else:
        newest = check_stopped(pool, folder, unbroken, received, output)
    print(f"{seed}: {received.name} to {whom} after step {step}: stopped after {newest}, gone in {seconds:.1f} s")


@pytest.mark.parametrize("seed", [5, pytest.param(4, marks=pytest.mark.slow)])
def test_a_signal_at_a_random_instant_saves_the_step_and_the_run_continues_bit_equal(pool, unbroken, tmp_path, seed):
    stop_at_random(pool, unbroken, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("KILLS", 5))))
def test_signals_at_many_random_instants(pool, unbroken, tmp_path, seed):
    stop_at_random(pool, unbroken, tmp_path, seed)


@pytest.mark.slow
def test_torchrun_itself_passes_a_signal_on_and_the_run_continues_bit_equal(pool, unbroken, tmp_path):
    """torchrun ends with its own traceback and status: what the ranks say and leave is looked at."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--local-addr=127.0.0.1"]
    command += [str(REPOSITORY / "train.py"), "--config=debug", *unbroken[1], f"--job.dump_folder={tmp_path}"]
    with open(tmp_path / "stderr", "w") as stderr:
        environment = {**os.environ, MARK: str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
        for line in process.stdout:
            if re.search("step +3/", line):
                break
        process.send_signal(signal.SIGTERM)
        output = finish(process, must_succeed=False)
    assert process.returncode != 0
    check_stopped(pool, tmp_path, unbroken, signal.SIGTERM, output)
