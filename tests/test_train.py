"""train.py under torchrun, started as users start it: killed, restarted, resumed on another layout."""

import shutil
from pathlib import Path
from subprocess import Popen

import pytest
from kill_while_training import finish, kill_rank, launch, list_differences, read_losses

from torchtitan_lite.dump_folder import FILES

STEPS = 28
KEYS = [
    f"--training.steps={STEPS}",
    "--model.n_layers=2",
    "--training.seq_len=32",
    "--training.global_batch_size=12",
    "--validation.enable",
    "--validation.freq=10",
    "--validation.steps=3",
    "--metrics.log_freq=1",
    "--checkpoint.enable",
    "--checkpoint.interval=8",
    "--job.no_overwrite",
]
RANKS = 4
OTHER_LAYOUTS = {  # ranks, keys: three data-parallel degrees with other microbatches
    "one rank": (1, ["--training.local_batch_size=6"]),
    "dp2": (2, ["--training.local_batch_size=3"]),
    "dp3": (3, ["--training.local_batch_size=4"]),
}


def start(dump_folder: Path, cache: Path, *more_keys: str, n_ranks: int = RANKS, **environment: str) -> Popen:
    keys = [*KEYS, "--training.local_batch_size=3", *more_keys]
    return launch(dump_folder, cache, *keys, n_ranks=n_ranks, **environment)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Dump folder of a run that nothing disturbed, and its cache."""
    folder = tmp_path_factory.mktemp("train with spaces")
    finish(start(folder / "unbroken", folder / "cache"))
    return folder / "unbroken", folder / "cache"


def test_a_run_leaves_what_the_readme_says(unbroken):
    dump_folder, _ = unbroken
    assert {path.name for path in dump_folder.iterdir() if path.is_dir()} >= {"tb", "checkpoint"}
    files = {path.name for path in dump_folder.iterdir() if path.is_file()}
    assert {"config.toml", "metrics.jsonl", "log.txt"} <= files <= set(FILES)
    assert list(read_losses(dump_folder)) == list(range(1, STEPS + 1))


def test_a_killed_rank_is_restarted_and_the_run_ends_bit_equal_to_the_unbroken_one(unbroken, tmp_path):
    process = start(tmp_path / "killed", unbroken[1], MAX_RESTARTS="1")
    kill_rank(process, RANKS - 1, after_step=11)
    output = finish(process)
    assert "resumed from" in output and "step-8" in output
    assert list_differences(tmp_path / "killed", unbroken[0], STEPS) == []


@pytest.mark.parametrize("name", ["dp3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one rank", "dp2"))])
def test_a_run_resumed_on_another_layout_has_the_losses_of_the_unbroken_one(unbroken, tmp_path, name):
    n_ranks, keys = OTHER_LAYOUTS[name]
    shutil.copytree(unbroken[0] / "checkpoint" / "step-8", tmp_path / "resumed" / "checkpoint" / "step-8")
    finish(start(tmp_path / "resumed", unbroken[1], *keys, n_ranks=n_ranks))
    losses, expected = read_losses(tmp_path / "resumed"), read_losses(unbroken[0])
    assert list(losses) == list(range(9, STEPS + 1))  # 20 of them
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-4)
    validated = read_losses(tmp_path / "resumed", "val_loss")
    expected = read_losses(unbroken[0], "val_loss")
    assert list(validated) == [10, 20, STEPS] and list(expected) == [1, *validated]
    assert validated == pytest.approx({step: expected[step] for step in validated}, rel=1e-4)
