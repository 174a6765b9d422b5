"""Train with one rank that hangs: `python hanging.py KIND RANK [--section.key value]...`."""

import importlib
import os
import pkgutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torchtitan_lite.preflight import RunSpec
from torchtitan_lite.tools import launch

HANG = "RANK_THAT_HANGS"  # variable: kind and rank
STEP = "train.train_step"
PLACES = {  # kind -> the function before which a rank hangs, and the number of the call
    "start": ("train.open_data", 1),
    "set-up": ("train.build_run", 1),
    "data": ("torchtitan_lite.data.dataset.SampleStream.batch", 4),
    "save": ("torchtitan_lite.checkpoint.save.write_tensors", 1),
    "validation": ("torchtitan_lite.validation.forward_only", 5),
}
ACTS = {
    "slow": lambda *_: time.sleep(9),
    "none": print,
    **dict.fromkeys(PLACES, lambda *_: time.sleep(10_000)),
}


def hang_at(place: str, number: int, act: Callable) -> None:
    """Wrap the function at `place`: before its call number `number`, call `act`."""
    original = pkgutil.resolve_name(place)
    calls = count(1)

    def function(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            act(*args)
        return original(*args, **options)

    patch(place, function).start()


def train(args: list[str], folder: Path, spec: RunSpec) -> int:
    """Train in this process, as one rank."""
    kind, rank = os.environ[HANG].split(",")
    if rank == os.environ["RANK"]:
        hang_at(*PLACES.get(kind, (STEP, 4)), ACTS[kind])
    return importlib.import_module("torchtitan_lite.tools.agent").train_rank(args, folder, spec)


if __name__ == "__main__":
    importable = importlib.import_module("hanging")  # ranks cannot import __main__
    os.environ[HANG] = ",".join(sys.argv[1:3])
    sys.exit(launch.main(Namespace(config_args=sys.argv[3:]), importable.train))
