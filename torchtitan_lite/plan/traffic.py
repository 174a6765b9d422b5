"""Bytes that one rank moves in one step, by mesh axis and operation: the closed form of what the dry run records.

    axis              what travels                                      how often
    tp                hidden states (B, S/cp, D)                        4 times a layer and microbatch, and recompute
    cp                keys and values, and their gradients              2 or 3 times a layer and microbatch
    dp_shard x cp     parameters (compute dtype), gradients (fp32)      by ZeRO stage: once a microbatch, or a step
    dp_replicate      the own shard of the gradients                    once a step
    pp                hidden states (B, S/cp/tp, D), their gradients    once a microbatch and border of stages

Per rank, P = bytes of the whole tensor, n ranks: an all-gather or reduce-scatter moves P(n-1)/n, an all-reduce
2P(n-1)/n, a send or receive P. The docstrings in parallel/ say why each of them is there. Numbers of a few bytes
(token count, loss, gradient norm) are counted too, so that nothing is left over beside the dry run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torchtitan_lite.config.layout import MESH_DIMS, Layout
from torchtitan_lite.plan.simulator import Rows
from torchtitan_lite.plan.workload import MASTER_BYTES, Stage, Workload


@dataclass(frozen=True)
class Traffic:
    """All calls of one operation over one axis in a step."""

    axis: str  # mesh dims of the group that are larger than 1: "dp_shard x cp"
    operation: str
    count: int
    n_bytes: float  # that this rank moves in all of them


@dataclass(frozen=True)
class Moved:
    """What one rank moves over a mesh axis in a step."""

    n_calls: int
    n_bytes: float


def share_moved(operation: str, n_ranks: int, rank: int = 0, splits: Sequence[int] = ()) -> float:
    """Part of the bytes of the whole tensor that one rank of a group moves.

    `splits`: of an all-to-all, how many rows this `rank` has for each one; none where all get as many.
    """
    if operation == "all-to-all" and splits:
        return 1 - splits[rank] / max(1, sum(splits))
    ring = (n_ranks - 1) / n_ranks
    return {"all-reduce": 2 * ring, "broadcast": 1, "send": 1, "receive": 1}.get(operation, ring)


def name_axis(layout: Layout, ranks: list[int]) -> str:
    """Mesh dims along which these ranks lie: those in which the first and the last of them differ."""
    first, last, dims = ranks[0], ranks[-1], []
    for dim in reversed(MESH_DIMS):  # innermost first
        degree = layout.degrees[dim]
        dims = [dim] * (first % degree != last % degree) + dims
        first, last = first // degree, last // degree
    return " x ".join(dims)


class Tally:
    """Adds up calls. Groups of one rank do not talk."""

    def __init__(self, workload: Workload):
        self.layout = workload.layout
        self.count: Counter[tuple[str, str]] = Counter()
        self.n_bytes: Counter[tuple[str, str]] = Counter()

    def add(self, dims: tuple[str, ...], operation: str, count: int, whole_bytes: float) -> None:
        """`count` calls on a tensor of `whole_bytes` over the group along `dims`."""
        used = [dim for dim in dims if getattr(self.layout, dim) > 1]
        n = prod(getattr(self.layout, dim) for dim in used)
        if n == 1 or not count:
            return
        share = 1 if operation == "all-to-all" else share_moved(operation, n)  # to the next rank goes all of it
        key = " x ".join(used), operation
        self.count[key] += count
        self.n_bytes[key] += count * whole_bytes * share

    def list(self) -> list[Traffic]:
        return [Traffic(*key, count, self.n_bytes[key]) for key, count in self.count.items()]


def list_traffic(workload: Workload, pp_rank: int, rows: Rows) -> list[Traffic]:
    """What a rank with this place on mesh dim `pp` moves in one step. `rows`: the order of work of each pp rank."""
    tally = Tally(workload)
    for index in workload.layout.stages_of(pp_rank):
        stage = workload.stages[index]
        add_tensor_parallel(tally, workload, stage)
        add_context_parallel(tally, workload, stage)
        add_sharding(tally, workload, stage, [action.kind for action in rows[pp_rank] if action.stage == index])
        add_sends(tally, workload, index)
    add_numbers(tally)
    return tally.list()


def add_tensor_parallel(tally: Tally, workload: Workload, stage: Stage) -> None:
    """Recompute stops early: of a forward's four calls the last reduce-scatter does not come again."""
    m, n_layers = workload.layout.n_microbatches, stage.n_layers
    gathers = workload.average(
        {"none": 4, "op": 6, "alternate": 6, "full": 6}
    )  # of a layer, forward, recompute and backward
    scatters = workload.average({"none": 4, "op": 4, "alternate": 4, "full": 5})
    tp, hidden = ("tp",), workload.hidden_bytes
    tally.add(tp, "all-gather", m * (n_layers * gathers + stage.has_embedding + stage.has_head), hidden)
    tally.add(tp, "reduce-scatter", m * (n_layers * scatters + stage.has_embedding + stage.has_head), hidden)
    # Each rank's norm weights saw its part of the sequence: their gradients are added up when FSDP takes them.
    # Sums over several microbatches are in fp32.
    norms = (2 * n_layers + stage.has_head) * workload.n_reductions
    width = workload.compute_bytes if workload.n_reductions == m else MASTER_BYTES
    tally.add(tp, "all-reduce", norms, workload.shape.dim * width)
    if not stage.has_head:
        return
    if not workload.shards_loss:
        logits = workload.n_tokens * workload.shape.vocab_size * workload.compute_bytes
        tally.add(tp, "all-gather", m * workload.n_loss_chunks, logits / workload.n_loss_chunks)
    elif workload.loss_chunk_tokens:  # of each rank, a sum of exponentials and the target's logit: fp32, of each token
        sums = workload.layout.tp * workload.n_tokens * 8
        tally.add(tp, "all-gather", m * workload.n_loss_chunks, sums / workload.n_loss_chunks)
    else:  # maximum, sum of exponentials, the target's logit: fp32, of each token
        tally.add(tp, "all-reduce", 3 * m, workload.n_tokens * 4)


def add_context_parallel(tally: Tally, workload: Workload, stage: Stage) -> None:
    """Forward, backward, and the forward again where all of it is recomputed; gradients of keys and values in fp32."""
    cp, n = ("cp",), workload.layout.cp
    calls = workload.layout.n_microbatches * stage.n_layers
    again = workload.average({"none": 0, "op": 0, "alternate": 0, "full": 1})
    keys_values, fp32 = workload.keys_values_bytes, workload.keys_values_bytes / workload.compute_bytes * 4
    if n == 1:
        return
    if workload.documents:
        again = workload.average({"none": 0, "op": 1, "alternate": 1, "full": 1})
        tally.add(cp, "all-gather", calls * (1 + again), keys_values)
        tally.add(cp, "reduce-scatter", calls, keys_values)
    elif workload.ring:
        tally.add(cp, "all-to-all", calls * (2 + again) * (n - 1), keys_values / n)
        tally.add(cp, "all-to-all", calls * n, fp32 / n)
    else:
        tally.add(cp, "all-gather", calls * (2 + again), keys_values)
        tally.add(cp, "reduce-scatter", calls, fp32)


def add_sharding(tally: Tally, workload: Workload, stage: Stage, kinds: list[str]) -> None:
    """FSDP's gathers and reductions of each group of parameters (fsdp.py)."""
    if workload.is_whole:
        return
    shard = ("dp_shard", "cp")
    groups = workload.groups_of(stage)
    for index, n_parameters in enumerate(groups):
        is_head = stage.has_head and index == len(groups) - 1
        n_gathers = count_gathers(kinds, workload, freed_after_forward=not is_head)
        tally.add(shard, "all-gather", n_gathers, n_parameters * workload.compute_bytes)
        tally.add(shard, "reduce-scatter", workload.n_reductions, n_parameters * MASTER_BYTES)
        tally.add(("dp_replicate",), "all-reduce", 1, n_parameters / workload.n_shards * MASTER_BYTES)


def count_gathers(kinds: list[str], workload: Workload, *, freed_after_forward: bool) -> int:
    """How often a group's parameters are fetched in the course of a stage's actions.

    ZeRO 3 frees them after each forward and each backward; in a pipeline torch frees them after forwards only.
    """
    if workload.layout.zero_stage < 3:
        return 1
    n_gathers, is_here = 0, False
    for kind in kinds:
        n_gathers += not is_here
        freed_after_backward = workload.layout.pp == 1
        is_here = not (freed_after_forward if kind == "F" else freed_after_backward)
    return n_gathers


def add_sends(tally: Tally, workload: Workload, index: int) -> None:
    """Hidden states to the next stage and their gradients back, where that is on another rank."""
    ranks = workload.layout.stage_ranks
    neighbours = [other for other in (index - 1, index + 1) if 0 <= other < len(ranks) and ranks[other] != ranks[index]]
    for operation in ("send", "receive"):  # with each neighbour one of both: states or gradients
        n_bytes = workload.hidden_bytes / workload.layout.tp
        tally.add(("pp",), operation, len(neighbours) * workload.layout.n_microbatches, n_bytes)


def add_numbers(tally: Tally) -> None:
    """Counted tokens (int64), loss (fp32) and squared gradient norm (float64), once a step."""
    tally.add(("dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 8)
    tally.add(("pp", "dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 4)
    tally.add(MESH_DIMS, "all-reduce", 1, 8)
