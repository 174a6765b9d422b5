"""Bytes that one rank moves in one step, by mesh axis and operation: the closed form.

    axis              what travels                                      how often
    tp                hidden states (B, S/cp, D)                        4 times a layer and microbatch, and recompute
    cp                keys and values, and their gradients              2 or 3 times a layer and microbatch
    dp_shard x cp     parameters (compute dtype), gradients (fp32)      by ZeRO stage: once a microbatch, or a step
    dp_replicate      the rank's shard of the gradients                 once a step
    pp                hidden states (B, S/cp/tp, D), their gradients    once a microbatch and border of stages

Bytes are counted as in collectives.py. The docstrings in parallel/ say why each collective is needed. All-reduces of a
few bytes (token count, loss, gradient norm) are counted too, so that the dry run and this form agree to the byte.
"""

from math import prod

from torchtitan_lite.config.layout import MESH_DIMS, Layout
from torchtitan_lite.config.workload import MASTER_BYTES, Stage, Workload
from torchtitan_lite.plan.collectives import Moved, fraction_moved, sum_moved
from torchtitan_lite.plan.simulator import PipelineOrder


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


def estimate_traffic(workload: Workload, pp_rank: int, order: PipelineOrder) -> dict[tuple[str, str], Moved]:
    """Return (axis, operation) -> what a rank with this index on mesh dim `pp` moves in one step."""
    tally = Tally(workload.layout)
    for index in workload.layout.stages_of(pp_rank):
        stage = workload.stages[index]
        add_tensor_parallel(tally, workload, stage)
        add_context_parallel(tally, workload, stage)
        add_sharding(tally, workload, stage, [action.kind for action in order[pp_rank] if action.stage == index])
        add_sends(tally, workload, index)
    # Counted tokens (int64), loss (fp32) and squared gradient norm (float64), once a step.
    tally.add(("dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 8)
    tally.add(("pp", "dp_replicate", "dp_shard", "cp"), "all-reduce", 1, 4)
    tally.add(MESH_DIMS, "all-reduce", 1, 8)
    return sum_moved(tally.calls)


def add_tensor_parallel(tally: Tally, workload: Workload, stage: Stage) -> None:
    """Forward gathers each norm's output and scatters each rowwise layer's; backward mirrors that.

    Recompute gathers again. Full recompute scatters again too, but stops before the last reduce-scatter.
    """
    m, n_layers = workload.layout.n_microbatches, stage.n_layers
    mirrored, again = workload.n_norms + workload.n_rowwise, workload.n_norms
    gathers = mirrored + workload.average({"none": 0, "op": again, "alternate": again, "full": again})
    scatters = mirrored + workload.average({"none": 0, "op": 0, "alternate": 0, "full": workload.n_rowwise - 1})
    tp, hidden = ("tp",), workload.hidden_bytes
    tally.add(tp, "all-gather", m * (n_layers * gathers + stage.has_embedding + stage.has_head), hidden)
    tally.add(tp, "reduce-scatter", m * (n_layers * scatters + stage.has_embedding + stage.has_head), hidden)
    # Each tp rank's norms saw its part of the sequence, so FSDP's reduction sums their gradients over tp too.
    # Sums over several microbatches are in fp32.
    norms = (workload.n_norms * n_layers + stage.has_head) * workload.n_reductions
    width = workload.compute_bytes if workload.n_reductions == m else MASTER_BYTES
    tally.add(tp, "all-reduce", norms, workload.args.dim * width)
    if not stage.has_head:
        return
    if not workload.shards_loss:
        logits = workload.n_tokens * workload.args.vocab_size * workload.compute_bytes
        tally.add(tp, "all-gather", m * workload.n_loss_chunks, logits / workload.n_loss_chunks)
    elif workload.loss_chunk_tokens:  # from each rank and token: sum of exponentials, the target's logit, in fp32
        sums = workload.layout.tp * workload.n_tokens * 8
        tally.add(tp, "all-gather", m * workload.n_loss_chunks, sums / workload.n_loss_chunks)
    else:  # from each token: maximum, sum of exponentials, the target's logit, in fp32
        tally.add(tp, "all-reduce", 3 * m, workload.n_tokens * 4)


def add_context_parallel(tally: Tally, workload: Workload, stage: Stage) -> None:
    """Forward, backward, and the recomputed forward of full recompute. Gradients of keys and values are fp32."""
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
    """FSDP gathers and reduces each group of parameters (fsdp.py). `kinds`: the stage's actions in their order."""
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
    """Return how often a stage's actions gather a group of parameters.

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
    """Hidden states go to the next stage, gradients come back, where that stage is on another rank."""
    ranks = workload.layout.stage_ranks
    neighbours = [other for other in (index - 1, index + 1) if 0 <= other < len(ranks) and ranks[other] != ranks[index]]
    for operation in ("send", "receive"):  # with each neighbour one of each: states or gradients
        n_bytes = workload.hidden_bytes / workload.layout.tp
        tally.add(("pp",), operation, len(neighbours) * workload.layout.n_microbatches, n_bytes)
