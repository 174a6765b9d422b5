"""Bytes that one rank moves in one step, by the closed form. The dry run records the same calls one by one (meter.py).

    axis              what travels                                      how often
    tp                hidden states (B, S/cp, D)                        4 times a layer and microbatch, and recompute;
                                                                        twice in an MoE layer
    ep                rows of tokens, their results and gradients       4 times an MoE layer, and recompute
    efsdp             experts and routers, as dp_shard x cp the rest    by ZeRO stage
    cp                keys and values, and their gradients              2 or 3 times a layer and microbatch
    dp_shard x cp     parameters (compute dtype), gradients (fp32)      by ZeRO stage: once a microbatch, or a step
    dp_replicate      the rank's shard of the gradients                 once a step
    pp                hidden states (B, S/cp/tp, D), their gradients    once a microbatch and border of stages

P = bytes of the whole tensor, n ranks: an all-gather, reduce-scatter or all-to-all moves P(n-1)/n, an all-reduce
2P(n-1)/n, a broadcast, send or receive P. All-reduces of a few bytes (token count, loss, gradient norm) are counted
too, because the dry run and the closed form must agree to the byte. parallel/ says why each collective is needed.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

from torchtitan_lite.config.layout import MESH_DIMS
from torchtitan_lite.tools.plan.orders import Order
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, LayerKind, Stage, Workload


@dataclass(frozen=True)
class Moved:
    """What one rank moves in a step, over a mesh axis for instance."""

    n_calls: int
    n_bytes: float


def sum_moved(calls: Iterable[tuple[Hashable, float, float]]) -> dict[Hashable, Moved]:
    """Return key -> the sum of one rank's calls: (key, number of calls, bytes of all of them)."""
    moved: dict[Hashable, Moved] = {}
    for key, n_calls, n_bytes in calls:
        before = moved.get(key, Moved(0, 0))
        moved[key] = Moved(before.n_calls + n_calls, before.n_bytes + n_bytes)
    return moved


def fraction_moved(operation: str, n_ranks: int, rank: int = 0, splits: Sequence[int] = ()) -> float:
    """Return the fraction of the whole tensor's bytes that one rank of a group moves.

    `splits`: rows that this `rank` of an all-to-all has for each rank; empty: equally many.
    """
    if operation == "all-to-all" and splits:
        return 1 - splits[rank] / max(1, sum(splits))
    ring = (n_ranks - 1) / n_ranks
    return {"all-reduce": 2 * ring, "broadcast": 1, "send": 1, "receive": 1}.get(operation, ring)


def estimate_traffic(workload: Workload, pp_rank: int, order: Order) -> dict[tuple[str, str], Moved]:
    """Return (axis, operation) -> what a rank with this index on mesh dim `pp` moves in one step."""
    traffic = Traffic(workload)
    for index in workload.layout.stages_of(pp_rank):
        stage = workload.stages[index]
        traffic.add_ends(stage)
        for kind in workload.kinds:
            traffic.add_tensor_parallel(kind, kind.count(stage))
            traffic.add_context_parallel(kind, kind.count(stage))
            traffic.add_expert_parallel(kind, kind.count(stage) * kind.is_moe)
        traffic.add_sharding(stage, [action.kind for action in order[pp_rank] if action.stage == index])
        traffic.add_sends(index)
    # Counted tokens (int64), loss (fp32), squared gradient norm and two signals (float64), once a step.
    traffic.add(("dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 8)
    traffic.add(("pp", "dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 4)
    traffic.add(MESH_DIMS, "all-reduce", 1, 24)
    if moe := workload.args.moe:  # loads of all layers, float64
        traffic.add(MESH_DIMS, "all-reduce", 1, workload.args.n_layers * (moe.n_experts + 1) * 8)
    return sum_moved(traffic.calls)


class Traffic:
    """Tallies the calls of one rank, part by part of its model."""

    def __init__(self, workload: Workload):
        self.workload, self.layout = workload, workload.layout
        self.calls: list[tuple[tuple[str, str], float, float]] = []  # (axis, operation), calls, bytes of all of them
        # Bytes of a number of a gradient that is summed over tp or ep. Sums over several microbatches are in fp32.
        sums_each = workload.n_reductions == workload.layout.n_microbatches
        self.reduced_bytes = workload.compute_bytes if sums_each else MASTER_BYTES

    def add(self, dims: tuple[str, ...], operation: str, n_calls: float, whole_bytes: float) -> None:
        """Add `n_calls` on a tensor of `whole_bytes` over the group along `dims`. A group of one rank has none."""
        used = [dim for dim in dims if getattr(self.layout, dim) > 1]
        if used and n_calls:
            fraction = fraction_moved(operation, prod(getattr(self.layout, dim) for dim in used))
            self.calls.append(((" x ".join(used), operation), n_calls, n_calls * whole_bytes * fraction))

    def add_ends(self, stage: Stage) -> None:
        """tp in the embedding, the final norm, the head and the loss."""
        w, m, tp = self.workload, self.layout.n_microbatches, ("tp",)
        for operation in ("all-gather", "reduce-scatter"):
            self.add(tp, operation, m * (stage.has_embedding + stage.has_head), w.hidden_bytes)
        self.add(tp, "all-reduce", stage.has_head * w.n_reductions, w.args.dim * self.reduced_bytes)
        # All logits; or from each rank and token the sum of exponentials and the target's logit, in fp32
        gathered = self.layout.tp * 8 if w.shards_loss else w.args.vocab_size * w.compute_bytes
        n_chunks = ceil(w.n_tokens / w.loss_chunk_tokens) if w.loss_chunk_tokens else 1
        self.add(tp, "all-gather", stage.has_head * m * n_chunks, w.n_tokens * gathered / n_chunks)

    def add_tensor_parallel(self, kind: LayerKind, n_layers: int) -> None:
        """Forward gathers the input of colwise layers and scatters the output of rowwise layers; backward mirrors that.

        Recompute gathers again. Full recompute scatters again too, but may stop before the last reduce-scatter.
        """
        w, tp, both, again = self.workload, ("tp",), kind.n_gathers + len(kind.rowwise), kind.n_gathers
        n_passes = self.layout.n_microbatches * n_layers
        gathers = both + kind.average(op=again, alternate=again, full=again)
        scatters = both + kind.average(full=len(kind.rowwise) - kind.ends_in_rowwise)
        self.add(tp, "all-gather", n_passes * gathers, w.hidden_bytes)
        self.add(tp, "reduce-scatter", n_passes * scatters, w.hidden_bytes)
        # Each tp rank's norms saw its part of the sequence, or of the heads: their gradients are summed over tp too.
        for norm in kind.norms:
            self.add(tp, "all-reduce", n_layers * w.n_reductions, norm.weight[0] * self.reduced_bytes)

    def add_expert_parallel(self, kind: LayerKind, n_layers: int) -> None:
        """Counts and rows travel to equally loaded experts, results come back; backward mirrors the latter two."""
        w, n_passes, again = self.workload, self.layout.n_microbatches * n_layers, kind.average(full=1)
        n_experts = w.args.moe.n_experts if n_layers else 0
        self.add(("ep",), "all-to-all", n_passes * (4 + 2 * again), w.n_rows * w.args.dim * w.compute_bytes)
        self.add(("ep",), "all-to-all", n_passes * (1 + again), n_experts * 8)
        # Each ep rank's router saw its own tokens.
        self.add(("ep",), "all-reduce", n_layers * w.n_reductions, n_experts * w.args.dim * self.reduced_bytes)
        for dim in ("cp", "tp"):  # routes of whole sequences, int64
            self.add((dim,), "all-reduce", n_passes * w.balances_by_loss, self.layout.microbatch_size * n_experts * 8)

    def add_context_parallel(self, kind: LayerKind, n_layers: int) -> None:
        """Keys and values, and their gradients in fp32."""
        w, cp, n, n_passes = self.workload, ("cp",), self.layout.cp, self.layout.n_microbatches * n_layers
        keys_values, fp32 = w.keys_values_bytes, w.keys_values_bytes / w.compute_bytes * MASTER_BYTES
        if w.documents:
            self.add(cp, "all-gather", n_passes * (1 + kind.average(op=1, alternate=1, full=1)), keys_values)
            self.add(cp, "reduce-scatter", n_passes, keys_values)
        elif w.ring and n > 1:  # each call sends a whole piece, 1/n, to the next rank
            self.add(cp, "all-to-all", n_passes * (2 + kind.average(full=1)) * (n - 1), keys_values / (n - 1))
            self.add(cp, "all-to-all", n_passes * n, fp32 / (n - 1))
        else:
            self.add(cp, "all-gather", n_passes * (2 + kind.average(full=1)), keys_values)
            self.add(cp, "reduce-scatter", n_passes, fp32)

    def add_sharding(self, stage: Stage, kinds: list[str]) -> None:
        """FSDP gathers and reduces each group of parameters (fsdp.py). `kinds`: the stage's actions in their order."""
        w, layout = self.workload, self.layout
        if w.is_whole:
            return
        moes = [kind.parameters[1] for kind in w.kinds if kind.is_moe for _ in range(stage.n_moes)]
        others = w.groups_of(stage)
        has_own_embedding = stage.has_embedding and not (stage.has_head and w.args.tie_embeddings)
        for index, n_parameters in enumerate(moes + others):
            shard, n_shards = (("efsdp",), layout.efsdp) if index < len(moes) else (("dp_shard", "cp"), w.n_shards)
            is_head = stage.has_head and index == len(moes + others) - 1
            n_gathers = self.count_gathers(kinds, is_head=is_head)
            if layout.zero_stage == 3 and has_own_embedding and index == len(moes):  # its backward needs no weight
                n_gathers = kinds.count("F")
            self.add(shard, "all-gather", n_gathers, n_parameters * w.compute_bytes)
            self.add(shard, "reduce-scatter", w.n_reductions, n_parameters * MASTER_BYTES)
            self.add(("dp_replicate",), "all-reduce", 1, n_parameters / n_shards * MASTER_BYTES)

    def count_gathers(self, kinds: list[str], *, is_head: bool) -> int:
        """Return how often a stage's actions gather a group of parameters.

        ZeRO 3 frees them after each forward and each backward; in a pipeline torch frees them after forwards only. The
        head is kept from its forward to its backward.
        """
        n_gathers, is_here = 0, False
        for kind in kinds:
            n_gathers += not is_here
            is_here = self.layout.zero_stage < 3 or (is_head if kind == "F" else self.layout.pp > 1)
        return n_gathers

    def add_sends(self, index: int) -> None:
        """Hidden states go to the next stage, gradients come back, if that stage is on another rank."""
        ranks, n_bytes = self.layout.stage_ranks, self.workload.hidden_bytes / self.layout.tp
        neighbors = [at for at in (index - 1, index + 1) if 0 <= at < len(ranks) and ranks[at] != ranks[index]]
        for operation in ("send", "receive"):  # with each neighbor one of each: states or gradients
            self.add(("pp",), operation, len(neighbors) * self.layout.n_microbatches, n_bytes)
