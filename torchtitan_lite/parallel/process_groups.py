"""Start one process among many: its settings, its device, the groups it talks in, how long it waits in them ([comm]).

    groups of the mesh, pipeline   init_timeout_seconds until the first step is done, train_timeout_seconds after it
    groups of the host             init_timeout_seconds throughout: a rank waits for the slowest disk of all ranks

A rank that waits longer in a collective, a send or a receive raises. In the first step ranks compile, connect and read
at different speeds. After it, a peer that is late by many steps is hung.

Effect: the default process group exists; mesh.py makes the others.
"""

import logging
import os
import resource
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import _redistribute, debug

from torchtitan_lite.config.schema import Config
from torchtitan_lite.parallel.pipeline import list_stages

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """The place of this process among all ranks, as torchrun's environment says."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this host
    n_hosts: int
    restarts: int  # of the job


def read_torchrun_environment(environment: os._Environ) -> Place:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name not in environment for name in names):
        sys.exit("train.py is one rank of many: start it with ./run_train.sh, or with torchrun")
    rank, world_size, local_rank, local_world_size = (int(environment[name]) for name in names)
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
    return Place(rank, world_size, local_rank, world_size // local_world_size, restarts)


@dataclass(frozen=True)
class Groups:
    """Groups of all ranks for objects and CPU tensors, over gloo.

    Two threads that share a group deadlock: ranks match its calls by their order, and two threads have none.
    """

    host: dist.ProcessGroup  # for the main thread
    saver: dist.ProcessGroup  # for the thread that saves


def start_process(place: Place, device_type: str, config: Config, dump_folder: Path) -> tuple[torch.device, Groups]:
    """Prepare this process, and connect it to all ranks. Collective."""
    device = choose_device(place.local_rank, device_type)
    prepare_process(config, dump_folder, place.world_size)
    start_process_group(device, config, n_hosts=place.n_hosts, restarts=place.restarts)
    host = make_host_group("host", config.comm.init_timeout_seconds)
    check_equal_gpus(device, host)
    saver = make_host_group("saver", config.comm.init_timeout_seconds) if config.checkpoint.enable else host
    return device, Groups(host, saver)


def end_process(groups: Groups) -> None:
    dist.barrier(groups.host)  # no rank closes its connections while another still communicates
    dist.destroy_process_group()


def prepare_process(config: Config, dump_folder: Path, world_size: int) -> None:
    """Set what holds for the whole process: determinism, folders of compiled code and traces, limit of open files."""
    if config.debug.deterministic:  # weights and data depend on the seed only in any case
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed one
        torch.use_deterministic_algorithms(True, warn_only=config.debug.deterministic_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid: it writes every new tensor twice

    # The next run finds the code that inductor compiles in this one. The user may have named another folder; torch
    # names its own when it is imported.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(config.training.cache_folder).absolute() / "compiled")

    # NCCL records its last collectives and writes them on a time-out.
    traces, n_recorded = dump_folder / config.comm.save_traces_folder, config.comm.trace_buf_size
    if n_recorded and torch.cuda.is_available():
        traces.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(n_recorded)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = str(int(n_recorded > 0))
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(traces / "rank_")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4 * world_size + 256:  # gloo opens about n + 3 files for each group of n ranks
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def choose_device(local_rank: int, device_type: str) -> torch.device:
    """Return this process's GPU, or the CPU. `device_type` comes from config/machine.py.

    Raises RuntimeError if the driver and this build of torch disagree: one rank on the CPU would stop all others.
    """
    if device_type == "cpu":
        if torch.cuda.is_available():
            raise RuntimeError(
                "torch sees GPUs, and nvidia-smi on this host lists none: repair nvidia-smi, "
                "or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "nvidia-smi lists GPUs that this torch cannot use: install a CUDA build of torch, "
            "or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def start_process_group(device: torch.device, config: Config, *, n_hosts: int, restarts: int) -> None:
    """Join the job's process group (its address is in torchrun's environment): NCCL on CUDA, gloo on CPU.

    Offload needs gloo beside NCCL: gradients are on the host, and their norm is a CPU tensor, which NCCL cannot reduce.
    """
    if n_hosts > 1:
        warn_of_loopback()
    backend = "gloo" if device.type == "cpu" else "nccl"
    if device.type == "cuda" and config.training.enable_cpu_offload:
        backend = "cuda:nccl,cpu:gloo"
    # With a device_id NCCL connects a group at once, and then runs all sends and receives of a pipeline on one stream,
    # where each waits for the one before it. Without, it connects when ranks first talk.
    connects_at_once = device.type == "cuda" and config.parallelism.pipeline_parallel_degree == 1
    timeout = timedelta(seconds=config.comm.init_timeout_seconds)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        backend,
        # torchrun keeps one store over all restarts, and in it the addresses of dead ranks. Without a prefix of its
        # own, a restarted rank may read those, and fail to connect or wait forever (torch 2.13).
        store=dist.PrefixStore(f"restart-{restarts}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if connects_at_once else None,
    )


def warn_of_loopback() -> None:
    """Warn if gloo would give the other hosts an address at which each of them finds itself."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError:
        address = "127.0.0.1"  # as in gloo, for a name without an address
    if address.startswith("127.") or address == "::1":
        logger.warning(
            f"{host} has the address {address} on this host, and gloo gives it to the other hosts, which cannot reach "
            "it: set GLOO_SOCKET_IFNAME to the interface that joins the hosts, such as eth0"
        )


def check_equal_gpus(device: torch.device, host_group: dist.ProcessGroup) -> None:
    """Raise RuntimeError if ranks have different GPUs: they would draw different weights from the same seed.

    CUDA's random numbers depend on the number of multiprocessors. Collective.
    """
    if device.type == "cpu":
        return
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, torch.cuda.get_device_name(device), group=host_group)
    for rank, name in enumerate(names):
        if name != names[0]:
            raise RuntimeError(
                f"rank 0 has a {names[0]} and rank {rank} a {name}, which draw different initial weights from one "
                "seed: start the run on GPUs of one kind"
            )


def make_host_group(name: str, timeout_s: int) -> dist.ProcessGroup:
    """Make a group of all ranks for objects and CPU tensors, to be used by one thread. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=name)


def list_groups() -> list[dist.ProcessGroup]:
    """List every process group of this rank: DeviceMesh, torch's pipeline and this code make them.

    torch has no public list of them; its private map holds those of this rank only.
    """
    return list(dist.distributed_c10d._world.pg_map)


def set_timeouts(
    timeout_s: int,
    schedule: _PipelineSchedule | None,
    *,
    host_group: dist.ProcessGroup,
    besides: Collection[dist.ProcessGroup] = (),
) -> None:
    """Set the time-out of every group of this process, except the groups in `besides`.

    Collective: no rank may wait with a short time-out for one that is still in its first step.
    """
    dist.barrier(host_group)
    timeout = timedelta(seconds=timeout_s)
    for group in list_groups():
        if group not in besides and dist.get_backend(group) != "fake":
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    renew_pipeline_group(timeout, schedule)


def renew_pipeline_group(timeout: timedelta, schedule: _PipelineSchedule | None) -> None:
    """Give the stages of this rank a new group with this time-out, if they use gloo.

    Gloo's send and receive keep the time-out with which their group was made; one that is set later applies to
    collectives only (torch 2.13). The old group stays, idle: its name in the store must not be used again.
    """
    stages = list_stages(schedule)
    if stages and dist.get_backend(stages[0].group) == "gloo":
        ranks = dist.get_process_group_ranks(stages[0].group)
        group = dist.new_group(
            ranks, timeout=timeout, backend="gloo", use_local_synchronization=True, group_desc="pipeline"
        )
        for stage in stages:
            stage.group = group
            if hasattr(stage, "_downstream_group"):  # torch 2.14 has two more names for it
                stage._downstream_group = stage._upstream_group = group


def forget_groups() -> None:
    """Clear torch's caches by mesh: an equal mesh of a later job must not get the groups of an earlier one."""
    torch._dynamo.reset()
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # not in every torch
        _redistribute.clear_redistribute_planner_cache()
