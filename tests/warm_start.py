"""Run train.py from top to bottom in the workers of a rank pool: a second, where torchrun takes ten to twenty."""

import io
import os
import signal
from contextlib import redirect_stdout
from pathlib import Path
from random import Random
from unittest.mock import patch

from made_corpora import write_corpus

import train
from torchtitan_lite.components.shutdown import StopRequest
from torchtitan_lite.tools.verify.train_start import make_environment, process_left_as_it_was


class StopAfter(StopRequest):
    """Gets SIGTERM in front of this step; 0: never."""

    def __init__(self, last_step: int):
        super().__init__()
        self.last_step = last_step

    def announce(self, step: int) -> None:
        self.received = signal.SIGTERM if step == self.last_step else None
        super().announce(step)


def start(rank: int, world_size: int, keys: list[str], last_step: int = 0) -> int:
    """Worker: train over the process group that this worker is in, as rank 0 gets SIGTERM. Return the exit status."""
    with (
        process_left_as_it_was(),
        redirect_stdout(io.StringIO()),
        patch.object(train, "start_process_group"),
        patch.object(train.dist, "destroy_process_group"),
    ):
        os.environ.update(make_environment(rank, world_size, port=0))
        return train.main(["--config=debug", *keys], StopAfter(last_step if rank == 0 else 0))


def write_letters(folder: Path) -> list[str]:
    """Write a small corpus of random letters. Return the keys of a small model that reads it."""
    draw = Random(0)
    documents = [draw.choices(range(97, 123), k=draw.randint(20, 200)) for _ in range(100)]
    write_corpus(folder, [documents[:80]], validation=[documents[80:]])
    dims = ["--model.dim=64", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.head_dim=16"]
    tokens = ["--model.ffn_dim=96", "--model.hf_assets_path=bytes", "--model.vocab_size=264", "--training.seq_len=32"]
    return [*dims, *tokens, f"--training.dataset={folder}", "--metrics.log_freq=1", "--checkpoint.enable"]
