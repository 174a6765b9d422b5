"""The lower bound of memory by which `check` refuses a run: what no rank's peak is below.

    at the loss       weights, optimizer state, gradients of earlier microbatches; activations of one, logits of a chunk
    after backward    weights, optimizer state, gradients of all microbatches
    at both           tokens, targets, positions and documents of a whole step

The bound is the larger of the two. All numbers are means over the ranks that have one copy of the model, so no rank's
peak is below them, and only activations that every recompute mode, kernel and compiler keeps are counted. A run above
this bound may still not fit: `plan` makes a dry run.
"""

from dataclasses import dataclass, replace
from math import ceil, lcm, prod

from torchtitan_lite.config.flavors import AUTO, FLAVORS, ModelArgs, count_parameters
from torchtitan_lite.config.hardware import GIB, Machine, find_cluster, measure_cpu_memory
from torchtitan_lite.config.layout import plan_batch
from torchtitan_lite.config.memory import count_state_bytes, list_kept_bytes
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.workload import MASTER_BYTES

BATCH_BYTES = 4 * 8  # per token of a step: the four fields of data/dataset.py's Batch, int64


@dataclass(frozen=True)
class MemoryBound:
    """The least bytes needed of one memory: a GPU's, or that of a host, which all its ranks use."""

    state_bytes: int  # weights, gradients, optimizer state
    activation_bytes: int  # and logits
    batch_bytes: int  # tokens, targets, positions and documents of a whole step
    available_bytes: int
    n_ranks: int  # that use this memory
    on_host: bool  # not on a GPU

    @property
    def needed_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes + self.batch_bytes


def bound_memory(
    config: Config, args: ModelArgs, degrees: dict[str, int], machine: Machine, n_hosts: int
) -> list[MemoryBound]:
    """Return a bound for each kind of memory that is known. `degrees` multiply to the world size."""
    n_ranks = ceil(prod(degrees.values()) / n_hosts)
    bytes_each = count_state_bytes(config.optimizer)
    offloads = machine.device_type == "cuda" and config.training.enable_cpu_offload
    bounds = []
    if (available := machine.memory_bytes_per_device) is not None:
        on_host = machine.device_type == "cpu"
        n_sharing = n_ranks if on_host else 1
        peak = bound_rank(config, args, degrees, machine.device_type, 0 if offloads else bytes_each)
        bounds.append(MemoryBound(*(n_sharing * part for part in peak), available, n_sharing, on_host))
    if offloads and machine.is_here:
        state_bytes = n_ranks * shard_state(args, degrees, bytes_each)
        bounds.append(MemoryBound(state_bytes, 0, 0, measure_cpu_memory(), n_ranks, on_host=True))
    return bounds


def bound_rank(
    config: Config, args: ModelArgs, degrees: dict[str, int], device_type: str, bytes_each: int
) -> tuple[int, int, int]:
    """Return the bytes of state (`bytes_each` per parameter), of activations and of the batch at a rank's peak."""
    training = config.training
    batch = plan_batch(config, degrees)
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    batch_bytes = BATCH_BYTES * batch["global_batch_size"] // dp * training.seq_len

    after_backward = shard_state(args, degrees, bytes_each)
    gradient_bytes = MASTER_BYTES if batch["n_microbatches"] == 1 else 0  # they do not exist yet
    at_loss = shard_state(args, degrees, max(0, bytes_each - gradient_bytes))

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
    activations = n_tokens / degrees["tp"] * of_layers
    n_at_once = min(training.loss_chunk_tokens or n_tokens, n_tokens)
    logits = itemsize * n_at_once * args.vocab_size / degrees["tp"]
    activation_bytes = int((activations + logits) / degrees["pp"])
    if at_loss + activation_bytes > after_backward:
        return at_loss, activation_bytes, batch_bytes
    return after_backward, 0, batch_bytes


def shard_state(args: ModelArgs, degrees: dict[str, int], bytes_each: int) -> int:
    """Return one rank's bytes of the state, spread evenly over the ranks that have one copy of the model."""
    n_shards = prod(degree for dim, degree in degrees.items() if dim != "dp_replicate")
    return ceil(count_parameters(args) * bytes_each / n_shards)


def check_memory(config: Config, args: ModelArgs, bounds: list[MemoryBound], machine: Machine) -> list[Problem]:
    """Return a problem for each memory that is too small."""
    problems = []
    for bound in bounds:
        if bound.needed_bytes > bound.available_bytes:
            where = f"on {'this host' if bound.on_host else f'each {machine.name}'}"
            where += f", which has {bound.available_bytes / GIB:.1f} GiB"
            if bound.state_bytes > bound.available_bytes:
                problems.append(refuse_model(config, args, bound, machine, where))
            else:
                problems.append(refuse_tokens(config, bound, where))
    return problems


def refuse_model(config: Config, args: ModelArgs, bound: MemoryBound, machine: Machine, where: str) -> Problem:
    """Describe a model whose parameters alone do not fit, by the key of [model] that causes most of them.

    That is the key that is farthest above its flavor's value, else the flavor; or the Hugging Face folder.
    """
    n_parameters, bytes_each = count_parameters(args), count_state_bytes(config.optimizer)
    why = (
        f"{n_parameters / 1e9:.2f} billion parameters of {bytes_each} bytes (weight, gradient, optimizer state) need "
        f"at least {bound.state_bytes / GIB:.1f} GiB {where}"
    )
    remedy, works_here = "Run `./run_train.sh --config debug` here", ""
    if machine.device_type == "cuda" and machine.memory_bytes_per_device:
        n_gpus = ceil(n_parameters * bytes_each / machine.memory_bytes_per_device)
        remedy += f", or share one copy of the model among at least {n_gpus} such GPUs"
    else:
        n_bytes, name = n_parameters * bytes_each, config.job.config_file.removesuffix(".toml")
        remedy += f", or this config on GPUs with more than {n_bytes / GIB:.0f} GiB among them"
        node = lcm(8, prod(n for key, n in vars(config.parallelism).items() if key.endswith("_degree") and n > 0))
        n_gpus = node * ceil(n_bytes / (node * find_cluster("h100", None).memory_bytes))
        works_here = f". What works here: `python -m torchtitan_lite verify --config {name}` proves its layout, and "
        works_here += f"`python -m torchtitan_lite plan --config {name} --gpus {n_gpus}` says what it costs on GPUs"
    if config.model.flavor == AUTO and config.checkpoint.initial_load_in_hf:
        return Problem("checkpoint.initial_load_path", config.checkpoint.initial_load_path, why, remedy)
    flavor = FLAVORS[config.model.flavor]
    without = {"flavor": n_parameters}  # key -> parameters if it had its flavor's value
    for key, size in vars(args).items():
        if type(size) is int and getattr(config.model, key) is not None:
            without[key] = count_parameters(replace(args, **{key: getattr(flavor, key)}))
    key = min(without, key=without.__getitem__)
    return Problem(f"model.{key}", getattr(config.model, key), why, remedy + works_here)


def refuse_tokens(config: Config, bound: MemoryBound, where: str) -> Problem:
    """Describe a model that fits, with a batch or a sequence whose activations do not."""
    training, parallelism = config.training, config.parallelism
    left_bytes, token_bytes = bound.available_bytes - bound.state_bytes, bound.activation_bytes + bound.batch_bytes
    pipelined = parallelism.pipeline_parallel_degree > 1
    microbatch_size = parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
    if bound.batch_bytes > bound.activation_bytes and training.global_batch_size != -1:
        key, value = "training.global_batch_size", training.global_batch_size
    elif microbatch_size > 1 and token_bytes / microbatch_size <= left_bytes:
        key = "parallelism.pipeline_parallel_microbatch_size" if pipelined else "training.local_batch_size"
        value = microbatch_size
    else:
        key, value = "training.seq_len", training.seq_len
    most = int(value * left_bytes / token_bytes)
    why = (
        f"microbatches of {microbatch_size} x {training.seq_len} tokens keep {bound.activation_bytes / GIB:.1f} GiB of "
        f"activations and logits, the batch of a step takes {bound.batch_bytes / GIB:.1f} GiB, weights, gradients and "
        f"optimizer state {bound.state_bytes / GIB:.1f} GiB: at least {bound.needed_bytes / GIB:.1f} GiB {where}"
    )
    remedy = f"More than about {most} cannot fit" if most else "Use a smaller model, or more ranks"
    if config.activation_checkpoint.mode != "full" and bound.activation_bytes > bound.batch_bytes:
        remedy += '; activation_checkpoint.mode = "full" keeps less of each token'
    return Problem(key, value, why, remedy)
