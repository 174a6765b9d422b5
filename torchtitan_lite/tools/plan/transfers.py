"""Formulas for the number of bytes that one rank moves in one step. A dry run records the same calls (meter.py).

    axis              tensors                                           number of calls
    tp                hidden states (B, S/cp, D)                        4 per layer and microbatch (2 in an MoE layer),
                                                                        plus recompute
    ep                rows of tokens, results of experts, gradients     4 per MoE layer and microbatch, plus recompute
    efsdp             parameters and gradients of experts and routers   as dp_shard x cp
    cp                keys and values, and their gradients              2 or 3 per layer and microbatch
    dp_shard x cp     parameters (compute dtype or float8), gradients   once per microbatch or once per step, depending
                      (fp32), largest values of float8 weights          on the ZeRO stage
    dp_replicate      the local shard of the gradients                  once per step
    dp_shard x cp, tp slices of the matrices that Muon updates          2 per round (extensions/muon.py)
    pp                hidden states (B, S/cp/tp, D), their gradients    once per microbatch and stage boundary

For a full tensor of P bytes and n ranks, an all-gather, reduce-scatter or all-to-all moves P(n-1)/n bytes per rank, an
all-reduce 2P(n-1)/n, and a broadcast, send or receive P. Tiny all-reduces (token count, loss, gradient norm) are
counted too, because tests require that the formulas and the dry run agree to the byte. parallel/ explains why each
collective is needed.
"""

import re
from collections.abc import Hashable, Iterable
from math import ceil, prod
from typing import NamedTuple

from torchtitan_lite.config.block import list_gathered
from torchtitan_lite.config.features import INT8_BLOCK
from torchtitan_lite.config.layout import MESH_DIMS, Layout
from torchtitan_lite.config.model_rows import ModuleRow
from torchtitan_lite.tools.plan.orders import count_gathers
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, Group, LayerKind, Stage, Workload

# axis -> mesh dims, for axes of several mesh dims
DIMS = {
    "fsdp": ("dp_shard", "cp"),
    "world": MESH_DIMS,
}
DIM_PATTERN = re.compile("e?fsdp_[a-z]+|pp|dp_replicate|dp_shard|efsdp|ep|cp|tp")  # mesh dims
Call = tuple[str, str, float, float]  # (axis, operation, number of calls, bytes of the full tensor)


class Moved(NamedTuple):
    """Number of calls and bytes of one rank in one step, for one kind of call."""

    n_calls: int
    n_bytes: float


def sum_moved(calls: Iterable[tuple[Hashable, float, float]]) -> dict[Hashable, Moved]:
    """Sum the calls of one rank that have equal keys. Each item of `calls` is (key, number of calls, total bytes)."""
    moved: dict[Hashable, Moved] = {}
    for key, n_calls, n_bytes in calls:
        before = moved.get(key, Moved(0, 0))
        moved[key] = Moved(before.n_calls + n_calls, before.n_bytes + n_bytes)
    return moved


def fraction_moved(operation: str, n_ranks: int) -> float:
    """Return the fraction of a tensor's bytes that one rank of a group moves."""
    ring = (n_ranks - 1) / n_ranks
    return {"all-reduce": 2 * ring, "broadcast": 1, "send": 1, "receive": 1}.get(operation, ring)


def name_axis(layout: Layout, description: str) -> str:
    """Return "dp_shard x cp" for the group description "mesh_dp_shard_cp", and all dims for the default group."""
    return " x ".join(DIM_PATTERN.findall(description) or layout.used_dims)


def estimate_traffic(w: Workload, pp_rank: int) -> dict[tuple[str, str], Moved]:
    """Return a dict mapping (axis, operation) to the calls and bytes of one rank of `pp_rank` in one step."""
    layout = w.layout
    n_gathers = count_gathers(w.order[pp_rank])
    calls = []
    n_scales = 0  # number of precomputed scales: one per weight that is all-gathered in float8
    for index in layout.stages_of(pp_rank):
        stage = w.stages[index]
        for kind in w.kinds:
            n_layers = kind.count(stage)
            n_scales += w.precomputes_scales * kind.n_float8 * n_layers
            for axis, operation, n_calls, n_bytes in list_calls_of_pass(w, kind):
                calls.append((axis, operation, n_calls * layout.n_microbatches * n_layers, n_bytes))
            calls += list_reductions_over_tp(w, kind.block, n_layers)
        calls += list_calls_of_fsdp(w, stage, n_gathers[index])
        calls += list_calls_of_stage(w, index)
    calls += list_calls_of_tied_matrix(w, pp_rank)
    for _, elements in w.deal_rounds(pp_rank):
        for axis, n_elements in elements.items():
            calls.append((axis, "all-to-all", 2, n_elements * w.compute_bytes))
    # Once per step: token count (int64); squared gradient norm, loss and four signals (float64); float8 scales.
    calls += [
        ("world", "all-reduce", 1, 8),
        ("world", "all-reduce", 1, 56),
        ("fsdp", "all-reduce", min(n_scales, 1), n_scales * 4),
    ]
    if moe := w.args.moe:  # expert loads of all layers, float64
        calls.append(("world", "all-reduce", 1, w.args.n_layers * (moe.n_experts + 1) * 8))
    moved = []
    for axis, operation, n_calls, whole_bytes in calls:
        used = [dim for dim in DIMS.get(axis, [axis]) if getattr(layout, dim) > 1]
        if used and n_calls:
            n_ranks = prod(getattr(layout, dim) for dim in used)
            n_bytes = n_calls * whole_bytes * fraction_moved(operation, n_ranks)
            moved.append(((" x ".join(used), operation), n_calls, n_bytes))
    return sum_moved(moved)


def list_calls_of_stage(w: Workload, index: int) -> list[Call]:
    """List the calls of embedding, final norm, head and loss over tp, and the sends to neighboring stages."""
    m = w.layout.n_microbatches
    stage = w.stages[index]
    # Each of these modules has an all-gather and a reduce-scatter: one in forward, the other in backward
    n_exchanging = len(list_gathered(list(stage.ends)))
    n_exchanging += sum(row.tp_style in ("rowwise", "vocabulary") for row in stage.ends)
    # Each tp rank contributes two fp32 numbers per token: the sum of exponentials, and the target's logit.
    sums_bytes = w.n_tokens * w.layout.tp * 8
    n_chunks = ceil(w.n_tokens / w.chunk_tokens)
    # A stage has one send and one receive per neighbor: hidden states move in one direction, gradients in the other
    ranks = w.layout.stage_ranks
    nearest = ranks[max(0, index - 1) : index + 2]  # includes this stage's own rank
    n_neighbors = sum(rank != ranks[index] for rank in nearest)
    sent_bytes = w.hidden_bytes / w.layout.tp
    outputs = sum(row.weight[0] for row in stage.ends if row.tp_style == "gathered")
    return [
        ("tp", "all-gather", m * (outputs > 0), outputs * w.hidden_bytes / w.args.dim),
        ("tp", "all-gather", m * n_exchanging, w.hidden_bytes),
        ("tp", "reduce-scatter", m * n_exchanging, w.hidden_bytes),
        *list_reductions_over_tp(w, stage.ends, 1),
        ("tp", "all-gather", m * n_chunks * stage.has_head, sums_bytes / n_chunks),
        ("pp", "send", m * n_neighbors, sent_bytes),
        ("pp", "receive", m * n_neighbors, sent_bytes),
    ]


def list_reductions_over_tp(w: Workload, modules: Iterable[ModuleRow], n_layers: int) -> list[Call]:
    """List the all-reduces of gradients over tp and ep. Each rank computes such a gradient from different tokens."""
    calls = []
    # a gradient that is a sum over several microbatches is in fp32
    sums_each = w.n_reductions == w.layout.n_microbatches
    width = w.compute_bytes if sums_each else MASTER_BYTES
    for module in modules:
        axis = "tp"
        sizes = list(map(prod, module.tensors.values()))
        # the gradient is partial, because each ep rank routes different tokens
        if module.kind == "router":
            axis = "ep"
        # the gradient is partial, because a bias is added after the scatter
        elif module.tp_style == "rowwise":
            sizes = sizes[1:]
        elif module.tp_style in ("colwise", "vocabulary", "experts"):
            continue
        # A tp rank has the gradient of a norm's weight only for its shard of the sequence, or only for its heads.
        for size in sizes:
            calls.append((axis, "all-reduce", n_layers * w.n_reductions, size * width))
    return calls


def list_calls_of_pass(w: Workload, kind: LayerKind) -> list[Call]:
    """List the calls over tp, ep and cp of one layer and microbatch. Backward mirrors forward.

    Over tp, inputs of colwise layers are all-gathered and outputs of rowwise layers are reduce-scattered. Recompute
    repeats the all-gathers. Full recompute also repeats the reduce-scatters, except one at the end of the block. Over
    ep, counts and rows go to experts, and results come back.
    """
    again = kind.average(full=1)
    n_both = kind.n_gathers + kind.n_scatters
    calls = [
        ("tp", "all-gather", n_both + kind.gathers_again, w.hidden_bytes),
        ("tp", "reduce-scatter", n_both + kind.scatters_again, w.hidden_bytes),
    ]
    # Ranks that share a head exchange their slices of the head in an all-to-all over tp. The splits have unequal sizes.
    if kind.n_shared:
        n = w.n_sharing
        evenly = (
            w.head_bytes
            * fraction_moved("all-to-all", n)
            / fraction_moved("all-to-all", w.layout.tp)
        )
        calls.append(("tp", "all-to-all", (2 + again) * kind.n_shared, evenly))
    if kind.is_moe:
        n_experts = w.args.moe.n_experts
        calls.append(("ep", "all-to-all", 4 + 2 * again, w.rows_bytes))
        calls.append(("ep", "all-to-all", 1 + again, n_experts * 8))
        if w.balances_by_loss:  # number of routes to each expert in full sequences, int64
            routes_bytes = w.layout.microbatch_size * n_experts * 8
            calls.append(("cp", "all-reduce", 1, routes_bytes))
            calls.append(("tp", "all-reduce", 1, routes_bytes))
    n = w.layout.cp
    n_bytes = w.keys_values_bytes
    if w.attention == "triton":  # attention inside documents
        calls.append(("cp", "all-gather", 1 + kind.average(op=1, full=1), n_bytes))
        calls.append(("cp", "reduce-scatter", 1, n_bytes))
    elif w.ring and n > 1:  # each call sends a shard (1/n) to the next rank
        calls.append(("cp", "all-to-all", (2 + again) * (n - 1), n_bytes / (n - 1)))
        calls.append(("cp", "all-to-all", n, w.fp32_keys_values_bytes / (n - 1)))
    else:
        calls.append(("cp", "all-gather", 2 + again, n_bytes))
        calls.append(("cp", "reduce-scatter", 1, w.fp32_keys_values_bytes))
    return calls


def list_calls_of_fsdp(w: Workload, stage: Stage, n_gathers: int) -> list[Call]:
    """List the calls of FSDP (fsdp.py). `n_gathers` is the number of times that the stage is all-gathered under ZeRO 1
    and 2."""
    m = w.layout.n_microbatches
    numbers = [n_gathers] * 3  # all-gathers of the embedding, of the head, and of every other group
    if w.layout.zero_stage == 3:
        # Blocks are resharded after forward and backward. The head is not resharded between its forward and its
        # backward, and the backward of the embedding needs no weight. In a pipeline, torch does not reshard after a
        # backward.
        numbers = [m, 1, m + 1] if w.layout.pp > 1 else [m, m, 2 * m]
    calls = []
    for index, group in enumerate(w.groups_of(stage)):
        calls += list_calls_of_group(w, group, numbers[min(index, 2)])
    return calls


def list_calls_of_group(w: Workload, group: Group, n_gathers: int) -> list[Call]:
    """List the all-gathers and reductions of several equal FSDP groups."""
    axis, parameters, n_groups = group
    near = f"{axis}_near"  # axis over the ranks inside a node
    n_shards = getattr(w.layout, axis)
    n_near = getattr(w.layout, near)
    n_again = 0  # number of all-gathers inside a node
    if "hpz" in w.zero_plus_plus and n_near > 1:
        n_again = n_gathers - w.layout.n_microbatches
    packed = 0  # bytes of all shards if they are sent in the int8 blocks of zero_plus_plus.py
    gathered = 0
    n_scales = 0  # one per weight in float8
    n_bytes = 0  # of gradients
    for size, width in parameters:
        n_blocks = ceil(size / n_shards / INT8_BLOCK)
        packed += n_shards * n_blocks * (INT8_BLOCK + 4)
        gathered += size * width
        n_scales += width == 1
        n_bytes += size * MASTER_BYTES
    if "qwz" in w.zero_plus_plus:
        gathered = packed
    n_reductions = n_groups * w.n_reductions
    calls = [
        (axis, "all-reduce", n_scales * n_groups * n_gathers * (not w.precomputes_scales), 4),
        (axis, "all-gather", n_groups * (n_gathers - n_again), gathered),
        (near, "all-gather", n_groups * n_again, gathered),
        ("dp_replicate", "all-reduce", n_groups, n_bytes / n_shards),
    ]
    if "qgz" in w.zero_plus_plus:
        calls.append((near if n_near > 1 else axis, "all-to-all", n_reductions, packed))
        calls.append((f"{axis}_far", "all-to-all", n_reductions, packed / n_near))
    else:
        calls.append((axis, "reduce-scatter", n_reductions, n_bytes))
    return calls


def list_calls_of_tied_matrix(w: Workload, pp_rank: int) -> list[Call]:
    """List the calls of tied_embeddings.py between two pp ranks: a broadcast of weights, an all-reduce of gradients."""
    pp = w.layout.pp
    ends = {w.layout.stage_ranks[0], w.layout.stage_ranks[-1]}
    if not w.layout.tied or len(ends) == 1 or pp_rank not in ends:
        return []
    n_bytes = w.table / w.layout.fsdp * w.weight_bytes
    # An all-reduce of P bytes moves P between two ranks, and 2P(pp-1)/pp among all pp ranks.
    return [("pp", "broadcast", 1, n_bytes), ("pp", "all-reduce", 1, n_bytes * pp / (2 * pp - 2))]
