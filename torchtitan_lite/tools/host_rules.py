"""Check that the hosts of a run have enough memory and disk, a suitable build of torch, and kernels for the heads.

Only the launcher and `check` load these rules. The lower bound on memory is the size of weights, gradients and
optimizer state:

    bytes per parameter   16 for AdamW: 4 weight (fp32) + 4 gradient + 8 moments; 12 with bfloat16 moments; 8 with
                          bfloat16 moments and weights; 8 for SGD
    bytes per rank        (parameters / ranks that share one copy of the model) * bytes per parameter

Each GPU holds one rank. On a host without GPUs, all ranks share the memory. Activations are not included:
`python3 -m torchtitan_lite plan` predicts them.
"""

import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from math import ceil, log2
from pathlib import Path
from runpy import run_path

from torchtitan_lite.config.block import count_parameters, has_masks
from torchtitan_lite.config.choices import ATTENTIONS, OPTIMIZERS
from torchtitan_lite.config.machine import GIB, Machine
from torchtitan_lite.config.messages import Problems, Refused, name_command
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config, Optimizer
from torchtitan_lite.dump_folder import LOCAL_FOLDER, find_nearest, name_snapshots
from torchtitan_lite.tools.detect import OLDER_INDEX, explain_misfit

# bytes that the training state may use on an 80 GB GPU (`plan`'s default); the rest is for activations
USUAL_GPU_BYTES = 40 * GIB
MASTER_BYTES = 4  # a parameter and its gradient are fp32
LEAST_HEAD_DIM = 16  # minimum head dim of flex attention on GPUs (torch 2.13)


def check_host(
    config: Config,
    model_args: ModelArgs,
    n_ranks: int,
    *,
    args: list[str],
    machine: Machine,
    n_hosts: int,
) -> Problems:
    """Return a problem for each resource that is insufficient for this run on hosts like `machine`. Remedies quote
    `args`."""
    bound = bound_memory(config, model_args, n_ranks, machine, n_hosts)
    rules = [check_memory(bound, args, n_ranks, machine), check_heads(config, model_args, machine)]
    if machine.is_here:
        # This is a lower bound: every host stores all shards of its ranks, but replicas on several hosts are counted
        # only once.
        snapshot_bytes = count_saved_bytes(config, model_args) // n_hosts
        rules += [check_torch_build(machine), check_snapshots(config, snapshot_bytes)]
    return Problems(config, model_args, chain(*rules))


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class MemoryBound:
    """Bytes of weights, gradients and optimizer state on one GPU, or on a host without GPUs."""

    state_bytes: int
    available_bytes: int
    n_ranks: int  # ranks that share this memory

    def __str__(self) -> str:
        ranks = f"{self.n_ranks} ranks share" if self.n_ranks > 1 else "a rank has"
        return (
            f"at least {self.state_bytes / GIB:.2f} GiB for weights, gradients and optimizer state (plus "
            "activations, unsharded weights and memory that the allocator reserves); "
            f"{ranks} {self.available_bytes / GIB:.1f} GiB"
        )


def count_moment_bytes(section: Optimizer) -> int:
    """Return the bytes of optimizer state per parameter."""
    return OPTIMIZERS[section.name].n_moments * (2 if section.moments_dtype == "bfloat16" else 4)


def count_weight_bytes(config: Config) -> int:
    """Return the bytes per parameter of the weights between steps. Gradients take as many bytes as weights."""
    return 2 if config.training.dtype == "bfloat16" else MASTER_BYTES


def count_saved_bytes(config: Config, model_args: ModelArgs) -> int:
    """Return the size of a checkpoint in bytes: all weights, and the optimizer state."""
    n_parameters = count_parameters(model_args)
    saved_bytes = n_parameters * (count_weight_bytes(config) + count_moment_bytes(config.optimizer))
    if OPTIMIZERS[config.optimizer.name].updates_matrices:
        n_matrices = count_parameters(model_args, in_matmuls=True)
        saved_bytes -= n_matrices * MASTER_BYTES
    return saved_bytes


def bound_memory(
    config: Config, model_args: ModelArgs, world_size: int, machine: Machine, n_hosts: int
) -> MemoryBound | None:
    """Return the lower bound for one GPU, or for one host without GPUs. Return None if the memory size is unknown."""
    if machine.memory_bytes_per_device is None:
        return None
    on_gpu = machine.device_type == "cuda"
    n_sharing = 1 if on_gpu else ceil(world_size / n_hosts)
    gradient_bytes = count_parameters(model_args) * count_weight_bytes(config)
    state_bytes = count_saved_bytes(config, model_args) + gradient_bytes
    if on_gpu and config.training.enable_cpu_offload:
        state_bytes = 0
    n_copies = config.parallelism.data_parallel_replicate_degree
    of_rank = ceil(state_bytes * n_copies / world_size)
    return MemoryBound(n_sharing * of_rank, machine.memory_bytes_per_device, n_sharing)


def check_memory(
    bound: MemoryBound | None, args: list[str], world_size: int, machine: Machine
) -> Refused:
    """Refuse a run whose state does not fit in memory. The remedy names a number of GPUs that is large enough."""
    if bound is None or bound.state_bytes <= bound.available_bytes:
        return
    on_gpu = machine.device_type == "cuda"
    gpu_bytes = bound.available_bytes if on_gpu else USUAL_GPU_BYTES
    times = bound.state_bytes / bound.n_ranks / gpu_bytes
    n_gpus = world_size * 2 ** max(0, ceil(log2(times)))
    remedy = f"Use {n_gpus} such GPUs"
    if not on_gpu:
        command = shlex.join(args)
        verify = name_command(f"verify {command}")
        plan = name_command(f"plan {command} --gpus {n_gpus}")
        remedy = (
            f"On this machine, `{verify}` checks the layout, and `{plan}` predicts the run on GPUs"
        )
    yield "model.flavor", f"the run needs {bound} on {machine.name}", remedy


# ---------------------------------------------------------------- kernels


def check_heads(config: Config, model_args: ModelArgs, machine: Machine) -> Refused:
    """Refuse heads that are too small for flex attention, which computes attention with masks on GPUs."""
    attention = config.model.attention
    uses_flex = ATTENTIONS[attention].uses_documents or has_masks(attention, model_args)
    if machine.device_type == "cuda" and uses_flex and model_args.head_dim < LEAST_HEAD_DIM:
        why = f"on a GPU, document masks, windows and attention sinks need heads of at least {LEAST_HEAD_DIM} features"
        remedy = f"Set it to {LEAST_HEAD_DIM}, or use fewer heads"
        yield "model.head_dim", f"{why}, and heads have {model_args.head_dim}", remedy


# ---------------------------------------------------------------- the build of torch


def check_torch_build(machine: Machine) -> Refused:
    """Refuse a build of torch that does not support the GPUs or the driver of this host."""
    found = find_spec("torch")
    if found is None or not found.origin:
        return
    # read the version without importing torch
    build = run_path(str(Path(found.origin).with_name("version.py")))
    command = f'{sys.executable} -m pip install --upgrade "torch<2.15" --index-url {OLDER_INDEX}'
    misfit = explain_misfit(machine, build["cuda"], command)
    if build["hip"]:
        why = f"it was built for ROCm {build['hip']}, but this trainer is for NVIDIA GPUs and CPUs"
        misfit = why, "Install a build of torch for CUDA, or for CPUs"
    elif machine.driver and not build["cuda"]:
        why = f"it was built for CPUs, but this host has {machine.name}, driver {machine.driver}"
        remedy = "Install a build of torch for CUDA, or set CUDA_VISIBLE_DEVICES to an empty value"
        misfit = why, remedy
    if misfit:
        yield "torch", *misfit, version("torch")


# ---------------------------------------------------------------- disk


def check_snapshots(config: Config, snapshot_bytes: int) -> Refused:
    """Refuse snapshots if this host does not have enough space. During a save, a host stores three snapshots: the last
    two and the new one."""
    section = config.checkpoint
    n_saved = (config.training.steps - 1) // section.local_interval
    needed = min(3, n_saved) * snapshot_bytes
    if not section.local_folder or section.load_only or not needed:
        return
    folder = name_snapshots(section.local_folder, Path(config.job.dump_folder)).absolute()
    replaced = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    free = shutil.disk_usage(find_nearest(folder)).free + replaced
    if free < needed:
        size = f"{needed / GIB:.3g} GiB of snapshots"
        why = f"{size} do not fit: this folder's file system has {free / GIB:.3g} GiB free"
        remedy = "Free some space, name a folder on a different file system, or leave this key out"
        yield LOCAL_FOLDER, why, remedy
