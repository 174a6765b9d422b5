"""train.py is killed and restarted under torchrun, and resumed on a different layout."""

import fcntl
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import warm_start
from checkpoints import assemble, flip_bit
from marks import each_row
from warm_start import (
    finish,
    kill_last_rank,
    launch,
    list_differences,
    list_ranks,
    read_losses,
    read_records,
    read_until,
)

from torchtitan_lite.checkpoint.format import find_steps
from torchtitan_lite.dump_folder import CONFIG_TOML, LOCK
from torchtitan_lite.extensions.overwrite import FILES_OF_RUN
from torchtitan_lite.tools.verify.ranks import RankFailure

STEPS = 20
KEYS = f"""
--training.steps={STEPS} --training.global_batch_size=12
--validation.enable --validation.freq=10 --validation.steps=3 --checkpoint.interval=8
""".split()
RANKS, LAYOUT = 2, "--training.local_batch_size=6"


@pytest.fixture(scope="module")
def unbroken(run_training, letters, tmp_path_factory) -> tuple[Path, list[str]]:
    """Train without interruption, in the workers of the pool. Return the dump folder and the config keys of the run."""
    folder = tmp_path_factory.mktemp("train with spaces")
    keys = [*KEYS, *letters, LAYOUT]
    run_training(folder, keys, RANKS)
    return folder, keys


def test_a_killed_rank_is_restarted_and_the_run_ends_bit_equal_to_the_unbroken_one(
    unbroken, tmp_path
):
    # after a restart, --job.overwrite deletes nothing
    keys = [*unbroken[1], "--job.overwrite", "--checkpoint.last_save_in_hf"]
    process = launch(tmp_path / "killed", tmp_path, *keys, n_ranks=RANKS, MAX_RESTARTS="2")
    kill_last_rank(process, after_step=11)
    read_until(process, "All ranks start again")
    kill_new_rank(process)  # kill the rank as soon as it is forked
    output = finish(process)
    assert "resumed from" in output and "step-8" in output
    assert list_differences(tmp_path / "killed", unbroken[0], STEPS) == []
    assert (tmp_path / "killed" / "checkpoint" / f"step-{STEPS}-hf" / "config.json").exists()
    left = {path.name for path in (tmp_path / "killed").iterdir() if path.is_file()}
    assert {"config.toml", "metrics.jsonl", "log.txt"} <= left
    assert left <= {CONFIG_TOML, *FILES_OF_RUN, LOCK}
    assert (tmp_path / "killed" / "tb").is_dir()


def kill_new_rank(process: subprocess.Popen) -> None:
    """Kill the last rank of a start. The rank has not imported anything yet."""
    while len(ranks := list_ranks(process)) < RANKS:
        time.sleep(0.001)
    os.kill(ranks[-1], signal.SIGKILL)


@each_row("n_ranks", [3, 1], slow=[1])  # one rank accumulates gradients
def test_a_run_resumed_on_other_ranks_has_the_losses_of_the_unbroken_one(
    run_training, unbroken, tmp_path, n_ranks
):
    folder, keys = unbroken
    checkpoints = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint" / "step-8", checkpoints / "step-8")
    keys = [*keys, f"--training.local_batch_size={12 // max(2, n_ranks)}"]
    run_training(tmp_path, keys, n_ranks, stop_at=4)
    assert find_steps(checkpoints) == [8, 12]
    run_training(tmp_path, keys, n_ranks)
    for name, steps in (("loss", range(9, STEPS + 1)), ("val_loss", (10, STEPS))):
        expected = read_losses(folder, name)
        seen = read_losses(tmp_path, name)
        assert list(seen) == list(steps)
        assert seen == pytest.approx({step: expected[step] for step in steps}, rel=1e-4)


def test_a_second_run_says_that_the_first_has_finished_and_changes_nothing(run_training, unbroken):
    """The second run is started twice: by ./run_train.sh, and by train.py alone, as torchrun starts it."""
    folder, keys = unbroken
    (folder / "checkpoint" / f"step-{STEPS}-hf").mkdir()
    before = describe_tree(folder)
    export = "--checkpoint.last_save_in_hf"
    output = finish(launch(folder, folder / "cache", *keys, export, n_ranks=RANKS))
    assert f"already at step {STEPS}" in output and "trained" not in output
    assert "already exists. To convert" in output
    run_training(folder, keys, RANKS)
    assert describe_tree(folder) == before


# -- a run that only reads

SAVES = """
--checkpoint.interval=4 --checkpoint.local_interval=3 --checkpoint.enable_first_step_checkpoint
"""
READER = """
--checkpoint.load_only --validation.freq=1 --profiling.enable_profiling
--profiling.profile_freq=1 --profiling.profiler_warmup=0 --checkpoint.local_interval=1
--checkpoint.interval=1 --checkpoint.last_save_in_hf
""".split()


def describe_tree(folder: Path) -> dict[Path, tuple]:
    """Return a dict mapping paths to (mode, time of the last change, content), for every file in a folder."""
    tree = {}
    for path in (folder, *folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        tree[path] = path.stat().st_mode, path.stat().st_mtime_ns, content
    return tree


@pytest.fixture(scope="module")
def stopped(run_training, unbroken, tmp_path_factory) -> tuple[Path, list[str]]:
    """Stop a run after step 10 by a signal. Return the run's dump folder with snapshots, and the run's keys."""
    folder = tmp_path_factory.mktemp("stopped")
    keys = [*unbroken[1], *SAVES.split(), f"--checkpoint.local_folder={folder / 'snapshots'}"]
    run_training(folder / "run", keys, RANKS, stop_at=10)
    hang = folder / "run" / "hang" / "restart-0" / "rank-00000.json"
    hang.parent.mkdir(parents=True)
    hang.write_text("of the run that was stopped")
    return folder, [*keys, f"--job.dump_folder={folder / 'run'}"]


# keys | whether the newest checkpoint is damaged | first step
READ = """
--checkpoint.load_step=4 --training.steps=6 | | 5
--training.steps=12 | | 11
--training.steps=11 | damaged | 9
"""


@each_row("more, damaged, first", READ)
def test_a_run_that_only_reads_changes_no_file_of_the_run_that_it_loads(
    run_training, stopped, unbroken, tmp_path, more, damaged, first
):
    shutil.copytree(stopped[0], tmp_path, dirs_exist_ok=True)
    keys = [key.replace(str(stopped[0]), str(tmp_path)) for key in stopped[1]]
    run = tmp_path / "run"
    assert find_steps(run / "checkpoint") == [1, 4, 8, 10]
    if damaged:
        flip_bit(run / "checkpoint" / "step-10" / "rank-00001.safetensors")
    before = describe_tree(tmp_path)
    with (run / "lock").open("ab") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # a run that still writes to this folder holds the same lock
        output = run_training(run, [*keys, *READER, *more.split()], RANKS)
    losses = dict(re.findall(r"step +(\d+)/\d+  loss ([\d.]+)", output))
    assert min(map(int, losses)) == int(first)
    expected = read_losses(unbroken[0])
    assert losses == {step: f"{expected[int(step)]:.5f}" for step in losses}
    assert "writes nothing to" in output and "val_loss" in output
    assert describe_tree(tmp_path) == before


def test_a_restart_never_resumes_the_run_that_job_overwrite_deletes(
    pool, run_training, unbroken, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(unbroken[0], folder)
    keys = [*unbroken[1], f"--job.dump_folder={folder}", "--job.overwrite"]
    assert pool.run(warm_start.fail_at, RANKS, keys, "train.start_process") == ["planted"] * RANKS
    run_training(folder, keys, RANKS, stop_at=2, restarts=1)
    assert find_steps(folder / "checkpoint") == [2]


@contextmanager
def slowed(place: str, seconds: float) -> Iterator[None]:
    """Let the function `place` take `seconds` or more."""
    function = pkgutil.resolve_name(place)

    def wait_and_call(*args) -> object:
        time.sleep(seconds)
        return function(*args)

    with patch(place, wait_and_call):
        yield


def test_the_time_of_a_step_does_not_include_saves(run_training, unbroken, tmp_path):
    seconds = 2.0
    keys = [*unbroken[1], "--checkpoint.interval=1"]
    inside = partial(slowed, "torchtitan_lite.checkpoint.save.CheckpointSaver.save", seconds)
    run_training(tmp_path, keys, RANKS, stop_at=2, inside=inside)
    records = read_records(tmp_path)
    assert [line["waited_s"] > seconds for line in records if line["kind"] == "save"] == [True] * 2
    times = [line["step_time_s"] for line in records if line["kind"] == "step"]
    assert len(times) == 2 and 0 < max(times) < seconds


def test_steps_that_nearly_time_out_are_reported_once_with_a_remedy(
    run_training, unbroken, tmp_path
):
    lines = []
    for seconds in (1, 100):
        keys = [*unbroken[1], "--job.overwrite", f"--comm.train_timeout_seconds={seconds}"]
        inside = partial(slowed, "warm_start.train_step", 0.6)
        said = run_training(tmp_path, keys, stop_at=3, inside=inside)  # a single rank
        lines.append([line for line in said.splitlines() if "time out after" in line])
    ((line,), others) = lines
    assert int(re.search(r"to (\d+) or more", line)[1]) >= 3
    assert not others


def test_a_run_that_only_reads_and_fails_or_is_stopped_writes_no_report(
    pool, run_training, stopped
):
    folder, keys = stopped
    before = describe_tree(folder)
    failed = pool.run(warm_start.fail_at, RANKS, [*keys, *READER], "train.RunMetrics.log")
    assert failed == ["planted"] * RANKS
    keys = [*keys, *READER, "--checkpoint.load_step=4"]
    said = run_training(folder / "run", keys, RANKS, stop_at=2)
    # a command that continues this run would be wrong
    assert "after step 6 of 20; nothing is saved" in said
    assert describe_tree(folder) == before


# -- what acts once


def read_adam_step(dump_folder: Path) -> int:
    """Return AdamW's step count in the newest checkpoint."""
    step = find_steps(dump_folder / "checkpoint")[-1]
    tensors = assemble(dump_folder / "checkpoint" / f"step-{step}")
    (count,) = {int(value) for name, value in tensors.items() if name.endswith(".step")}
    return count


ANEW = "--checkpoint.exclude_from_loading=optimizer"
# The same command is started several times: number of steps after which each start stops, or 0 at the end.
STARTS = {
    "three, the first two save": [3, 4, 0],
    "two, the newest of the first is damaged": [5, "damage", 0],
}


@each_row("name", STARTS, fast=["two, the newest of the first is damaged"])
def test_new_moments_begin_once_however_often_the_command_is_started(
    run_training, unbroken, tmp_path, name
):
    shutil.copytree(unbroken[0] / "checkpoint" / "step-8", tmp_path / "checkpoint" / "step-8")
    keys = [*unbroken[1], ANEW, "--checkpoint.interval=99", "--training.skip_spikes=9"]
    for n_steps in STARTS[name]:
        if n_steps == "damage":
            newest = find_steps(tmp_path / "checkpoint")[-1]
            flip_bit(tmp_path / "checkpoint" / f"step-{newest}" / "rank-00000.safetensors")
        else:
            run_training(tmp_path, keys, RANKS, n_steps)
    n_updates = STEPS - 8
    assert read_adam_step(tmp_path) == n_updates
    # A new dump folder is a new run, so its first start begins with new moments, unless it loads the moments of a
    # checkpoint.
    path = tmp_path / "checkpoint" / f"step-{STEPS}"
    keys += [
        f"--checkpoint.initial_load_path={path}",
        "--checkpoint.no_initial_load_model_only",
        f"--training.steps={STEPS + 3}",
        "--training.skip_spikes=0",
    ]
    for more, n_before in ((ANEW, 0), ("--checkpoint.exclude_from_loading=[]", n_updates)):
        folder = tmp_path / more
        run_training(folder, [*keys, more], RANKS)
        assert read_adam_step(folder) == n_before + 3
        assert "(2 in total)" in (folder / "log.txt").read_text()  # of the spike filter


def test_the_options_that_a_refusal_prints_continue_the_run_in_a_different_folder(
    run_training, unbroken, tmp_path
):
    folder, keys = unbroken
    before = describe_tree(folder)
    keys = [*keys, "--training.steps=24"]
    with pytest.raises(RankFailure) as refused:
        run_training(folder, [*keys, "--checkpoint.load_step=8"], RANKS)
    said = f"{refused.value}\n"
    way = re.search(r"use these options instead: (--.*?)\.\s", said)[1]
    again = tmp_path / "again"
    way = shlex.split(way.replace("FOLDER", shlex.quote(str(again))))
    more = ["--optimizer.lr=1e-4", "--lr_scheduler.total_steps=20"]
    run_training(again, [*keys, *way, *more], RANKS)
    rates = read_losses(again, "lr")
    assert list(rates) == [*range(9, 25)]
    assert rates[9] == pytest.approx(read_losses(folder, "lr")[9] / 40)  # 4e-3 in debug.toml
    assert read_losses(again)[9] == read_losses(folder)[9]
    assert describe_tree(folder) == before
