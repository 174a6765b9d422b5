"""The contenders of `bench checkpoint`: a checkpoint of 1 GiB on one rank, and what this machine could do at best.

    save            to the disk and committed, in front of the next step
    write, hash     the same bytes written to a file and fsynced; hashed in memory
    write_or_hash   the slower of the two, round by round: a save that hashes all it writes cannot be faster
    load            the checkpoint, with every file hashed
    read            the file read once
    blocked         what an asynchronous save takes of the steps: asking for it, and waiting for its copy in front of
                    the optimizer, with a forward's worth of work between the two

Files are read from the page cache, as after a restart on the same machine: a disk would make the ratio of loading look
better than it is. What a turn has written is deleted between the turns, on the account of nobody. Every round makes
several asynchronous saves in a row, and says by how much the process has grown.
"""

import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.bench.rounds import Report, measure_rounds
from torchtitan_lite.bench.step import one_rank_group
from torchtitan_lite.checkpoint.load import load_checkpoint
from torchtitan_lite.checkpoint.manifest import HASH_BYTES, find_steps
from torchtitan_lite.checkpoint.save import CheckpointSaver
from torchtitan_lite.config.files import sync_folder
from torchtitan_lite.config.hardware import detect_machine
from torchtitan_lite.config.schema import Checkpoint

N_TENSORS, TENSOR_BYTES = 64, 16 * 2**20
BLOCK_BYTES = 2**20
SECONDS_OF_WORK = 0.5  # a forward and backward of the model whose checkpoint takes 1 GiB takes longer
SECTION = Checkpoint(enable=True, keep_latest_k=0)
RATIO_OF = {
    "save": ("save", "write_or_hash"),
    "load": ("load", "read_or_hash"),
    "blocked": ("save", "blocked"),  # of speeds, so the share of a save's time that the steps lose
}


def bench_checkpoint(
    *, n_rounds: int = 5, n_steps: int = 5, n_tensors: int = N_TENSORS, seconds_of_work: float = SECONDS_OF_WORK
) -> Report:
    """Measures all contenders; `n_steps` is the number of asynchronous saves in a round. Writes into TMPDIR."""
    device = torch.device("cpu")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, one_rank_group(device):
        bench = CheckpointBench(Path(folder), n_tensors, device)
        bench.save()
        contenders = {"save": bench.save, "write": bench.write, "hash": bench.hash, "load": bench.load}
        contenders["read"] = bench.read
        times_s = measure_rounds(
            contenders, n_rounds=n_rounds, n_steps=1, wait_for_device=lambda: None, clean_up=bench.clean_up
        )
        times_s["write_or_hash"] = [max(both) for both in zip(times_s["write"], times_s["hash"], strict=True)]
        times_s["read_or_hash"] = [max(both) for both in zip(times_s["read"], times_s["hash"], strict=True)]
        times_s["blocked"], grown_mib = bench.save_beside_steps(n_rounds, n_steps, find_work(seconds_of_work))
    setting = {
        "bench": "checkpoint",
        "device": detect_machine().name,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "asynchronous": {"saves": n_rounds * n_steps, "MiB grown after the first round": round(grown_mib, 1)},
    }
    n_mib = dict.fromkeys(times_s, n_tensors * TENSOR_BYTES // 2**20)
    return Report(setting, "MiB", n_mib, times_s, {}, RATIO_OF)


class CheckpointBench:
    """What takes turns. All of it handles the same bytes."""

    def __init__(self, folder: Path, n_tensors: int, device: torch.device):
        self.folder, self.device = folder, device
        self.contents = [bytearray(os.urandom(TENSOR_BYTES)) for _ in range(n_tensors)]
        self.tensors = {
            f"model.{number}": torch.frombuffer(content, dtype=torch.float32).view(-1, 1024)  # the same memory
            for number, content in enumerate(self.contents)
        }
        self.optimizer = torch.optim.SGD([torch.zeros(1)])
        self.group = dist.new_group(backend="gloo")
        self.saver = self.open_saver(SECTION)
        self.step = 0

    def open_saver(self, section: Checkpoint) -> CheckpointSaver:
        return CheckpointSaver(
            self.folder, section, self.optimizer, fingerprint={}, run={}, group=self.group, device=self.device
        )

    def save(self) -> None:
        self.step += 1
        self.saver.save(self.step, self.tensors)

    def write(self) -> None:
        path = self.folder / "plain"
        with open(path, "wb", buffering=0) as file:
            for content in self.contents:
                for start in range(0, TENSOR_BYTES, BLOCK_BYTES):
                    file.write(memoryview(content)[start : start + BLOCK_BYTES])
            os.fsync(file.fileno())

    def hash(self) -> None:
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        for content in self.contents:
            digest.update(content)

    def load(self) -> None:
        path = self.folder / f"step-{find_steps(self.folder)[-1]}"
        load_checkpoint(path, self.tensors, fingerprint={}, verify=True, group=self.group)

    def read(self) -> None:
        (path,) = self.folder.glob("step-*/*.safetensors")
        block = bytearray(BLOCK_BYTES)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass

    def clean_up(self) -> None:
        """Leaves the newest checkpoint only, and a disk that is not at work any more."""
        (self.folder / "plain").unlink(missing_ok=True)
        for step in find_steps(self.folder)[:-1]:
            shutil.rmtree(self.folder / f"step-{step}")
        sync_folder(self.folder)

    def save_beside_steps(self, n_rounds: int, n_saves: int, work: Callable[[], None]) -> tuple[list[float], float]:
        """Seconds per save that the steps were blocked, by round; MiB by which the process grew after the first."""
        times_s, memory_mib = [], []
        with self.open_saver(replace(SECTION, async_mode="async", keep_latest_k=1)) as saver:
            for _ in range(n_rounds):
                blocked_s = 0.0
                for _ in range(n_saves):
                    self.step += 1
                    start_s = time.perf_counter()
                    saver.save(self.step, self.tensors)
                    blocked_s += time.perf_counter() - start_s
                    work()
                    start_s = time.perf_counter()
                    saver.staging.wait()
                    blocked_s += time.perf_counter() - start_s
                    saver.wait()  # the steps of an interval would have passed: not counted
                times_s.append(blocked_s / n_saves)
                memory_mib.append(read_memory_mib())
        return times_s, memory_mib[-1] - memory_mib[0]


def find_work(seconds: float) -> Callable[[], None]:
    """Matrix products for about that long."""
    matrix = torch.randn(1024, 1024)
    start_s, n_products = time.perf_counter(), 0
    while time.perf_counter() - start_s < seconds:
        matrix @ matrix
        n_products += 1

    def work() -> None:
        for _ in range(n_products):
            matrix @ matrix

    return work


def read_memory_mib() -> float:
    """Resident memory of this process."""
    n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return n_pages * os.sysconf("SC_PAGE_SIZE") / 2**20
