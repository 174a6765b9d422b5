"""train.py under torchrun, started as users start it: killed, restarted, resumed on another layout."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import assemble, list_differing

REPOSITORY = Path(__file__).resolve().parent.parent
STEPS = 28
KEYS = [
    f"--training.steps={STEPS}",
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
OTHER_LAYOUTS = {  # ranks, keys: three data-parallel degrees with other microbatches, and tp
    "one rank": (1, ["--training.local_batch_size=6"]),
    "dp2": (2, ["--training.local_batch_size=3"]),
    "dp3": (3, ["--training.local_batch_size=4"]),
    "tp2": (2, ["--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=12"]),
}


def start(dump_folder: Path, cache: Path, *more_keys: str, **environment: str) -> subprocess.Popen:
    """./run_train.sh on four ranks. torchrun takes the shell's place, so its pid is the one returned."""
    command = [str(REPOSITORY / "run_train.sh"), "--config", "debug", *KEYS, "--job.dump_folder", str(dump_folder)]
    command += ["--training.cache_folder", str(cache), "--training.local_batch_size=3", *more_keys]
    environment = {**os.environ, "NGPU": str(RANKS), "PYTHON": sys.executable, **environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks before itself
        process.wait()
        raise
    assert process.returncode == 0, output
    return output


def read_losses(dump_folder: Path, name: str = "loss") -> dict[int, float]:
    """Step -> its loss, or another number that was measured."""
    lines = [json.loads(line) for line in (dump_folder / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines), "a step was logged twice"
    return {line["step"]: line[name] for line in lines if line[name] is not None}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Dump folder of a run that nothing disturbed, and its cache."""
    folder = tmp_path_factory.mktemp("train with spaces")
    finish(start(folder / "unbroken", folder / "cache"))
    return folder / "unbroken", folder / "cache"


def test_a_run_leaves_what_the_readme_says(unbroken):
    dump_folder, _ = unbroken
    assert {path.name for path in dump_folder.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "tb",
        "checkpoint",
        "log.txt",
    }
    assert list(read_losses(dump_folder)) == list(range(1, STEPS + 1))


def test_a_killed_rank_is_restarted_and_the_run_ends_bit_equal_to_the_unbroken_one(unbroken, tmp_path):
    process = start(tmp_path / "killed", unbroken[1], MAX_RESTARTS="1")
    for line in process.stdout:
        if f"step 11/{STEPS}" in line:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            break
    output = finish(process)
    assert "resumed from" in output and "step-8" in output
    assert read_losses(tmp_path / "killed") == read_losses(unbroken[0])
    expected = assemble(unbroken[0] / "checkpoint" / f"step-{STEPS}")
    state = assemble(tmp_path / "killed" / "checkpoint" / f"step-{STEPS}")
    assert list_differing(state, expected) == []


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_a_run_resumed_on_another_layout_has_the_losses_of_the_unbroken_one(unbroken, tmp_path, name):
    n_ranks, keys = OTHER_LAYOUTS[name]
    shutil.copytree(unbroken[0] / "checkpoint" / "step-8", tmp_path / "resumed" / "checkpoint" / "step-8")
    finish(start(tmp_path / "resumed", unbroken[1], *keys, NGPU=str(n_ranks)))
    losses, expected = read_losses(tmp_path / "resumed"), read_losses(unbroken[0])
    assert list(losses) == list(range(9, STEPS + 1))  # 20 of them
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-4)
    validated = read_losses(tmp_path / "resumed", "val_loss")
    expected = read_losses(unbroken[0], "val_loss")
    assert list(validated) == [10, 20, STEPS] and list(expected) == [1, *validated]
    assert validated == pytest.approx({step: expected[step] for step in validated}, rel=1e-4)
