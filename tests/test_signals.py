"""A run that gets SIGINT or SIGTERM: after which step it stops, what it leaves, how it ends.

KILLS=20 with --all stops a 3-D run at as many random instants.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_start
from warm_start import MARK, finish, launch, list_children, list_differences, list_ranks, read_losses, read_until

from torchtitan_lite import REPOSITORY
from torchtitan_lite.checkpoint.manifest import find_steps
from torchtitan_lite.components import shutdown
from torchtitan_lite.components.shutdown import COPIES_ARRIVE_WITHIN_S, StopRequest, describe_stop
from torchtitan_lite.config.reader import read_config


class Ended(Exception):
    """Raised in place of the end of the process."""


@pytest.fixture
def request_(monkeypatch) -> StopRequest:
    """Return the StopRequest of a process that has finished its first step."""

    def end(request, received, when):
        raise Ended(received)

    monkeypatch.setattr(StopRequest, "end", end)
    request = StopRequest()
    request.is_first_step = False
    return request


def test_a_second_signal_ends_the_process_but_a_copy_of_the_first_does_not(request_, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: now_s)
    assert request_.requested == 0
    request_.note(signal.SIGTERM)
    now_s += COPIES_ARRIVE_WITHIN_S
    request_.note(signal.SIGTERM)
    assert request_.requested == signal.SIGTERM
    now_s += 0.1
    with pytest.raises(Ended):
        request_.note(signal.SIGTERM)


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
    config = read_config(args).config
    line = describe_stop(signal.SIGTERM, 7, config, Path("out/checkpoint/step-7"), args, "8")
    assert line.endswith(f"out/checkpoint/step-7; to continue: NGPU=8 ./run_train.sh {' '.join(args)}{change}")
    assert read_config([*args, *change.split()]).problems == []
    assert describe_stop(signal.SIGTERM, 7, config, None, args, None).endswith("nothing is saved")


# ---------------------------------------------------------------- who gets which signal, and when, on two ranks

WHOM = ("group", "launcher", "one rank")  # the first two get it ten times in 0.2 s, as `timeout` and systemd send it
WHEN = {  # moment -> keys of the run
    "import": [],
    "first step": ["--training.global_batch_size=2048"],  # a second or more
    "step": [],
    "save": ["--checkpoint.interval=1"],
}
DEFAULT = [("group", signal.SIGTERM, "step"), ("group", signal.SIGINT, "import"), ("launcher", signal.SIGTERM, "save")]


def wait_for_moment(process: subprocess.Popen, when: str, whom: str, folder: Path) -> str:
    """Return the output up to a moment of the run."""
    if when == "import":
        output = read_until(process, "  files ")
        while not (list_ranks(process) if whom == "one rank" else list_children(process.pid)):
            time.sleep(0.001)
        return output
    output = read_until(process, "data: " if when == "first step" else "step +3/")
    while when == "save" and not list((folder / "checkpoint").glob("*.tmp")):
        time.sleep(0.001)
    return output


@pytest.mark.parametrize(
    ("whom", "received", "when"),
    [
        pytest.param(*row, marks=[] if row in DEFAULT else pytest.mark.slow)
        for row in itertools.product(WHOM, (signal.SIGTERM, signal.SIGINT), WHEN)
    ],
)
def test_a_signal_loses_no_step_however_often_it_arrives(tmp_path, whom, received, when):
    folder = tmp_path / "run"
    keys = [*warm_start.write_letters(tmp_path / "letters"), "--training.local_batch_size=4", "--training.steps=5000"]
    process = launch(folder, tmp_path, *keys, "--validation.no_enable", *WHEN[when], n_ranks=2)
    output = wait_for_moment(process, when, whom, folder)
    if whom == "one rank":
        os.kill(list_ranks(process)[-1], received)
    else:
        for _ in range(10):
            (os.killpg if whom == "group" else os.kill)(process.pid, received)
            time.sleep(0.02)
    output += finish(process, status=128 + received)
    assert output.splitlines()[-1] == f"run_train.sh: stopped by {received.name}", output
    is_missed = whom == "one rank" and when == "first step"  # the other rank reports that its peer is gone
    assert ("Traceback" not in output or is_missed) and not is_running(folder)
    steps = find_steps(folder / "checkpoint")
    if when in ("import", "first step"):
        assert steps == []
    else:
        assert steps[-1] == max(read_losses(folder)), "the last step that was made is saved"
        assert f"stopped by {received.name} after step {steps[-1]} of 5000" in output
        assert "to continue: NGPU=2 ./run_train.sh" in output


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


@pytest.fixture(scope="module")
def unbroken(pool, tmp_path_factory) -> tuple[Path, list[str]]:
    """Dump folder of a run that nothing disturbs, and the keys of its data. Its ranks are the workers of the pool."""
    folder = tmp_path_factory.mktemp("signals")
    keys = [*KEYS, *warm_start.write_letters(folder / "letters"), f"--training.cache_folder={folder / 'cache'}"]
    assert pool.run(warm_start.start, RANKS, [*keys, f"--job.dump_folder={folder}"]) == [0] * RANKS
    return folder, keys


def is_running(dump_folder: Path) -> bool:
    """Return whether the launcher, a rank, or what they have started is still there."""
    environments = (path / "environ" for path in Path("/proc").iterdir() if path.name.isdecimal())
    return any(f"{MARK}={dump_folder}".encode() in read_environment(path) for path in environments)


def read_environment(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # the process has ended, or is somebody else's
        return []


def stop_at_random(pool, unbroken: tuple[Path, list[str]], folder: Path, seed: int) -> None:
    """Signals, ways to save, and who gets the signal take turns; every fifth comes before the end of the first step."""
    draw = random.Random(seed)
    received = (signal.SIGTERM, signal.SIGINT)[seed % 2]
    mode = f"--checkpoint.async_mode={('disabled', 'async')[seed // 2 % 2]}"
    process = launch(folder, folder / "cache", *unbroken[1], mode, n_ranks=RANKS)
    started_s = time.monotonic()
    is_early, step = seed % 5 == 4, draw.randint(1, LAST_STEP)
    output = read_until(process, "  files " if is_early else f"step +{step}/")
    time.sleep(draw.uniform(0, 5.0 if is_early else min(0.3, time.monotonic() - started_s)))
    if not is_early and seed % 3 == 2:  # one rank is enough
        os.kill(draw.choice(list_ranks(process)), received)
    elif seed % 3 == 1:  # as a terminal does
        os.killpg(process.pid, received)
    else:
        process.send_signal(received)
    output += finish(process, status=128 + received)
    assert output.splitlines()[-1] == f"run_train.sh: stopped by {received.name}"
    assert "Traceback" not in output and not is_running(folder)
    if steps := find_steps(folder / "checkpoint"):
        assert steps[-1] == max(read_losses(folder)), "the last step that was made is saved"
        assert f"stopped by {received.name} after step {steps[-1]} of {STEPS}; newest checkpoint" in output
        assert not list((folder / "checkpoint").glob("*.tmp"))
        assert pool.run(warm_start.start, RANKS, [*unbroken[1], f"--job.dump_folder={folder}"]) == [0] * RANKS
        assert list_differences(folder, unbroken[0], STEPS) == []
    assert steps or is_early


SEEDS = [5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(int(os.environ.get("KILLS", 5))))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_signal_at_a_random_instant_saves_the_step_and_the_run_continues_bit_equal(pool, unbroken, tmp_path, seed):
    stop_at_random(pool, unbroken, tmp_path, seed)
