"""Bytes that one rank holds at its peak: the one closed form, and a lower bound by which `check` refuses a run.

`check`, plan, search, the out-of-memory report and `bench gpu` all use it; the dry run and tests/measure_memory.py are
its measure.

    at rest      parameters, gradients (fp32), optimizer state: of the rank's stages, over tp and over dp_shard x cp, of
                 experts over ep and over efsdp
    gathered     whole parameters in compute dtype: of a block and the next (ZeRO 3), or of everything (ZeRO 1, 2)
    activations  what forward keeps for backward, by recompute mode, times microbatches in flight; of experts on the
                 most loaded rank
    received     a pipeline's receive buffers: torch makes those of all microbatches of a step at once
    working      temporary tensors of the block in backward, or the logits and their gradients

These are live bytes. The allocator reserves more: Cluster.reserve_factor. Legend in workload.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, lcm, prod

from torchtitan_lite.config.flavors import AUTO, FLAVORS, ModelArgs, count_parameters, find_expert_dim, list_block
from torchtitan_lite.config.hardware import GIB, Machine, find_cluster, measure_cpu_memory
from torchtitan_lite.config.layout import plan_batch
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.schema import Config, Optimizer
from torchtitan_lite.config.workload import (
    MASTER_BYTES,
    LayerKind,
    Stage,
    Workload,
    count_layers,
    count_moment_bytes,
)

BATCH_BYTES = 4 * 8  # per token of a step: the four fields of data/dataset.py's Batch, int64


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    received: float  # hidden states and their gradients, of all microbatches
    working: float  # of the block or the loss that is being computed

    @property
    def live(self) -> float:
        return sum(vars(self).values())


def count_state_bytes(section: Optimizer) -> int:
    """Return the bytes per parameter of weight, gradient and optimizer state: 16 for AdamW, 12 with bf16 moments."""
    return 2 * MASTER_BYTES + count_moment_bytes(section)


Kept = dict[str, float]  # recompute mode -> bytes that are kept for backward, per token of T


def list_kept_bytes(args: ModelArgs, compute_bytes: int, *, tp: int = 1, mixture: bool = False, **experts) -> Kept:
    """Return the bytes that a layer keeps per token, by recompute mode. `experts`: as list_mixture_bytes takes them."""
    pieces = list_kept_pieces(args, compute_bytes, tp=tp, mixture=mixture, **experts)
    return {mode: sum(piece[mode] for piece in pieces) for mode in pieces[0]}


@lru_cache
def list_kept_pieces(
    args: ModelArgs, compute_bytes: int, *, tp: int = 1, mixture: bool = False, **experts
) -> list[Kept]:
    """Return what the pieces of a layer keep: all of a dense one; of one with experts its mixture, and the rest.

    In numbers of the compute dtype (1/tp of all but what is marked "whole"); in KiB of 8B in bf16 on one rank:

        none       164.1  input of each norm and its gathered output (whole), outputs of colwise layers (q, k, v, w1,
                          w3), inputs of rowwise ones (attention's output, the product), output of silu. Queries lie
                          in memory as (B, S, H, E), and so does what attention returns: wo reads it without a copy
        op         100.1  input of the block, outputs of colwise layers and of attention, outputs of rowwise layers
                          (whole: partial sums), with tp also scattered
        full         8.0  input of the block
        alternate   62.1  input of the block, outputs of wq, wv, w1, attention and w2 (whole)

    and 4 bytes per head of attention's log-sum-exp, unless backward runs attention's forward again. Rotation keeps
    nothing: its backward needs the angles only. A norm of heads keeps its input, and 4 bytes per head. CPU kernels keep
    one or two more tensors per norm. With experts "op" recomputes piece by piece: the norm before the mixture is in no
    piece, and its input and output are kept.
    """
    block = list_block(args, mixture=mixture)
    colwise = [module for module in block if module.split == "colwise"]
    rowwise = [module.weight for module in block if module.split == "rowwise"]
    norms = sum(module.weight[0] for module in block if module.split == "sequence")
    gathered = args.dim * len({module.name.rpartition(".")[0] for module in colwise})
    heads, keys = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    hidden, of_colwise = args.dim / tp, sum(module.weight[0] for module in colwise) / tp
    of_rowwise = sum(out for out, _ in rowwise)  # partial sums of the whole width
    scattered = of_rowwise / tp * (tp > 1)
    of_products = sum(width for _, width in rowwise) + sum(width for _, width in rowwise[1:])
    elements = {
        "none": norms / tp + gathered + of_colwise + (of_products + (heads + keys) * args.qk_norm) / tp,
        "op": hidden + of_colwise + of_rowwise + scattered + heads / tp + 2 * hidden * mixture,
        "full": hidden,
        "alternate": hidden + (heads + keys + args.ffn_dim + heads) / tp + args.dim,
    }
    of_heads = {"none": args.n_heads + (args.n_heads + args.n_kv_heads) * args.qk_norm, "full": 0}
    rest = {mode: n * compute_bytes + 4 * of_heads.get(mode, args.n_heads) / tp for mode, n in elements.items()}
    return [rest, list_mixture_bytes(args, compute_bytes, tp=tp, **experts)] if mixture else [rest]


def list_mixture_bytes(
    args: ModelArgs, compute_bytes: int, *, tp: int = 1, ep: int = 1, imbalance: float = 1.0
) -> Kept:
    """Return what router and experts keep per token. A rank has 1/tp of the tokens, and `imbalance` times its rows.

    none    in fp32: input and scores of the router, weights, what the weights multiply; routes and orders (int64);
            rows sorted by expert, outputs of w1 and w3, output of silu, the product
    op      logits, routes, outputs of the experts' matmuls; with ep > 1 the rows that arrive and those that return
    """
    n_experts, width = args.mixture.n_experts, args.mixture.expert_ffn_dim
    sent, normalized = args.mixture.top_k, args.mixture.normalize_top_k  # those keep weights before and after, and sums
    received = sent * imbalance if ep > 1 else sent
    kept = {
        "none": 4 * (args.dim + n_experts + sent * args.dim)
        + sent * (4 + 4 * normalized + 3 * 8)
        + 4 * normalized
        + received * ((args.dim + 4 * width) * compute_bytes + 2 * 8 * (ep > 1)),
        "op": 4 * n_experts
        + sent * (4 + 8)
        + (received * (2 * width + args.dim) + (received + sent) * args.dim * (ep > 1)) * compute_bytes,
        "full": 0.0,
    }
    return {mode: n_bytes / tp for mode, n_bytes in {**kept, "alternate": kept["op"]}.items()}


def estimate_layer(workload: Workload, kind: LayerKind) -> tuple[float, float]:
    """Return the bytes that a layer keeps of a microbatch, the mean over recompute modes, and those of its backward.

    In backward it holds its recomputed activations and temporary gradients besides what is kept. A mixture, large as it
    is, may need more at two other moments: while the next one is gathered, by a buffer and copies of its slices; and
    when its gradients are reduced, once in compute dtype and once in fp32. By then its activations are freed, and under
    ZeRO 3 its parameters.
    """
    args, layout, width = workload.args, workload.layout, workload.compute_bytes
    kept_by = {"tp": layout.tp, "mixture": kind.is_mixture}
    if not kind.is_mixture:
        (piece,) = list_kept_pieces(args, width, **kept_by)
        again = max(piece["none"] - piece[mode] for mode in kind.recompute)
        temporary = (3 * args.ffn_dim / layout.tp + args.dim) * width
        return kind.average(piece) * workload.n_tokens, (max(0, again) + temporary) * workload.n_tokens

    rest, mixture = list_kept_pieces(args, width, **kept_by, ep=layout.ep, imbalance=workload.imbalance)
    weighted = workload.n_rows * args.dim * MASTER_BYTES  # what the weights of a token multiply, in fp32
    of_experts = workload.n_rows_received * (3 * args.mixture.expert_ffn_dim + args.dim) * width
    exchanged = (3 * workload.n_rows_received + 2 * workload.n_rows) * args.dim * width * (layout.ep > 1)
    # Gradients of rows and of weights; before they are weighted: rows that travel in forward, gradients of the experts.
    temporary = max(2 * weighted, max(of_experts, exchanged) - weighted)
    is_cut = find_expert_dim(args, layout.ep, layout.efsdp) != 0  # FSDP then joins the slices in a further copy
    moments = [kind.mixture_parameters * width * (1 + is_cut) * (layout.zero_stage == 3)]
    for mode in kind.recompute:
        of_rest, of_mixture = rest["none"] - rest[mode], mixture["none"] - mixture[mode]
        again = max(of_rest, of_mixture) if mode == "op" else of_rest + of_mixture
        moments.append(again * workload.n_tokens + temporary)
        if layout.pp == 1:
            freed = mixture[mode] - of_rest * (mode == "full")
            n_bytes = MASTER_BYTES + width * (layout.zero_stage < 3)
            moments.append(kind.mixture_parameters * n_bytes - freed * workload.n_tokens)
    return (kind.average(rest) + kind.average(mixture)) * workload.n_tokens, max(moments)


def estimate_memory(workload: Workload, pp_rank: int, in_flight: Mapping[int, float]) -> Memory:
    """Return what a rank with this index on mesh dim `pp` holds at its peak.

    `in_flight`: stage -> microbatches whose activations this pp rank holds at once (simulator.count_in_flight).
    """
    layout = workload.layout
    stages = {index: workload.stages[index] for index in layout.stages_of(pp_rank)}
    n_parameters = sum(workload.count_stage_parameters(s) + workload.count_stage_mixtures(s) for s in stages.values())
    at_rest = sum(map(workload.count_at_rest, stages.values()))
    summed_whole = layout.zero_stage == 1 or layout.pp > 1
    gradients = MASTER_BYTES * (n_parameters if summed_whole else at_rest)
    embedding = workload.vocabulary_parameters * any(stage.has_embedding for stage in stages.values())
    layers = [(kind, *estimate_layer(workload, kind)) for kind in workload.kinds]
    kept = sum(
        of_layer * count_layers(stages[i], kind) * n for kind, of_layer, _ in layers for i, n in in_flight.items()
    )
    # A stage keeps its output too. A stage with layers has no extra bytes for it: its input is received and kept.
    kept += sum(
        workload.hidden_bytes / layout.tp * n
        for index, n in in_flight.items()
        if stages[index].has_embedding and not stages[index].n_layers
    )
    present = [costs for kind, *costs in layers if any(count_layers(stage, kind) for stage in stages.values())]
    kept_of_layer, block = map(max, zip(*present, strict=True)) if present else (0.0, 0.0)
    has_head = any(stage.has_head for stage in stages.values())
    loss = estimate_loss(workload) * has_head
    # The head's gradients are freed when those of a whole block are reduced: after the last mixture's backward.
    of_head = workload.vocabulary_parameters * MASTER_BYTES * has_head * (layout.pp == 1 and layout.ep > 0)
    if layout.n_microbatches > 1:
        moments = [(gradients, kept, max(block + of_head, loss, embedding * workload.compute_bytes))]
    else:  # gradients come as activations go: the peak is at the logits, or at the very end
        moments = [(0, kept, max(block + of_head, loss)), (gradients, kept_of_layer, block)]
    gradients, kept, working = max(moments, key=sum)
    # Receive buffers hold hidden states for all stages but the model's first, and gradients for all but its last.
    n_received = sum((index > 0) + (index < len(layout.stages) - 1) for index in stages)
    return Memory(
        parameters=at_rest * MASTER_BYTES,
        gradients=gradients,
        optimizer=at_rest * workload.moment_bytes,
        gathered=estimate_gathered(workload, list(stages.values())),
        activations=kept,
        received=n_received * layout.n_microbatches * workload.hidden_bytes / layout.tp,
        working=working,
    )


def estimate_loss(workload: Workload) -> float:
    """Return what the loss holds at its peak.

    In chunks, and over tp always: the gradient of the weight in fp32, and either a chunk's logits in compute dtype and
    in fp32, or their gradient and its contribution to that of the weight.

    All at once on one rank, of the logits (T, V): three fp32 tensors in backward, log-softmax and two gradients.
    """
    layout = workload.layout
    if layout.tp == 1 and not workload.loss_chunk_tokens:
        return 12 * workload.n_tokens * workload.args.vocab_size
    width = workload.compute_bytes
    weight = workload.args.vocab_size * workload.args.dim / layout.tp
    chunk_tokens = min(workload.loss_chunk_tokens or workload.n_tokens, workload.n_tokens)
    logits = chunk_tokens * workload.args.vocab_size / (layout.tp if workload.shards_loss else 1)
    if width == MASTER_BYTES:  # one tensor serves as both, and the contribution is added in place
        return (weight + logits) * MASTER_BYTES
    return weight * MASTER_BYTES + max(logits * (width + MASTER_BYTES), (weight + logits) * width)


def estimate_gathered(workload: Workload, stages: list[Stage]) -> float:
    """Return the bytes of gathered parameters.

    ZeRO 3: two blocks, and the head from its forward to its backward, or an embedding that is alone on its stage; and
    the gradients of a block without its mixture, once in compute dtype and once as they are reduced. ZeRO 1 and 2: all
    parameters.
    """
    if workload.is_whole:
        return 0
    if workload.layout.zero_stage < 3:
        whole = sum(workload.count_stage_parameters(stage) + workload.count_stage_mixtures(stage) for stage in stages)
        return whole * workload.compute_bytes
    has_layers = any(stage.n_layers for stage in stages)
    has_matrix = any(stage.has_head for stage in stages) or not has_layers
    kinds = [kind for kind in workload.kinds if any(count_layers(stage, kind) for stage in stages)]
    of_layer = max((kind.parameters + kind.mixture_parameters for kind in kinds), default=0)
    of_block = max((kind.parameters for kind in kinds), default=0)
    reduced = of_block * (workload.compute_bytes + MASTER_BYTES) * (workload.layout.pp == 1)
    gathered = 2 * of_layer + workload.vocabulary_parameters * has_matrix
    return gathered * workload.compute_bytes + reduced


# ---------------------------------------------------------------- the lower bound of `check`
#
#   at the loss       weights, optimizer state, gradients of earlier microbatches; activations of one, logits of a chunk
#   after backward    weights, optimizer state, gradients of all microbatches
#   at both           tokens, targets, positions and documents of a whole step
#
# The bound is the larger of the two. All numbers are means over the ranks that have one copy of the model, so no rank's
# peak is below them, and only activations that every recompute mode, kernel and compiler keeps are counted. A run above
# this bound may still not fit: `plan` makes a dry run.


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
