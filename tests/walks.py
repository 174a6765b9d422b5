"""Print which files the walks of torchtitan_lite/README.md pass through, from a trace:
`PYTHONPATH=. python3 tests/walks.py`.

token     from a corpus to the update of a weight: what `next(batches)` and `train_step` call on one rank
weight    to disk and back: what a saver calls after a step, and the start of the next run
degree    parallelism.tensor_parallel_degree: the functions that name it, from the config to the shards
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import train
from torchtitan_lite import REPOSITORY
from torchtitan_lite.__main__ import main
from torchtitan_lite.checkpoint.save import CheckpointSaver
from torchtitan_lite.components.signals import StopFlag
from torchtitan_lite.data import dataset

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
DEGREE = "parallelism.tensor_parallel_degree"
NAMES = {DEGREE, DEGREE.partition(".")[2], "tp"}


class Walk:
    """Notes the files of the functions that are called in `follow`. `names`: only functions that use one of them."""

    def __init__(self, names: set[str] | None = None):
        self.names = names
        self.files: set[str] = set()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = Path(code.co_filename)
        if event != "call" or code.co_name == "<module>" or not file.is_relative_to(REPOSITORY):
            return
        if not self.names or self.names & {*code.co_names, *code.co_varnames, *code.co_consts}:
            self.files.add(str(file.relative_to(REPOSITORY)))

    def follow(self, function: Callable) -> Callable:
        def followed(*args: Any, **options: Any) -> Any:
            sys.setprofile(self.note)
            try:
                return function(*args, **options)
            finally:
                sys.setprofile(None)

        return followed


def trace_training(folder: str) -> dict[str, set[str]]:
    """Train a step, save, resume, and train another step."""
    token = Walk()
    reading = Walk()
    weight = Walk()
    train.train_step = token.follow(train.train_step)
    train.start_from = weight.follow(train.start_from)
    CheckpointSaver.after_step = weight.follow(CheckpointSaver.after_step)
    dataset.SampleStream.batch = reading.follow(dataset.SampleStream.batch)  # in a thread
    os.environ |= ONE_RANK | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for n_steps in (1, 2):
        args = [f"--job.dump_folder={folder}", f"--training.steps={n_steps}"]
        assert train.main([*args, "--validation.no_enable"], StopFlag("0")) == 0
    return {"token": token.files | reading.files, "weight": weight.files}


def trace_degree() -> set[str]:
    """Build a run as a rank of two, as `plan --dry-run` does."""
    walk = Walk(NAMES)
    args = [
        "plan",
        "--dry-run",
        "--config",
        "debug",
        "--gpus",
        "2",
        "--gpu",
        "cpu",
        f"--{DEGREE}=2",
    ]
    walk.follow(main)(args)
    return {file for file in walk.files if "/tools/" not in file}


if __name__ == "__main__":
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        walks = {**trace_training(folder), "degree": trace_degree()}
    print(json.dumps({name: sorted(files) for name, files in walks.items()}, indent=1))
