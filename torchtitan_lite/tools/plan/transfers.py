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
too, so that the dry run and the closed form agree to the byte. The docstrings in parallel/ say why each collective is
needed.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torchtitan_lite.config.layout import MESH_DIMS, Layout
from torchtitan_lite.tools.plan.orders import Order
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, LayerKind, Stage, Workload, count_layers


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


def max_moved(ranks: Iterable[dict[Hashable, Moved]]) -> dict[Hashable, Moved]:
    """Return key -> what the rank moves that moves most bytes of this key."""
    most: dict[Hashable, Moved] = {}
    for moved in ranks:
        for key, each in moved.items():
            if key not in most or each.n_bytes > most[key].n_bytes:
                most[key] = each
    return most


def fraction_moved(operation: str, n_ranks: int, rank: int = 0, splits: Sequence[int] = ()) -> float:
    """Return the fraction of the whole tensor's bytes that one rank of a group moves.

    `splits`: rows that this `rank` of an all-to-all has for each rank; empty: equally many.
    """
    if operation == "all-to-all" and splits:
        return 1 - splits[rank] / max(1, sum(splits))
    ring = (n_ranks - 1) / n_ranks
    return {"all-reduce": 2 * ring, "broadcast": 1, "send": 1, "receive": 1}.get(operation, ring)


class Tally:
    """Calls and bytes of one rank by axis and operation. Groups of one rank have none."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.calls: list[tuple[tuple[str, str], float, float]] = []  # (axis, operation), calls, bytes of all of them

    def add(self, dims: tuple[str, ...], operation: str, n_calls: float, whole_bytes: float) -> None:
        """Add `n_calls` on a tensor of `whole_bytes` over the group along `dims`."""
        used = [dim for dim in dims if getattr(self.layout, dim) > 1]
        n = prod(getattr(self.layout, dim) for dim in used)
        if n > 1 and n_calls:
            # A ring's all-to-all sends all of the tensor to the next rank.
            fraction = 1 if operation == "all-to-all" else fraction_moved(operation, n)
            self.calls.append(((" x ".join(used), operation), n_calls, n_calls * whole_bytes * fraction))


def estimate_traffic(workload: Workload, pp_rank: int, order: Order) -> dict[tuple[str, str], Moved]:
    """Return (axis, operation) -> what a rank with this index on mesh dim `pp` moves in one step."""
    tally = Tally(workload.layout)
    for index in workload.layout.stages_of(pp_rank):
        stage = workload.stages[index]
        add_tensor_parallel(tally, workload, stage)
        for kind in workload.kinds:
            add_blocks(tally, workload, kind, count_layers(stage, kind))
            add_context_parallel(tally, workload, kind, count_layers(stage, kind))
            if kind.is_moe:
                add_expert_parallel(tally, workload, kind, stage.n_moes)
        add_sharding(tally, workload, stage, [action.kind for action in order[pp_rank] if action.stage == index])
        add_sends(tally, workload, index)
    # Counted tokens (int64), loss (fp32), squared gradient norm and two signals (float64), once a step.
    tally.add(("dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 8)
    tally.add(("pp", "dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 4)
    tally.add(MESH_DIMS, "all-reduce", 1, 24)
    if moe := workload.args.moe:  # loads of all layers, float64
        tally.add(MESH_DIMS, "all-reduce", 1, workload.args.n_layers * (moe.n_experts + 1) * 8)
    return sum_moved(tally.calls)


def add_tensor_parallel(tally: Tally, workload: Workload, stage: Stage) -> None:
    """Embedding, final norm, head and loss."""
    m, tp = workload.layout.n_microbatches, ("tp",)
    for operation in ("all-gather", "reduce-scatter"):
        tally.add(tp, operation, m * (stage.has_embedding + stage.has_head), workload.hidden_bytes)
    tally.add(tp, "all-reduce", stage.has_head * workload.n_reductions, workload.args.dim * workload.reduced_bytes)
    if not stage.has_head:
        return
    if not workload.shards_loss:
        logits = workload.n_tokens * workload.args.vocab_size * workload.compute_bytes
        tally.add(tp, "all-gather", m * workload.n_loss_chunks, logits / workload.n_loss_chunks)
    else:  # from each rank and token: sum of exponentials, the target's logit, in fp32
        sums = workload.layout.tp * workload.n_tokens * 8
        tally.add(tp, "all-gather", m * workload.n_loss_chunks, sums / workload.n_loss_chunks)


def add_blocks(tally: Tally, workload: Workload, kind: LayerKind, n_layers: int) -> None:
    """Tensor parallel in the layers of one kind.

    Forward gathers the input of the colwise layers and scatters the output of each rowwise one; backward mirrors that.
    Recompute gathers again. Full recompute scatters again too, but may stop before the last reduce-scatter.
    """
    tp, mirrored, again = ("tp",), kind.n_gathers + len(kind.rowwise), kind.n_gathers
    gathers = mirrored + kind.average({"none": 0, "op": again, "alternate": again, "full": again})
    repeated = len(kind.rowwise) - kind.ends_in_rowwise
    scatters = mirrored + kind.average({"none": 0, "op": 0, "alternate": 0, "full": repeated})
    tally.add(tp, "all-gather", workload.layout.n_microbatches * n_layers * gathers, workload.hidden_bytes)
    tally.add(tp, "reduce-scatter", workload.layout.n_microbatches * n_layers * scatters, workload.hidden_bytes)
    # Each tp rank's norms saw its part of the sequence, or of the heads, so FSDP's reduction sums their gradients over
    # tp too.
    for norm in kind.norms:
        n_calls = n_layers * workload.n_reductions
        tally.add(tp, "all-reduce", n_calls, norm.weight[0] * workload.reduced_bytes)


def add_expert_parallel(tally: Tally, workload: Workload, kind: LayerKind, n_layers: int) -> None:
    """Counts and rows travel to the experts, results come back; backward mirrors the latter two.

    Full recompute repeats forward. Of the most loaded rank: what it keeps for itself is not sent.
    """
    n_passes = workload.layout.n_microbatches * n_layers
    again = kind.average({"none": 0, "op": 0, "alternate": 0, "full": 1})
    n, n_experts = workload.layout.ep, workload.args.moe.n_experts
    if n > 1:
        own, row_bytes = workload.n_rows_each, workload.args.dim * workload.compute_bytes
        for n_rows in (workload.n_rows - own, own * (n - 1)):
            tally.add(("ep",), "all-to-all", n_passes * (2 + again), n_rows * row_bytes)
        tally.add(("ep",), "all-to-all", n_passes * (1 + again), n_experts * 8 * (n - 1) / n)
    # Each ep rank's router saw its own tokens.
    reduced = kind.router_parameters * workload.reduced_bytes
    tally.add(("ep",), "all-reduce", n_layers * workload.n_reductions, reduced)
    for dim in ("cp", "tp"):  # routes of whole sequences, int64
        of_sequences = workload.layout.microbatch_size * n_experts * 8
        tally.add((dim,), "all-reduce", n_passes * workload.balances_by_loss, of_sequences)


def add_context_parallel(tally: Tally, workload: Workload, kind: LayerKind, n_layers: int) -> None:
    """Forward, backward, and the recomputed forward of full recompute. Gradients of keys and values are fp32."""
    cp, n = ("cp",), workload.layout.cp
    calls = workload.layout.n_microbatches * n_layers
    again = kind.average({"none": 0, "op": workload.documents, "alternate": workload.documents, "full": 1})
    keys_values, fp32 = workload.keys_values_bytes, workload.keys_values_bytes / workload.compute_bytes * 4
    if n == 1:
        return
    if workload.documents:
        tally.add(cp, "all-gather", calls * (1 + again), keys_values)
        tally.add(cp, "reduce-scatter", calls, keys_values)
    elif workload.ring:
        tally.add(cp, "all-to-all", calls * (2 + again) * (n - 1), keys_values / n)
        tally.add(cp, "all-to-all", calls * n, fp32 / n)
    else:
        tally.add(cp, "all-gather", calls * (2 + again), keys_values)
        tally.add(cp, "reduce-scatter", calls, fp32)


def add_sharding(tally: Tally, workload: Workload, stage: Stage, kinds: list[str]) -> None:
    """FSDP gathers and reduces each group of parameters (fsdp.py). `kinds`: the stage's actions in their order."""
    if workload.is_whole:
        return
    moes = [
        (("efsdp",), workload.layout.efsdp, kind.moe_parameters)
        for kind in workload.kinds
        if kind.is_moe
        for _ in range(stage.n_moes)
    ]
    others = [(("dp_shard", "cp"), workload.n_shards, n) for n in workload.groups_of(stage)]
    tied = stage.has_head and workload.args.tie_embeddings
    for index, (shard, n_shards, n_parameters) in enumerate(moes + others):
        n_gathers = count_gathers(
            kinds,
            workload,
            is_head=stage.has_head and index == len(moes + others) - 1,
            is_embedding=stage.has_embedding and not tied and index == len(moes),
        )
        tally.add(shard, "all-gather", n_gathers, n_parameters * workload.compute_bytes)
        tally.add(shard, "reduce-scatter", workload.n_reductions, n_parameters * MASTER_BYTES)
        tally.add(("dp_replicate",), "all-reduce", 1, n_parameters / n_shards * MASTER_BYTES)


def count_gathers(kinds: list[str], workload: Workload, *, is_head: bool, is_embedding: bool) -> int:
    """Return how often a stage's actions gather a group of parameters.

    ZeRO 3 frees them after each forward and each backward; in a pipeline torch frees them after forwards only. The head
    is kept from its forward to its backward. The backward of an embedding needs no weight.
    """
    if workload.layout.zero_stage < 3:
        return 1
    if is_embedding:
        return kinds.count("F")
    n_gathers, is_here = 0, False
    for kind in kinds:
        n_gathers += not is_here
        freed_after_backward = workload.layout.pp == 1
        is_here = is_head if kind == "F" else not freed_after_backward
    return n_gathers


def add_sends(tally: Tally, workload: Workload, index: int) -> None:
    """Hidden states go to the next stage, gradients come back, where that stage is on another rank."""
    ranks = workload.layout.stage_ranks
    neighbors = [other for other in (index - 1, index + 1) if 0 <= other < len(ranks) and ranks[other] != ranks[index]]
    for operation in ("send", "receive"):  # with each neighbor one of each: states or gradients
        n_bytes = workload.hidden_bytes / workload.layout.tp
        tally.add(("pp",), operation, len(neighbors) * workload.layout.n_microbatches, n_bytes)
