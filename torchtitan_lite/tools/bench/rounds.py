"""Measure in rounds: contenders take turns in one process, so only neighbors in time are compared.

    round 1    trainer       bare_loop     transformers  compiled        a turn: n_steps, timed as one
    round 2    bare_loop     transformers  compiled      trainer         another one is first
    ratio      the median, over the rounds, of (speed of one / speed of the other, both of that round)

A speed depends on the machine more than on the code, and on a shared machine it drifts. The ratio of neighbors does
not, and a median ignores the round in which somebody else was busy.
"""

import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from torchtitan_lite.config.block import FlopsPerToken
from torchtitan_lite.config.machine import detect_machine, list_gpus, select_visible

CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu")  # as nvidia-smi calls them


class BenchFailed(Exception):
    """A bench without a result, or contenders that do not compute the same."""


class Absent(Exception):
    """A contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Report:
    """The result of a bench."""

    setting: dict[str, object]  # what ran, on what, with which versions, when
    unit: str  # of the counted work: "tokens"
    units_per_step: dict[str, int]  # contender -> work of its step
    step_times_s: dict[str, list[float]]  # contender -> seconds per step in each round
    absent: dict[str, str]  # contender -> why it did not run
    ratio_of: dict[str, tuple[str, str]]  # ratio -> (contender, the one it is divided by): above 1, the first is faster
    figures: dict[str, list[float]] = field(default_factory=dict)  # numbers without contenders, one a round
    flops_per_token: dict[str, FlopsPerToken] = field(default_factory=dict)  # of contenders that train
    peak_flops: float | None = None  # of the device by its data sheet, FLOP/s; None: unknown, as for a CPU
    matmul_flops: dict[str, float] = field(default_factory=dict)  # contender -> measured beside it, FLOP/s
    memory_gib: dict[str, float] = field(default_factory=dict)  # contender -> as the bench defines it


# ---------------------------------------------------------------- measuring


def measure_rounds(
    contenders: dict[str, Callable[[], object]],
    *,
    n_rounds: int,
    n_steps: int,
    wait_for_device: Callable[[], None] = lambda: None,
    read_clock_s: Callable[[], float] = time.perf_counter,
    clean_up: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return name -> seconds per step of each round. `clean_up` follows each turn, outside of its time."""
    step_times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for name in order_turns(list(contenders), n_rounds):
        with collection_paused():
            wait_for_device()
            start_s = read_clock_s()
            for _ in range(n_steps):
                contenders[name]()
            wait_for_device()  # a GPU works long after the call has returned
            step_times_s[name].append((read_clock_s() - start_s) / n_steps)
        clean_up()
    return step_times_s


def order_turns(names: list[str], n_rounds: int) -> Iterator[str]:
    """Yield whose turn it is. Another one is first each round."""
    for number in range(n_rounds):
        first = number % len(names)
        yield from names[first:] + names[:first]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Context manager: collects garbage before, and none inside, where it would delay an arbitrary contender."""
    gc.collect(1)  # young objects, so those of the last turn: a full collection takes a fifth of a second
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def one_rank_group(device: torch.device) -> Iterator[None]:
    """Context manager: a process group of this process alone, which the trainer needs."""
    cuda = device.type == "cuda"
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device if cuda else None)
    try:
        yield
    finally:
        dist.destroy_process_group()


def read_setting(bench: str, *packages: str) -> dict[str, object]:
    """Return where and when a bench runs, with versions of Python, torch and the named packages."""
    return {
        "bench": bench,
        "device": detect_machine().name,
        "clocks": read_clocks(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            **{package: find_version(package) for package in packages},
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
    }


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_clocks() -> dict[str, str] | None:
    """Return clocks, power and temperature of the first GPU now; None without nvidia-smi or a GPU."""
    gpus = select_visible(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return None
    query = ["nvidia-smi", f"--id={gpus[0].uuid}", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return dict(zip(CLOCKS, answer.strip().split(", "), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
