"""Process groups of a run: no two threads talk over one of them, and none waits longer than [comm] says.

STARTS=50 makes the test with slow disks as long as one likes.
"""

import gc
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import PP, SCHEDULE, TP
from made_corpora import write_corpus
from torchtitan_lite.tools.plan.step_measure import FRONT, TrafficCount

import train
from torchtitan_lite import step as stepping
from torchtitan_lite.checkpoint.save import CheckpointSaver
from torchtitan_lite.checkpoint.storage import StorageWriter
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.parallel.mesh import list_groups, make_host_group, set_timeouts
from torchtitan_lite.tools.plan import step_measure

N_STARTS = int(os.environ.get("STARTS", 3))
INIT_TIMEOUT_S, TRAIN_TIMEOUT_S = 200, 100  # patient: a loaded machine is no failure
SIZES = "dim=32 n_layers=2 n_heads=4 n_kv_heads=2 head_dim=8 ffn_dim=32 hf_assets_path=bytes vocab_size=264".split()
KEYS = [
    *(f"--model.{size}" for size in SIZES),
    *(f"--training.{size}" for size in ("seq_len=16", "global_batch_size=8")),
    *(f"--checkpoint.{key}" for key in ("enable", "interval=1", "enable_first_step_checkpoint", "async_mode=async")),
    "--metrics.no_enable_tensorboard",
    "--job.no_overwrite",
    f"--comm.init_timeout_seconds={INIT_TIMEOUT_S}",
    f"--comm.train_timeout_seconds={TRAIN_TIMEOUT_S}",
]
VALIDATED = ["--validation.enable", "--validation.freq=1", "--validation.steps=1"]
EXPORTED = ["--checkpoint.last_save_model_only", "--checkpoint.export_dtype=float16", "--checkpoint.last_save_in_hf"]
LAYOUTS = {
    "dp2": ["--training.local_batch_size=4"],
    "tp2": ["--training.local_batch_size=8", "--parallelism.tensor_parallel_degree=2"],
    "pp2": ["--training.local_batch_size=8", "--parallelism.pipeline_parallel_degree=2"],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Some thousand tokens, some hundred of them held out."""
    document = list(range(97, 123)) * 10
    return write_corpus(tmp_path_factory.mktemp("corpus") / "letters", [[document] * 10], validation=[[document] * 2])


def start(rank: int, world_size: int, keys: list[str], slow_rank: int | None = None) -> int:
    """Worker: train.py from top to bottom over the group that this worker is in. Its exit status.

    The disk of `slow_rank` is the slowest there can be: it has written nothing before the steps wait for it.
    """
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    write_data, wait = StorageWriter.write_data, CheckpointSaver.wait
    waited_for = threading.Event()

    def write_slowly(*args):
        waited_for.wait()
        return write_data(*args)

    def wait_for_slow(saver: CheckpointSaver) -> None:
        waited_for.set()
        try:
            wait(saver)
        finally:
            waited_for.clear()

    try:
        with (
            patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
            patch.object(train, "start_process_group"),
            patch.object(train, "start_logging"),
            patch.object(train.dist, "destroy_process_group"),
            patch.object(StorageWriter, "write_data", write_slowly if rank == slow_rank else write_data),
            patch.object(CheckpointSaver, "wait", wait_for_slow),
        ):
            return train.main(["--config=debug", *keys])
    finally:
        gc.unfreeze()
        gc.enable()


# ---------------------------------------------------------------- threads


@contextmanager
def groups_watched() -> Iterator[dict[str, set[str]]]:
    """Notes, by group, the threads of this process that issue collectives, sends and receives over it.

    On a CPU autograd calls them in the thread that called it, so that two names are two threads at work at once.
    """
    threads: dict[str, set[str]] = defaultdict(set)

    def note(operator: torch._ops.OpOverload, keys: torch.DispatchKeySet, *args):
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        threads[name_group(dist.ProcessGroup.unbox(boxed))].add(threading.current_thread().name)
        return operator.redispatch(keys.remove(FRONT), *args)

    operators = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    with torch.library._scoped_library("c10d", "IMPL") as library:
        for operator in (getattr(torch.ops.c10d, name.removeprefix("c10d::")).default for name in operators):
            if "ProcessGroup" in str(operator._schema):
                library.impl(operator, partial(note, operator), FRONT.name, with_keyset=True)
        yield threads


def name_group(group: dist.ProcessGroup) -> str:
    return f"{group.group_desc}, {group.group_name}"


def watch_start(rank: int, world_size: int, keys: list[str]) -> tuple[int, dict[str, set[str]], dict[str, float]]:
    """Worker: exit status of this start; by group, the threads that talked over it, and its time-out in the end."""

    def uncounted(layout, **options) -> Iterator[TrafficCount]:
        yield TrafficCount(layout, **options)

    with groups_watched() as threads, patch.object(step_measure, "count_traffic", contextmanager(uncounted)):
        status = start(rank, world_size, keys)
    backends = {name_group(group): group._get_backend(torch.device("cpu")) for group in list_groups()}
    return status, dict(threads), {name: one.options._timeout.total_seconds() for name, one in backends.items()}


@pytest.mark.parametrize("layout", ["dp2", "pp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_no_two_threads_talk_over_one_group_and_every_group_has_a_time_out_of_comm(pool, corpus, tmp_path, layout):
    folders = [f"--training.dataset={corpus}", f"--job.dump_folder={tmp_path}/run"]
    keys = [*KEYS, *LAYOUTS[layout], *VALIDATED, *folders]
    for more_keys in (["--training.steps=4"], ["--training.steps=8", *EXPORTED]):  # begins; resumes
        for status, threads, timeouts_s in pool.run(watch_start, 2, [*keys, *more_keys]):
            assert status == 0
            assert {group: names for group, names in threads.items() if len(names) > 1} == {}
            assert set().union(*threads.values()) == {"MainThread", "checkpoint_0"}
            assert threads.keys() <= timeouts_s.keys()
            of_disks = {name: timeouts_s.pop(name) for name in list(timeouts_s) if name.startswith(("host", "saver"))}
            assert set(of_disks.values()) == {INIT_TIMEOUT_S} and len(of_disks) == 2
            assert set(timeouts_s.values()) == {TRAIN_TIMEOUT_S}, timeouts_s
    assert (tmp_path / "run" / "checkpoint" / "step-8-hf").is_dir()


def test_starts_end_whichever_disk_is_slow(pool, corpus, tmp_path):
    for number in range(N_STARTS):
        layout, slow_rank = list(LAYOUTS)[number % len(LAYOUTS)], number % 2
        folders = [f"--training.dataset={corpus}", f"--job.dump_folder={tmp_path}/{number}"]
        keys = [*KEYS, *LAYOUTS[layout], *folders, "--training.steps=4"]
        assert pool.run(start, 2, keys, slow_rank) == [0, 0], (layout, slow_rank)
        assert len(list((tmp_path / str(number) / "checkpoint").iterdir())) == 4


# ---------------------------------------------------------------- time-outs


HUNG = {  # ranks, keys, steps before: of the next one, the second half of the ranks does nothing
    "dp2": (2, {}, 1),
    "pp2": (2, {PP: 2}, 1),
    "pp2 in its first step": (2, {PP: 2}, 0),
    "pp2 x tp2, interleaved": (4, {PP: 2, TP: 2, SCHEDULE: "Interleaved1F1B"}, 1),
}


def wait_for_hung_peers(rank: int, world_size: int, keys: dict[str, object], n_steps: int) -> str:
    """Worker: what a rank of the first half raises when the others do not come to a step."""
    run = compare.build_table_run(world_size, keys)
    batch = compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size))
    for _ in range(n_steps):
        stepping.train_step(run, batch)
    set_timeouts(1, run.schedule)
    store = dist.distributed_c10d._get_default_store()
    if rank >= world_size // 2:
        store.wait(["rank 0 gave up"])
        return ""
    try:
        stepping.train_step(run, batch)
    except RuntimeError as error:
        return str(error)
    finally:
        if rank == 0:
            store.set("rank 0 gave up", "")
    return "no time-out"


@pytest.mark.parametrize("name", HUNG)
def test_a_hung_peer_is_waited_for_as_long_as_was_set_and_no_longer(pool, name):
    world_size, *args = HUNG[name]
    assert "1000ms" in pool.run(wait_for_hung_peers, world_size, *args)[0]


def wait_for_slow_disk(rank: int, world_size: int, folder: Path) -> str:
    """Worker: what a rank raises when the disk of rank 1 has not finished in a second."""
    group = make_host_group("saver", timeout_s=1)
    tensors = {name: torch.ones(3) for name in "ab"}
    optimizer = torch.optim.SGD(list(tensors.values()))
    options = {"fingerprint": {}, "run": {}, "group": group, "device": torch.device("cpu")}
    saver = CheckpointSaver(folder, Checkpoint(enable=True, on_save_error="continue"), optimizer, **options)
    store, write_data = dist.distributed_c10d._get_default_store(), StorageWriter.write_data

    def write_late(*args):
        store.wait(["rank 0 gave up"])
        return write_data(*args)

    with patch.object(StorageWriter, "write_data", write_late if rank == 1 else write_data):
        try:
            saver.save(1, tensors)
        except RuntimeError as error:
            return str(error)
        finally:
            store.set("rank 0 gave up", "")
    return "no time-out"


def test_a_save_that_waits_too_long_for_a_disk_names_the_key_and_ends_the_run(pool, tmp_path):
    said = pool.run(wait_for_slow_disk, 2, tmp_path)[0]
    assert "step-1 was not saved" in said and "comm.init_timeout_seconds" in said and "1000ms" in said
