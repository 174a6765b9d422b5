"""Bytes that one rank holds when it holds most: the closed form, good for ranking layouts; the dry run is the measure.

    at rest      parameters, gradients (fp32), optimizer: of the stages of the rank, over tp, and over dp_shard x cp
    gathered     whole parameters in compute dtype: of a block and the next (ZeRO 3), or of everything (ZeRO 1, 2)
    activations  what forward keeps for backward, by recompute mode, times microbatches in flight
    received     what a pipeline receives into: torch makes room for all microbatches of a step at once
    working      what one block needs beside that while it runs backward, or the logits and their gradients

Live bytes are what tensors hold. What the allocator reserves is more: Cluster.reserve_factor.

Legend in workload.py. Activations per token and layer, elements of compute dtype (tp shares those marked /t):

    none   x, h (2D/t), normed and gathered (2D), q, k turned and v, out (2(H+K)E/t), w1, silu, w3, product (4F/t)
    op     x (D/t), outputs of all matmuls ((H+2K)E/t + 2D + 2F/t), attention's (HE/t), with tp the scattered (2D/t)
    full   x (D/t)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_lite.plan.workload import MASTER_BYTES, STATE_BYTES, Stage, Workload


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes, at the peak."""

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


def estimate_memory(workload: Workload, pp_rank: int, in_flight: Mapping[int, float]) -> Memory:
    """`in_flight`: microbatches of each stage that this pp rank holds at once (simulator.count_in_flight)."""
    layout = workload.layout
    stages = {index: workload.stages[index] for index in layout.stages_of(pp_rank)}
    n_parameters = sum(map(workload.count_stage_parameters, stages.values()))
    at_rest = n_parameters / workload.n_shards
    summed_whole = layout.zero_stage == 1 or layout.pp > 1
    gradients = MASTER_BYTES * (n_parameters if summed_whole else at_rest)
    # DTensor forms the embedding's gradient for the whole vocabulary on each tp rank, and so it is added up.
    has_embedding = any(stage.has_embedding for stage in stages.values())
    embedding = workload.vocabulary_parameters * layout.tp * has_embedding
    gradients += MASTER_BYTES * (embedding - embedding / layout.tp) * summed_whole
    has_layers = any(stage.n_layers for stage in stages.values())
    kept_per_layer = workload.average(list_kept_bytes(workload)) * has_layers
    kept = kept_per_layer * sum(stages[index].n_layers * n for index, n in in_flight.items())
    # A stage keeps its output too. With layers that is made up for by its input, which counts as received and as kept.
    kept += sum(
        workload.hidden_bytes / layout.tp * n
        for index, n in in_flight.items()
        if stages[index].has_embedding and not stages[index].n_layers
    )
    block = estimate_block(workload) * has_layers
    loss = estimate_loss(workload) * any(stage.has_head for stage in stages.values())
    if layout.n_microbatches > 1:
        moments = [(gradients, kept, max(block, loss, embedding * workload.compute_bytes))]
    else:  # gradients come as activations go: the peak is at the logits, or at the very end
        moments = [(0, kept, max(block, loss)), (gradients, kept_per_layer, block)]
    gradients, kept, working = max(moments, key=sum)
    return Memory(
        parameters=at_rest * MASTER_BYTES,
        gradients=gradients,
        optimizer=at_rest * STATE_BYTES[workload.optimizer],
        gathered=estimate_gathered(workload, list(stages.values())),
        activations=kept,
        received=estimate_received(workload, list(stages)),
        working=working,
    )


def estimate_received(workload: Workload, stages: list[int]) -> float:
    """Hidden states for all stages of the rank but the first of the model, gradients for all but the last."""
    layout = workload.layout
    n_received = sum((index > 0) + (index < len(layout.stages) - 1) for index in stages)
    return n_received * layout.n_microbatches * workload.hidden_bytes / layout.tp


def list_kept_bytes(workload: Workload) -> dict[str, float]:
    """Bytes of activations that a layer keeps for the backward of one microbatch, by recompute mode."""
    shape, tp = workload.shape, workload.layout.tp
    hidden, ffn = shape.dim, shape.ffn_dim / tp
    queries, keys = shape.n_heads * shape.head_dim / tp, shape.n_kv_heads * shape.head_dim / tp
    scattered = 2 * hidden / tp * (tp > 1)
    elements = {
        "none": 2 * hidden / tp + 2 * hidden + 2 * (queries + keys) + 4 * ffn,
        "op": hidden / tp + queries + 2 * keys + 2 * hidden + 2 * ffn + queries + scattered,
        "full": hidden / tp,
        # wq, wv, w1 and w2, and attention
        "alternate": hidden / tp + queries + keys + ffn + hidden + queries,
    }
    return {mode: n * workload.n_tokens * workload.compute_bytes for mode, n in elements.items()}


def estimate_block(workload: Workload) -> float:
    """What a block in backward holds beside what was kept: the rest of it, computed again, and gradients in passing."""
    kept = list_kept_bytes(workload)
    again = max(kept["none"] - kept[mode] for mode in workload.recompute)
    passing = 3 * workload.shape.ffn_dim / workload.layout.tp + workload.shape.dim
    return max(0, again) + passing * workload.n_tokens * workload.compute_bytes


def estimate_loss(workload: Workload) -> float:
    """In chunks: the gradient of the weight in fp32, and either a chunk's logits in compute dtype and in fp32, or their
    gradient and what they add to that of the weight.

    All at once, of the logits (T, V): in backward three fp32 tensors, log-softmax and two gradients. Over tp most is
    held in forward: the logits, in fp32 too, less their maximum, and the exponentials of that.
    """
    tp = workload.layout.tp if workload.shards_loss else 1
    if workload.loss_chunk_tokens:
        width = workload.compute_bytes
        weight = workload.shape.vocab_size * workload.shape.dim / workload.layout.tp
        logits = min(workload.loss_chunk_tokens, workload.n_tokens) * workload.shape.vocab_size / tp
        if width == MASTER_BYTES:  # one tensor is both, and what is added needs no memory of its own
            return (weight + logits) * MASTER_BYTES
        return weight * MASTER_BYTES + max(logits * (width + MASTER_BYTES), (weight + logits) * width)
    bytes_each = 12 if tp == 1 else 12 + workload.compute_bytes
    return bytes_each * workload.n_tokens * workload.shape.vocab_size / tp


def estimate_gathered(workload: Workload, stages: list[Stage]) -> float:
    """Parameters in compute dtype. ZeRO 3: two blocks, and the head from its forward to its backward, or an embedding
    that is alone; and the gradients of a block, once in compute dtype and once as they are reduced."""
    if workload.is_whole:
        return 0
    if workload.layout.zero_stage < 3:
        return sum(map(workload.count_stage_parameters, stages)) * workload.compute_bytes
    has_layers = any(stage.n_layers for stage in stages)
    has_matrix = any(stage.has_head for stage in stages) or not has_layers
    reduced = workload.layer_parameters * (workload.compute_bytes + MASTER_BYTES) * (workload.layout.pp == 1)
    gathered = 2 * workload.layer_parameters * has_layers + workload.vocabulary_parameters * has_matrix
    return gathered * workload.compute_bytes + reduced
