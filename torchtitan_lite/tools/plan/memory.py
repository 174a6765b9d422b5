"""Bytes that one rank holds at its peak: the one closed form.

    at rest      parameters, gradients (fp32) and optimizer state of the rank's stages, over tp and over dp_shard x cp;
                 experts over ep and over efsdp
    gathered     whole parameters in compute dtype: of a block and the next (ZeRO 3), or of everything (ZeRO 1, 2)
    activations  what forward keeps for backward, by recompute mode, times microbatches in flight
    received     receive buffers of a pipeline: torch allocates them for all microbatches of a step at once
    working      temporary tensors of the block in backward, or the logits and their gradients

These are live bytes; the allocator reserves more (Cluster.reserve_factor). The dry run checks them.
Legend in workload.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_lite.config.block import find_expert_dim
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, LayerKind, Stage, Workload

# Between the halves of a split backward a microbatch also holds the gradients that norms and linear layers return:
# in a block of 8B 264 instead of 164 KiB a token.
WAITING = 1.6


EMBEDDING_ALONE = Stage(0, 0, has_embedding=True, has_head=False)


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


def list_kept(w: Workload, kind: LayerKind) -> dict[str, float]:
    """Return recompute mode -> bytes per token that a layer keeps for backward, besides router and experts.

    In numbers of the compute dtype (1/tp of all but what is marked "whole"); in KiB of 8B in bf16 on one rank:

        none       164.1  input of each norm and its gathered output (whole), outputs of colwise layers (q, k, v, w1,
                          w3), inputs of rowwise layers (attention's output, the product), output of silu
        op         100.1  input of the block, outputs of colwise layers and of attention, outputs of rowwise layers
                          (whole: partial sums), with tp also scattered
        full         8.0  input of the block
        alternate   62.1  input of the block, outputs of wq, wv, w1, attention and w2 (whole)

    and 4 bytes per head of attention's log-sum-exp, unless backward runs attention's forward again. Unfused attention
    keeps its scores. A norm of heads keeps its input, and 4 bytes per head. With experts "op" recomputes pieces: the
    norm before the experts is in no piece, and its input and output are kept.
    """
    args, tp = w.args, w.layout.tp
    heads, keys = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    hidden, of_colwise, of_rowwise = (
        args.dim / tp,
        sum(module.weight[0] for module in kind.colwise) / tp,
        args.dim * len(kind.rowwise),
    )
    norms, gathered = hidden * sum(module.split == "sequence" for module in kind.norms), args.dim * kind.n_gathers
    if not w.sequence_parallel:
        hidden, norms, gathered = args.dim, norms * tp, 0  # norms keep the whole sequence, which linear layers read
    widths = [module.weight[1] for module in kind.rowwise]
    has_silu = (
        kind.is_moe or len(kind.colwise) > 3
    )  # code that joins queries, keys and values joins silu and product too
    of_products = sum(widths) + sum(widths[1:]) * has_silu
    elements = {
        "none": norms + gathered + of_colwise + (of_products + (heads + keys) * args.qk_norm) / tp,
        "op": hidden + of_colwise + of_rowwise * (1 + (tp > 1) / tp) + heads / tp + 2 * hidden * kind.is_moe,
        "full": hidden,
        "alternate": hidden + (heads + keys + args.ffn_dim + heads) / tp + args.dim,
    }
    score_bytes = 5 * w.seq_len * (w.attention == "unfused")  # softmax, dropout and its mask
    of_heads = {
        "full": 0,
        "none": args.n_heads * (4 + score_bytes) + 4 * (args.n_heads + args.n_kv_heads) * args.qk_norm,
    }
    return {mode: n * w.compute_bytes + of_heads.get(mode, 4 * args.n_heads) / tp for mode, n in elements.items()}


def list_kept_by_experts(w: Workload) -> dict[str, float]:
    """Return what router and experts keep per token. A rank has 1/tp of the tokens.

    none    in fp32: input and scores of the router, weights, what the weights multiply; routes and orders (int64);
            rows sorted by expert, outputs of w1 and w3, output of silu, the product
    op      logits, routes, outputs of the experts' matmuls; with ep > 1 the rows that arrive and those that return
    """
    args, moe, travels, c = w.args, w.args.moe, w.layout.ep > 1, w.compute_bytes
    normalized = 4 * (moe.top_k + 1) * moe.normalize_top_k  # those keep weights before and after, and sums
    routes = moe.top_k * (4 + 3 * 8) + normalized + 4 * (args.dim + moe.n_experts + moe.top_k * args.dim)
    rows = (args.dim + 4 * moe.expert_ffn_dim) * c + 2 * 8 * travels
    products = (2 * moe.expert_ffn_dim + args.dim + 2 * args.dim * travels) * c
    op = 4 * moe.n_experts + moe.top_k * (4 + 8 + products)
    kept = {"none": routes + moe.top_k * rows, "op": op, "alternate": op, "full": 0.0}
    return {mode: n_bytes / w.layout.tp for mode, n_bytes in kept.items()}


def estimate_layer(w: Workload, kind: LayerKind) -> tuple[float, float]:
    """Return the bytes that a layer keeps of a microbatch, and those that it holds besides at the peak of its backward.

    In backward it holds its recomputed activations and temporary gradients. The MoE is large and may need more at two
    other moments: while the next one is gathered, by a buffer and copies of its slices; and when its gradients are
    reduced, once in compute dtype and once in fp32. By then its activations are freed, and under ZeRO 3 its parameters.
    """
    args, layout, width, rest = w.args, w.layout, w.compute_bytes, list_kept(w, kind)
    if not kind.is_moe:
        again = max(rest["none"] - rest[mode] for mode in kind.recompute)
        temporary = (3 * args.ffn_dim / layout.tp + args.dim) * width
        return kind.average(**rest) * w.n_tokens, (max(0, again) + temporary) * w.n_tokens

    experts = list_kept_by_experts(w)
    weighted = w.n_rows * args.dim * MASTER_BYTES  # what the weights of a token multiply, in fp32
    of_experts = w.n_rows * (3 * args.moe.expert_ffn_dim + args.dim) * width
    exchanged = 5 * w.n_rows * args.dim * width * (layout.ep > 1)
    # Gradients of rows and of weights; before they are weighted: rows that travel in forward, gradients of the experts.
    temporary = max(2 * weighted, max(of_experts, exchanged) - weighted)
    is_cut = find_expert_dim(args, layout.ep, layout.efsdp) != 0  # FSDP then joins the slices in a further copy
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
    """Return what the loss holds at its peak.

    All logits (T, V) at once on one rank: three fp32 tensors in backward, log-softmax and two gradients; one if the
    loss is compiled. In chunks, and over tp always: the gradient of the weight in fp32, and either a chunk's logits in
    compute dtype and fp32 with their gradient, or that gradient and what it adds to the weight's.
    """
    width, vocab_size = w.compute_bytes, w.args.vocab_size
    if w.layout.tp == 1 and not w.loss_chunk_tokens:
        return (4 if w.compiles_loss else 12) * w.n_tokens * vocab_size
    weight = vocab_size * w.args.dim / w.layout.tp
    chunk_tokens = min(w.loss_chunk_tokens or w.n_tokens, w.n_tokens)
    logits = chunk_tokens * vocab_size / (w.layout.tp if w.shards_loss else 1)
    if width == MASTER_BYTES:  # one tensor serves as both, and the contribution is added in place
        return (weight + logits) * MASTER_BYTES
    return weight * MASTER_BYTES + max(logits * (2 * width + MASTER_BYTES), (weight + logits) * width)


InFlight = Mapping[tuple[int, str], float]  # (stage, its last action: F or I) -> microbatches that a rank holds at once
Layers = list[tuple[LayerKind, float, float]]  # with their bytes by estimate_layer


def estimate_memory(w: Workload, in_flight: Mapping[int, InFlight]) -> list[Memory]:
    """Return what these pp ranks hold at their peak. `in_flight`: pp rank -> the result of timeline.count_in_flight."""
    layers = [(kind, *estimate_layer(w, kind)) for kind in w.kinds]
    return [estimate_rank(w, layers, pp_rank, each) for pp_rank, each in in_flight.items()]


def estimate_rank(w: Workload, layers: Layers, pp_rank: int, in_flight: InFlight) -> Memory:
    """Return what one pp rank holds at its peak.

    The peak is at the loss, in the first block of backward, in the last block, or when the embedding's gradient is
    reduced: activations are freed as gradients are made.
    """
    layout, width, table = w.layout, w.compute_bytes, w.vocabulary_parameters
    stages = {index: w.stages[index] for index in layout.stages_of(pp_rank)}
    layers = [layer for layer in layers if any(layer[0].count(stage) for stage in stages.values())]
    has_embedding = any(stage.has_embedding for stage in stages.values())
    has_head = any(stage.has_head for stage in stages.values())
    at_rest, n_parameters = (
        sum(map(w.count_at_rest, stages.values())),
        sum(sum(w.parameters[stage]) for stage in stages.values()),
    )
    block = max((sum(kind.parameters) for kind, *_ in layers), default=0)
    working = max((working for *_, working in layers), default=0.0)
    kept = sum(
        (WAITING if action == "I" else 1) * each * kind.count(stages[index]) * n
        for kind, each, _ in layers
        for (index, action), n in in_flight.items()
    )
    # A stage keeps its output too. With layers it needs no extra bytes: they keep its input, which is a receive buffer.
    alone = sum(n for (index, _), n in in_flight.items() if stages[index] == EMBEDDING_ALONE)
    kept += alone * w.hidden_bytes / layout.tp
    # Hidden states before and after the norm, and their gradient; tp gathers the latter two.
    loss = (estimate_loss(w) + w.hidden_bytes * (3 if layout.tp == 1 else 2 + 2 / layout.tp)) * has_head
    # FSDP gathers into a buffer and copies. The buffer of the head is there until its backward, that of a block until
    # the next one is gathered; a reduction's input, in fp32, until the next reduction.
    is_sharded = not w.is_whole and layout.zero_stage == 3
    whole = n_parameters * width * (not w.is_whole and layout.zero_stage < 3)
    head, blocks = table * width * is_sharded, block * width * is_sharded
    if layout.pp > 1:  # gradients are whole until the end of the step, which reduces them
        gathered = 2 * blocks + head * (has_head or not layers)  # or an embedding that is alone on its stage
        working = max(working, loss, table * width * has_embedding)
        # A stage without backward so far has no gradients. After its first one it has, and one microbatch less.
        fresh = {index for (index, _), n in in_flight.items() if n == layout.n_microbatches}
        older = sum(sum(w.parameters[stage]) for index, stage in stages.items() if index not in fresh)
        first = kept / layout.n_microbatches / len(fresh) if fresh else 0.0
        moments = [
            (gathered, w.grad_bytes * older, kept, working),
            (gathered, w.grad_bytes * n_parameters, kept - first, working),
        ]
    else:
        summed = MASTER_BYTES * (n_parameters if layout.zero_stage == 1 else at_rest)
        before = summed if layout.n_microbatches > 1 else 0.0
        reduced = w.reduce_bytes * (not w.is_whole and (layout.zero_stage > 1 or layout.n_microbatches == 1))
        last = max((each for _, each, _ in layers), default=0.0)
        dense = max((kind.parameters[0] for kind, *_ in layers), default=0)
        to_come = 0.0 if before else MASTER_BYTES * (dense + table) / w.n_shards  # after the last block's backward
        moments = [
            (2 * head, before, kept, loss),
            (2 * blocks, before + table * reduced, kept, working),
            (blocks, summed - to_come + dense * reduced, last, working),
            (0.0, summed + table * (reduced + width), 0.0, 0.0),
        ]
    gathered, gradients, kept, working = max(moments, key=sum)
    # Receive buffers hold hidden states for all stages but the model's first, and gradients for all but its last.
    n_received = sum((index > 0) + (index < len(layout.stages) - 1) for index in stages)
    return Memory(
        parameters=at_rest * MASTER_BYTES,
        gradients=gradients,
        optimizer=at_rest * w.moment_bytes,
        gathered=whole + gathered,
        activations=kept,
        received=n_received * (w.receive_buffers or layout.n_microbatches) * w.hidden_bytes / layout.tp,
        working=working,
    )
