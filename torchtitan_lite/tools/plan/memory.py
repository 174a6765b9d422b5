"""Estimate the peak memory of one rank, in bytes, by a closed form.

    at rest      parameters, gradients (fp32) and optimizer state of the rank's stages, sharded over tp and
                 dp_shard x cp; experts are sharded over ep and efsdp
    gathered     full parameters in the compute dtype: two blocks (ZeRO 3), or all blocks (ZeRO 1, 2)
    activations  tensors that forward keeps for backward, by recompute mode, times microbatches in flight
    received     receive buffers of a pipeline; torch allocates them for all microbatches of a step at once
    working      temporary tensors of the block in backward, or the logits and their gradients

These are live bytes; the allocator reserves more (Cluster.reserve_factor). Tests compare them with the dry run.
Legend in workload.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_lite.config.block import find_expert_dim
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, LayerKind, Stage, Workload

# Between the two halves of a split backward, a microbatch also holds the gradients of the outputs of norms and linear
# layers: in a block of Llama 8B, 264 KiB per token instead of 164.
WAITING = 1.6


EMBEDDING_ALONE = Stage(0, 0, has_embedding=True, has_head=False)


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds at its peak."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    received: float  # hidden states and their gradients, for all microbatches
    working: float  # temporary tensors of the current block, or of the loss

    @property
    def live(self) -> float:
        return sum(vars(self).values())


def list_kept(w: Workload, kind: LayerKind) -> dict[str, float]:
    """Return recompute mode -> bytes per token that a layer keeps for backward, without router and experts.

    Tensors are in the compute dtype and sharded over tp, except those marked "whole". KiB: Llama 8B, bf16, one rank.

        none       164.1  input of each norm and its gathered output (whole), outputs of colwise layers (q, k, v, w1,
                          w3), inputs of rowwise layers (attention's output, the product), output of silu
        op         100.1  input of the block, outputs of colwise layers and attention, outputs of rowwise layers
                          (whole: partial sums); with tp, also after the reduce-scatter
        full         8.0  input of the block
        alternate   62.1  input of the block, outputs of wq, wv, w1, attention and w2 (whole)

    Each mode also keeps the log-sum-exp of attention, 4 bytes per head, unless attention is recomputed. Unfused
    attention keeps its scores. QK norms keep their input and 4 bytes per head. In MoE layers, "op" recomputes pieces of
    the block. The norm before the experts is in none of the pieces, so its input and output are kept.
    """
    args, tp = w.args, w.layout.tp
    heads, keys = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    hidden, of_rowwise = args.dim / tp, args.dim * len(kind.rowwise)
    of_colwise = sum(module.weight[0] for module in kind.colwise) / tp
    norms, gathered = (
        hidden * sum(module.split == "sequence" for module in kind.norms),
        args.dim * kind.n_gathers,
    )
    if not w.sequence_parallel:
        hidden, norms, gathered = (
            args.dim,
            norms * tp,
            0,
        )  # norms keep the whole sequence; nothing is gathered
    widths = [module.weight[1] for module in kind.rowwise]
    has_silu = kind.is_gated
    of_products = sum(widths) + sum(widths[1:]) * has_silu
    elements = {
        "none": norms + gathered + of_colwise + (of_products + (heads + keys) * args.qk_norm) / tp,
        "op": hidden
        + of_colwise
        + of_rowwise * (1 + (tp > 1) / tp)
        + heads / tp
        + 2 * hidden * kind.is_moe,
        "full": hidden,
        "alternate": hidden + (heads + keys + args.ffn_dim + heads) / tp + args.dim,
    }
    score_bytes = (
        5 * w.seq_len * (w.attention == "unfused")
    )  # softmax, dropout and the dropout mask
    of_heads = {
        "full": 0,
        "none": args.n_heads * (4 + score_bytes)
        + 4 * (args.n_heads + args.n_kv_heads) * args.qk_norm,
    }
    return {
        mode: n * w.compute_bytes + of_heads.get(mode, 4 * args.n_heads) / tp
        for mode, n in elements.items()
    }


def list_kept_by_experts(w: Workload) -> dict[str, float]:
    """Return recompute mode -> bytes per token kept by router and experts for backward. A rank has 1/tp of the tokens.

    none    in fp32: input and scores of the router, routing weights, the rows they multiply; routes and orders (int64);
            rows sorted by expert, outputs of w1 and w3, output of silu, the product
    op      logits, routes, outputs of the experts' matmuls; with ep > 1, also the rows after each all-to-all
    """
    args, moe, travels, c = w.args, w.args.moe, w.layout.ep > 1, w.compute_bytes
    normalized = (
        4 * (moe.top_k + 1) * moe.normalize_top_k
    )  # weights before normalization, and their sums
    routes = (
        moe.top_k * (4 + 3 * 8) + normalized + 4 * (args.dim + moe.n_experts + moe.top_k * args.dim)
    )
    rows = (args.dim + 4 * moe.expert_ffn_dim) * c + 2 * 8 * travels
    products = (2 * moe.expert_ffn_dim + args.dim + 2 * args.dim * travels) * c
    op = 4 * moe.n_experts + moe.top_k * (4 + 8 + products)
    kept = {"none": routes + moe.top_k * rows, "op": op, "alternate": op, "full": 0.0}
    return {mode: n_bytes / w.layout.tp for mode, n_bytes in kept.items()}


def estimate_layer(w: Workload, kind: LayerKind) -> tuple[float, float]:
    """Return the bytes that a layer keeps per microbatch, and the additional bytes at the peak of its backward.

    In backward, a layer holds recomputed activations and temporary gradients. An MoE can need more at two other times:
    when the next MoE is gathered (a buffer, and copies of its slices), and when its own gradients are reduced (in the
    compute dtype and in fp32). By then its activations are freed and, under ZeRO 3, its parameters.
    """
    args, layout, width, rest = w.args, w.layout, w.compute_bytes, list_kept(w, kind)
    if not kind.is_moe:
        again = max(rest["none"] - rest[mode] for mode in kind.recompute)
        temporary = (3 * args.ffn_dim / layout.tp + args.dim) * width
        return kind.average(**rest) * w.n_tokens, (max(0, again) + temporary) * w.n_tokens

    experts = list_kept_by_experts(w)
    weighted = (
        w.n_rows * args.dim * MASTER_BYTES
    )  # outputs of the experts in fp32, which the routing weights multiply
    of_experts = w.n_rows * (3 * args.moe.expert_ffn_dim + args.dim) * width
    exchanged = 5 * w.n_rows * args.dim * width * (layout.ep > 1)
    # First the gradients of the weighted rows and of their weights, then those of the experts or of the all-to-alls.
    temporary = max(2 * weighted, max(of_experts, exchanged) - weighted)
    is_cut = (
        find_expert_dim(args, layout.ep, layout.efsdp) != 0
    )  # FSDP then concatenates the slices: another copy
    moments = [kind.parameters[1] * width * (1 + is_cut) * (layout.zero_stage == 3)]
    for mode in kind.recompute:
        of_rest, of_moe = rest["none"] - rest[mode], experts["none"] - experts[mode]
        again = max(of_rest, of_moe) if mode == "op" else of_rest + of_moe
        moments.append(again * w.n_tokens + temporary)
        if layout.pp == 1:
            freed = experts[mode] - of_rest * (mode == "full")
            n_bytes = MASTER_BYTES + width * (layout.zero_stage < 3)
            moments.append(kind.parameters[1] * n_bytes - freed * w.n_tokens)
    return (kind.average(**rest) + kind.average(**experts)) * w.n_tokens, max(moments)


def estimate_loss(w: Workload) -> float:
    """Return the bytes that the loss holds at its peak.

    It holds the fp32 gradient of the weight, plus the larger of two sums: a chunk's logits in both dtypes and
    their gradient, or the gradient of the logits and the chunk's contribution to the weight's gradient. A trainer that
    keeps all logits holds three fp32 tensors (T, V): log-softmax and two gradients; one if compiled.
    """
    width, vocab_size = w.compute_bytes, w.args.vocab_size
    if w.keeps_logits:
        return (4 if w.compiles_loss else 12) * w.n_tokens * vocab_size / w.layout.tp
    weight = vocab_size * w.args.dim / w.layout.tp
    chunk_tokens = min(w.loss_chunk_tokens or w.n_tokens, w.n_tokens)
    logits = chunk_tokens * vocab_size / (w.layout.tp if w.shards_loss else 1)
    if (
        width == MASTER_BYTES
    ):  # the logits need one tensor, and the weight's gradient is accumulated in place
        return (weight + logits) * MASTER_BYTES
    return weight * MASTER_BYTES + max(
        logits * (2 * width + MASTER_BYTES), (weight + logits) * width
    )


InFlight = Mapping[
    tuple[int, str], float
]  # (stage, last action of the microbatch: F or I) -> microbatches in flight
Layers = list[tuple[LayerKind, float, float]]  # kind, and the two results of estimate_layer


def estimate_memory(w: Workload, in_flight: Mapping[int, InFlight]) -> list[Memory]:
    """Return the peak memory of some pp ranks. `in_flight`: pp rank -> the result of timeline.count_in_flight."""
    layers = [(kind, *estimate_layer(w, kind)) for kind in w.kinds]
    return [estimate_rank(w, layers, pp_rank, each) for pp_rank, each in in_flight.items()]


def estimate_rank(w: Workload, layers: Layers, pp_rank: int, in_flight: InFlight) -> Memory:
    """Return the peak memory of one pp rank.

    Activations are freed while gradients are allocated. The peak is at the loss, in the first or last block of
    backward, or when the gradient of the embedding is reduced.
    """
    layout, width, table = w.layout, w.compute_bytes, w.vocabulary_parameters
    stages = {index: w.stages[index] for index in layout.stages_of(pp_rank)}
    layers = [layer for layer in layers if any(layer[0].count(stage) for stage in stages.values())]
    has_embedding = any(stage.has_embedding for stage in stages.values())
    has_head = any(stage.has_head for stage in stages.values())
    at_rest = sum(map(w.count_at_rest, stages.values()))
    n_parameters = sum(sum(w.parameters[stage]) for stage in stages.values())
    copied = (
        table / w.n_shards if layout.tied and has_head else 0.0
    )  # the owner of a tied matrix has its moments
    in_matrices = sum(matrix.n_at_rest for matrix in w.list_matrices(pp_rank))
    block = max((sum(kind.parameters) for kind, *_ in layers), default=0)
    working = max((working for *_, working in layers), default=0.0)
    kept = sum(
        (WAITING if action == "I" else 1) * each * kind.count(stages[index]) * n
        for kind, each, _ in layers
        for (index, action), n in in_flight.items()
    )
    # A stage also keeps its output. For a stage with layers this adds nothing: its kept input is a receive buffer.
    alone = sum(n for (index, _), n in in_flight.items() if stages[index] == EMBEDDING_ALONE)
    kept += alone * w.hidden_bytes / layout.tp
    # Hidden states before and after the norm, and their gradient. tp gathers the last two.
    loss = (
        estimate_loss(w) + w.hidden_bytes * (3 if layout.tp == 1 else 2 + 2 / layout.tp)
    ) * has_head
    # FSDP gathers into a buffer and copies. The head's buffer is freed after its backward, a block's buffer when the
    # next block is gathered, and the fp32 input of a reduction at the next reduction.
    is_sharded = not w.is_whole and layout.zero_stage == 3
    whole = n_parameters * width * (not w.is_whole and layout.zero_stage < 3)
    head, blocks = table * width * is_sharded, block * width * is_sharded
    # What hpZ keeps of each block, and what qgZ needs while it reduces a gradient, per element
    kept_width = (1 if "qwz" in w.zero_plus_plus else width) * ("hpz" in w.zero_plus_plus)
    near = [(at, n) for at, n in enumerate((layout.fsdp_near, layout.efsdp_near)) if n > 1]
    kept_parameters = sum(
        kind.parameters[at] / n * kind.count(w.stages[0]) for kind in w.kinds for at, n in near
    )
    packing = (6 + 4 / layout.fsdp_near) * ("qgz" in w.zero_plus_plus)
    if layout.pp > 1:  # gradients stay unsharded until they are reduced at the end of the step
        gathered = 2 * blocks + head * (
            has_head or not layers
        )  # a stage without layers has the head or the embedding
        working = max(working, loss, table * width * has_embedding)
        # Before its first backward, a stage has no gradients. After it, the stage has them, and one microbatch less.
        fresh = {index for (index, _), n in in_flight.items() if n == layout.n_microbatches}
        older = sum(
            sum(w.parameters[stage]) for index, stage in stages.items() if index not in fresh
        )
        first = kept / layout.n_microbatches / len(fresh) if fresh else 0.0
        moments = [
            (gathered, w.grad_bytes * older, kept, working),
            (gathered, w.grad_bytes * n_parameters, kept - first, working),
        ]
    else:
        summed = MASTER_BYTES * (n_parameters if layout.zero_stage == 1 else at_rest)
        before = summed if layout.n_microbatches > 1 else 0.0
        reduced = w.reduce_bytes * (
            not w.is_whole and (layout.zero_stage > 1 or layout.n_microbatches == 1)
        )
        last = max((each for _, each, _ in layers), default=0.0)
        dense = max((kind.parameters[0] for kind, *_ in layers), default=0)
        to_come = (
            0.0 if before else MASTER_BYTES * (dense + table) / w.n_shards
        )  # after the last block's backward
        moments = [
            (2 * head + kept_width * kept_parameters, before, kept, loss),
            (2 * blocks + kept_width * kept_parameters, before + table * reduced, kept, working),
            (blocks, summed - to_come + dense * reduced, last, working),
            (0.0, summed + table * (reduced + packing + width), 0.0, 0.0),
        ]
    gathered, gradients, kept, working = max(moments, key=sum)
    # Receive buffers hold hidden states for all stages except the first, and gradients for all except the last.
    n_received = sum((index > 0) + (index < len(layout.stages) - 1) for index in stages)
    return Memory(
        parameters=at_rest * MASTER_BYTES,
        gradients=gradients,
        optimizer=(at_rest - copied) * w.moment_bytes - in_matrices * MASTER_BYTES,
        gathered=whole + gathered,
        activations=kept,
        received=n_received
        * (w.receive_buffers or layout.n_microbatches)
        * w.hidden_bytes
        / layout.tp,
        working=working,
    )
