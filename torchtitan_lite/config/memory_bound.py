"""The lower bound of memory by which `check` refuses a run: what no rank's peak is below.

    at the loss       weights, optimizer state, gradients of earlier microbatches; activations of one, logits of a chunk
    after backward    weights, optimizer state, gradients of all microbatches
    at both           tokens, targets, positions and documents of a whole step

The bound is the larger of the two. All numbers are means over the ranks that have one copy of the model, and only
activations that every recompute mode, kernel and compiler keeps are counted. A run above this bound may still not fit:
`plan` makes a dry run.
"""

from dataclasses import dataclass
from math import ceil, prod

from torchtitan_lite.config.flavors import ModelArgs, count_parameters
from torchtitan_lite.config.hardware import GIB, Machine
from torchtitan_lite.config.layout import plan_batch
from torchtitan_lite.config.memory import count_state_bytes, list_kept_bytes
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.config.workload import MASTER_BYTES

BATCH_BYTES = 4 * 8  # per token of a step: the four fields of data/dataset.py's Batch, int64


@dataclass(frozen=True)
class MemoryBound:
    """The least bytes needed of one memory: a GPU's, or that of a host, which all its ranks use."""

    state_bytes: int  # weights, gradients, optimizer state
    activation_bytes: int  # and logits
    batch_bytes: int
    available_bytes: int
    n_ranks: int  # that use this memory

    @property
    def needed_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes + self.batch_bytes

    def __str__(self) -> str:
        parts = {
            "weights, gradients and optimizer": self.state_bytes,
            "activations and logits": self.activation_bytes,
            "the batch": self.batch_bytes,
        }
        shares = ", ".join(f"{n_bytes / GIB:.2f} for {part}" for part, n_bytes in parts.items() if n_bytes)
        ranks = f"{self.n_ranks} ranks share" if self.n_ranks > 1 else "a rank has"
        return f"at least {self.needed_bytes / GIB:.2f} GiB ({shares}); {ranks} {self.available_bytes / GIB:.1f} GiB"


def bound_memory(
    config: Config, args: ModelArgs, degrees: dict[str, int], machine: Machine, n_hosts: int
) -> MemoryBound | None:
    """Return the bound of a GPU, or of a host without GPUs; None if its memory is not known."""
    if machine.memory_bytes_per_device is None:
        return None
    on_gpu = machine.device_type == "cuda"
    state_bytes = 0 if on_gpu and config.training.enable_cpu_offload else count_state_bytes(config.optimizer)
    n_sharing = 1 if on_gpu else ceil(prod(degrees.values()) / n_hosts)
    peak = bound_rank(config, args, degrees, machine.device_type, state_bytes)
    return MemoryBound(*(n_sharing * part for part in peak), machine.memory_bytes_per_device, n_sharing)


def bound_rank(
    config: Config, args: ModelArgs, degrees: dict[str, int], device_type: str, bytes_each: int
) -> tuple[int, int, int]:
    """Return the bytes of state (`bytes_each` per parameter), of activations and of the batch at a rank's peak."""
    training = config.training
    batch = plan_batch(config, degrees)
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    batch_bytes = BATCH_BYTES * batch["global_batch_size"] // dp * training.seq_len

    n_parameters = count_parameters(args) * degrees["dp_replicate"] / prod(degrees.values())
    after_backward = ceil(n_parameters * bytes_each)
    gradient_bytes = MASTER_BYTES if batch["n_microbatches"] == 1 else 0  # they do not exist yet
    at_loss = ceil(n_parameters * max(0, bytes_each - gradient_bytes))

    param = training.mixed_precision_param
    itemsize = 2 if param == "bfloat16" or (param == "auto" and device_type == "cuda") else 4
    n_tokens = batch["microbatch_size"] * training.seq_len / degrees["cp"]
    # A compiler may keep less than the closed form for eager mode, and blocks that recompute differ from one another.
    section = config.activation_checkpoint
    by_op = not config.compile.compiles_blocks and (section.is_by_op or section.mode == "none")
    n_mixtures = args.n_mixture_layers
    counts = {False: args.n_layers - n_mixtures, True: n_mixtures}
    mode = "op" if by_op else "full"
    of_layers = sum(list_kept_bytes(args, itemsize, mixture=has)[mode] * n for has, n in counts.items() if n)
    n_at_once = min(training.loss_chunk_tokens or n_tokens, n_tokens)
    logits = itemsize * n_at_once * args.vocab_size
    activation_bytes = int((n_tokens * of_layers + logits) / degrees["tp"] / degrees["pp"])
    if at_loss + activation_bytes > after_backward:
        return at_loss, activation_bytes, batch_bytes
    return after_backward, 0, batch_bytes


def check_memory(config: Config, args: ModelArgs, bound: MemoryBound | None, machine: Machine) -> list[Problem]:
    """Return a problem if the memory is too small, with the key that needs most of it."""
    if bound is None or bound.needed_bytes <= bound.available_bytes:
        return []
    why = f"the run needs {bound} on {machine.name}"
    if bound.state_bytes <= bound.available_bytes:
        pipelined = config.parallelism.pipeline_parallel_degree > 1
        key = "parallelism.pipeline_parallel_microbatch_size" if pipelined else "training.local_batch_size"
        if get_value(config, key) == 1:
            key = "training.seq_len"
        remedy = 'Lower it; activation_checkpoint.mode = "full" keeps less of each token'
        return [Problem(key, get_value(config, key), why, remedy)]
    n_bytes, name = count_parameters(args) * count_state_bytes(config.optimizer), config.job.config_file
    remedy = f"Share one copy of the model among GPUs with more than {n_bytes / GIB:.0f} GiB together"
    if machine.device_type == "cpu":
        remedy += f". Here `python -m torchtitan_lite verify --config {name}` proves the layout; `plan` forecasts costs"
    return [Problem("model.flavor", config.model.flavor, why, remedy)]
