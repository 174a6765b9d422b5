"""Start one rank: process settings, device, process groups, and the time-outs of collectives ([comm]).

    groups of the mesh   init_timeout_seconds in the first step and the first validation of a start, otherwise
                         train_timeout_seconds
    HOST_GROUPS          always init_timeout_seconds, because a rank waits for the slowest disk of all ranks

A rank that waits longer than its time-out raises an error. During the first step and the first validation, ranks
compile, connect and read at different speeds. In later steps, the speeds of ranks differ little, so a peer that exceeds
the time-out has hung. On CPUs, sends and receives of a pipeline keep gloo's default time-out of 30 minutes, because
gloo cannot change the time-out of the group that they use.

Effect: creates the default process group; mesh.py creates all other groups.
"""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.parallel.gloo_workers import limit_gloo_workers

MOST_OPEN_FILES = 10240  # the value of OPEN_MAX on macOS
# options of glibc's mallopt, their environment variables, and a threshold in bytes that is never reached
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
NEVER = 2**31 - 1
# in groups of at least this size, gloo connects two ranks when they first communicate
MANY_RANKS = 1024
# torch's key in the store: a rank sets it if NCCL fails or times out, and the NCCL threads of all ranks read it
NCCL_FAILED = "exception_dump"
# Names of the gloo groups in which all ranks exchange objects and CPU tensors: "host" is for the main thread, "saver"
# for the thread of asynchronous saves, "snapshot" for the thread of snapshots. Ranks match calls by their order, so two
# threads that share a group can deadlock.
HOST_GROUPS = ("host", "saver", "snapshot")


@dataclass(frozen=True)
class Place:
    """Position of this process among all ranks, as given by torchrun's environment variables."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this host
    host_ranks: range  # the ranks of this host
    restarts: int  # number of times the job was restarted, the maximum over hosts


def join_job(environment: os._Environ) -> tuple[Place, dist.Store]:
    """Return the position of this process, and the key-value store of this start of the job. Collective.

    torchrun counts a restart only on the hosts whose own ranks caused it, and the count of a host that joins late
    starts at 0. Hosts must agree on whether the job has restarted, so they use the largest count. The store must be
    empty after each restart (tools/launch.py).
    """
    if "LOCAL_WORLD_SIZE" not in environment:
        sys.exit("train.py runs as one rank of many: start it with ./run_train.sh or torchrun")
    store, rank, world_size = next(dist.rendezvous("env://"))
    local_rank = int(environment["LOCAL_RANK"])
    n_local = int(environment["LOCAL_WORLD_SIZE"])
    n_hosts = world_size // n_local
    first = rank - local_rank
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
    if n_hosts > 1:
        may_restart = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        if may_restart and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise UserError(
                "torchrun cannot restart several hosts. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each host"
            )
        counts = [f"restarts of host {host}" for host in range(n_hosts)]
        if local_rank == 0:
            store.set(counts[rank // n_local], str(restarts))
        if rank == 0:  # publish the largest value, so that other ranks read only one value
            store.set("restarts", str(max(map(int, store.multi_get(counts)))))
        restarts = int(store.get("restarts"))
    # On a single host, torchrun's store survives restarts. If the store still contains this key (without a prefix),
    # NCCL's threads end the restarted rank within minutes.
    store.delete_key(NCCL_FAILED)
    # The store also contains the addresses of dead ranks. Without a new prefix, a restarted rank may read these
    # addresses, and fail to connect or wait forever (torch 2.13).
    fresh_store = dist.PrefixStore(f"restart-{restarts}", store)
    place = Place(rank, world_size, local_rank, range(first, first + n_local), restarts)
    return place, fresh_store


def start_process(
    place: Place, store: dist.Store, device_type: str, config: Config
) -> tuple[torch.device, dist.ProcessGroup]:
    """Prepare this process and join the job's process group, which uses NCCL on CUDA and gloo on CPU. Collective.

    `store` is the result of join_job. Returns the device of this process, and the group "host". CPU offload needs both
    backends, because the gradient norm is then a CPU tensor, which NCCL cannot reduce.
    """
    device = choose_device(place.local_rank, device_type)
    prepare_process(config)
    if device.type == "cpu":
        keep_freed_memory()
    limit_gloo_workers()
    connect_late(place.world_size)

    backend = "gloo" if device.type == "cpu" else "nccl"
    # With a device_id, NCCL connects a group immediately, but then runs all sends and receives of a pipeline on one
    # stream, so each send or receive waits for the one before it. Without a device_id, NCCL connects at the first
    # collective.
    connects_at_once = device.type == "cuda" and config.parallelism.pipeline_parallel_degree == 1
    if device.type == "cuda" and config.training.enable_cpu_offload:
        backend = "cuda:nccl,cpu:gloo"
        # With a device_id, DeviceMesh splits its groups from the default group, and the gloo groups among them get two
        # workers (gloo_workers.py).
        connects_at_once = False
    timeout = timedelta(seconds=config.comm.init_timeout_seconds)
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=device if connects_at_once else None,
    )
    return device, dist.new_group(backend="gloo", timeout=timeout, group_desc="host")


def end_process(host: dist.ProcessGroup) -> None:
    dist.barrier(host)  # no rank may close its connections while other ranks still communicate
    dist.destroy_process_group()


def prepare_process(config: Config) -> None:
    """Apply process-wide settings: determinism, folders of compiled code and NCCL traces, limit of open files."""
    # this key does not affect initial weights and data, which always depend only on the seed
    if config.debug.deterministic:
        # cuBLAS needs a fixed workspace for determinism.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.debug.deterministic_warn_only)

    # Keep inductor's compiled code for the next run, unless the user has set a different folder. Importing torch sets
    # the variable to torch's default.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        cache_folder = Path(config.training.cache_folder).absolute()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder / "compiled")

    # NCCL's flight recorder keeps the last `n_recorded` collectives.
    n_recorded = config.comm.trace_buf_size
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(n_recorded)
    if torch.cuda.is_available():  # NCCL writes the recorded collectives on a time-out
        traces = Path(config.job.dump_folder, config.comm.save_traces_folder)
        if n_recorded:
            traces.mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1" if n_recorded else "0"
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(traces / "rank_")

    allow_open_files()


def connect_late(world_size: int) -> None:
    """In large jobs, let the ranks of a gloo group connect when they first communicate.

    By default, every rank opens n + 3 files for each group of n ranks. With this setting, a rank has 4 open files at
    first, and about 2 log2(n) later. Rank 0 has n open files when it gathers from all ranks (measured with 12 ranks,
    torch 2.13).
    """
    if world_size >= MANY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def allow_open_files() -> None:
    """Raise this process's limit of open files: gloo opens about n + 3 files for each group of n ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard
    if hard == resource.RLIM_INFINITY:  # on macOS, the soft limit must be finite
        most = max(soft, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees, so the next step takes no page faults for it.

    Does nothing if the user has set one of these thresholds with an environment variable of glibc.
    """
    if not THRESHOLDS.isdisjoint(os.environ):
        return
    with suppress(AttributeError):  # a C library without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, NEVER)
        mallopt(MMAP_THRESHOLD, NEVER)


def choose_device(local_rank: int, device_type: str) -> torch.device:
    """Return this process's GPU, or the CPU. `device_type` comes from config/machine.py.

    Raises RuntimeError if only one of the driver and torch reports GPUs. If only one rank fell back to the CPU, all
    other ranks would hang.
    """
    expects_gpu = device_type == "cuda"
    if torch.cuda.is_available() != expects_gpu:
        raise RuntimeError(
            f"nvidia-smi lists GPUs: {expects_gpu}; this torch can use them: {not expects_gpu}. It was built for CUDA "
            f"{torch.version.cuda}. Repair nvidia-smi or the driver, install a build of torch for this driver, or set "
            "CUDA_VISIBLE_DEVICES to an empty value to train on the CPU"
        )
    if not expects_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def set_timeouts(timeout_s: int, host: dist.ProcessGroup) -> None:
    """Set the time-out of all groups of this process, except HOST_GROUPS. `host`: the group "host".

    Collective. The barrier keeps the long time-out until all ranks have finished their first step.
    """
    dist.barrier(host)
    timeout = timedelta(seconds=timeout_s)
    # dist.set_timeout is public since torch 2.14
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):  # torch has no public list of groups
        if group.group_desc not in HOST_GROUPS and dist.get_backend(group) != "fake":
            set_timeout(timeout, group)
