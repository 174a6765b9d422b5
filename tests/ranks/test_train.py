"""train.py: killed and restarted under torchrun, resumed on another layout."""

import os
import random
import shutil
from pathlib import Path

import pytest
import warm_start
from marks import slow
from warm_start import finish, kill_rank, launch, list_differences, read_losses

from torchtitan_lite.checkpoint.format import find_steps
from torchtitan_lite.checkpoint.load import OpenCheckpoint
from torchtitan_lite.dump_folder import CONFIG_TOML, FILES, LOCK

STEPS = 20
KEYS = [
    f"--training.steps={STEPS}",
    "--training.global_batch_size=12",
    "--validation.enable",
    "--validation.freq=10",
    "--validation.steps=3",
    "--checkpoint.interval=8",
]
MARKS = ("start", "validation", "save", "stop")  # kinds of records besides "step"
RANKS, LAYOUT = 2, "--training.local_batch_size=6"


@pytest.fixture(scope="module")
def unbroken(pool, tmp_path_factory) -> tuple[Path, list[str]]:
    """Dump folder of a run that nothing disturbs, and the keys of its data. Its ranks are the workers of the pool."""
    folder = tmp_path_factory.mktemp("train with spaces")
    keys = [*KEYS, *warm_start.write_letters(folder / "letters")]
    assert (
        pool.run(warm_start.start, RANKS, [*keys, LAYOUT, f"--job.dump_folder={folder}"])
        == [0] * RANKS
    )
    return folder, keys


def test_a_killed_rank_is_restarted_and_the_run_ends_bit_equal_to_the_unbroken_one(
    unbroken, tmp_path
):
    keys = [
        *unbroken[1],
        LAYOUT,
        "--job.overwrite",
        "--checkpoint.last_save_in_hf",
    ]  # a restart does not start over
    process = launch(tmp_path / "killed", tmp_path, *keys, n_ranks=RANKS, MAX_RESTARTS="1")
    kill_rank(process, RANKS - 1, after_step=11)
    output = finish(process)
    assert "resumed from" in output and "step-8" in output
    assert list_differences(tmp_path / "killed", unbroken[0], STEPS) == []
    assert (tmp_path / "killed" / "checkpoint" / f"step-{STEPS}-hf" / "config.json").exists()
    left = {path.name: path.is_dir() for path in (tmp_path / "killed").iterdir()}
    assert {name for name, is_folder in left.items() if is_folder} >= {"tb", "checkpoint"}
    files = {name for name, is_folder in left.items() if not is_folder}
    assert {"config.toml", "metrics.jsonl", "log.txt"} <= files <= {CONFIG_TOML, *FILES, LOCK}


@pytest.mark.parametrize(
    "n_ranks, layout",
    [
        (3, "--training.local_batch_size=4"),
        slow(1, LAYOUT),  # accumulates
    ],
)
def test_a_run_resumed_on_other_ranks_has_the_losses_of_the_unbroken_one(
    pool, unbroken, tmp_path, n_ranks, layout
):
    folder, keys = unbroken
    checkpoints = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint" / "step-8", checkpoints / "step-8")
    keys = [*keys, layout, f"--job.dump_folder={tmp_path}"]
    stopped = pool.run(warm_start.start, n_ranks, keys, 4)  # by a signal
    assert stopped == [143] * n_ranks
    assert find_steps(checkpoints) == [8, 12]
    assert pool.run(warm_start.start, n_ranks, keys) == [0] * n_ranks
    for name, steps in (("loss", range(9, STEPS + 1)), ("val_loss", (10, STEPS))):
        expected = read_losses(folder, name)
        seen = read_losses(tmp_path, name)
        assert list(seen) == list(steps)
        assert seen == pytest.approx({step: expected[step] for step in steps}, rel=1e-4)


def test_a_second_run_says_that_the_first_has_finished_and_changes_nothing(pool, unbroken):
    """By ./run_train.sh, and by train.py alone as a bare torchrun starts it."""
    folder, keys = unbroken
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    output = finish(launch(folder, folder / "cache", *keys, LAYOUT, n_ranks=RANKS))
    assert f"already at step {STEPS}" in output and "trained" not in output
    assert (
        pool.run(warm_start.start, RANKS, [*keys, LAYOUT, f"--job.dump_folder={folder}"])
        == [0] * RANKS
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_metrics_jsonl_tells_a_run_from_its_start_to_its_stop(unbroken):
    records = warm_start.read_records(unbroken[0])
    kinds = {
        kind: [record["step"] for record in records if record["kind"] == kind] for kind in MARKS
    }
    assert kinds == {
        "start": [0],
        "validation": [1, 10, STEPS],
        "save": [8, 16, STEPS],
        "stop": [STEPS],
    }
    assert [record["step"] for record in records if record["kind"] == "step"] == list(
        range(1, STEPS + 1)
    )
    first, last = records[0], records[-1]
    assert first["layout"]["dp_shard"] == first["world_size"] == RANKS and not first["resumed"]
    assert (
        first["time"] < last["time"] and f"trained {STEPS} steps (1 to {STEPS})" in last["reason"]
    )


LAYOUTS = {
    "data_parallel_shard": "--training.local_batch_size=6",
    "tensor_parallel": "--training.local_batch_size=12",
    "pipeline_parallel": "--training.local_batch_size=12",
}


@pytest.mark.slow  # half a minute each; KILLS=10 kills as often as one likes
@pytest.mark.parametrize("seed", range(int(os.environ.get("KILLS", 3))))
def test_a_run_killed_at_a_random_instant_ends_bit_equal_to_the_unbroken_one(
    pool, unbroken, tmp_path, seed
):
    """Layouts, ways to save, and ways to resume take turns."""
    draw = random.Random(seed)
    steps = 60  # the run must not end before the kill
    dim, batch = list(LAYOUTS.items())[seed % 3]
    mode = ("disabled", "async")[seed % 2]
    keys = [*unbroken[1], f"--parallelism.{dim}_degree=2", batch, f"--checkpoint.async_mode={mode}"]
    keys += [f"--debug.seed={seed}", f"--training.steps={steps}", "--checkpoint.interval=3"]
    whole = [*keys, f"--job.dump_folder={tmp_path / 'unbroken'}"]
    assert pool.run(warm_start.start, 2, whole) == [0, 0]
    restarts = 1 - seed // 2 % 2  # 0: the user starts the run again
    killed = tmp_path / "killed"
    process = launch(killed, tmp_path, *keys, n_ranks=2, MAX_RESTARTS=str(restarts))
    step, delay_s = draw.randint(1, 16), draw.uniform(0, 0.2)
    kill_rank(process, draw.randrange(2), after_step=step, delay_s=delay_s)
    finish(process, status=None)
    for step in find_steps(killed / "checkpoint"):
        OpenCheckpoint(killed / "checkpoint" / f"step-{step}")  # each one is whole
    if process.returncode:  # also where torchrun itself does not survive the death of a rank
        finish(launch(killed, tmp_path, *keys, n_ranks=2))
    assert list_differences(killed, tmp_path / "unbroken", steps) == []
