"""Estimate the bytes that one rank moves in one step, by a closed form. A dry run records the same calls (meter.py).

    axis              tensors                                           number of calls
    tp                hidden states (B, S/cp, D)                        4 per layer and microbatch, 2 in an MoE layer,
                                                                        plus recompute
    ep                rows of tokens, results of experts, gradients     4 per MoE layer and microbatch, plus recompute
    efsdp             parameters and gradients of experts and routers   as dp_shard x cp
    cp                keys and values, and their gradients              2 or 3 per layer and microbatch
    dp_shard x cp     parameters (compute dtype), gradients (fp32)      by ZeRO stage: once per microbatch or step
    dp_replicate      the local shard of the gradients                  once per step
    dp_shard x cp, tp slices of the matrices that Muon updates          2 per round (components/muon.py)
    pp                hidden states (B, S/cp/tp, D), their gradients    once per microbatch and stage boundary

With P bytes in the whole tensor and n ranks, an all-gather, reduce-scatter or all-to-all moves P(n-1)/n, an all-reduce
2P(n-1)/n, a broadcast, send or receive P. Tiny all-reduces (token count, loss, gradient norm) are counted too, because
tests compare the closed form and the dry run to the byte. parallel/ explains why each collective is needed.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from torchtitan_lite.config.degrees import MESH_DIMS
from torchtitan_lite.tools.plan.in_flight import count_gathers
from torchtitan_lite.tools.plan.orders import Order
from torchtitan_lite.tools.plan.workload import (
    MASTER_BYTES,
    SHARD_DIMS,
    FsdpGroup,
    LayerKind,
    Stage,
    Workload,
    list_summed_over_tp,
)

REPLICAS = ("dp_replicate",)


@dataclass(frozen=True)
class Moved:
    """Calls and bytes of one rank in one step, for example over one mesh axis."""

    n_calls: int
    n_bytes: float


def sum_moved(calls: Iterable[tuple[Hashable, float, float]]) -> dict[Hashable, Moved]:
    """Sum the calls of one rank by key. `calls`: (key, number of calls, total bytes)."""
    moved: dict[Hashable, Moved] = {}
    for key, n_calls, n_bytes in calls:
        before = moved.get(key, Moved(0, 0))
        moved[key] = Moved(before.n_calls + n_calls, before.n_bytes + n_bytes)
    return moved


def fraction_moved(
    operation: str, n_ranks: int, rank: int = 0, splits: Sequence[int] = ()
) -> float:
    """Return the fraction of a tensor's bytes that one rank of a group moves.

    `splits`: number of rows that `rank` sends to each rank in an all-to-all. Empty: the same number to each rank.
    """
    if operation == "all-to-all" and splits:
        return 1 - splits[rank] / max(1, sum(splits))
    ring = (n_ranks - 1) / n_ranks
    return {"all-reduce": 2 * ring, "broadcast": 1, "send": 1, "receive": 1}.get(operation, ring)


def estimate_traffic(
    workload: Workload, pp_rank: int, order: Order
) -> dict[tuple[str, str], Moved]:
    """Return (axis, operation) -> the calls and bytes of one rank of `pp_rank` in one step."""
    traffic = Traffic(workload)
    n_gathers = count_gathers(order[pp_rank])
    for index in workload.layout.stages_of(pp_rank):
        stage = workload.stages[index]
        traffic.add_ends(stage)
        for kind in workload.kinds:
            n_layers = kind.count(stage)
            traffic.add_tensor_parallel(kind, n_layers)
            traffic.add_context_parallel(kind, n_layers)
            if kind.is_moe:
                traffic.add_expert_parallel(kind, n_layers)
        traffic.add_sharding(stage, n_gathers[index])
        traffic.add_sends(index)
    traffic.add_tied_matrix(pp_rank)
    for _, elements in workload.deal_rounds(pp_rank):
        for dims, n_elements in elements.items():
            traffic.add(dims, "all-to-all", 2, n_elements * workload.compute_bytes)
    # Once per step: token count (int64), loss (fp32), squared gradient norm and four signals (float64).
    dp = REPLICAS + SHARD_DIMS["fsdp"]
    traffic.add(dp, "all-reduce", 1, 8)
    traffic.add(("pp", *dp), "all-reduce", 1, 4)
    traffic.add(MESH_DIMS, "all-reduce", 1, 40)
    if moe := workload.args.moe:  # expert loads of all layers, float64
        traffic.add(MESH_DIMS, "all-reduce", 1, workload.args.n_layers * (moe.n_experts + 1) * 8)
    return sum_moved(traffic.calls)


class Traffic:
    """Collects the calls of one rank for each part of its model."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.layout = workload.layout
        # (axis, operation), number of calls, total bytes
        self.calls: list[tuple[tuple[str, str], float, float]] = []
        # Bytes per element of a gradient that is reduced over tp or ep. Sums over several microbatches are in fp32.
        sums_each = workload.n_reductions == workload.layout.n_microbatches
        self.reduced_bytes = workload.compute_bytes if sums_each else MASTER_BYTES

    def add(
        self, dims: tuple[str, ...], operation: str, n_calls: float, whole_bytes: float
    ) -> None:
        """Add `n_calls` on a tensor of `whole_bytes` over the mesh dims `dims`. A group of one rank makes no calls."""
        used = [dim for dim in dims if getattr(self.layout, dim) > 1]
        if used and n_calls:
            n_bytes = whole_bytes * fraction_moved(operation, self.workload.count_ranks(used))
            self.calls.append(((" x ".join(used), operation), n_calls, n_calls * n_bytes))

    def add_ends(self, stage: Stage) -> None:
        """Add the calls over tp of the embedding, the final norm, the head and the loss."""
        w = self.workload
        tp = ("tp",)
        m = self.layout.n_microbatches
        n_ends = stage.has_embedding + stage.has_head
        self.add(tp, "all-gather", m * n_ends, w.hidden_bytes)
        self.add(tp, "reduce-scatter", m * n_ends, w.hidden_bytes)
        if stage.has_head:
            self.add(tp, "all-reduce", w.n_reductions, w.args.dim * self.reduced_bytes)
            # All logits, or two fp32 numbers per rank and token: the sum of exponentials and the target's logit
            token_bytes = (
                self.layout.tp * 8 if w.shards_loss else w.args.vocab_size * w.compute_bytes
            )
            n_chunks = ceil(w.n_tokens / (w.loss_chunk_tokens or w.n_tokens))
            self.add(tp, "all-gather", m * n_chunks, w.n_tokens * token_bytes / n_chunks)

    def add_tensor_parallel(self, kind: LayerKind, n_layers: int) -> None:
        """Add the calls over tp: forward gathers inputs of colwise layers and scatters outputs of rowwise layers.

        Backward mirrors this. Recompute repeats the gathers. Full recompute also repeats all or all but one scatters.
        """
        w = self.workload
        n_passes = self.layout.n_microbatches * n_layers
        n_gathers = kind.n_gathers
        n_scatters = len(kind.rowwise)
        gathers_again = kind.average(op=n_gathers, full=n_gathers)
        scatters_again = kind.average(full=n_scatters - kind.ends_in_rowwise)
        both = n_gathers + n_scatters
        self.add(("tp",), "all-gather", n_passes * (both + gathers_again), w.hidden_bytes)
        self.add(("tp",), "reduce-scatter", n_passes * (both + scatters_again), w.hidden_bytes)
        # A norm on a tp rank saw a shard of the sequence or of the heads, so its gradient is also reduced over tp.
        for size in list_summed_over_tp(kind.block):
            self.add(("tp",), "all-reduce", n_layers * w.n_reductions, size * self.reduced_bytes)

    def add_expert_parallel(self, kind: LayerKind, n_layers: int) -> None:
        """Add the calls over ep: counts and rows go to experts, results come back. Backward mirrors the last two."""
        w = self.workload
        ep = ("ep",)
        n_experts = w.args.moe.n_experts
        n_passes = self.layout.n_microbatches * n_layers
        again = kind.average(full=1)
        rows_bytes = w.n_rows * w.args.dim * w.compute_bytes
        self.add(ep, "all-to-all", n_passes * (4 + 2 * again), rows_bytes)
        self.add(ep, "all-to-all", n_passes * (1 + again), n_experts * 8)
        # The router of each ep rank saw different tokens.
        router_bytes = n_experts * w.args.dim * self.reduced_bytes
        self.add(ep, "all-reduce", n_layers * w.n_reductions, router_bytes)
        if w.balances_by_loss:  # number of routes to each expert in whole sequences, int64
            routes_bytes = self.layout.microbatch_size * n_experts * 8
            self.add(("cp",), "all-reduce", n_passes, routes_bytes)
            self.add(("tp",), "all-reduce", n_passes, routes_bytes)

    def add_context_parallel(self, kind: LayerKind, n_layers: int) -> None:
        """Add the calls over cp: keys and values, and their gradients in fp32."""
        w = self.workload
        cp = ("cp",)
        n = self.layout.cp
        n_passes = self.layout.n_microbatches * n_layers
        n_bytes = w.keys_values_bytes
        fp32_bytes = n_bytes / w.compute_bytes * MASTER_BYTES
        again = kind.average(full=1)
        if w.documents:
            n_gathers = 1 + kind.average(op=1, full=1)
            self.add(cp, "all-gather", n_passes * n_gathers, n_bytes)
            self.add(cp, "reduce-scatter", n_passes, n_bytes)
        elif w.ring and n > 1:  # each call sends a shard (1/n) to the next rank
            self.add(cp, "all-to-all", n_passes * (2 + again) * (n - 1), n_bytes / (n - 1))
            self.add(cp, "all-to-all", n_passes * n, fp32_bytes / (n - 1))
        else:
            self.add(cp, "all-gather", n_passes * (2 + again), n_bytes)
            self.add(cp, "reduce-scatter", n_passes, fp32_bytes)

    def add_sharding(self, stage: Stage, n_gathers: int) -> None:
        """Add the calls of FSDP (fsdp.py). `n_gathers`: how often a stage is gathered if ZeRO 3 does not free it."""
        w = self.workload
        n_head_gathers = n_gathers
        n_embedding_gathers = n_gathers
        if self.layout.zero_stage == 3:
            # Blocks are freed after forward and backward. The head is not freed between its forward and its backward,
            # and the backward of the embedding needs no weight.
            m = self.layout.n_microbatches
            n_gathers = 2 * m
            n_head_gathers = m
            n_embedding_gathers = m
            if self.layout.pp > 1:  # torch frees nothing after a backward
                n_gathers = m + 1
                n_head_gathers = 1
        for kind in w.kinds:
            for group, n in kind.groups:
                self.add_group(group, n * kind.count(stage), n_gathers)
        if stage.has_head:
            self.add_group(w.head, 1, n_head_gathers)
        if w.has_own_embedding(stage):
            self.add_group(w.embedding, 1, n_embedding_gathers)

    def add_group(self, group: FsdpGroup, n_groups: int, n_gathers: int) -> None:
        """Add the gathers of some equal FSDP groups, and the reductions of their gradients."""
        w = self.workload
        shards = SHARD_DIMS[group.axis]
        n_near = w.count_ranks(group.near)
        n_again = 0  # gathers inside a node
        if "hpz" in w.zero_plus_plus and n_near > 1:
            n_again = n_gathers - self.layout.n_microbatches
        packed = group.packed_bytes
        gathered = packed if "qwz" in w.zero_plus_plus else group.n_parameters * w.compute_bytes
        self.add(shards, "all-gather", n_groups * (n_gathers - n_again), gathered)
        self.add(group.near, "all-gather", n_groups * n_again, gathered)
        n_reductions = n_groups * w.n_reductions
        n_bytes = group.n_parameters * MASTER_BYTES
        if "qgz" in w.zero_plus_plus:
            self.add(group.near if n_near > 1 else shards, "all-to-all", n_reductions, packed)
            self.add(group.far, "all-to-all", n_reductions, packed / n_near)
        else:
            self.add(shards, "reduce-scatter", n_reductions, n_bytes)
        self.add(REPLICAS, "all-reduce", n_groups, n_bytes / group.n_shards)

    def add_tied_matrix(self, pp_rank: int) -> None:
        """Add the calls of tied_embeddings.py: weights one way, gradients both ways, between two ranks."""
        ends = {self.layout.stage_ranks[0], self.layout.stage_ranks[-1]}
        if self.layout.tied and len(ends) == 2 and pp_rank in ends:
            w = self.workload
            n_bytes = w.embedding.n_parameters / w.n_shards * MASTER_BYTES
            self.calls.append((("pp", "broadcast"), 1, n_bytes))
            self.calls.append((("pp", "all-reduce"), 1, n_bytes))  # 2P(n-1)/n for two ranks

    def add_sends(self, index: int) -> None:
        """Add the sends and receives of hidden states and gradients between stages on different ranks."""
        ranks = self.layout.stage_ranks
        n_bytes = self.workload.hidden_bytes / self.layout.tp
        neighbors = ranks[max(0, index - 1) : index + 2]  # and this stage's own rank
        n_calls = sum(rank != ranks[index] for rank in neighbors) * self.layout.n_microbatches
        # One of each per neighbor: hidden states one way, gradients the other.
        self.add(("pp",), "send", n_calls, n_bytes)
        self.add(("pp",), "receive", n_calls, n_bytes)
