"""train.py: killed and restarted under torchrun, resumed on another layout."""

import shutil
from pathlib import Path

import pytest
import warm_start
from kill_while_training import finish, kill_rank, launch, list_differences, read_losses

from torchtitan_lite.dump_folder import FILES

STEPS = 20
KEYS = [
    f"--training.steps={STEPS}",
    "--training.global_batch_size=12",
    "--validation.enable",
    "--validation.freq=10",
    "--validation.steps=3",
    "--checkpoint.interval=8",
    "--job.no_overwrite",
]
RANKS, LAYOUT = 2, "--training.local_batch_size=6"


@pytest.fixture(scope="module")
def unbroken(pool, tmp_path_factory) -> tuple[Path, list[str]]:
    """Dump folder of a run that nothing disturbs, and the keys of its data. Its ranks are the workers of the pool."""
    folder = tmp_path_factory.mktemp("train with spaces")
    keys = [*KEYS, *warm_start.write_letters(folder / "letters")]
    assert pool.run(warm_start.start, RANKS, [*keys, LAYOUT, f"--job.dump_folder={folder}"]) == [0] * RANKS
    return folder, keys


def test_a_killed_rank_is_restarted_and_the_run_ends_bit_equal_to_the_unbroken_one(unbroken, tmp_path):
    process = launch(tmp_path / "killed", tmp_path, *unbroken[1], LAYOUT, n_ranks=RANKS, MAX_RESTARTS="1")
    kill_rank(process, RANKS - 1, after_step=11)
    output = finish(process)
    assert "resumed from" in output and "step-8" in output
    assert list_differences(tmp_path / "killed", unbroken[0], STEPS) == []
    left = {path.name: path.is_dir() for path in (tmp_path / "killed").iterdir()}
    assert {name for name, is_folder in left.items() if is_folder} >= {"tb", "checkpoint"}
    files = {name for name, is_folder in left.items() if not is_folder}
    assert {"config.toml", "metrics.jsonl", "log.txt"} <= files <= set(FILES)


@pytest.mark.parametrize(
    ("n_ranks", "layout"),
    [(3, "--training.local_batch_size=4"), pytest.param(1, LAYOUT, marks=pytest.mark.slow)],  # slow: accumulates
)
def test_a_run_resumed_on_other_ranks_has_the_losses_of_the_unbroken_one(pool, unbroken, tmp_path, n_ranks, layout):
    shutil.copytree(unbroken[0] / "checkpoint" / "step-8", tmp_path / "checkpoint" / "step-8")
    keys = [*unbroken[1], layout, f"--job.dump_folder={tmp_path}"]
    assert pool.run(warm_start.start, n_ranks, keys) == [0] * n_ranks
    for name, steps in (("loss", list(range(9, STEPS + 1))), ("val_loss", [10, STEPS])):
        seen, expected = read_losses(tmp_path, name), read_losses(unbroken[0], name)
        assert list(seen) == steps
        assert seen == pytest.approx({step: expected[step] for step in steps}, rel=1e-4)
