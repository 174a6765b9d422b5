"""`bench io`: checkpoint, data and start-up, each as one ratio against what the machine can do at best.

    save       a checkpoint of 1 GiB, on the disk and committed, against the slower of a plain write with fsync and the
               hash of the same bytes: a save that hashes all it writes cannot be faster
    batches    SampleStream.batch (order of samples, targets, positions, checks) against raw windows of mapped files
    start      ./run_train.sh until the debug model has made one step on one rank, against `import torch`

Everything is written to TMPDIR. Files are read from the page cache. Each kind has its own rounds.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

from torchtitan_lite import REPOSITORY
from torchtitan_lite.checkpoint.manifest import find_steps
from torchtitan_lite.checkpoint.save import CheckpointSaver
from torchtitan_lite.config.files import sync_folder
from torchtitan_lite.config.schema import Checkpoint, Training
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.corpus_folder import MANIFEST, CorpusManifest, Split, dump_manifest
from torchtitan_lite.data.dataset import SampleReader, SampleStream
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.tools.bench.rounds import BenchFailed, Report, measure_rounds, one_rank_group, read_setting

TENSOR_BYTES, BLOCK_BYTES = 16 * 2**20, 2**20
TOKENIZER = "assets/tokenizer"
START = ["bash", str(REPOSITORY / "run_train.sh")]
START += "--config debug --training.steps 1 --checkpoint.no_enable".split()
RATIO_OF = {
    "save": ("save", "write_or_hash"),
    "batches": ("batches", "raw_windows"),
    "start": ("start", "import_torch"),
}


def bench_io(
    *, n_rounds: int = 5, n_steps: int = 1, n_tensors: int = 64, n_tokens: int = 10**8, n_windows: int = 4096
) -> Report:
    """Measure the three kinds on the CPU."""
    torch.set_num_threads(1)
    times_s: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-io-") as name, one_rank_group(torch.device("cpu")):
        folder = Path(name)
        checkpoint = CheckpointBench(folder / "checkpoint", n_tensors)
        kinds = [
            ({"save": checkpoint.save, "write": checkpoint.write, "hash": checkpoint.hash}, checkpoint.clean_up),
            (build_reading(folder, n_tokens, n_windows), lambda: None),
            (build_starts(folder), lambda: None),
        ]
        for contenders, clean_up in kinds:
            for work in contenders.values():
                work()  # the first time allocates, and reads files into memory
            times_s |= measure_rounds(contenders, n_rounds=n_rounds, n_steps=n_steps, clean_up=clean_up)
    times_s["write_or_hash"] = [max(both) for both in zip(times_s["write"], times_s["hash"], strict=True)]
    n_mib = n_tensors * TENSOR_BYTES // 2**20
    setting = {
        **read_setting("io"),
        "checkpoint": f"{n_mib} MiB",
        "windows": {"of": Training.seq_len + 1, "n": n_windows, "tokens of the corpus": n_tokens},
        "rounds": {"n_rounds": n_rounds, "n_steps": n_steps},
    }
    return Report(setting, "turns", dict.fromkeys(times_s, 1), times_s, {}, RATIO_OF)


class CheckpointBench:
    """Saves, writes and hashes the same bytes."""

    def __init__(self, folder: Path, n_tensors: int):
        folder.mkdir()
        self.folder, self.step = folder, 0
        self.contents = [bytearray(os.urandom(TENSOR_BYTES)) for _ in range(n_tensors)]
        self.tensors = {
            f"model.{number}": torch.frombuffer(content, dtype=torch.float32).view(-1, 1024)  # the same memory
            for number, content in enumerate(self.contents)
        }
        self.saver = CheckpointSaver(
            folder,
            Checkpoint(enable=True, keep_latest_k=0),
            torch.optim.SGD([torch.zeros(1)]),
            fingerprint={},
            run={},
            group=dist.new_group(backend="gloo"),
            device=torch.device("cpu"),
        )

    def save(self) -> None:
        self.step += 1
        self.saver.save(self.step, self.tensors)

    def write(self) -> None:
        with open(self.folder / "plain", "wb", buffering=0) as file:
            for content in self.contents:
                for start in range(0, TENSOR_BYTES, BLOCK_BYTES):
                    file.write(memoryview(content)[start : start + BLOCK_BYTES])
            os.fsync(file.fileno())

    def hash(self) -> None:
        digest = hashlib.blake2b()
        for content in self.contents:
            digest.update(content)

    def clean_up(self) -> None:
        """Keep the newest checkpoint only, and wait for the disk."""
        (self.folder / "plain").unlink(missing_ok=True)
        for step in find_steps(self.folder)[:-1]:
            shutil.rmtree(self.folder / f"step-{step}")
        sync_folder(self.folder)


def build_reading(folder: Path, n_tokens: int, n_windows: int) -> dict[str, Callable[[], None]]:
    """Return two contenders that read as many windows of seq_len + 1 tokens from all over one corpus."""
    tokenizer, path = load_tokenizer(TOKENIZER), folder / "train.tokens"
    seq_len, n_rows = Training.seq_len, Training.local_batch_size
    block = torch.randint(tokenizer.vocab_size, (2**20,), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
    content = bytes(block.view(torch.uint8).tolist())  # bytes() of a torch storage takes two seconds a MiB
    with open(path, "wb") as file:
        for start in range(0, n_tokens, len(block)):
            file.write(content[: 2 * (n_tokens - start)])
    (folder / "train.documents").write_bytes(bytes(8))
    split = Split(n_tokens, 1, 0, 0, {"tokens": "", "documents": ""})
    (folder / MANIFEST).write_text(dump_manifest(CorpusManifest("uint16", tokenizer.identity, {"train": split})))
    corpus = open_corpus(str(folder), tokenizer, cache_folder=folder)
    reader = SampleReader([corpus], seq_len=seq_len, vocab_size=tokenizer.vocab_size)
    stream = SampleStream(reader, global_batch_size=n_rows, seed=0)
    steps, draw = count(), Random(0)
    starts = [draw.randrange(n_tokens - seq_len) for _ in range(n_windows)]

    def read_windows() -> None:
        with open(path, "rb") as file:  # mapped anew, so that none of its pages is in the process
            tokens = torch.frombuffer(mmap(file.fileno(), 0, access=ACCESS_COPY), dtype=torch.uint16)
        for start in starts:
            tokens[start : start + seq_len + 1].to(torch.int64)

    def read_batches() -> None:
        for _ in range(n_windows // n_rows):
            stream.batch(next(steps), range(n_rows))

    return {"raw_windows": read_windows, "batches": read_batches}


def build_starts(folder: Path) -> dict[str, Callable[[], None]]:
    """Return the start of a run, whose corpus is tokenised in its first turn, and `import torch`."""
    environment = os.environ | {"NGPU": "1", "NNODES": "1", "PYTHON": sys.executable}
    folders = ["--job.dump_folder", str(folder / "run"), "--training.cache_folder", str(folder / "corpora")]

    def run(command: list[str]) -> None:
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise BenchFailed(f"{' '.join(command)} failed:\n{done.stdout.strip()}\n{done.stderr.strip()}")

    return {
        "import_torch": lambda: run([sys.executable, "-c", "import torch"]),
        "start": lambda: run([*START, *folders]),
    }
