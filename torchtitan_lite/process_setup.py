"""What a rank reads and sets before it joins the others: who it is, determinism, where compiled code and traces go."""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Comm, Config, Debug
from torchtitan_lite.parallel.mesh import choose_device, make_host_group, start_process_group


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


def start_process(
    place: Place, device_type: str, config: Config, layout: Layout, dump_folder: Path
) -> tuple[torch.device, Groups]:
    """Prepare this process, and connect it to all ranks."""
    device = choose_device(place.local_rank, device_type)
    make_deterministic(config.debug)
    keep_compiled_code(Path(config.training.cache_folder))
    record_collectives(config.comm, dump_folder)
    raise_file_limit(place.world_size)
    timeout_s = config.comm.init_timeout_seconds
    offload, is_pipelined = config.training.enable_cpu_offload, layout.pp > 1
    start_process_group(device, timeout_s, place.restarts, offload=offload, is_pipelined=is_pipelined)
    host = make_host_group("host", timeout_s)
    return device, Groups(host, make_host_group("saver", timeout_s) if config.checkpoint.enable else host)


def end_process(groups: Groups) -> None:
    dist.barrier(groups.host)  # no rank closes its connections while another still communicates
    dist.destroy_process_group()


def make_deterministic(section: Debug) -> None:
    """Use torch's deterministic algorithms, if asked for. Weights and data depend on the seed only in any case."""
    if section.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed one
        torch.use_deterministic_algorithms(True, warn_only=section.deterministic_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid: it writes every new tensor twice


def raise_file_limit(world_size: int) -> None:
    """Allow this process the files that its groups need: gloo opens about n + 3 for each group of n ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4 * world_size + 256:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_compiled_code(cache_folder: Path) -> None:
    """Make inductor write to a folder that the next run reads, unless the user has named one."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):  # torch names its own when imported
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder.absolute() / "compiled")


def record_collectives(section: Comm, dump_folder: Path) -> None:
    """Make NCCL record its last collectives and write them on a time-out. Call before groups are made."""
    traces = dump_folder / section.save_traces_folder
    if section.trace_buf_size and torch.cuda.is_available():
        traces.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(section.trace_buf_size)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = str(int(section.trace_buf_size > 0))
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(traces / "rank_")
