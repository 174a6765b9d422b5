"""Process groups of a run: no two threads use the same one, and none waits longer than [comm] says."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import compare
import pytest
import torch
import torch.distributed as dist
import warm_start

from torchtitan_lite import step as stepping
from torchtitan_lite.parallel.process_groups import Groups, make_host_group, set_timeouts

FRONT = torch.DispatchKey.BackendSelect  # runs before the kernels of all devices; c10d has no kernels there
INIT_TIMEOUT_S, TRAIN_TIMEOUT_S = 200, 100  # patient: a loaded machine is no failure
KEYS = ["--training.global_batch_size=8", "--checkpoint.interval=1", "--checkpoint.enable_first_step_checkpoint"]
KEYS += ["--checkpoint.async_mode=async", "--metrics.no_enable_tensorboard", "--job.no_overwrite"]
KEYS += [f"--comm.init_timeout_seconds={INIT_TIMEOUT_S}", f"--comm.train_timeout_seconds={TRAIN_TIMEOUT_S}"]
VALIDATED = ["--validation.enable", "--validation.freq=1", "--validation.steps=1"]
LAYOUTS = {
    "dp2": ["--training.local_batch_size=4"],
    "tp2": ["--training.local_batch_size=8", "--parallelism.tensor_parallel_degree=2"],
    "pp2": ["--training.local_batch_size=8", "--parallelism.pipeline_parallel_degree=2"],
}


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> list[str]:
    return warm_start.write_letters(tmp_path_factory.mktemp("corpus") / "letters")


# ---------------------------------------------------------------- threads


def watch_start(rank: int, world_size: int, keys: list[str]) -> tuple[int, dict[str, set[str]], dict[str, float]]:
    """Worker: start train.py. Return its exit status; by group, the threads that used it, and its time-out in the end.

    On a CPU autograd calls collectives in the thread that called it, so two names are two threads at work at once.
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
        status = warm_start.start(rank, world_size, keys)
    groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) == "gloo"]
    backends = {name_group(group): group._get_backend(torch.device("cpu")) for group in groups}
    return status, dict(threads), {name: one.options._timeout.total_seconds() for name, one in backends.items()}


def name_group(group: dist.ProcessGroup) -> str:
    return f"{group.group_desc}, {group.group_name}"


@pytest.mark.parametrize("layout", ["dp2", "pp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_no_two_threads_use_one_group_and_every_group_has_a_time_out_of_comm(pool, letters, tmp_path, layout):
    keys = [*letters, *KEYS, *LAYOUTS[layout], *VALIDATED, f"--job.dump_folder={tmp_path}/run"]
    for steps in (4, 8):  # begins; resumes
        for status, threads, timeouts_s in pool.run(watch_start, 2, [*keys, f"--training.steps={steps}"]):
            assert status == 0
            assert {group: names for group, names in threads.items() if len(names) > 1} == {}
            assert len(set().union(*threads.values())) == 2, "the main thread and the one that saves"
            of_disks = {name: timeouts_s.pop(name) for name in list(timeouts_s) if name.startswith(("host", "saver"))}
            assert set(of_disks.values()) == {INIT_TIMEOUT_S} and len(of_disks) == 2
            assert set(timeouts_s.values()) == {TRAIN_TIMEOUT_S}, timeouts_s


# ---------------------------------------------------------------- time-outs


def wait_for_hung_peer(rank: int, world_size: int) -> str:
    """Worker: return what rank 0 raises when the other rank does not come to the second step."""
    run = compare.build_table_run(world_size, {})
    batch = compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size))
    stepping.train_step(run, batch)
    set_timeouts(1, Groups(*(make_host_group(name, INIT_TIMEOUT_S) for name in ("host", "saver"))))
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["rank 0 gave up"])
        return ""
    with giving_up():
        try:
            stepping.train_step(run, batch)
        except RuntimeError as error:
            return str(error)
    return "no time-out"


@contextmanager
def giving_up() -> Iterator[None]:
    """Context manager: on exit, tell the other ranks that rank 0 waits no longer."""
    try:
        yield
    finally:
        if dist.get_rank() == 0:
            dist.distributed_c10d._get_default_store().set("rank 0 gave up", "")


def test_a_hung_peer_is_waited_for_as_long_as_was_set_and_no_longer(pool):
    assert "1000ms" in pool.run(wait_for_hung_peer, 2)[0]
