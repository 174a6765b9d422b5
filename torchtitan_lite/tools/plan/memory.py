"""Bytes that one rank holds at its peak: the one closed form.

`check` (memory_bound.py), plan, search, the out-of-memory report and `bench gpu` all use it; the dry run and
tests/measure_memory.py are its measure.

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
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torchtitan_lite.config.block import find_expert_dim, list_block
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.tools.plan.workload import (
    MASTER_BYTES,
    LayerKind,
    Workload,
    count_layers,
)


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


Kept = dict[str, float]  # recompute mode -> bytes that are kept for backward, per token of T


@lru_cache
def list_kept_pieces(
    args: ModelArgs,
    compute_bytes: int,
    *,
    tp: int = 1,
    moe: bool = False,
    sequence_parallel: bool = True,
    score_bytes: float = 0.0,
    **experts,
) -> list[Kept]:
    """Return what the pieces of a layer keep: all of a dense one; of one with experts its MoE layer, and the rest.

    In numbers of the compute dtype (1/tp of all but what is marked "whole"); in KiB of 8B in bf16 on one rank:

        none       164.1  input of each norm and its gathered output (whole), outputs of colwise layers (q, k, v, w1,
                          w3), inputs of rowwise ones (attention's output, the product), output of silu. Queries lie
                          in memory as (B, S, H, E), and so does what attention returns: wo reads it without a copy
        op         100.1  input of the block, outputs of colwise layers and of attention, outputs of rowwise layers
                          (whole: partial sums), with tp also scattered
        full         8.0  input of the block
        alternate   62.1  input of the block, outputs of wq, wv, w1, attention and w2 (whole)

    waiting    264.1  in a split backward, from the gradient of the input to those of the weights: "none", and the
                          gradients of what norms (1/tp) and linear layers give

    and 4 bytes per head of attention's log-sum-exp, unless backward runs attention's forward again. Rotation keeps
    nothing: its backward needs the angles only. Unfused attention keeps `score_bytes` of a head. A norm of heads
    keeps its input, and 4 bytes per head. CPU kernels keep one or two more tensors per norm. With experts "op"
    recomputes piece by piece: the norm before the experts is in no piece, and its input and output are kept.
    """
    block = list_block(args, moe=moe)
    colwise = [module for module in block if module.split == "colwise"]
    rowwise = [module.weight for module in block if module.split == "rowwise"]
    norms = sum(module.weight[0] for module in block if module.split == "sequence")
    gathered = args.dim * len({module.name.rpartition(".")[0] for module in colwise})
    heads, keys = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    hidden, of_colwise = args.dim / tp, sum(module.weight[0] for module in colwise) / tp
    if not sequence_parallel:
        hidden, norms, gathered = args.dim, norms * tp, 0  # norms keep the whole sequence, which linear layers read
    of_rowwise = sum(out for out, _ in rowwise)  # partial sums of the whole width
    scattered = of_rowwise / tp * (tp > 1)
    is_gated = len(colwise) > 3 or moe
    of_products = sum(width for _, width in rowwise) + sum(width for _, width in rowwise[1:]) * is_gated
    elements = {
        "none": norms / tp + gathered + of_colwise + (of_products + (heads + keys) * args.qk_norm) / tp,
        "op": hidden + of_colwise + of_rowwise + scattered + heads / tp + 2 * hidden * moe,
        "full": hidden,
        "alternate": hidden + (heads + keys + args.ffn_dim + heads) / tp + args.dim,
    }
    elements["waiting"] = elements["none"] + of_colwise + of_rowwise + norms / tp
    every_head = args.n_heads + (args.n_heads + args.n_kv_heads) * args.qk_norm
    every_head += args.n_heads * score_bytes / 4
    of_heads = {"none": every_head, "waiting": every_head, "full": 0}
    rest = {mode: n * compute_bytes + 4 * of_heads.get(mode, args.n_heads) / tp for mode, n in elements.items()}
    return [rest, list_moe_bytes(args, compute_bytes, tp=tp, **experts)] if moe else [rest]


def list_moe_bytes(args: ModelArgs, compute_bytes: int, *, tp: int = 1, ep: int = 1, imbalance: float = 1.0) -> Kept:
    """Return what router and experts keep per token. A rank has 1/tp of the tokens, and `imbalance` times its rows.

    none    in fp32: input and scores of the router, weights, what the weights multiply; routes and orders (int64);
            rows sorted by expert, outputs of w1 and w3, output of silu, the product
    op      logits, routes, outputs of the experts' matmuls; with ep > 1 the rows that arrive and those that return
    """
    n_experts, width = args.moe.n_experts, args.moe.expert_ffn_dim
    sent, normalized = args.moe.top_k, args.moe.normalize_top_k  # those keep weights before and after, and sums
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
    of_gradients = 4 * n_experts + received * (2 * width + args.dim) * compute_bytes
    kept["waiting"] = kept["none"] + of_gradients
    return {mode: n_bytes / tp for mode, n_bytes in {**kept, "alternate": kept["op"]}.items()}


class LayerBytes(NamedTuple):
    """What a layer holds of a microbatch. Means over recompute modes, but for `working`."""

    kept: float  # from forward to backward
    waiting: float  # of a split backward: from the gradient of its input to those of its weights
    working: float  # besides, at the peak of backward


def estimate_layer(workload: Workload, kind: LayerKind) -> LayerBytes:
    """Return what a layer holds of a microbatch.

    In backward it holds its recomputed activations and temporary gradients besides what is kept. The MoE is large and
    may need more at two other moments: while the next one is gathered, by a buffer and copies of its slices; and when
    its gradients are reduced, once in compute dtype and once in fp32. By then its activations are freed, and under
    ZeRO 3 its parameters.
    """
    args, layout, width = workload.args, workload.layout, workload.compute_bytes
    score_bytes = 5 * workload.seq_len if workload.attention == "unfused" else 0  # softmax, dropout and its mask
    kept_by = {"tp": layout.tp, "moe": kind.is_moe, "score_bytes": score_bytes}
    kept_by["sequence_parallel"] = workload.sequence_parallel
    if not kind.is_moe:
        (piece,) = list_kept_pieces(args, width, **kept_by)
        again = max(0, *(piece["none"] - piece[mode] for mode in kind.recompute))
        temporary = (3 * args.ffn_dim / layout.tp + args.dim) * width
        held = kind.average(piece), piece["waiting"], again + temporary
        return LayerBytes(*(n_bytes * workload.n_tokens for n_bytes in held))

    rest, moe = list_kept_pieces(args, width, **kept_by, ep=layout.ep, imbalance=workload.imbalance)
    weighted = workload.n_rows * args.dim * MASTER_BYTES  # what the weights of a token multiply, in fp32
    of_experts = workload.n_rows_received * (3 * args.moe.expert_ffn_dim + args.dim) * width
    exchanged = (3 * workload.n_rows_received + 2 * workload.n_rows) * args.dim * width * (layout.ep > 1)
    # Gradients of rows and of weights; before they are weighted: rows that travel in forward, gradients of the experts.
    temporary = max(2 * weighted, max(of_experts, exchanged) - weighted)
    is_cut = find_expert_dim(args, layout.ep, layout.efsdp) != 0  # FSDP then joins the slices in a further copy
    moments = [kind.moe_parameters * width * (1 + is_cut) * (layout.zero_stage == 3)]
    for mode in kind.recompute:
        of_rest, of_moe = rest["none"] - rest[mode], moe["none"] - moe[mode]
        again = max(of_rest, of_moe) if mode == "op" else of_rest + of_moe
        moments.append(again * workload.n_tokens + temporary)
        if layout.pp == 1:
            freed = moe[mode] - of_rest * (mode == "full")
            n_bytes = MASTER_BYTES + width * (layout.zero_stage < 3)
            moments.append(kind.moe_parameters * n_bytes - freed * workload.n_tokens)
    kept, waiting = kind.average(rest) + kind.average(moe), rest["waiting"] + moe["waiting"]
    return LayerBytes(kept * workload.n_tokens, waiting * workload.n_tokens, max(moments))


def weigh_waiting(workload: Workload) -> float:
    """Return the bytes of a microbatch that waits for the gradients of its weights, those after its forward being 1."""
    layers = [(kind.recompute.total(), estimate_layer(workload, kind)) for kind in workload.kinds]
    return sum(n * held.waiting for n, held in layers) / sum(n * held.kept for n, held in layers)


def estimate_memory(workload: Workload, pp_rank: int, in_flight: Mapping[tuple[int, str], float]) -> Memory:
    """Return what a rank with this index on mesh dim `pp` holds at its peak.

    `in_flight`: (stage, its last action: F or I) -> microbatches that this pp rank holds at once
    (timeline.count_in_flight). With a split backward the sum is right within 9 %.

    The peak is at the loss, in the first block of backward, in the last one, or when the embedding's gradient is
    reduced: activations go as gradients come.
    """
    w, layout, width = workload, workload.layout, workload.compute_bytes
    stages = {index: w.stages[index] for index in layout.stages_of(pp_rank)}
    has_embedding = any(stage.has_embedding for stage in stages.values())
    has_head = any(stage.has_head for stage in stages.values())
    at_rest = sum(map(w.count_at_rest, stages.values()))
    n_parameters = sum(w.stage_parameters[s] + w.count_stage_moes(s) for s in stages.values())
    table = w.vocabulary_parameters
    present = [
        (kind, estimate_layer(w, kind))
        for kind in w.kinds
        if any(count_layers(stage, kind) for stage in stages.values())
    ]
    block = max((kind.parameters + kind.moe_parameters for kind, _ in present), default=0)
    dense = max((kind.parameters for kind, _ in present), default=0)
    working = max((held.working for _, held in present), default=0.0)
    kept = sum(
        (held.waiting if action == "I" else held.kept) * count_layers(stages[index], kind) * n
        for kind, held in present
        for (index, action), n in in_flight.items()
    )
    # A stage keeps its output too. A stage with layers has no extra bytes for it: its input is received and kept.
    kept += sum(
        w.hidden_bytes / layout.tp * n
        for (index, _), n in in_flight.items()
        if stages[index].has_embedding and not stages[index].n_layers
    )
    # Hidden states before and after the norm, and their gradient; tp gathers the latter two.
    states = w.hidden_bytes * (3 if layout.tp == 1 else 2 + 2 / layout.tp)
    loss = (estimate_loss(w) + states) * has_head
    # FSDP gathers into a buffer and copies. The buffer of the head is there until its backward, that of a block until
    # the next one is gathered; a reduction's input, in fp32, until the next reduction.
    if w.is_whole:
        whole = head = blocks = reduced = 0.0
    elif layout.zero_stage < 3:
        whole, head, blocks, reduced = n_parameters * width, 0.0, 0.0, w.reduce_bytes * (layout.pp == 1)
    else:
        whole, head, blocks, reduced = 0.0, table * width, block * width, w.reduce_bytes * (layout.pp == 1)
    if layout.pp > 1:  # gradients are whole until the end of the step, which reduces them
        held = 2 * blocks + head * (has_head or not present)  # or an embedding that is alone on its stage
        working = max(working, loss, table * width * has_embedding)
        # A stage without backward so far has no gradients. After its first one it has, and one microbatch less.
        fresh = {index for (index, _), n in in_flight.items() if n == layout.n_microbatches}
        older = sum(
            w.stage_parameters[stage] + w.count_stage_moes(stage)
            for index, stage in stages.items()
            if index not in fresh
        )
        first = kept / layout.n_microbatches / len(fresh) if fresh else 0.0
        moments = [
            (held, w.grad_bytes * older, kept, working),
            (held, w.grad_bytes * n_parameters, kept - first, working),
        ]
    else:
        summed = MASTER_BYTES * (n_parameters if layout.zero_stage == 1 else at_rest)
        before = summed if layout.n_microbatches > 1 else 0.0
        is_reduced = layout.zero_stage > 1 or layout.n_microbatches == 1
        reduced *= is_reduced
        last = max((held.kept for _, held in present), default=0.0)
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


def estimate_loss(workload: Workload) -> float:
    """Return what the loss holds at its peak.

    In chunks, and over tp always: the gradient of the weight in fp32, and either a chunk's logits in compute dtype and
    in fp32 with their gradient, or that gradient and its contribution to that of the weight.

    All at once on one rank, of the logits (T, V): three fp32 tensors in backward, log-softmax and two gradients; one
    if the loss is compiled.
    """
    layout, width = workload.layout, workload.compute_bytes
    if layout.tp == 1 and not workload.loss_chunk_tokens:
        return (4 if workload.compiles_loss else 12) * workload.n_tokens * workload.args.vocab_size
    weight = workload.args.vocab_size * workload.args.dim / layout.tp
    chunk_tokens = min(workload.loss_chunk_tokens or workload.n_tokens, workload.n_tokens)
    logits = chunk_tokens * workload.args.vocab_size / (layout.tp if workload.shards_loss else 1)
    if width == MASTER_BYTES:  # one tensor serves as both, and the contribution is added in place
        return (weight + logits) * MASTER_BYTES
    return weight * MASTER_BYTES + max(logits * (2 * width + MASTER_BYTES), (weight + logits) * width)
