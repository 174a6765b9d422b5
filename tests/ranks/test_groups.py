"""Test process groups: no two threads (including gloo's) use the same group, and the timeouts are those in [comm]."""

import gc
import os
import threading
from collections import defaultdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock, patch

import torch
import torch.distributed as dist
import warm_start
from marks import each_row
from torch.distributed import ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh

from torchtitan_lite.config.schema import Config
from torchtitan_lite.parallel import gloo_workers, process_groups
from torchtitan_lite.tools.verify.ranks import RankPool
from torchtitan_lite.tools.verify.reduction import override

# a dispatch key that runs before the kernels of all devices; c10d has no kernels of this key
FRONT = torch.DispatchKey.BackendSelect
INIT_TIMEOUT_S = 200  # long, so that the test does not fail on a loaded machine
TRAIN_TIMEOUT_S = 100
KEYS = f"""
--training.global_batch_size=8 --checkpoint.interval=1 --checkpoint.enable_first_step_checkpoint
--checkpoint.async_mode=async --metrics.no_enable_tensorboard --job.no_overwrite
--validation.enable --validation.freq=1 --validation.steps=1
--comm.init_timeout_seconds={INIT_TIMEOUT_S} --comm.train_timeout_seconds={TRAIN_TIMEOUT_S}
""".split()
LAYOUTS = {
    "dp2": "--training.local_batch_size=4",
    "tp2": "--training.local_batch_size=8 --parallelism.tensor_parallel_degree=2",
    "pp2": "--training.local_batch_size=8 --parallelism.pipeline_parallel_degree=2",
}


# ---------------------------------------------------------------- threads


def watch_start(
    rank: int, world_size: int, keys: list[str]
) -> tuple[int, int, dict[str, set], dict[str, float]]:
    """Worker: start train.py in a process that has not yet limited gloo's workers.

    Return the exit status of train.py, the number of workers beyond one per group, the threads of each group, and the
    final time-out of each group.

    On a CPU, autograd calls collectives in the thread that called it. Threads with different names run simultaneously.
    """
    threads = defaultdict(set)
    surplus = count_surplus_workers()

    def note(operator, keys, *args):
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        threads[name_group(group)].add(threading.current_thread().name)
        return operator.redispatch(keys.remove(FRONT), *args)

    with (
        torch.library._scoped_library("c10d", "IMPL") as library,
        patch.object(ProcessGroupGloo, "__init__", gloo_workers.start_with_options),
    ):
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, name = name.partition("::")
            if namespace != "c10d":
                continue
            operator = getattr(torch.ops.c10d, name).default
            if "ProcessGroup" in str(operator._schema):
                library.impl(operator, partial(note, operator), FRONT.name, with_keyset=True)
        status, _ = warm_start.start(rank, world_size, keys)
    surplus = count_surplus_workers() - surplus  # earlier jobs of this process may have left groups
    timeouts_s = {}
    for group in dist.distributed_c10d._world.pg_map:
        if is_gloo(group):
            options = group._get_backend(torch.device("cpu")).options
            timeouts_s[name_group(group)] = options._timeout.total_seconds()
    return status, surplus, dict(threads), timeouts_s


def count_surplus_workers() -> int:
    """Return the number of gloo's worker threads beyond one per gloo group in this process. Collective over each
    group."""
    gc.collect()
    groups = [group for group in dist.distributed_c10d._world.pg_map if is_gloo(group)]
    for group in groups:
        dist.barrier(group)  # this runs in a worker thread and names the thread
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop") - len(groups)


def is_gloo(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo"


def name_group(group: dist.ProcessGroup) -> str:
    return f"{group.group_desc}, {group.group_name}"


@each_row("layout", LAYOUTS, slow=["tp2"])
def test_no_two_threads_use_one_group_and_every_group_has_a_time_out_of_comm(
    pool, letters, tmp_path, layout
):
    keys = [*letters, *KEYS, *LAYOUTS[layout].split(), f"--job.dump_folder={tmp_path}/run"]
    for steps in (4, 8):  # the run begins, and is later resumed
        results = pool.run(watch_start, 2, [*keys, f"--training.steps={steps}"])
        for status, surplus_workers, threads, timeouts_s in results:
            assert (status, surplus_workers) == (0, 0)
            for group, names in threads.items():
                assert len(names) == 1, f"{names} share {group}"
            assert len(set().union(*threads.values())) == 2, "one trains, one saves"
            of_hosts = {group for group in timeouts_s if group.startswith(("host", "saver"))}
            assert len(of_hosts) == 2
            for group, timeout_s in timeouts_s.items():
                right = INIT_TIMEOUT_S if group in of_hosts else TRAIN_TIMEOUT_S
                assert timeout_s == right, group


def test_a_restarted_rank_does_not_see_that_nccl_failed_before():
    """NCCL's threads read the key without any prefix. torchrun's store keeps the key after a restart."""
    of_torchrun = dist.TCPStore("127.0.0.1", 0, is_master=True)
    of_torchrun.set(process_groups.NCCL_FAILED, b"rank")
    environment = warm_start.make_environment(0, 1, port=of_torchrun.port)
    with patch.dict(os.environ, environment, TORCHELASTIC_USE_AGENT_STORE="True"):
        _, store = process_groups.join_job(os.environ)
    assert not store._underlying_non_prefix_store.check([process_groups.NCCL_FAILED])


# ---------------------------------------------------------------- workers of gloo (gloo_workers.py)


def make_groups(rank: int, world_size: int) -> tuple[int, int]:
    """Worker: create groups in each way that the project uses. Return the numbers of groups and of surplus workers."""
    dist.new_group(use_local_synchronization=True, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh["a", "b"]._flatten()._unflatten(0, (2, 2), ("far", "near"))
    return len(dist.distributed_c10d._world.pg_map), count_surplus_workers()


def test_each_gloo_group_of_a_pool_has_one_worker():
    with RankPool() as pool:
        results = pool.run(make_groups, 4)
    assert results == [(results[0][0], 0)] * 4
    assert results[0][0] > 4


def list_listeners() -> dict[str, str]:
    """Return a dict mapping inodes to addresses, for each socket on which this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    found = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            # 0A: a socket that listens
            if state == "0A" and f"socket:[{inode}]" in own:
                found[inode] = local.partition(":")[0]
    return found


@each_row("interfaces, n_listeners", [("lo", 1), ("lo,lo", 2), ("", 1)])
def test_a_group_with_one_worker_listens_on_the_interfaces_that_torch_would_choose(
    monkeypatch, interfaces, n_listeners
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    timeout = timedelta(seconds=7)
    addresses = []
    for start in (gloo_workers.start_with_options, gloo_workers.start_with_one_worker):
        before = list_listeners()
        group = ProcessGroupGloo.__new__(ProcessGroupGloo)
        start(group, dist.HashStore(), 0, 1, timeout=timeout)
        after = list_listeners()
        addresses.append(sorted(after[inode] for inode in after.keys() - before.keys()))
        assert group.options._timeout == timeout
    assert group.options._threads == 1
    assert addresses[1] == addresses[0]
    assert len(addresses[1]) == n_listeners


def test_if_torch_has_no_option_for_gloo_workers_a_warning_names_the_option(caplog):
    with patch.object(gloo_workers, "ProcessGroupGloo", SimpleNamespace()):
        gloo_workers.limit_gloo_workers()
    assert "_threads" in caplog.text


@each_row("offload, pp, is_bound", [(False, 1, True), (False, 2, False), (True, 1, False)])
def test_groups_of_offload_are_not_split_from_the_default_group(offload, pp, is_bound):
    """If a group is split from the default group, its gloo backend gets two workers. DeviceMesh splits groups from the
    default group if the default group is bound to a device."""
    keys = {"training.enable_cpu_offload": offload, "parallelism.pipeline_parallel_degree": pp}
    config = override(Config(), keys)
    place = process_groups.Place(0, 1, 0, range(1), 0)
    device = torch.device("cuda", 0)
    own = {
        "choose_device": lambda *_: device,
        "prepare_process": Mock(),
        "limit_gloo_workers": Mock(),
    }
    with (
        patch.multiple(process_groups, **own),
        patch.multiple(process_groups.dist, init_process_group=DEFAULT, new_group=DEFAULT) as calls,
    ):
        process_groups.start_process(place, dist.HashStore(), "cuda", config)
    join = calls["init_process_group"]
    assert join.call_args.kwargs["device_id"] == (device if is_bound else None)


def count_sockets() -> int:
    """Count the open sockets of this process. Other threads may open files at any time, so files are not counted."""
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


def count_opened(rank: int, world_size: int, many_ranks: int) -> int:
    """Worker: create a group. Return the number of sockets that it opens."""
    with patch.dict(os.environ), patch.object(process_groups, "MANY_RANKS", many_ranks):
        process_groups.connect_late(world_size)
        before = count_sockets()
        group = dist.new_group(backend="gloo")
        opened = count_sockets() - before
        dist.barrier()  # a rank that is ahead would connect to ranks that have not counted yet
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        assert ones.item() == world_size
        return opened


def test_in_large_runs_creating_a_group_does_not_connect_each_rank_to_all_others(pool):
    least_at_once = min(pool.run(count_opened, 4, 5))
    assert max(pool.run(count_opened, 4, 4)) <= least_at_once - 3
