"""What a rank reads and sets before it joins the others: who it is, determinism, where compiled code and traces go."""

import os
import resource
import sys
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from torchtitan_lite.config.schema import Comm, Debug


def read_torchrun_environment(environment: os._Environ) -> tuple[int, int, int, int, int]:
    """Return rank, world size, ranks on this host, rank on this host, and restarts of the job."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    if any(name not in environment for name in names):
        sys.exit("train.py is one rank of many: start it with ./run_train.sh, or with torchrun")
    rank, world_size, local_world_size, local_rank = (int(environment[name]) for name in names)
    return rank, world_size, local_world_size, local_rank, int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))


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
