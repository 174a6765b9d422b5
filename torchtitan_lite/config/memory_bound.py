"""A lower bound of a run's memory: `check` refuses what cannot fit, before torch is imported.

    at the loss       weights, optimizer state, gradients of earlier microbatches, activations of one, logits of a chunk
    after backward    weights, optimizer state, gradients of all microbatches
    at both           tokens, targets, positions and documents of a whole step

The bound is the larger of the two. All numbers are means over the ranks that share a model, so no rank's peak is below
them, and only activations that every recompute mode, kernel and compiler keeps are counted. A run below this bound may
still not fit: `plan` makes a dry run. Bytes per parameter and per token are those of config/memory.py.
"""

from dataclasses import dataclass, replace
from math import ceil, prod

from torchtitan_lite.config.case import compiles_blocks, recomputes_by_op
from torchtitan_lite.config.flavors import FLAVORS, ModelArgs, count_parameters
from torchtitan_lite.config.hardware import Machine, measure_cpu_memory
from torchtitan_lite.config.layout import plan_batch
from torchtitan_lite.config.memory import count_state_bytes, list_kept_bytes
from torchtitan_lite.config.schema import Config, Problem
from torchtitan_lite.config.workload import MASTER_BYTES

GIB = 2**30
BATCH_BYTES = 4 * 8  # per token of a step: the four fields of data/dataset.py's Batch, int64


@dataclass(frozen=True)
class MemoryBound:
    """The least bytes needed of one memory: a GPU's, or a host's, which all its ranks share."""

    state_bytes: int  # weights, gradients, optimizer state
    activation_bytes: int  # and logits
    batch_bytes: int  # tokens, targets, positions and documents of a whole step
    available_bytes: int
    n_ranks: int  # that share this memory
    on_host: bool  # not on a GPU

    @property
    def needed_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes + self.batch_bytes


def bound_memory(
    config: Config, shape: ModelArgs, degrees: dict[str, int], machine: Machine, n_hosts: int
) -> list[MemoryBound]:
    """A bound for each kind of memory that is known. `degrees` multiply to the world size."""
    n_ranks = ceil(prod(degrees.values()) / n_hosts)
    bytes_each = count_state_bytes(config.optimizer)
    offloads = machine.device_type == "cuda" and config.training.enable_cpu_offload
    bounds = []
    if (available := machine.memory_bytes_per_device) is not None:
        on_host = machine.device_type == "cpu"
        n_sharing = n_ranks if on_host else 1
        peak = bound_rank(config, shape, degrees, machine.device_type, 0 if offloads else bytes_each)
        bounds.append(MemoryBound(*(n_sharing * part for part in peak), available, n_sharing, on_host))
    if offloads and machine.is_here:
        state_bytes = n_ranks * share_state(config, shape, degrees, bytes_each)
        bounds.append(MemoryBound(state_bytes, 0, 0, measure_cpu_memory(), n_ranks, on_host=True))
    return bounds


def bound_rank(
    config: Config, shape: ModelArgs, degrees: dict[str, int], device_type: str, bytes_each: int
) -> tuple[int, int, int]:
    """Return the bytes of state (`bytes_each` per parameter), of activations and of the batch at a rank's peak."""
    training = config.training
    batch = plan_batch(config, degrees)
    dp, n_pieces = degrees["dp_replicate"] * degrees["dp_shard"], degrees["cp"] * degrees["tp"]
    batch_bytes = BATCH_BYTES * batch["global_batch_size"] // dp * training.seq_len

    after_backward = share_state(config, shape, degrees, bytes_each)
    gradient_bytes = MASTER_BYTES if batch["n_microbatches"] == 1 else 0  # they do not exist yet
    at_loss = share_state(config, shape, degrees, max(0, bytes_each - gradient_bytes))

    param = training.mixed_precision_param
    itemsize = 2 if param == "bfloat16" or (param == "auto" and device_type == "cuda") else 4
    n_tokens = batch["microbatch_size"] * training.seq_len // degrees["cp"]
    # A compiler may keep less than the closed form for eager mode, and blocks that recompute differ from one another.
    by_op = not compiles_blocks(config) and (recomputes_by_op(config) or config.activation_checkpoint.mode == "none")
    per_layer = list_kept_bytes(shape, itemsize)["op" if by_op else "full"]
    activations = batch["microbatch_size"] * training.seq_len / n_pieces * shape.n_layers * per_layer
    n_at_once = min(training.loss_chunk_tokens or n_tokens, n_tokens)
    logits = itemsize * n_at_once * shape.vocab_size / degrees["tp"]
    activation_bytes = int((activations + logits) / degrees["pp"])
    if at_loss + activation_bytes > after_backward:
        return at_loss, activation_bytes, batch_bytes
    return after_backward, 0, batch_bytes


def share_state(config: Config, shape: ModelArgs, degrees: dict[str, int], bytes_each: int) -> int:
    """Return one rank's share of the state, spread evenly over the ranks that share one copy of the model."""
    n_shares = prod(degree for dim, degree in degrees.items() if dim != "dp_replicate")
    return ceil(count_parameters(shape) * bytes_each / n_shares)


def check_memory(config: Config, shape: ModelArgs, bounds: list[MemoryBound], machine: Machine) -> list[Problem]:
    """Return a problem for each memory that is too small."""
    problems = []
    for bound in bounds:
        if bound.state_bytes > bound.available_bytes:
            problems.append(refuse_model(config, shape, bound, machine))
        elif bound.needed_bytes > bound.available_bytes:
            problems.append(refuse_tokens(config, bound, machine))
    return problems


def refuse_model(config: Config, shape: ModelArgs, bound: MemoryBound, machine: Machine) -> Problem:
    """Describe a model whose parameters alone do not fit."""
    n_parameters, bytes_each = count_parameters(shape), count_state_bytes(config.optimizer)
    why = (
        f"{n_parameters / 1e9:.2f} billion parameters of {bytes_each} bytes (weight, gradient, optimizer state) need "
        f"at least {bound.state_bytes / GIB:.1f} GiB {describe_place(bound, machine)}"
    )
    remedy = "Run `./run_train.sh --config debug` here"
    if machine.device_type == "cuda" and machine.memory_bytes_per_device:
        n_gpus = ceil(n_parameters * bytes_each / machine.memory_bytes_per_device)
        remedy += f", or share one copy of the model among at least {n_gpus} such GPUs"
    else:
        remedy += f", or this config on GPUs with more than {n_parameters * bytes_each / GIB:.0f} GiB among them"
    name = find_largest(config, shape)
    return Problem(f"model.{name}", getattr(config.model, name), why, remedy)


def find_largest(config: Config, shape: ModelArgs) -> str:
    """Return the key of [model] that causes most parameters: one above its flavor's value, else the flavor."""
    flavor = FLAVORS[config.model.flavor]
    n_parameters = {"flavor": count_parameters(shape)}
    for name, size in vars(shape).items():
        if type(size) is int and getattr(config.model, name) is not None:
            n_parameters[name] = count_parameters(replace(shape, **{name: getattr(flavor, name)}))
    return min(n_parameters, key=n_parameters.__getitem__)


def refuse_tokens(config: Config, bound: MemoryBound, machine: Machine) -> Problem:
    """Describe a model that fits, with a batch or a sequence whose activations do not."""
    training, parallelism = config.training, config.parallelism
    left_bytes = bound.available_bytes - bound.state_bytes
    pipelined = parallelism.pipeline_parallel_degree > 1
    microbatch_size = parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
    if bound.batch_bytes > bound.activation_bytes and training.global_batch_size != -1:
        key, value = "training.global_batch_size", training.global_batch_size
    elif microbatch_size > 1 and (bound.activation_bytes + bound.batch_bytes) / microbatch_size <= left_bytes:
        key = "parallelism.pipeline_parallel_microbatch_size" if pipelined else "training.local_batch_size"
        value = microbatch_size
    else:
        key, value = "training.seq_len", training.seq_len
    most = int(value * left_bytes / (bound.activation_bytes + bound.batch_bytes))
    why = (
        f"microbatches of {microbatch_size} x {training.seq_len} tokens keep {bound.activation_bytes / GIB:.1f} GiB of "
        f"activations and logits, the batch of a step takes {bound.batch_bytes / GIB:.1f} GiB, weights, gradients and "
        f"optimizer state {bound.state_bytes / GIB:.1f} GiB: at least {bound.needed_bytes / GIB:.1f} GiB "
        f"{describe_place(bound, machine)}"
    )
    remedy = f"More than about {most} cannot fit" if most else "Use a smaller model, or more ranks"
    if config.activation_checkpoint.mode != "full" and bound.activation_bytes > bound.batch_bytes:
        remedy += '; activation_checkpoint.mode = "full" keeps less of each token'
    return Problem(key, value, why, remedy)


def describe_place(bound: MemoryBound, machine: Machine) -> str:
    place = "this host" if bound.on_host else f"each {machine.name}"
    return f"on {place}, which has {bound.available_bytes / GIB:.1f} GiB"
