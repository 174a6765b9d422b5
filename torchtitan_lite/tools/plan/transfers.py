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
from math import ceil, prod

from torchtitan_lite.config.degrees import MESH_DIMS
from torchtitan_lite.tools.plan.orders import Order
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, LayerKind, Stage, Workload


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
    for index in workload.layout.stages_of(pp_rank):
        stage = workload.stages[index]
        traffic.add_ends(stage)
        for kind in workload.kinds:
            traffic.add_tensor_parallel(kind, kind.count(stage))
            traffic.add_context_parallel(kind, kind.count(stage))
            traffic.add_expert_parallel(kind, kind.count(stage) * kind.is_moe)
        traffic.add_sharding(
            stage, [action.kind for action in order[pp_rank] if action.stage == index]
        )
        traffic.add_sends(index)
    traffic.add_tied_matrix(pp_rank)
    for _, elements in workload.deal_rounds(pp_rank):
        for dims, n_elements in elements.items():
            traffic.add(dims, "all-to-all", 2, n_elements * workload.compute_bytes)
    # Once per step: token count (int64), loss (fp32), squared gradient norm and two signals (float64).
    traffic.add(("dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 8)
    traffic.add(("pp", "dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 4)
    traffic.add(MESH_DIMS, "all-reduce", 1, 24)
    if moe := workload.args.moe:  # expert loads of all layers, float64
        traffic.add(MESH_DIMS, "all-reduce", 1, workload.args.n_layers * (moe.n_experts + 1) * 8)
    return sum_moved(traffic.calls)


class Traffic:
    """Collects the calls of one rank for each part of its model."""

    def __init__(self, workload: Workload):
        self.workload, self.layout = workload, workload.layout
        self.calls: list[
            tuple[tuple[str, str], float, float]
        ] = []  # (axis, operation), number of calls, total bytes
        # Bytes per element of a gradient that is reduced over tp or ep. Sums over several microbatches are in fp32.
        sums_each = workload.n_reductions == workload.layout.n_microbatches
        self.reduced_bytes = workload.compute_bytes if sums_each else MASTER_BYTES

    def add(
        self, dims: tuple[str, ...], operation: str, n_calls: float, whole_bytes: float
    ) -> None:
        """Add `n_calls` on a tensor of `whole_bytes` over the mesh dims `dims`. A group of one rank makes no calls."""
        used = [dim for dim in dims if getattr(self.layout, dim) > 1]
        if used and n_calls:
            fraction = fraction_moved(operation, prod(getattr(self.layout, dim) for dim in used))
            self.calls.append(
                ((" x ".join(used), operation), n_calls, n_calls * whole_bytes * fraction)
            )

    def add_ends(self, stage: Stage) -> None:
        """Add the calls over tp of the embedding, the final norm, the head and the loss."""
        w, m, tp = self.workload, self.layout.n_microbatches, ("tp",)
        for operation in ("all-gather", "reduce-scatter"):
            self.add(tp, operation, m * (stage.has_embedding + stage.has_head), w.hidden_bytes)
        self.add(tp, "all-reduce", stage.has_head * w.n_reductions, w.args.dim * self.reduced_bytes)
        # All logits, or two fp32 numbers per rank and token: the sum of exponentials and the target's logit
        gathered = self.layout.tp * 8 if w.shards_loss else w.args.vocab_size * w.compute_bytes
        n_chunks = ceil(w.n_tokens / w.loss_chunk_tokens) if w.loss_chunk_tokens else 1
        self.add(tp, "all-gather", stage.has_head * m * n_chunks, w.n_tokens * gathered / n_chunks)

    def add_tensor_parallel(self, kind: LayerKind, n_layers: int) -> None:
        """Add the calls over tp: forward gathers inputs of colwise layers and scatters outputs of rowwise layers.

        Backward mirrors this. Recompute repeats the gathers. Full recompute also repeats all or all but one scatters.
        """
        w, tp, both, again = (
            self.workload,
            ("tp",),
            kind.n_gathers + len(kind.rowwise),
            kind.n_gathers,
        )
        n_passes = self.layout.n_microbatches * n_layers
        gathers = both + kind.average(op=again, alternate=again, full=again)
        scatters = both + kind.average(full=len(kind.rowwise) - kind.ends_in_rowwise)
        self.add(tp, "all-gather", n_passes * gathers, w.hidden_bytes)
        self.add(tp, "reduce-scatter", n_passes * scatters, w.hidden_bytes)
        # A norm on a tp rank saw a shard of the sequence or of the heads, so its gradient is also reduced over tp.
        for size in kind.summed_over_tp:
            self.add(tp, "all-reduce", n_layers * w.n_reductions, size * self.reduced_bytes)

    def add_expert_parallel(self, kind: LayerKind, n_layers: int) -> None:
        """Add the calls over ep: counts and rows go to experts, results come back. Backward mirrors the last two."""
        w, n_passes, again = (
            self.workload,
            self.layout.n_microbatches * n_layers,
            kind.average(full=1),
        )
        n_experts = w.args.moe.n_experts if n_layers else 0
        self.add(
            ("ep",),
            "all-to-all",
            n_passes * (4 + 2 * again),
            w.n_rows * w.args.dim * w.compute_bytes,
        )
        self.add(("ep",), "all-to-all", n_passes * (1 + again), n_experts * 8)
        # The router of each ep rank saw different tokens.
        self.add(
            ("ep",),
            "all-reduce",
            n_layers * w.n_reductions,
            n_experts * w.args.dim * self.reduced_bytes,
        )
        for dim in ("cp", "tp"):  # number of routes to each expert in whole sequences, int64
            self.add(
                (dim,),
                "all-reduce",
                n_passes * w.balances_by_loss,
                self.layout.microbatch_size * n_experts * 8,
            )

    def add_context_parallel(self, kind: LayerKind, n_layers: int) -> None:
        """Add the calls over cp: keys and values, and their gradients in fp32."""
        w, cp, n, n_passes = (
            self.workload,
            ("cp",),
            self.layout.cp,
            self.layout.n_microbatches * n_layers,
        )
        keys_values, fp32 = (
            w.keys_values_bytes,
            w.keys_values_bytes / w.compute_bytes * MASTER_BYTES,
        )
        if w.documents:
            self.add(
                cp,
                "all-gather",
                n_passes * (1 + kind.average(op=1, alternate=1, full=1)),
                keys_values,
            )
            self.add(cp, "reduce-scatter", n_passes, keys_values)
        elif w.ring and n > 1:  # each call sends a shard (1/n) to the next rank
            self.add(
                cp,
                "all-to-all",
                n_passes * (2 + kind.average(full=1)) * (n - 1),
                keys_values / (n - 1),
            )
            self.add(cp, "all-to-all", n_passes * n, fp32 / (n - 1))
        else:
            self.add(cp, "all-gather", n_passes * (2 + kind.average(full=1)), keys_values)
            self.add(cp, "reduce-scatter", n_passes, fp32)

    def add_sharding(self, stage: Stage, kinds: list[str]) -> None:
        """Add the calls of FSDP for each group of parameters (fsdp.py). `kinds`: the stage's actions, in order."""
        w, layout = self.workload, self.layout
        if w.is_whole:
            return
        moes = [
            (kind.parameters[1], kind.packed[1])
            for kind in w.kinds
            if kind.is_moe
            for _ in range(stage.n_moes)
        ]
        others = w.groups_of(stage)
        has_own_embedding = stage.has_embedding and not (stage.has_head and w.args.tie_embeddings)
        for index, (n_parameters, packed) in enumerate(moes + others):
            shard, n_shards = (
                (("efsdp",), layout.efsdp)
                if index < len(moes)
                else (("dp_shard", "cp"), w.n_shards)
            )
            near, far = (
                ("efsdp_near", "efsdp_far") if index < len(moes) else ("fsdp_near", "fsdp_far")
            )
            n_near = getattr(layout, near)
            is_head = stage.has_head and index == len(moes + others) - 1
            n_gathers = self.count_gathers(kinds, is_head=is_head)
            if (
                layout.zero_stage == 3 and has_own_embedding and index == len(moes)
            ):  # backward needs no weight
                n_gathers = kinds.count("F")
            n_again = (
                n_gathers - kinds.count("F") if "hpz" in w.zero_plus_plus and n_near > 1 else 0
            )  # from the node
            gathered = packed if "qwz" in w.zero_plus_plus else n_parameters * w.compute_bytes
            self.add(shard, "all-gather", n_gathers - n_again, gathered)
            self.add((near,), "all-gather", n_again, gathered)
            if "qgz" in w.zero_plus_plus:
                self.add((near,) if n_near > 1 else shard, "all-to-all", w.n_reductions, packed)
                self.add((far,), "all-to-all", w.n_reductions, packed / n_near)
            else:
                self.add(shard, "reduce-scatter", w.n_reductions, n_parameters * MASTER_BYTES)
            self.add(("dp_replicate",), "all-reduce", 1, n_parameters / n_shards * MASTER_BYTES)

    def count_gathers(self, kinds: list[str], *, is_head: bool) -> int:
        """Return how often a group of parameters is gathered during these actions.

        ZeRO 3 frees parameters after each forward and backward; in a pipeline, torch frees them after forwards only.
        The head is not freed between its forward and its backward.
        """
        n_gathers, is_here = 0, False
        for kind in kinds:
            n_gathers += not is_here
            is_here = self.layout.zero_stage < 3 or (is_head if kind == "F" else self.layout.pp > 1)
        return n_gathers

    def add_tied_matrix(self, pp_rank: int) -> None:
        """Add the calls of tied_embeddings.py: weights one way, gradients both ways, between two ranks."""
        ends = {self.layout.stage_ranks[0], self.layout.stage_ranks[-1]}
        if self.layout.tied and len(ends) == 2 and pp_rank in ends:
            n_bytes = self.workload.vocabulary_parameters / self.workload.n_shards * MASTER_BYTES
            self.calls.append((("pp", "broadcast"), 1, n_bytes))
            self.calls.append((("pp", "all-reduce"), 1, n_bytes * fraction_moved("all-reduce", 2)))

    def add_sends(self, index: int) -> None:
        """Add the sends and receives of hidden states and gradients between stages on different ranks."""
        ranks, n_bytes = self.layout.stage_ranks, self.workload.hidden_bytes / self.layout.tp
        neighbors = [
            at
            for at in (index - 1, index + 1)
            if 0 <= at < len(ranks) and ranks[at] != ranks[index]
        ]
        for operation in (
            "send",
            "receive",
        ):  # one of each per neighbor: hidden states one way, gradients the other
            self.add(("pp",), operation, len(neighbors) * self.layout.n_microbatches, n_bytes)
