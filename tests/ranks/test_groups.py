"""Process groups of a run: no two threads use the same one, and none waits longer than [comm] says."""

import threading
from collections import defaultdict
from functools import partial

import pytest
import torch
import torch.distributed as dist
import warm_start
from marks import slow

FRONT = (
    torch.DispatchKey.BackendSelect
)  # runs before the kernels of all devices; c10d has no kernels there
INIT_TIMEOUT_S = 200  # patient: a loaded machine is no failure
TRAIN_TIMEOUT_S = 100
KEYS = [
    "--training.global_batch_size=8",
    "--checkpoint.interval=1",
    "--checkpoint.enable_first_step_checkpoint",
    "--checkpoint.async_mode=async",
    "--metrics.no_enable_tensorboard",
    "--job.no_overwrite",
    "--validation.enable",
    "--validation.freq=1",
    "--validation.steps=1",
    f"--comm.init_timeout_seconds={INIT_TIMEOUT_S}",
    f"--comm.train_timeout_seconds={TRAIN_TIMEOUT_S}",
]
LAYOUTS = {
    "dp2": ["--training.local_batch_size=4"],
    "tp2": ["--training.local_batch_size=8", "--parallelism.tensor_parallel_degree=2"],
    "pp2": [
        "--training.local_batch_size=8",
        "--parallelism.pipeline_parallel_degree=2",
    ],
}


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> list[str]:
    return warm_start.write_letters(tmp_path_factory.mktemp("corpus") / "letters")


# ---------------------------------------------------------------- threads


def watch_start(
    rank: int, world_size: int, keys: list[str]
) -> tuple[int, dict[str, set], dict[str, float]]:
    """Worker: start train.py. Return its exit status, and for each group its threads and its time-out in the end.

    On a CPU, autograd calls collectives in the thread that called it. Two names are two threads that work at once.
    """
    threads = defaultdict(set)

    def note(operator, keys, *args):
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        threads[name_group(group)].add(threading.current_thread().name)
        return operator.redispatch(keys.remove(FRONT), *args)

    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, name = name.partition("::")
            if namespace != "c10d":
                continue
            operator = getattr(torch.ops.c10d, name).default
            if "ProcessGroup" in str(operator._schema):
                library.impl(
                    operator,
                    partial(note, operator),
                    FRONT.name,
                    with_keyset=True,
                )
        status = warm_start.start(rank, world_size, keys)
    timeouts_s = {}
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_backend(group) == "gloo":
            options = group._get_backend(torch.device("cpu")).options
            timeouts_s[name_group(group)] = options._timeout.total_seconds()
    return status, dict(threads), timeouts_s


def name_group(group: dist.ProcessGroup) -> str:
    return f"{group.group_desc}, {group.group_name}"


@pytest.mark.parametrize("layout", ["dp2", "pp2", slow("tp2")])
def test_no_two_threads_use_one_group_and_every_group_has_a_time_out_of_comm(
    pool, letters, tmp_path, layout
):
    keys = [*letters, *KEYS, *LAYOUTS[layout], f"--job.dump_folder={tmp_path}/run"]
    for steps in (4, 8):  # begins; resumes
        results = pool.run(watch_start, 2, [*keys, f"--training.steps={steps}"])
        for status, threads, timeouts_s in results:
            assert status == 0
            check_threads(threads)
            check_timeouts(timeouts_s)


def check_threads(threads: dict[str, set]) -> None:
    for group, names in threads.items():
        assert len(names) == 1, f"{names} share {group}"
    assert len(set().union(*threads.values())) == 2, "the main thread and the thread that saves"


def check_timeouts(timeouts_s: dict[str, float]) -> None:
    n_host_groups = 0
    for group, timeout_s in timeouts_s.items():
        if group.startswith(("host", "saver")):
            n_host_groups += 1
            assert timeout_s == INIT_TIMEOUT_S, group
        else:
            assert timeout_s == TRAIN_TIMEOUT_S, group
    assert n_host_groups == 2
